"""Theorems 2.4 and S1.14, Remark S1.15: pairs of β_ij and β_ji, and the resulting symmetry.

The theorem assumes that β_ij and β_ji have the same sign and about the same size, so that each pair
of tokens adds a nearly symmetric matrix β_ij K_ij + β_ji K_ijᵀ. This is tested on pairs of two
predicted tokens, because one of β_ij and β_ji is 0 under a causal mask, and in the last layer also
if only one token is predicted. If each token is predicted from all others (S9), β_ij is from the
pass that predicts i, and β_ji from the pass that predicts j.

Axes: B blocks, H query heads, N tokens (i predicted, j context), D width, U batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from wqk._typing import Array, Bool, Float
from wqk.errors import TheoryError
from wqk.forms import BilinearForm
from wqk.forms.scores import symmetry
from wqk_lab.theory.evidence import Evidence, StatementMeasure, inner_product, ratio
from wqk_lab.theory.gradients import LayerGradient
from wqk_lab.theory.verdict import Sample


class Pairs(NamedTuple):
    """The values β_ij and β_ji of one layer.

    Attributes
    ----------
    beta
        β_ij of the pass that predicts i, (B, H, N, N).
    overlap
        (x_i · x'_i)(x_j · x'_j), (B, N, N), with the inputs x of the pass that predicts i and x' of
        the pass that predicts j. In a single pass, ‖x_i‖² ‖x_j‖².
    cross
        (x_i · x_j)² in the pass that predicts i, (B, N, N).
    predicted
        Mask of the predicted tokens, (B, N).
    """

    beta: Float[Array, "blocks heads tokens tokens"]
    overlap: Float[Array, "blocks tokens tokens"]
    cross: Float[Array, "blocks tokens tokens"]
    predicted: Bool[Array, "blocks tokens"]

    @property
    def both(self) -> Bool[Array, "blocks tokens tokens"]:
        """Mask of the pairs i ≠ j of two predicted tokens."""
        different = ~np.eye(self.predicted.shape[-1], dtype=bool)
        return np.asarray(self.predicted[:, :, None] & self.predicted[:, None, :] & different)


def pairs_of(gradient: LayerGradient, predicted: Bool[Array, "batch tokens"]) -> Pairs:
    """Return the pairs of one layer, from the mask of predicted tokens in each application.

    If the examples predict one token each, in turn, N examples form one block.

    Raises
    ------
    TheoryError
        The block is cross-attention.
    """
    if gradient.attention.plan.kind != "self":
        raise TheoryError("only in self-attention does a pair of tokens meet both ways")
    beta = gradient.beta.astype(np.float64)  # (B, H, N, N)
    x = gradient.query_input.astype(np.float64)  # (B, N, D)
    predicted = np.tile(predicted, (len(x) // len(predicted), 1))
    if _each_in_turn(predicted):
        return _pairs_of_turns(beta, x)
    squares = (x**2).sum(axis=-1)
    overlap = squares[:, :, None] * squares[:, None, :]
    cross = (x @ x.swapaxes(-1, -2)) ** 2
    return Pairs(beta, overlap, cross, predicted)


def _each_in_turn(predicted: Bool[Array, "batch tokens"]) -> bool:
    """Return whether every N consecutive examples predict N tokens, one token each."""
    examples, tokens = predicted.shape
    if examples % tokens:
        return False
    in_turn = np.tile(np.eye(tokens, dtype=bool), (examples // tokens, 1))
    return np.array_equal(predicted, in_turn)


def _pairs_of_turns(
    beta: Float[Array, "examples heads tokens tokens"], x: Float[Array, "examples tokens dim"]
) -> Pairs:
    """Return the pairs of blocks whose N tokens are predicted in turn, in N passes."""
    tokens, width = x.shape[1:]
    heads = beta.shape[1]
    turn = np.arange(tokens)
    x = x.reshape(-1, tokens, tokens, width)  # (B, pass, N, D)
    beta = beta.reshape(len(x), tokens, heads, tokens, tokens)
    beta_when_predicted = beta[:, turn, :, turn]  # (N, B, H, N): of token i in pass i
    input_when_predicted = x[:, turn, turn]  # x_i in the pass that predicts token i
    own_overlap = np.einsum("bid,bjid->bij", input_when_predicted, x)  # x_i · x'_i
    cross = np.einsum("bid,bijd->bij", input_when_predicted, x) ** 2
    return Pairs(
        beta=beta_when_predicted.transpose(1, 2, 0, 3),
        overlap=own_overlap * own_overlap.swapaxes(-1, -2),
        cross=cross,
        predicted=np.ones(x.shape[:2], bool),
    )


def correlation(pairs: Pairs) -> dict[str, float]:
    """Return the correlation of β_ij and β_ji over pairs of two predicted tokens, in all heads.

    The result also contains ``agreement``, the share of pairs with equal signs among the pairs
    without a 0, and the number of ``pairs``.
    """
    is_counted = np.broadcast_to(pairs.both[:, None], pairs.beta.shape)
    forward = pairs.beta[is_counted]  # β_ij
    backward = pairs.beta.swapaxes(-1, -2)[is_counted]  # β_ji
    mean = forward.mean() if forward.size else 0.0  # also of β_ji
    forward_deviations = forward - mean
    backward_deviations = backward - mean
    square = float(forward_deviations @ forward_deviations)
    products = forward * backward
    return {
        "correlation": ratio(forward_deviations @ backward_deviations, square),
        "agreement": ratio((products > 0).sum(), (products != 0).sum()),
        "pairs": float(is_counted.sum() / 2),
    }


def parts_of_symmetry(gradient: LayerGradient, pairs: Pairs) -> dict[str, float]:
    """Return the symmetry of G = Σ β_ij x_iᵀ x_j in three parts, and as a whole.

    tr(G G) = Σ_{i≠j} β_ij β_ji ‖x_i‖² ‖x_j‖² (``from_pairs``, the subject of the theorem) + Σ_i
    β_ii² ‖x_i‖⁴ (``from_diagonal``) + a contribution of similar tokens (``from_likeness``).

    Examples
    --------
    >>> from wqk_lab.theory.gradients import example
    >>> gradient = example()
    >>> numbers = parts_of_symmetry(gradient, pairs_of(gradient, np.ones((1, 5), bool)))
    >>> *parts, whole = numbers.values()
    >>> abs(sum(parts) - whole) < 1e-6
    True
    """
    form = gradient.by_prediction()
    square_norm = float(form.norm) ** 2
    beta = pairs.beta.sum(axis=1)  # of all heads, (B, N, N)
    terms = beta * beta.swapaxes(-1, -2) * pairs.overlap  # β_ij β_ji ‖x_i‖² ‖x_j‖²
    is_diagonal = np.eye(beta.shape[-1], dtype=bool)
    from_diagonal = ratio(terms.sum(where=is_diagonal), square_norm)
    from_pairs = ratio(terms.sum(where=~is_diagonal), square_norm)
    total = float(symmetry(form))
    return {
        "from_pairs": from_pairs,
        "from_diagonal": from_diagonal,
        "from_likeness": total - from_diagonal - from_pairs,
        "symmetry": total,
    }


def share_of_predicted(pairs: Pairs) -> dict[str, float]:
    """Return the symmetric part of pairs of two predicted tokens, relative to pairs with one.

    ``count`` is the ratio of their numbers, near p/(1−p) (S119), ``size`` is the ratio of their
    squared norms, and ``ratio`` is size/count. The ratio is 1 if two predicted tokens add a
    symmetric matrix (S118, the part with S_ij), other pairs add none, and all β_ij K_ij have one
    size. NaN if no block has two predicted tokens and another token.
    """
    beta = pairs.beta.sum(axis=1)  # of all heads, (B, N, N)
    both_predicted = pairs.both
    only_query_predicted = pairs.predicted[:, :, None] & ~pairs.predicted[:, None, :]
    squares_of_terms = beta**2 * pairs.overlap  # ‖β_ij K_ij‖²
    square_with_one = float(squares_of_terms[only_query_predicted].sum())
    if not both_predicted.any() or not square_with_one:
        return {"ratio": np.nan, "count": np.nan, "size": np.nan}
    count = float(both_predicted.sum() / only_query_predicted.sum())
    # (β_ij + β_ji)² ‖S_ij‖² for each unordered pair, with ‖S_ij‖² = (‖K_ij‖² + (x_i · x_j)²)/2.
    beta_sums = beta + beta.swapaxes(-1, -2)
    squares_of_symmetric_parts = beta_sums**2 * (pairs.overlap + pairs.cross) / 4
    square_with_both = float(squares_of_symmetric_parts[both_predicted].sum())
    size = square_with_both / square_with_one
    return {"ratio": size / count, "count": count, "size": size}


def common_symmetry(updates: Sequence[BilinearForm]) -> np.ndarray:
    """Return the symmetry of the common part of three or more updates, as jackknife pseudo-values.

    Σ_{a≠b} tr(G_a G_b) / Σ_{a≠b} ⟨G_a, G_b⟩ over pairs of different batches: the symmetry of the
    expected update, without the noise of single batches, which may hide the common part.

    Examples
    --------
    >>> from wqk.forms import BilinearForm
    >>> random = np.random.default_rng(0)
    >>> symmetric = np.diag([1.0, 2.0, 3.0, 4.0])
    >>> noise = 2 * random.standard_normal((40, 4, 4))
    >>> values = common_symmetry([BilinearForm(symmetric + n, np.eye(4)) for n in noise])
    >>> bool(0.8 < values.mean() < 1.2)
    True
    """
    count = len(updates)
    if count < 3:
        raise TheoryError(f"what batches have in common takes three of them, got {count}")
    traces = np.zeros((count, count))  # tr(G_a G_b)
    inner_products = np.zeros((count, count))  # ⟨G_a, G_b⟩
    for a, b in permutations(range(count), 2):
        traces[a, b] = inner_product(updates[a], updates[b].T)
        inner_products[a, b] = inner_product(updates[a], updates[b])
    symmetry_of_all = ratio(traces.sum(), inner_products.sum())
    sums = zip(_sums_without_each(traces), _sums_without_each(inner_products), strict=True)
    symmetry_without_each = np.array([ratio(trace, product) for trace, product in sums])
    return np.asarray(count * symmetry_of_all - (count - 1) * symmetry_without_each)


def _sums_without_each(products: np.ndarray) -> np.ndarray:
    """Return the sum of a symmetric matrix of batches without each batch's row and column."""
    return np.asarray(products.sum() - 2 * products.sum(axis=0))


def _of_pairs(
    measure: Callable[[LayerGradient, Pairs], dict[str, float]],
) -> Callable[[Evidence], Sample]:
    return lambda evidence: evidence.sample(
        lambda layer, index: measure(layer, pairs_of(layer, evidence.predicted[index]))
    )


def _common(evidence: Evidence) -> Sample:
    values = []
    for updates in evidence.updates.values():
        values.append(common_symmetry([update.form for update in updates]))
    return Sample(np.array(values).T, "batches", tuple(evidence.updates))


MEASURES: dict[str, StatementMeasure] = {
    "correlation": _of_pairs(lambda layer, pairs: correlation(pairs)),
    "parts": _of_pairs(parts_of_symmetry),
    "common": _common,
    "share": _of_pairs(lambda layer, pairs: share_of_predicted(pairs)),
}
