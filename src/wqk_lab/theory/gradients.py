"""Proposition 2.2: the gradient of W_qk is a sum of rank-1 matrices, one for each pair of tokens.

With score_ij = x_i W_qk y_jᵀ and any loss::

    ∂loss/∂W_qk = Σ_ij β_ij x_iᵀ y_j,    β_ij = ∂loss/∂score_ij
                = c_ij α_ij (e_ij − Σ_j' α_ij' e_ij'),    e_ij = ∂loss/∂α_ij

c_ij is the factor of the score before the softmax: its scale, and the slope of the soft cap, if
any. The rows x are the inputs of queries, the rows y the inputs of keys; in self-attention x = y.
Gradient descent moves W_qk against this gradient; the paper's ΔW_qk is its negative.

Axes: B batch, H query heads, G key heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._typing import Array, Float
from wqk.attention import Block
from wqk.attention.factors import Factor, load_factor
from wqk.checkpoints import Checkpoint
from wqk.errors import TheoryError
from wqk.families import AttentionPlan, Composed
from wqk.forms import BilinearForm
from wqk.model import open as open_model
from wqk_lab.theory.capture import BlockUses, attention_recorded, require_records

if TYPE_CHECKING:
    Loss = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """The gradient of a loss with respect to the scores of one block's attention.

    If a model applies a block several times, its applications are further examples.

    Attributes
    ----------
    attention
        The block's weights and plan.
    query_input, key_input
        Inputs of queries and keys, after the block's norm, (B, I, D) and (B, J, D).
    probabilities
        α_ij, (B, H, I, J).
    error
        e_ij = ∂loss/∂α_ij, (B, H, I, J): the error at the heads' output times each value, the
        paper's δ_iᵀ x_j (S31, S35).
    beta
        β_ij = ∂loss/∂(x_i W_qk y_jᵀ), (B, H, I, J), including the softmax (S36). 0 if j is hidden
        from i. Without a soft cap and sinks every row sums to 0, because a softmax ignores a
        constant that is added to all its scores.
    value_input, mixed
        Inputs of values, (B, J, D), for `mixing_error`; and inputs of W_o, (B, I, H·R), or None if
        the family does not name the values and outputs.
    """

    attention: Block
    query_input: Float[Array, "batch queries d"]
    key_input: Float[Array, "batch keys d"]
    probabilities: Float[Array, "batch heads queries keys"]
    error: Float[Array, "batch heads queries keys"]
    beta: Float[Array, "batch heads queries keys"]
    value_input: Float[Array, "batch keys d"] | None = field(default=None, kw_only=True)
    mixed: Float[Array, "batch queries width"] | None = field(default=None, kw_only=True)

    def by_prediction(self, head: int | None = None) -> BilinearForm:
        """Σ_i x_iᵀ (Σ_j β_ij y_j): one rank-1 matrix for each predicted token (S37); rank B·I.

        The result is the gradient of one head's form, or the sum of all heads' gradients. In rotary
        models, it is the gradient of a term E common to all distances, in scores x_i (A R(−N) Bᵀ +
        E) y_jᵀ; for the form at one distance see `at_distance`.
        """
        x, context = self.query_input, self._weights(head) @ self.key_input
        return BilinearForm.from_factors(_columns(x), _columns(context))

    def by_context(self, head: int | None = None) -> BilinearForm:
        """Return Σ_j (Σ_i β_ij x_i)ᵀ y_j: one rank-1 matrix for each context token (S38)."""
        predicted = self._weights(head).swapaxes(-1, -2) @ self.query_input
        return BilinearForm.from_factors(_columns(predicted), _columns(self.key_input))

    def at_distance(self, distance: int, head: int | None = None) -> BilinearForm:
        """Return the gradient of the form at distance i − j: a sum over pairs at this distance.

        Raises
        ------
        TheoryError
            No pair has this distance.
        """
        queries, keys = self.beta.shape[-2:]
        first_query = max(distance, 0)
        end_of_queries = min(queries, keys + distance)
        if end_of_queries <= first_query:
            raise TheoryError(f"no pair of {keys} tokens has the distance {distance}")
        i = np.arange(first_query, end_of_queries)
        j = i - distance
        weights = self._weights(head)[:, i, j]
        weighted_queries = weights[..., None] * self.query_input[:, i]
        keys_of_pairs = self.key_input[:, j]
        return BilinearForm.from_factors(_columns(weighted_queries), _columns(keys_of_pairs))

    def factor_gradients(
        self,
    ) -> tuple[Float[Array, "heads width d_query"], Float[Array, "key_heads width d_key"]]:
        """Return the gradients of W_q and W_k that β implies, (H, R, D) and (G, R, D).

        Σ_i x_i (Σ_j β_ij k_j) and Σ_j y_j (Σ_i β_ij q_i), rotated back by the tokens' positions, in
        the shapes of the stored weights. The result equals the parameters' gradients unless queries
        or keys also occur in other terms of the score.
        """
        gradient_of_queries = self.beta @ self.attention.keys(self.key_input)
        queries = self.attention.queries(self.query_input)
        gradient_of_keys = self.beta.swapaxes(-1, -2) @ queries
        query = _projected_gradient(self.attention, gradient_of_queries, self.query_input)
        key = _projected_gradient(self.attention, gradient_of_keys, self.key_input)
        groups = len(self.attention.key.weight)
        key_by_group = key.reshape(groups, -1, *key.shape[1:])
        return query, key_by_group.sum(axis=1)

    def _weights(self, head: int | None) -> np.ndarray:
        """Return β of one head, or summed over heads, (B, I, J)."""
        if head is None:
            return np.asarray(self.beta.sum(axis=1))
        return np.asarray(self.beta[:, head])


def bilinear_plans(name: str, plans: Sequence[AttentionPlan]) -> None:
    """Raise `TheoryError` if the score of any block is not bilinear in its inputs.

    Terms that are added to a form's score, such as a bias of positions, are allowed.
    """
    for plan in plans:
        sides = plan.query, plan.key
        reason = ""
        if any(side.norm for side in sides):
            reason = "queries and keys are normalized token by token before they meet"
        elif any(isinstance(side.projection, Composed) for side in sides):
            reason = "queries or keys go through a latent that is normalized token by token"
        elif plan.clip is not None:
            reason = f"queries and keys are clipped at ±{plan.clip}"
        elif plan.position == "scaled alibi":
            reason = "its linear biases are added twice in the attention it reports"
        if reason:
            raise TheoryError(
                f"{name}: the scores of layer {plan.layer} of the {plan.stack} are not a "
                f"bilinear form of its inputs: {reason}"
            )


def blocks_of(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> list[Block]:
    """Return the blocks of these plans, with queries and keys read."""
    blocks = [Block(checkpoint, plan) for plan in plans]
    for block in blocks:
        block.weights()
    return blocks


def load_values(checkpoint: Checkpoint, plan: AttentionPlan) -> Factor | None:
    """Return the weights and biases of a block's values; None if the family does not name them."""
    if plan.value is None:
        return None
    parts = plan.value.parts
    read = dict(zip(parts, checkpoint.read(parts), strict=True))
    return load_factor(read, plan.value, checkpoint.name)


