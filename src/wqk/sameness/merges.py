"""Share of an adapter in a merged model: the change, projected on the product of the factors.

The reference is a base model W with an adapter, W + P; the candidate C should be their merge. The
share <C − W, P> / <P, P> is 1 if the adapter is merged, 0 if the adapter is not merged, and 2 if
the adapter is merged twice. A merge into a base of few bits rounds most of the adapter away: the
share is then between 0 and 1. The method needs no tolerance for quantization, whose rounding is
independent of the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wqk._console import spans
from wqk.attention.rounding import ROUNDING, rounding_in
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.adapters import AdaptedCheckpoint, DoraUpdate, module_of, unrounded
from wqk.checkpoints.checkpoint import View
from wqk.sameness.circuits import SCORES
from wqk.sameness.comparisons import Cause
from wqk.sameness.decomposed_merges import wrong_merge
from wqk.sameness.edits import Edit, Take
from wqk.sameness.lora_merges import FittedMerge, MergeScale, fit_merge, mistake_of, unmerged
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Change, merged_steps
from wqk.sameness.tensor_names import numbers_of
from wqk.sameness.tolerances import (
    BESIDE_ADAPTER,
    CHANCE,
    DIFFERING_SHARES,
    LEAST_RESIDUAL,
    LEAST_SHARE,
    SAFETY,
)


@dataclass(frozen=True)
class MergedShare:
    """Share of an adapter's product that the candidate's tensor contains.

    Attributes
    ----------
    name, stored
        Name of the tensor in the reference, and in the candidate.
    share
        1 if the adapter is merged, 0 if the adapter is not merged.
    deviation
        Standard deviation of the share, from the rounding of the candidate.
    mistake
        The mistake, as a phrase that follows *is*; empty for a right merge. A wrong merge of DoRA
        has no share.
    is_dora
        Whether the adapter is a DoRA adapter.
    edit
        The edit of the candidate's stored tensor that corrects the merge.
    """

    name: str
    stored: str
    share: float
    deviation: float = 0.0
    mistake: str = ""
    is_dora: bool = False
    edit: Edit = field(default_factory=Take, compare=False)

    @property
    def chance(self) -> float:
        """The largest difference of shares that chance explains."""
        return max(LEAST_SHARE, CHANCE * self.deviation)

    @property
    def is_whole(self) -> bool:
        """True if the share is 1 up to chance."""
        return abs(self.share - 1) <= self.chance

    @property
    def method(self) -> str:
        """The kind of the adapter."""
        return "DoRA" if self.is_dora else "LoRA"

    @property
    def module(self) -> str:
        """The last word of the module's name."""
        return module_of(self.name).rpartition(".")[2]

    @property
    def layer(self) -> int | None:
        """Number of the tensor's layer; None if the name has no number."""
        numbers = numbers_of(self.name)
        return numbers[0] if numbers else None


def adapted(checkpoint: Checkpoint) -> AdaptedCheckpoint | None:
    """Return the adapted base model in a checkpoint, also below views; None without an adapter."""
    while isinstance(checkpoint, View):
        checkpoint = checkpoint.inner
    return checkpoint if isinstance(checkpoint, AdaptedCheckpoint) else None


def merged_shares(
    checkpoints: Sequence[Checkpoint], names: Mapping[str, str]
) -> Iterator[MergedShare]:
    """Measure the share of an adapter in all tensors that both models have in one shape.

    A tensor is left out if the reference has no adapter for the tensor, or if the candidate's
    tensor also has other changes, larger than rounding.
    """
    reference, candidate = checkpoints
    adapter = adapted(reference)
    if adapter is None:
        return
    exact = unrounded(adapter)
    for name, info in adapter.tensors().items():
        stored = names.get(name)
        if stored is None or adapter.scale_of(name) is None:
            continue
        stored_info = candidate.info(stored)
        if stored_info.shape != info.shape:
            continue
        (base,) = adapter.base.read([Part(name)])
        (expected,) = exact.read([Part(name)])
        (actual,) = candidate.read([Part(stored)])
        update = expected - base
        share = _MergedTensor(adapter, name, base, update, actual, stored_info).share
        if share is not None:
            yield replace(share, stored=stored)


