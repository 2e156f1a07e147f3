"""Theorems 2.4 and S1.14, Remark S1.15: how β_ij and β_ji pair up, and how symmetric that is.

The theorem assumes that β_ij and β_ji have one sign and about one size, so that each pair of tokens
adds a nearly symmetric matrix β_ij K_ij + β_ji K_ijᵀ. Under a causal mask one of the two is 0. With
masked tokens, the remark counts the pairs that are both predicted against those of which one is:
p/(1−p) for a share p of masked tokens. Masked tokens share one embedding, so that K_ij of two of
them is nearly symmetric whatever β is.

The symmetry of the whole update G = Σ β_ij x_iᵀ x_j has three parts::

    tr(G G) = Σ_i β_ii² ‖x_i‖⁴ + Σ_{i≠j} β_ij β_ji ‖x_i‖² ‖x_j‖² + what unlike pairs share

Axes: B batch, H query heads, N tokens (i predicted, j context), D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._typing import Array, Bool, Float
from wqk.errors import TheoryError
from wqk.forms.scores import symmetry
from wqk.theory.gradients import gradients
from wqk.theory.products import inner_product, trace_of_product

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from wqk.forms import BilinearForm
    from wqk.theory.gradients import LayerGradient
    from wqk.theory.subject import Subject

# Shares of masked tokens that are tried, those of practice among them.
MASK_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Pairing:
    """How β_ij and β_ji of one layer go together, and how symmetric the update is.

    Attributes
    ----------
    stack, layer, application
        Which self-attention.
    correlation
        Of β_ij and β_ji over the pairs i ≠ j of all heads.
    pair_symmetry
        2 Σ β_ij β_ji / Σ (β_ij² + β_ji²) over these pairs: 1 where they are equal, as the theorem
        assumes, −1 where opposite, 0 where one of each two is 0.
    agreement
        Share of the pairs of which neither is 0 that have one sign; NaN where there are none.
    symmetry
        Of the update Σ β_ij K_ij, summed over heads.
    symmetric_share
        ‖M_s‖²/‖M‖² of it, (1 + symmetry)/2.
    from_diagonal, from_pairs, from_likeness
        The three parts of ``symmetry``, which add up to it: of tokens with themselves, of pairs,
        which is what the theorem is about, and of tokens that are like others.
    likeness
        Mean cosine of two tokens' inputs.
    """

    stack: str
    layer: int
    application: int
    correlation: float
    pair_symmetry: float
    agreement: float
    symmetry: float
    symmetric_share: float
    from_diagonal: float
    from_pairs: float
    from_likeness: float
    likeness: float


@dataclass(frozen=True)
class PredictedPairing:
    """The same apart for pairs of which both, one or none of the tokens are predicted.

    A pair's size is β_ij² ‖x_i‖² ‖x_j‖², the squared norm of what it adds to the update.

    Attributes
    ----------
    stack, layer, application
        Which self-attention.
    share
        p, of the tokens that are predicted.
    count_ratio
        Pairs i ≠ j that are both predicted, over those of which i is and j is not.
    count_limit
        p/(1−p), for long texts (S119).
    size_ratio
        The same ratio of the pairs' sizes.
    both, one, other, neither, itself
        Shares of all pairs' size: both predicted; i is, j is not; j is, i is not; neither; i = j.
        The remark has only i that are predicted, which is exact in the last layer alone.
    symmetry_of_both
        Symmetry of the update from pairs that are both predicted, alone.
    symmetry_without_both
        Symmetry of the update without these.
    pair_symmetry_of_both, pair_symmetry_of_one
        As `Pairing.pair_symmetry`, among these pairs, and among those with one predicted token.
    likeness_of_both, likeness_of_one
        Mean cosine of the inputs of such pairs.
    """

    stack: str
    layer: int
    application: int
    share: float
    count_ratio: float
    count_limit: float
    size_ratio: float
    both: float
    one: float
    other: float
    neither: float
    itself: float
    symmetry_of_both: float
    symmetry_without_both: float
    pair_symmetry_of_both: float
    pair_symmetry_of_one: float
    likeness_of_both: float
    likeness_of_one: float


def pairing(gradient: LayerGradient) -> Pairing:
    """How far one layer's β bears out Theorem S1.14.

    Raises
    ------
    TheoryError
        The block is cross-attention.

    Examples
    --------
    >>> import torch, transformers
    >>> shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **shape)
    >>> model = transformers.BertForMaskedLM(config)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> (gradient,) = gradients(model, {"input_ids": tokens, "labels": tokens})
    >>> row = pairing(gradient)
    >>> abs(row.from_diagonal + row.from_pairs + row.from_likeness - row.symmetry) < 1e-6
    True
    """
    _require_self_attention(gradient)
    beta = gradient.beta.astype(np.float64)
    rows, columns = np.triu_indices(beta.shape[-1], 1)
    one, other = beta[..., rows, columns].ravel(), beta[..., columns, rows].ravel()
    mean = (one.mean() + other.mean()) / 2
    known = (one != 0) & (other != 0)
    form = gradient.by_prediction()
    whole = float(form.norm) ** 2
    summed = beta.sum(axis=1)
    reciprocal = summed * summed.swapaxes(-1, -2) * _sizes(gradient)
    itself = np.eye(beta.shape[-1], dtype=bool)
    diagonal = float(reciprocal.sum(where=itself)) / whole
    pairs = float(reciprocal.sum(where=~itself)) / whole
    s = float(symmetry(form))
    plan = gradient.attention.plan
    return Pairing(
        stack=plan.stack,
        layer=plan.layer,
        application=gradient.application,
        correlation=_pair_symmetry(one - mean, other - mean),
        pair_symmetry=_pair_symmetry(one, other),
        agreement=float((one * other > 0)[known].mean()) if known.any() else float("nan"),
        symmetry=s,
        symmetric_share=(1 + s) / 2,
        from_diagonal=diagonal,
        from_pairs=pairs,
        from_likeness=s - diagonal - pairs,
        likeness=float(_cosines(gradient)[:, rows, columns].mean()),
    )


def predicted_pairing(
    gradient: LayerGradient, predicted: Bool[Array, "batch tokens"]
) -> PredictedPairing:
    """How far one layer's β bears out Remark S1.15, given which tokens are predicted.

    Raises
    ------
    TheoryError
        The block is cross-attention, or no block has two predicted tokens and one that is not.
    """
    _require_self_attention(gradient)
    tokens = predicted.shape[-1]
    different = ~np.eye(tokens, dtype=bool)
    i, j = predicted[:, :, None], predicted[:, None, :]
    kinds = {
        "both": i & j & different,
        "one": i & ~j,
        "other": ~i & j,
        "neither": ~i & ~j & different,
        "itself": np.broadcast_to(~different, (len(predicted), tokens, tokens)),
    }
    if not kinds["both"].any() or not kinds["one"].any():
        raise TheoryError("pairs need two predicted tokens and one that is not, in some block")
    summed = gradient.beta.astype(np.float64).sum(axis=1)
    sizes = {name: float((summed**2 * _sizes(gradient))[of].sum()) for name, of in kinds.items()}
    whole = sum(sizes.values())
    cosines, share = _cosines(gradient), float(predicted.mean())
    plan = gradient.attention.plan
    return PredictedPairing(
        stack=plan.stack,
        layer=plan.layer,
        application=gradient.application,
        share=share,
        count_ratio=float(kinds["both"].sum() / kinds["one"].sum()),
        count_limit=share / (1 - share),
        size_ratio=sizes["both"] / sizes["one"],
        **{name: size / whole for name, size in sizes.items()},
        symmetry_of_both=float(symmetry(gradient.only(kinds["both"]).by_prediction())),
        symmetry_without_both=float(symmetry(gradient.only(~kinds["both"]).by_prediction())),
        pair_symmetry_of_both=_among(gradient, kinds["both"]),
        pair_symmetry_of_one=_among(gradient, kinds["one"]),
        likeness_of_both=float(cosines[kinds["both"]].mean()),
        likeness_of_one=float(cosines[kinds["one"]].mean()),
    )


@dataclass(frozen=True)
class CommonUpdate:
    """What the updates of one layer on several batches have in common.

    Attributes
    ----------
    single
        Median symmetry of one batch's update.
    together
        Symmetry of their sum.
    share, share_error
        Σ_{a≠b} ⟨G_a, G_b⟩ / (n−1) Σ_a ‖G_a‖², how much of a batch's update is that of all; and
        twice its standard error, by leaving out one batch at a time.
    common
        Σ_{a≠b} tr(G_a G_b) / Σ_{a≠b} ⟨G_a, G_b⟩ over two different batches: the symmetry of the
        update that is expected of a batch, into which no batch's own chance enters. NaN where what
        batches have in common is no more than its error.
    """

    single: float
    together: float
    share: float
    share_error: float
    common: float


def common_update(updates: Sequence[BilinearForm]) -> CommonUpdate:
    """The symmetry of what several updates have in common, beside that of each.

    The theorem may be about expectations: the chance of a batch can hide what adds up over many.

    Raises
    ------
    TheoryError
        There are fewer than three updates.

    Examples
    --------
    >>> from wqk.forms import BilinearForm
    >>> random = np.random.default_rng(0)
    >>> symmetric = np.diag([1.0, 2.0, 3.0, 4.0])
    >>> noise = 2 * random.standard_normal((40, 4, 4))
    >>> found = common_update([BilinearForm(symmetric + n, np.eye(4)) for n in noise])
    >>> found.single < 0.8 < 0.9 < found.common < 1.1
    True
    """
    if len(updates) < 3:
        raise TheoryError(f"what batches have in common takes three of them, got {len(updates)}")
    inner, traces = (
        np.array([[product(a, b) for b in updates] for a in updates])
        for product in (inner_product, trace_of_product)
    )
    without = [np.delete(np.delete(inner, a, 0), a, 1) for a in range(len(updates))]
    shares, count = np.array([_shared(some) for some in without]), len(updates)
    share, error = _shared(inner), 2 * float(shares.std() * np.sqrt(count - 1))
    crossed = ~np.eye(count, dtype=bool)
    return CommonUpdate(
        single=float(np.median(np.diag(traces) / np.diag(inner))),
        together=float(traces.sum() / inner.sum()),
        share=share,
        share_error=error,
        common=float(traces[crossed].sum() / inner[crossed].sum()) if share > error else np.nan,
    )


def _shared(inner: np.ndarray) -> float:
    own = np.trace(inner)
    return float((inner.sum() - own) / ((len(inner) - 1) * own))


def masking_sweep(
    subject: Subject,
    shares: Sequence[float] = MASK_SHARES,
    layers: Collection[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Both kinds of pairing for several shares of masked tokens: a row a share, batch and layer.

    Parameters
    ----------
    subject
        A masked model on its text; every share is tried on all its batches.
    shares
        p, of the tokens that are masked and predicted.
    layers
        Numbers of the layers to look at; all of them otherwise.

    Raises
    ------
    TheoryError
        The subject is no masked model, or a block's score is no bilinear form.
    """
    if subject.objective != "masked":
        raise TheoryError(f"{subject.name}: is not trained on masked tokens; none can be masked")
    for share in shares:
        masked = subject.having(mask_share=share)
        for index, batch in enumerate(masked.batches()):
            predicted = (batch["labels"] != -100).cpu().numpy()
            for gradient in gradients(subject.model, batch, None, layers):
                if gradient.attention.plan.kind == "self":
                    yield {
                        "mask_share": share,
                        "batch": index,
                        **vars(pairing(gradient)),
                        **vars(predicted_pairing(gradient, predicted)),
                    }


