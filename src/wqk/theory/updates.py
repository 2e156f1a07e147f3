"""Remark S1.6: what a step of W_q and W_k does to W_qk, and how symmetric that is.

Gradient descent with rate η moves the factors, not the form::

    ΔW_qk = (W_q − ηG_q)(W_k − ηG_k)ᵀ − W_q W_kᵀ  ≈  −η (G_q W_kᵀ + W_q G_kᵀ)        (S39)

Without biases and rotary positions G_q = G W_k and G_k = Gᵀ W_q, where G = Σ_ij β_ij K_ij is the
form's own gradient, so that to first order ΔW_qk = −η (G W_k W_kᵀ + W_q W_qᵀ G) (S40). It is not
proportional to G, and where G is symmetric it is symmetric only if W_q W_qᵀ = W_k W_kᵀ for every
head. For a symmetric G and independent random factors its symmetry is near `expected_symmetry`.

Axes: H query heads, G key heads, R head width, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wqk._typing import Array, Float
from wqk.attention import load_attention
from wqk.checkpoints import open_checkpoint
from wqk.errors import TheoryError
from wqk.forms import BilinearForm
from wqk.forms.scores import symmetry
from wqk.theory.capture import bilinear_plans
from wqk.theory.products import cosine

if TYPE_CHECKING:
    from collections.abc import Collection

    from wqk.attention import Attention
    from wqk.theory.gradients import LayerGradient


@dataclass(frozen=True, eq=False)
class ImplicitUpdate:
    """What a step of gradient descent on a block's W_q and W_k does to its forms.

    Attributes
    ----------
    before
        The block's weights.
    query_gradient, key_gradient
        Of the weights, as they are stored: (H, R, D) and (G, R, D).
    rate
        η.
    """

    before: Attention
    query_gradient: Float[Array, "heads width d_query"]
    key_gradient: Float[Array, "key_heads width d_key"]
    rate: float

    @property
    def after(self) -> Attention:
        """The block's weights after the step; biases stay."""
        query, key = self.before.query.weight, self.before.key.weight
        return self.before.with_weights(
            query - self.rate * self.query_gradient, key - self.rate * self.key_gradient
        )

    @property
    def exact(self) -> BilinearForm:
        """ΔW_qk of the layer, of rank 2·G·R."""
        return self.after.form.difference(self.before.form)

    @property
    def first_order(self) -> BilinearForm:
        """−η (G_q W_kᵀ + W_q G_kᵀ), summed over heads: ΔW_qk without what is of order η² (S39)."""
        form, gradient = self.before.form, self._gradient.form
        return -self.rate * (
            BilinearForm(gradient.query, form.key) + BilinearForm(form.query, gradient.key)
        )

    @property
    def _gradient(self) -> Attention:
        return self.before.with_weights(self.query_gradient, self.key_gradient)


@dataclass(frozen=True)
class UpdateSymmetry:
    """The form's own gradient of a layer beside what a step of the factors does to the form.

    Attributes
    ----------
    stack, kind, layer, application
        Which.
    gradient
        Symmetry of Σ_ij β_ij K_ij, summed over heads.
    update
        Symmetry of the first-order update of the layer's form by gradient descent.
    update_if_tied
        The same if every head's W_k were its W_q, at the same β and without biases.
    update_of_symmetric_part
        The same if β were symmetric, (β_ij + β_ji)/2, and hence every head's gradient: 1 if
        symmetry passed from gradient to update.
    expected
        The last for independent random factors of these sizes, by `expected_symmetry`.
    alignment
        Cosine of the update and −Σ_ij β_ij K_ij, as matrices: 1 if they were proportional (S40).
    """

    stack: str
    kind: str
    layer: int
    application: int
    gradient: float
    update: float
    update_if_tied: float
    update_of_symmetric_part: float
    expected: float
    alignment: float