class _MergedTensor:
    """A tensor into which an adapter should be merged.

    Parameters
    ----------
    adapter, name
        The adapter, and the reference's name of the tensor.
    base, product, actual
        The base model's tensor, the update that the adapter adds, and the candidate's tensor.
    info
        Metadata of the candidate's tensor.
    """

    def __init__(
        self,
        adapter: AdaptedCheckpoint,
        name: str,
        base: np.ndarray,
        product: np.ndarray,
        actual: np.ndarray,
        info: TensorInfo,
    ) -> None:
        self._adapter = adapter
        self._name = name
        self._base = base
        self._actual = actual
        self._is_quantized = info.quantized
        self._rounding = rounding_in(info, actual) * _norm(actual)
        self._fitted = self._fitted_if_plain(product)

    @property
    def share(self) -> MergedShare | None:
        """The share of the update; None if the share cannot be measured.

        The share cannot be measured if the update is only the rounding of float32, as for an
        adapter before training, or if the change contains more than the update and rounding.
        """
        update = self._adapter.decomposed(self._name)
        if update is not None:
            return self._share_of_dora(update)
        return None if self._fitted is None else self._share_of_lora(self._fitted)

    def _fitted_if_plain(self, product: np.ndarray) -> FittedMerge | None:
        """Fit the change; None if the change contains more than the update and rounding."""
        if _norm(product) <= SAFETY * ROUNDING["F32"] * _norm(self._base):
            return None
        fitted = fit_merge(self._base, product, self._actual)
        allowed = max(self._rounding, LEAST_RESIDUAL * fitted.product)
        return fitted if fitted.residual <= BESIDE_ADAPTER * allowed else None

    def _measured(self, fitted: FittedMerge) -> MergedShare:
        """Return the share with its deviation, without the mistake."""
        deviation = fitted.residual / math.sqrt(self._actual.size) / fitted.product
        return MergedShare(self._name, self._name, fitted.share, deviation)

    def _share_of_dora(self, update: DoraUpdate) -> MergedShare | None:
        """Return the share of a DoRA adapter; None if unknown and without a known mistake."""
        base, actual = self._base, self._actual
        if update.transposed:
            base, actual = base.T, actual.T
        mistake = wrong_merge(base, update, actual)
        if self._fitted is None and not mistake:
            return None
        share = MergedShare(self._name, self._name, math.nan)
        if self._fitted is not None:
            share = self._measured(self._fitted)
            if not (mistake or share.is_whole):
                mistake = f"merged with {share.share:.4g} times its update"
        return replace(share, mistake=mistake, is_dora=True)

    def _share_of_lora(self, fitted: FittedMerge) -> MergedShare:
        """Return the share of a LoRA adapter, with the mistake of a wrong merge."""
        share = self._measured(fitted)
        if share.is_whole and not fitted.transposed:
            return share
        factors = self._adapter.factors(self._name)
        assert factors is not None
        rank = self._adapter.rank_of(self._name)
        scale = MergeScale(factors.scale, rank, self._adapter.stabilized)
        mistake = mistake_of(fitted, scale, share.chance)
        if self._is_quantized:
            if share.chance < fitted.share < 1 - share.chance:
                mistake = "mostly removed by rounding (it was merged in few bits)"
            return replace(share, mistake=mistake)
        edit = unmerged(fitted, factors, scale, allowed=self._rounding)
        return replace(share, mistake=mistake, edit=edit or Take())


def _norm(array: np.ndarray) -> float:
    """Return the Frobenius norm, summed in float64."""
    return math.sqrt(float(np.square(array, dtype=np.float64).sum()))


