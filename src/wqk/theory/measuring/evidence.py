"""What the measurements look at: a subject, its text, and its gradients, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk._caching import cached_property
from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.errors import TheoryError
from wqk.theory.gradients import gradients
from wqk.theory.variants import Update

if TYPE_CHECKING:
    from collections.abc import Collection

    from wqk.forms import BilinearForm
    from wqk.theory.gradients import LayerGradient
    from wqk.theory.subject import Subject
    from wqk.theory.text import Text


@dataclass(frozen=True, eq=False)
class Evidence:
    """A subject on its text.

    Attributes
    ----------
    subject, text
        The model with its blocks, and the whole text that the blocks are from.
    layers
        Numbers of the layers to look at; all where None.
    """

    subject: Subject
    text: Text
    layers: Collection[int] | None = None

    @cached_property
    def gradients(self) -> list[list[LayerGradient]]:
        """Of the model's own loss: one list of layers for each batch."""
        return [gradients(self.subject.model, batch, None, self.layers) for batch in self.batches]

    @property
    def batches(self) -> list[dict[str, object]]:
        """The subject's batches, as PyTorch tensors."""
        return list(self.subject.batches())

    @cached_property
    def updates(self) -> dict[int, list[Update]]:
        """Each self-attention layer's updates, one for each batch."""
        return updates_of(self.gradients)

    @cached_property
    def forms(self) -> dict[int, BilinearForm]:
        """W_qk of each self-attention layer, the sum over its heads.

        Raises
        ------
        TheoryError
            No layer has a square form.
        """
        checkpoint = open_checkpoint(self.subject.model)
        forms = {
            plan.layer: load_attention(checkpoint, plan).form
            for plan in attention_plans(checkpoint)
            if plan.kind == "self" and (self.layers is None or plan.layer in self.layers)
        }
        square = {layer: form for layer, form in forms.items() if form.is_square}
        if not square:
            raise TheoryError(f"{self.subject.name}: no self-attention layer has a square form")
        return square

    def on(self, subject: Subject) -> Evidence:
        """The same layers of another subject."""
        return Evidence(subject, self.text, self.layers)


def updates_of(batches: list[list[LayerGradient]]) -> dict[int, list[Update]]:
    """Updates by layer; where a layer is applied several times, each use counts as a batch."""
    updates: dict[int, list[Update]] = {}
    for layers in batches:
        for layer in layers:
            plan = layer.attention.plan
            if plan.kind == "self":
                update = Update(plan.layer, layer.query_input, layer.beta.sum(axis=1))
                updates.setdefault(plan.layer, []).append(update)
    return updates
