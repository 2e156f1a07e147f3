"""What an optimizer makes of the gradient: rows and columns of the step that W_qk really takes.

Adam's first step moves every weight by the sign of its gradient, and later ones by much the same.
The gradient of W_q is Σ_i x_i (Σ_j β_ij k_j): the mean of the inputs gives its rows something in
common, and signs make the most of that. The gradient of W_k is Σ_j x_j (Σ_i β_ij q_i), from which
the mean falls out, because every row of β sums to 0. So the two factors change in unlike ways,
whatever the objective is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from wqk._typing import Array, Float
from wqk.theory.updates import ImplicitUpdate

if TYPE_CHECKING:
    from wqk.forms import BilinearForm
    from wqk.theory.gradients import LayerGradient


def steps(gradient: LayerGradient, mean: Float[Array, " d"]) -> dict[str, BilinearForm]:
    """To first order, what a layer's form changes by in one step of several kinds.

    ``gradient``: of the form itself, Σ_ij β_ij x_i x_jᵀ. ``descent``: through the factors, by plain
    gradient descent. ``signs``: through the factors, by the signs of their gradients. ``centered``:
    by signs, the queries' inputs being taken less their mean in the gradient of W_q.

    Parameters
    ----------
    gradient
        Of one self-attention layer.
    mean
        Of the layer's inputs, (D,).

    Examples
    --------
    >>> import torch, transformers
    >>> from wqk.theory.gradients import gradients
    >>> shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **shape)
    >>> model = transformers.BertForMaskedLM(config)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> (gradient,) = gradients(model, {"input_ids": tokens, "labels": tokens})
    >>> list(steps(gradient, gradient.query_input.mean(axis=(0, 1))))
    ['gradient', 'descent', 'signs', 'centered']
    """
    query, key = gradient.factor_gradients()
    centered, _ = replace(gradient, query_input=gradient.query_input - mean).factor_gradients()

    def step(query: np.ndarray, key: np.ndarray) -> BilinearForm:
        return ImplicitUpdate(gradient.attention, query, key, rate=1.0).first_order

    return {
        "gradient": gradient.by_prediction(),
        "descent": step(query, key),
        "signs": step(np.sign(query), np.sign(key)),
        "centered": step(np.sign(centered), np.sign(key)),
    }