def merge_sentence(shares: Sequence[MergedShare]) -> str:
    """Return one sentence on the shares of an adapter by layer; by module if these differ.

    Examples
    --------
    >>> names = [f"layers.{layer}.{module}.weight" for layer in (0, 1) for module in ("q", "k")]
    >>> print(merge_sentence([MergedShare(name, name, 1.0) for name in names]))
    Share of the adapter that survived the merge: 1.00 in layers 0-1.
    >>> print(merge_sentence([MergedShare(name, name, float("q" in name)) for name in names]))
    Share of the adapter that survived the merge: 1.00 in layers 0-1 (q), 0.00 in layers 0-1 (k).
    """
    shares = [share for share in shares if not math.isnan(share.share)]
    if not shares:
        return ""
    by_layer: dict[int | None, list[MergedShare]] = {}
    for share in shares:
        by_layer.setdefault(share.layer, []).append(share)
    by_module = any(_spread(members) > DIFFERING_SHARES for members in by_layer.values())
    layers_by_phrase: dict[tuple[str, str], list[int]] = {}
    for layer, members in by_layer.items():
        for phrase in _phrases(members, by_module):
            layers = layers_by_phrase.setdefault(phrase, [])
            if layer is not None:
                layers.append(layer)
    parts = []
    for (share_text, modules), layers in layers_by_phrase.items():
        where = ""
        if layers:
            noun = "layers" if len(layers) > 1 else "layer"
            where = f" in {noun} {spans(layers)}"
        parts.append(share_text + where + modules)
    title = "Share of the adapter that survived the merge"
    if max(share.share for share in shares) > 1 + DIFFERING_SHARES:
        title = "Strength of the adapter in the merged model, relative to its own scale"
    return f"{title}: {', '.join(parts)}."


def _phrases(shares: Sequence[MergedShare], by_module: bool) -> list[tuple[str, str]]:
    """Return the shares of one layer, with the modules of each share if ``by_module``."""
    if not by_module:
        return [(_range(shares), "")]
    modules: dict[str, list[str]] = {}
    for share in shares:
        modules.setdefault(f"{share.share:.2f}", []).append(share.module)
    return [(text, f" ({', '.join(dict.fromkeys(names))})") for text, names in modules.items()]


def _spread(shares: Sequence[MergedShare]) -> float:
    """Return the difference between the largest and the smallest share of some tensors."""
    values = [share.share for share in shares]
    return max(values) - min(values)


def _range(shares: Sequence[MergedShare]) -> str:
    """Return the smallest and the largest share of some tensors as text."""
    values = [share.share for share in shares]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def merge_causes(shares: Sequence[MergedShare]) -> list[Cause]:
    """Return the causes of tensors with a wrong merge of an adapter.

    Examples
    --------
    >>> name = "layers.0.mlp.up_proj.weight"
    >>> causes = merge_causes([MergedShare(name, "mlp.up", 0.0, mistake="not merged")])
    >>> print(causes[0].mismatch, causes[0].where)
    the adapter (LoRA) is not merged in up_proj layer 0
    """
    by_mistake: dict[tuple[str, str], list[MergedShare]] = {}
    for share in shares:
        if share.mistake:
            by_mistake.setdefault((share.method, share.mistake), []).append(share)
    causes = []
    for (method, mistake), members in by_mistake.items():
        names = tuple(member.name for member in members)
        values = [member.share for member in members]
        facts = {
            "tensors": dict.fromkeys(names, "weight"),
            "share": None if np.isnan(values).any() else [min(values), max(values)],
            "circuit": SCORES,
            "method": method,
            "mistake": mistake,
        }
        steps = merged_steps(Change((member.stored,), member.edit) for member in members)
        modules = ", ".join(dict.fromkeys(member.module for member in members))
        reason = f"the adapter ({method}) is {mistake} in {modules}"
        mismatch = Mismatch(Kind.ADAPTER, reason, steps, facts=facts)
        causes.append(Cause(mismatch, (), names))
    return causes
