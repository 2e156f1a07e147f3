"""Remark S1.6: effect of a step of W_q and W_k on W_qk, and the symmetry of this effect.

Gradient descent with rate η moves the factors, not the form::

    ΔW_qk = (W_q − ηG_q)(W_k − ηG_k)ᵀ − W_q W_kᵀ  ≈  −η (G_q W_kᵀ + W_q G_kᵀ)        (S39)

Without biases and rotary positions G_q = G W_k and G_k = Gᵀ W_q, where G = Σ_ij β_ij K_ij is the
gradient of the form. To first order, ΔW_qk = −η (G W_k W_kᵀ + W_q W_qᵀ G) (S40). This change is not
proportional to G, and is symmetric for a symmetric G only if W_q W_qᵀ = W_k W_kᵀ for every head.
For a symmetric G and independent random factors, its symmetry is near `expected_symmetry`.

Axes: H query heads, G key heads, R head width, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from wqk._typing import Array, Float
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.families import AttentionPlan
from wqk.families.plans import part_names
from wqk.forms import BilinearForm
from wqk.forms.scores import symmetry
from wqk_lab.theory.evidence import StatementMeasure, cosine, of_layers
from wqk_lab.theory.gradients import LayerGradient


def first_order(
    attention: Block,
    query_gradient: Float[Array, "heads width d_query"],
    key_gradient: Float[Array, "key_heads width d_key"],
) -> BilinearForm:
    """Return −(G_q W_kᵀ + W_q G_kᵀ), summed over heads: the limit of ΔW_qk / η for η → 0 (S39).

    The gradients have the shapes of the stored weights, (H, R, D) and (G, R, D).

    Examples
    --------
    >>> from wqk_lab.theory.gradients import example
    >>> layer = example()
    >>> first_order(layer.attention, *layer.factor_gradients())
    BilinearForm(16 × 16, rank 32)
    """
    form, gradient = attention.form, attention.with_weights(query_gradient, key_gradient).form
    return -(
        BilinearForm.from_factors(gradient.query, form.key)
        + BilinearForm.from_factors(form.query, gradient.key)
    )


def parameter_gradients(
    model: Any, plans: Sequence[AttentionPlan]
) -> list[tuple[Float[Array, "heads width d_query"], Float[Array, "key_heads width d_key"]]]:
    """Return the gradients of each block's W_q and W_k from a backward pass, in any layout.

    Raises
    ------
    CheckpointError
        A query or key has no gradient, because no backward pass was run.
    """
    gradients_before = {
        name: parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    blocks = [Block(open_checkpoint(gradients_before), plan) for plan in plans]
    return [(block.query.weight, block.key.weight) for block in blocks]


@contextmanager
def queries_and_keys_alone(model: Any, plans: Sequence[AttentionPlan]) -> Iterator[None]:
    """Restrict gradients to the blocks' queries and keys, within the context."""
    names = part_names(plans)
    frozen = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and name not in names:
            frozen.append(parameter)
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def alignment(gradient: LayerGradient) -> float:
    """Return the cosine of the first-order update and −Σ_ij β_ij K_ij; 1 if S40 holds."""
    return -cosine(_descent(gradient), gradient.by_prediction())


def passed_on(gradient: LayerGradient) -> dict[str, float]:
    """Return the share of the symmetry of Σ β K that an update through W_q and W_k keeps.

    The result contains the symmetries of Σ β K, the ``gradient``; of its ``update``; of the update
    ``if_tied``, with W_k = W_q in each head; and of ``update_of_symmetric_part``, for (β_ij +
    β_ji)/2 without biases. The value for independent random factors of these sizes is ``expected``.

    Examples
    --------
    >>> from wqk_lab.theory.gradients import example
    >>> numbers = passed_on(example())
    >>> -1 <= numbers["update"] <= 1, numbers["expected"]
    (True, 0.5)
    """
    attention = gradient.attention
    query, key = attention.query.stored_weight, attention.key.stored_weight
    plain, tied = (attention.with_weights(query, k, biases=False) for k in (key, query))
    both_ways = (gradient.beta + gradient.beta.swapaxes(-1, -2)) / 2
    return {
        "update_of_symmetric_part": _symmetry(replace(gradient, attention=plain, beta=both_ways)),
        "expected": expected_symmetry(*attention.query.weight.shape[:0:-1]),
        "gradient": float(symmetry(gradient.by_prediction())),
        "update": _symmetry(gradient),
        "if_tied": _symmetry(replace(gradient, attention=tied)),
    }


def expected_symmetry(width: int, rank: int) -> float:
    """Return the symmetry of G B Bᵀ + A Aᵀ G for random symmetric G and random A, B (D, R).

    The result is 2 / (2 + D/R) for large D: if P = A Aᵀ and Q = B Bᵀ are scaled to tr P = tr Q = D,
    then tr(P²) = D (1 + D/R), and traces of products of independent matrices factorize. This result
    is not in the paper.

    Examples
    --------
    >>> expected_symmetry(768, 768), round(expected_symmetry(768, 64), 3)
    (0.6666666666666666, 0.143)
    """
    return 2 / (2 + width / rank)


def _descent(gradient: LayerGradient) -> BilinearForm:
    return first_order(gradient.attention, *gradient.factor_gradients())


def _symmetry(gradient: LayerGradient) -> float:
    return float(symmetry(_descent(gradient)))


MEASURES: dict[str, StatementMeasure] = {
    "alignment": of_layers(lambda layer: {"cosine": alignment(layer)}),
    "passed_on": of_layers(passed_on),
}