def mixing_error(use: LayerGradient, values: Factor | None) -> float:
    """Return the largest relative difference of W_o's input from Σ_j α_ij (x_j W_v + b_v).

    NaN if the family does not name the values.
    """
    if values is None or use.mixed is None or use.value_input is None:
        return float("nan")
    value_vectors = values.vectors(use.value_input)
    heads_per_value_head = use.probabilities.shape[1] // value_vectors.shape[1]
    value_vectors = value_vectors.repeat(heads_per_value_head, axis=1)
    expected = (use.probabilities @ value_vectors).swapaxes(1, 2)
    actual = use.mixed.reshape(expected.shape)
    largest = float(np.abs(actual).max())
    if not largest:
        return float("nan")
    return float(np.abs(expected - actual).max()) / largest


def gradients(
    model: Any,
    batch: Mapping[str, Any],
    loss: Loss | None = None,
    layers: Collection[int] | None = None,
    *,
    blocks: Sequence[Block] | None = None,
) -> list[LayerGradient]:
    """Return the exact β_ij of a loss, for every head of every layer (paper, Proposition 2.2).

    The model runs in evaluation mode, without dropout; the mode and the parameters' gradients are
    restored. The results have the model's precision. For float64, create the model and call this
    function within ``wqk.live.running.double_precision()``.

    Parameters
    ----------
    model
        A `transformers` model of a known family.
    batch
        Keyword arguments of the model.
    loss
        Function of the model and the batch that returns a scalar tensor; by default the ``loss`` of
        ``model(**batch)``.
    layers
        Numbers of the layers to measure; by default all. The attention of a whole pass is in
        memory, (B, H, N, N) for each layer, as in training.
    blocks
        Blocks from `blocks_of`, instead of ``layers``.

    Raises
    ------
    TheoryError
        A block's score is not a bilinear form, or the loss is not a scalar tensor, or does not
        depend on the reported attention of a block.
    CheckpointError
        The model lacks a chosen layer.
    UnknownFamily
        The model's family is unknown.

    Examples
    --------
    >>> import torch, transformers
    >>> shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **shape)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> batch = {"input_ids": tokens, "labels": tokens}
    >>> (gradient,) = gradients(transformers.BertForMaskedLM(config), batch)
    >>> gradient.beta.shape
    (1, 2, 5, 5)
    >>> gradient.by_prediction(head=0)
    BilinearForm(16 × 16, rank 5)
    """
    import torch

    if blocks is None:
        opened = open_model(model)
        if layers is not None:
            opened = opened.select(layers=layers)
        bilinear_plans(opened.name, opened.plans)
        blocks = blocks_of(opened.checkpoint, opened.plans)
    plans = [block.plan for block in blocks]
    with attention_recorded(model, plans) as records:
        value = _own_loss(model, batch) if loss is None else loss(model, batch)
        require_records(model, plans, records)
        recorded = [use.attention for record in records for use in record.uses]
        if getattr(value, "ndim", None) != 0 or not value.requires_grad:
            raise TheoryError("a loss must be a scalar tensor that depends on the model's weights")
        errors = iter(torch.autograd.grad(value, recorded, allow_unused=True))
    result = []
    for block, record in zip(blocks, records, strict=True):
        errors_of_block = [next(errors) for _ in record.uses]
        if any(error is None for error in errors_of_block):
            raise TheoryError(
                f"{type(model).__name__}: the loss does not depend on the attention that layer "
                f"{block.layer} of the {block.plan.stack} reports; leave the layer out"
            )
        result.append(_layer_gradient(block, record, errors_of_block))
    return result


