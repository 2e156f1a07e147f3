"""The part of an adapter that survives a merge: a change projected on the product of its factors.

The reference is a base model W with an adapter, W + P; the candidate C should be their merge. The
share <C − W, P> / <P, P> is 1 where the adapter is merged, 0 where it is not, 2 where it is merged
twice. A merge into a base of few bits rounds most of the adapter away: the share is then between.
The method needs no tolerance for quantization, whose rounding is independent of the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wqk._console import spans
from wqk.attention.rounding import ROUNDING, rounding_in
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.adapters import AdaptedCheckpoint, module_of, unrounded
from wqk.checkpoints.checkpoint import View
from wqk.sameness.comparisons import Cause
from wqk.sameness.decomposed_merges import wrong_merge
from wqk.sameness.edits import Take
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.origins import numbers_of
from wqk.sameness.repairs import Change
from wqk.sameness.tolerances import (
    BESIDE_ADAPTER,
    CHANCE,
    DIFFERING_SHARES,
    LEAST_SHARE,
    SAFETY,
)
from wqk.sameness.weights import SCORES


@dataclass(frozen=True)
class MergedShare:
    """Share of an adapter's product that the candidate's tensor contains.

    Attributes
    ----------
    name, stored
        The reference's name of the tensor, and the candidate's.
    share
        1 where the adapter is merged, 0 where it is not.
    deviation
        Standard deviation of the share, from the rounding of the candidate.
    mistake
        Of a wrong merge of DoRA: what happened, in a phrase. Such a merge has no share.
    """

    name: str
    stored: str
    share: float
    deviation: float = 0.0
    mistake: str = ""

    @property
    def is_merged(self) -> bool:
        """True if the share differs from 1 by no more than chance."""
        return not self.mistake and abs(self.share - 1) <= max(LEAST_SHARE, CHANCE * self.deviation)

    @property
    def is_absent(self) -> bool:
        """True if the share differs from 0 by no more than chance."""
        return abs(self.share) <= max(LEAST_SHARE, CHANCE * self.deviation)

    @property
    def module(self) -> str:
        """The last word of the module's name."""
        return module_of(self.name).rpartition(".")[2]

    @property
    def layer(self) -> int | None:
        """The number of the tensor's layer; None without a number."""
        numbers = numbers_of(self.name)
        return numbers[0] if numbers else None


def adapted(checkpoint: Checkpoint) -> AdaptedCheckpoint | None:
    """Return the base model with an adapter that a checkpoint is, also below views of it."""
    while isinstance(checkpoint, View):
        checkpoint = checkpoint.inner
    return checkpoint if isinstance(checkpoint, AdaptedCheckpoint) else None


def merged_shares(
    checkpoints: Sequence[Checkpoint], names: Mapping[str, str]
) -> Iterator[MergedShare]:
    """Measure the share of an adapter in each tensor that both models have in one shape.

    Nothing is measured where the reference has no adapter, or where the candidate's tensor has
    changed otherwise by more than rounding.
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
        (sum_,) = exact.read([Part(name)])
        (actual,) = candidate.read([Part(stored)])
        share = _share(base, sum_ - base, actual, rounding_in(stored_info, actual))
        update = adapter.decomposed(name)
        mistake = ""
        if update is not None:
            if update.transposed:
                mistake = wrong_merge(base.T, update, actual.T)
            else:
                mistake = wrong_merge(base, update, actual)
        if share is not None or mistake:
            value, deviation = share or (math.nan, 0.0)
            yield MergedShare(name, stored, value, deviation, mistake)


def _share(
    base: np.ndarray, product: np.ndarray, actual: np.ndarray, rounding: float
) -> tuple[float, float] | None:
    """Return the share of a product in a change, and its standard deviation.

    None if the product is the rounding of float32 alone, as of an adapter before its training; or
    if the change contains more than the product and rounding.

    Examples
    --------
    >>> base, product = np.zeros(4), np.array([1.0, -1.0, 2.0, 0.0])
    >>> _share(base, product, base + 0.5 * product, 1e-6)
    (0.5, 0.0)
    """
    product = product.astype(np.float64)
    change = actual.astype(np.float64) - base
    squares = float(np.vdot(product, product))
    squares_of_base = float(np.square(base, dtype=np.float64).sum())
    if squares <= (SAFETY * ROUNDING["F32"]) ** 2 * squares_of_base:
        return None
    share = float(np.vdot(change, product)) / squares
    residual = change - share * product
    size = math.sqrt(float(np.square(residual).mean()))
    allowed = rounding * math.sqrt(float(np.square(actual, dtype=np.float64).mean()))
    if size > BESIDE_ADAPTER * max(allowed, 1e-6 * math.sqrt(squares / product.size)):
        return None
    return share, size / math.sqrt(squares)


def merge_sentence(shares: Sequence[MergedShare]) -> str:
    """Return one sentence on the shares of an adapter by layer, and by module where these differ.

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
    return f"Share of the adapter that survived the merge: {', '.join(parts)}."