def _require_self_attention(gradient: LayerGradient) -> None:
    if gradient.attention.plan.kind != "self":
        raise TheoryError("only in self-attention does a pair of tokens meet both ways")


def _pair_symmetry(one: np.ndarray, other: np.ndarray) -> float:
    """2 Σ ab / Σ (a² + b²); NaN where all are 0."""
    whole = float(one @ one + other @ other)
    return float(2 * (one @ other)) / whole if whole else float("nan")


def _among(gradient: LayerGradient, pairs: np.ndarray) -> float:
    """The pair symmetry of β among some pairs (B, N, N), each met in one direction or both."""
    beta = gradient.beta.astype(np.float64)
    heads = np.broadcast_to(pairs[:, None], beta.shape)
    return _pair_symmetry(beta[heads], beta.swapaxes(-1, -2)[heads])


def _sizes(gradient: LayerGradient) -> Float[Array, "batch tokens tokens"]:
    """‖x_i‖² ‖x_j‖²."""
    squares = (gradient.query_input.astype(np.float64) ** 2).sum(axis=-1)
    return squares[:, :, None] * squares[:, None, :]


def _cosines(gradient: LayerGradient) -> Float[Array, "batch tokens tokens"]:
    """Cosines of the tokens' inputs."""
    x = gradient.query_input.astype(np.float64)
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return x @ x.swapaxes(-1, -2)