def gradients_in_passes(
    model: Any, batch: Mapping[str, Any], blocks: Sequence[Block], positions: int
) -> list[LayerGradient]:
    """Return the gradients of the model's loss on a batch, from passes over parts of the batch.

    A pass with gradients stores the activations of all layers. Passes over a few texts at a time
    need less memory, with the same gradients: the loss of a batch is the mean of the losses of its
    texts, because all texts predict the same number of tokens.

    Parameters
    ----------
    model, batch, blocks
        As for `gradients`.
    positions
        Largest number of tokens in a pass; a pass has at least one text.
    """
    texts, tokens = batch["input_ids"].shape
    count = max(1, positions // tokens)
    passes = []
    for first in range(0, texts, count):
        part = {name: values[first : first + count] for name, values in batch.items()}
        share = len(part["input_ids"]) / texts
        passes.append(gradients(model, part, _share_of_loss(share), blocks=blocks))
    if len(passes) == 1:
        return passes[0]
    return [_joined_passes(layer, count) for layer in zip(*passes, strict=True)]


def _share_of_loss(share: float) -> Loss:
    """Return a loss function: this share of the model's loss."""
    return lambda model, batch: _own_loss(model, batch) * share


def _joined_passes(passes: Sequence[LayerGradient], count: int) -> LayerGradient:
    """Join one layer's gradients on parts of a batch, with ``count`` texts in the first part.

    If a model applies the layer several times, the texts of the first application come first.
    """
    uses = len(passes[0].probabilities) // count
    # If queries, keys and values have the same input, the array is stored once.
    joined_by_place: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def join(name: str) -> Any:
        parts = [getattr(gradient, name) for gradient in passes]
        if parts[0] is None:
            return None
        place = parts[0].ctypes.data, parts[0].shape
        if place not in joined_by_place:
            by_use = [part.reshape(uses, -1, *part.shape[1:]) for part in parts]
            array = np.concatenate(by_use, axis=1)
            joined_by_place[place] = array.reshape(-1, *array.shape[2:])
        return joined_by_place[place]

    arrays = [field.name for field in fields(LayerGradient) if field.name != "attention"]
    return replace(passes[0], **{name: join(name) for name in arrays})


def example() -> LayerGradient:
    """Return the gradient of one layer of a small random BERT on five tokens, for doctests."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = BertForMaskedLM(BertConfig(vocab_size=9, intermediate_size=8, **shape))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    return gradients(model, {"input_ids": tokens, "labels": tokens})[0]


def _own_loss(model: Any, batch: Mapping[str, Any]) -> Any:
    value = getattr(model(**batch), "loss", None)
    if value is None:
        raise TheoryError(
            f"{type(model).__name__} gives no loss for {', '.join(batch)}; add labels to the batch "
            "or pass a loss of your own"
        )
    return value


def _layer_gradient(block: Block, record: BlockUses, errors: Sequence[Any]) -> LayerGradient:
    """Join the recorded applications of a block, with the errors of probabilities."""
    tokens, contexts = record.uses[0].attention.shape[-2:]

    # If a layer projects one tensor to queries, keys and values, the array is stored once.
    arrays: dict[tuple[int, ...], np.ndarray] = {}

    def inputs(side: str, count: int) -> np.ndarray:
        tensors = [use.inputs.get(side, use.inputs["key"]) for use in record.uses]
        identity = tuple(map(id, tensors))
        if identity not in arrays:
            arrays[identity] = _joined(tensors)
        array = arrays[identity]
        return array.reshape(-1, count, array.shape[-1])

    x = inputs("query", tokens)
    y = inputs("key", contexts)
    shape = -1, block.head_count, tokens, contexts
    probabilities = _joined([use.attention for use in record.uses]).reshape(shape)
    error = _joined(errors).reshape(shape)
    centered = error - (probabilities * error).sum(axis=-1, keepdims=True)
    # What a change of x_i W_qk y_jᵀ is multiplied by before the softmax.
    slope: Any = 1
    cap = block.plan.softcap
    if cap:
        slope = 1 - (block.logits(x, y) / cap) ** 2
    beta = block.plan.score_scale * slope * probabilities * centered
    mixed = None
    if record.mixed:
        mixed = _joined(record.mixed).reshape(len(probabilities), tokens, -1)
    values = inputs("value", contexts)
    return LayerGradient(block, x, y, probabilities, error, beta, value_input=values, mixed=mixed)


def _joined(tensors: Sequence[Any]) -> np.ndarray:
    """Return tensors of several applications as one array; float64 stays, others are float32."""
    arrays = []
    for tensor in tensors:
        on_host = tensor.detach().cpu()
        arrays.append(on_host if on_host.dtype.itemsize == 8 else on_host.float())
    return np.concatenate(arrays)


def _columns(vectors: np.ndarray) -> np.ndarray:
    """Return row vectors (B, N, D) of all examples as the columns of a factor, (D, B·N)."""
    return vectors.reshape(-1, vectors.shape[-1]).T


def _projected_gradient(attention: Block, outputs: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Return the gradient (H, R, D) of a weight from gradients of its outputs (B, H, N, R)."""
    rotary = attention.plan.rotary
    if rotary is not None:  # the transpose of a turn is the turn back
        turned_back = rotary.rotate(outputs, -np.arange(outputs.shape[-2]))
        outputs = turned_back.astype(outputs.dtype, copy=False)
    gradients_of_texts = outputs.swapaxes(-1, -2) @ inputs[:, None]
    return np.asarray(gradients_of_texts.sum(axis=0))