def _phrases(shares: Sequence[MergedShare], by_module: bool) -> list[tuple[str, str]]:
    """Return the shares of one layer, each with its modules in parentheses if they are listed."""
    if not by_module:
        return [(_range(shares), "")]
    modules: dict[str, list[str]] = {}
    for share in shares:
        modules.setdefault(f"{share.share:.2f}", []).append(share.module)
    return [(text, f" ({', '.join(dict.fromkeys(names))})") for text, names in modules.items()]


def _spread(shares: Sequence[MergedShare]) -> float:
    """Difference of the largest and the smallest share of some tensors."""
    values = [share.share for share in shares]
    return max(values) - min(values)


def _range(shares: Sequence[MergedShare]) -> str:
    """Return the least and the largest share of some tensors as text."""
    values = [share.share for share in shares]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def merge_causes(shares: Sequence[MergedShare]) -> list[Cause]:
    """Return the causes of tensors into which an adapter was not merged as it should be.

    Examples
    --------
    >>> causes = merge_causes([MergedShare("layers.0.mlp.up_proj.weight", "mlp.up", 0.0)])
    >>> print(causes[0].mismatch, causes[0].where)
    the adapter (LoRA) is not merged into up_proj layer 0
    """
    by_reason: dict[str, list[MergedShare]] = {}
    for share in shares:
        if not share.is_merged:
            by_reason.setdefault(_reason_of(share), []).append(share)
    causes = []
    for reason, members in by_reason.items():
        names = tuple(member.name for member in members)
        modules = ", ".join(dict.fromkeys(member.module for member in members))
        values = [member.share for member in members]
        facts = {
            "tensors": dict.fromkeys(names, "weight"),
            "share": None if np.isnan(values).any() else [min(values), max(values)],
            "circuit": SCORES,
        }
        steps = (Change(tuple(member.stored for member in members), Take()),)
        mismatch = Mismatch(Kind.ADAPTER, reason.format(modules=modules), steps, facts=facts)
        causes.append(Cause(mismatch, (), names))
    return causes


def _reason_of(share: MergedShare) -> str:
    """Return the reason of a share that is not 1; braces stand for the modules."""
    if share.mistake:
        return f"the adapter (DoRA) is {share.mistake} in {{modules}}"
    if share.is_absent:
        return "the adapter (LoRA) is not merged into {modules}"
    if abs(share.share - 2) <= max(LEAST_SHARE, CHANCE * share.deviation):
        return "the adapter (LoRA) is merged twice into {modules}"
    if share.deviation > 0 and 0 < share.share < 1:
        return "rounding removed most of the adapter (LoRA) in {modules}: it was merged in few bits"
    return f"the adapter (LoRA) is merged with {share.share:.4g} times its scale into {{modules}}"
