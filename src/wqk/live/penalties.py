"""Terms of the loss that pull the forms toward symmetry, or toward skew-symmetry.

The paper's two ratios are functions of the symmetry s of a form M alone:

=============  ===========================  ===========  ==================
kind           ratio                        in s         least, at
=============  ===========================  ===========  ==================
``symmetric``  ‖M‖² / ‖M_s‖² (S147)         2/(1 + s)    1, at s = 1
``skew``       ‖M‖² / ‖M_n‖² (S148)         2/(1 − s)    1, at s = −1
=============  ===========================  ===========  ==================

(The paper says that S148 leads to s = 0.) Each has a pole at the other end, where the denominator
vanishes. `FLOOR` is added to it, 2/(1 ± s + FLOOR), so that value and gradient stay finite: the
value is at most 2/FLOOR, and the gradient vanishes only at the two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wqk._typing import Array, Float
from wqk.attention import Block
from wqk.checkpoints.modules import LiveCheckpoint, Read
from wqk.errors import CheckpointError, FormError
from wqk.families import AttentionPlan
from wqk.forms.scores import symmetry
from wqk.model import open as open_model

# Sign of s in the denominator.
SIGNS = {"symmetric": 1.0, "skew": -1.0}

# Lower limit of the denominator, far above the rounding of s in float32.
FLOOR = 1e-4


class Penalty:
    """The mean penalty over a model's self-attention layers, as a function of its live weights.

    Tensors are found once; a call forms each layer's factors from the parameters themselves, so
    that gradients reach them. It computes in float32 even under autocast. The caller multiplies it
    by a weight and adds it to the loss (S146).

    Parameters
    ----------
    model
        An `nn.Module` of `transformers`.
    kind
        ``symmetric`` or ``skew``.
    layers
        Numbers of the penalized layers, in every stack; None for all.
    heads
        Whether to average over heads instead of layers. A layer's form can be symmetric although
        those of its heads are not.

    Raises
    ------
    FormError
        There is no such kind.
    UnknownFamily
        The model's queries and keys cannot be found.
    CheckpointError
        The model has no such layers, or its weights are not loaded.

    Examples
    --------
    >>> import torch, transformers
    >>> config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    >>> model = transformers.BertModel(config)
    >>> penalty = Penalty(model, "symmetric")
    >>> (0.1 * penalty()).backward()
    >>> bool(model.encoder.layer[0].attention.self.query.weight.grad.any())
    True
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        layers: Sequence[int] | None = None,
        heads: bool = False,
    ) -> None:
        if kind not in SIGNS:
            raise FormError(f"a penalty must be one of {', '.join(SIGNS)}, got {kind!r}")
        self._sign, self._heads = SIGNS[kind], heads
        self._parameters = LiveCheckpoint(model, Read.GRADIENT)
        own = [plan for plan in open_model(self._parameters).plans if plan.kind == "self"]
        numbers = sorted({plan.layer for plan in own})
        wanted = numbers if layers is None else list(layers)
        if not wanted or not set(wanted) <= set(numbers):
            raise CheckpointError(
                f"{self._parameters.name}: a penalty applies to layers with self-attention, which "
                f"are {numbers}, got {wanted}"
            )
        self._plans = [plan for plan in own if plan.layer in wanted]

    def __call__(self) -> Float[Array, ""]:
        """The penalty of the current weights, a scalar tensor.

        Zero forms, which have no symmetry, count as s = 0. `NonFiniteWeights` if a weight is NaN or
        infinite.
        """
        import torch

        device = self._parameters.current(self._plans[0].query.tensor).device
        with torch.autocast(device.type, enabled=False):
            scores = torch.cat([self._symmetry(plan) for plan in self._plans])
            return (2 / (1 + self._sign * scores + FLOOR)).mean()

    def _symmetry(self, plan: AttentionPlan) -> Float[Array, " forms"]:
        block = Block(self._parameters, plan)
        form = block.groups if self._heads else block.form
        scores: Any = symmetry(form)
        return scores.nan_to_num(0.0).reshape(-1)