def implicit_update(gradient: LayerGradient, rate: float = 1.0) -> ImplicitUpdate:
    """The step that plain gradient descent would make, from the gradient of a block's scores.

    Examples
    --------
    >>> import torch, transformers
    >>> from wqk.theory.gradients import gradients
    >>> shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **shape)
    >>> model = transformers.BertForMaskedLM(config)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> (gradient,) = gradients(model, {"input_ids": tokens, "labels": tokens})
    >>> update = implicit_update(gradient, rate=0.1)
    >>> update.exact
    BilinearForm(16 × 16, rank 32)
    >>> float(update.exact.difference(update.first_order).norm / update.exact.norm) < 1e-2
    True
    """
    return ImplicitUpdate(gradient.attention, *gradient.factor_gradients(), rate)


def parameter_gradients(
    model: Any, layers: Collection[int] | None = None
) -> list[tuple[Float[Array, "heads width d_query"], Float[Array, "key_heads width d_key"]]]:
    """The gradients that a backward pass left on each block's W_q and W_k, whatever their layout.

    Raises
    ------
    TheoryError
        A block's score is no bilinear form.
    CheckpointError
        A query or key has no gradient: there was no backward pass.
    """
    plans = bilinear_plans(open_checkpoint(model), layers)
    left = {
        name: parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    blocks = [load_attention(open_checkpoint(left), plan) for plan in plans]
    return [(block.query.weight, block.key.weight) for block in blocks]


def update_between(before: Attention, after: Attention) -> BilinearForm:
    """ΔW_qk of an optimizer's actual step, or of many: factored, of rank 2·G·R."""
    return after.form.difference(before.form)


def update_symmetry(gradient: LayerGradient) -> UpdateSymmetry:
    """The symmetry of Σ β K beside that of the update it makes through W_q and W_k.

    Raises
    ------
    TheoryError
        The block is cross-attention, whose two sides are different tokens.

    Examples
    --------
    >>> import torch, transformers
    >>> from wqk.theory.gradients import gradients
    >>> shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **shape)
    >>> model = transformers.BertForMaskedLM(config)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> (gradient,) = gradients(model, {"input_ids": tokens, "labels": tokens})
    >>> row = update_symmetry(gradient)
    >>> -1 <= row.update <= 1, row.expected
    (True, 0.5)
    """
    attention, plan = gradient.attention, gradient.attention.plan
    if plan.kind != "self":
        raise TheoryError("symmetry is asked of self-attention only, got cross-attention")
    whole, update = gradient.by_prediction(), implicit_update(gradient).first_order
    query = attention.query.weight
    plain = attention.with_weights(query, attention.key.weight, biases=False)
    tied = attention.with_weights(query, query, biases=False)
    both_ways = (gradient.beta + gradient.beta.swapaxes(-1, -2)) / 2
    return UpdateSymmetry(
        stack=plan.stack,
        kind=plan.kind,
        layer=plan.layer,
        application=gradient.application,
        gradient=float(symmetry(whole)),
        update=float(symmetry(update)),
        update_if_tied=_update_symmetry(replace(gradient, attention=tied)),
        update_of_symmetric_part=_update_symmetry(
            replace(gradient, attention=plain, beta=both_ways)
        ),
        expected=expected_symmetry(*query.shape[:0:-1]),
        alignment=-cosine(update, whole),
    )


def expected_symmetry(width: int, rank: int) -> float:
    """Symmetry of G B Bᵀ + A Aᵀ G for a random symmetric G and independent random A, B (D, R).

    2 / (2 + D/R), for large D: with P = A Aᵀ and Q = B Bᵀ scaled to tr P = tr Q = D,
    tr(P²) = D (1 + D/R), and products of independent matrices factorize. The paper has no such
    number.

    Examples
    --------
    >>> expected_symmetry(768, 768), round(expected_symmetry(768, 64), 3)
    (0.6666666666666666, 0.143)
    """
    return 2 / (2 + width / rank)


def _update_symmetry(gradient: LayerGradient) -> float:
    return float(symmetry(implicit_update(gradient).first_order))
