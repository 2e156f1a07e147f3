"""What Proposition 2.2 leaves out: its proof takes scores for attention, without the softmax.

Without it (S33) the coefficient of a pair is the error at the heads' output met with the pair's
value, e_ij = δ_iᵀ x_j (S31, S35, values and W_o within δ). With it::

    β_ij = c α_ij (e_ij − Σ_j' α_ij' e_ij')

so that every row of β sums to 0: what a token gains from one context it loses from the others, and
a context that is like the average of what the token sees counts for nothing.

Axes: B batch, H query heads, N tokens (I queries, J keys).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from wqk.forms.scores import symmetry
from wqk.theory.products import cosine

if TYPE_CHECKING:
    from wqk.theory.gradients import LayerGradient


@dataclass(frozen=True)
class SoftmaxEffect:
    """One layer's exact β beside the coefficients that are derived without the softmax.

    Over all heads and all pairs of which the first token sees the second.

    Attributes
    ----------
    stack, kind, layer, application
        Which.
    cosine, correlation
        Of the two sets of coefficients; without and with their means taken off.
    agreement
        Share of pairs for which both have one sign, where neither is 0; half of them by chance.
    relative_error
        ‖β − c e‖ / ‖β‖ with the best c: what no learning rate can make up for.
    row_sums
        Largest sum of a row of β over the largest sum of a row's absolute values: 0 but for
        rounding, sinks and soft caps.
    row_sums_without
        The same ratio of a row of e, the median: 1 where the coefficients of a row have one sign.
    cosine_of_forms
        Of Σ β_ij K_ij and Σ e_ij K_ij, as matrices, summed over heads.
    symmetry, symmetry_without
        Of these two.
    """

    stack: str
    kind: str
    layer: int
    application: int
    cosine: float
    correlation: float
    agreement: float
    relative_error: float
    row_sums: float
    row_sums_without: float
    cosine_of_forms: float
    symmetry: float
    symmetry_without: float


def softmax_effect(gradient: LayerGradient) -> SoftmaxEffect:
    """Compare a layer's β with the coefficients of the paper's proof.

    Examples
    --------
    >>> import torch, transformers
    >>> from wqk.theory.gradients import gradients
    >>> shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **shape)
    >>> model = transformers.BertForMaskedLM(config)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> (gradient,) = gradients(model, {"input_ids": tokens, "labels": tokens})
    >>> effect = softmax_effect(gradient)
    >>> effect.row_sums < 1e-5, -1 <= effect.cosine <= 1
    (True, True)
    """
    plan = gradient.attention.plan
    visible = gradient.probabilities > 0
    without = replace(gradient, beta=np.where(visible, gradient.error, 0))
    beta, error = (a.beta[visible].astype(np.float64) for a in (gradient, without))
    angle = _cosine(beta, error)
    one, other = gradient.by_prediction(), without.by_prediction()
    square = one.is_square
    return SoftmaxEffect(
        stack=plan.stack,
        kind=plan.kind,
        layer=plan.layer,
        application=gradient.application,
        cosine=angle,
        correlation=_cosine(beta - beta.mean(), error - error.mean()),
        agreement=float((beta * error > 0)[beta * error != 0].mean()),
        relative_error=float(np.sqrt(max(0.0, 1 - angle**2))),
        row_sums=float(np.abs(gradient.beta.sum(-1)).max() / np.abs(gradient.beta).sum(-1).max()),
        row_sums_without=float(np.median(_one_sidedness(without.beta))),
        cosine_of_forms=cosine(one, other),
        symmetry=float(symmetry(one)) if square else float("nan"),
        symmetry_without=float(symmetry(other)) if square else float("nan"),
    )


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _one_sidedness(rows: np.ndarray) -> np.ndarray:
    """|Σ| / Σ|·| of rows (…, J), of those that are not all 0."""
    sizes = np.abs(rows).sum(axis=-1)
    return np.asarray(np.abs(rows.sum(axis=-1))[sizes > 0] / sizes[sizes > 0])
