"""Objectives: what a model sees of a block, and which tokens it has to tell, where.

Axis letters: B batch, N tokens of a block, P predictions (of the whole batch), D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor
    from transformers import PreTrainedModel


class Task(NamedTuple):
    """What to put in, (B, N), and the targets, (P,), of rows of the flattened output, (P,)."""

    inputs: Tensor
    rows: Tensor
    targets: Tensor

    def part(self, number: int, parts: int) -> Task:
        """One of equal parts by blocks; of one part, all of it."""
        batch, block = self.inputs.shape
        blocks, predictions = batch // parts, len(self.rows) // parts
        own = slice(number * predictions, (number + 1) * predictions)
        return Task(
            self.inputs[number * blocks : (number + 1) * blocks],
            self.rows[own] - number * blocks * block,
            self.targets[own],
        )


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden: their share, how (``bert`` or ``mask``), and with which token."""

    share: float
    corruption: str
    mask_token: int
    vocabulary_size: int

    def count(self, block: int) -> int:
        """How many tokens of each block are chosen."""
        return round(self.share * block)

    def hide(self, blocks: Tensor, chosen: Tensor, generator: Generator) -> Tensor:
        """The blocks with the chosen tokens, (B, k), hidden.

        ``mask``: all become the mask token. ``bert``: 80 % of them do, 10 % become any token of the
        vocabulary, 10 % stay as they are.
        """
        import torch

        if self.corruption == "mask":
            return blocks.scatter(1, chosen, self.mask_token)
        draw = {"generator": generator, "device": blocks.device}
        fate = torch.rand(chosen.shape, **draw)
        anything = torch.randint(self.vocabulary_size, chosen.shape, **draw)
        shown = blocks.gather(1, chosen)
        shown = torch.where(fate < 0.9, anything, shown)
        shown = shown.masked_fill(fate < 0.8, self.mask_token)
        return blocks.scatter(1, chosen, shown)


def masked(blocks: Tensor, masking: Masking, generator: Generator) -> Task:
    """Tell the hidden tokens, equally many in every block, from both sides."""
    chosen = _choose(blocks, masking.count(blocks.shape[1]), 0, generator)
    inputs = masking.hide(blocks, chosen, generator)
    return Task(inputs, _flat(chosen, blocks), blocks.gather(1, chosen).flatten())


def causal(blocks: Tensor, masking: Masking, generator: Generator) -> Task:
    """Tell each next token of the block."""
    import torch

    positions = torch.arange(blocks.shape[1] - 1, device=blocks.device).expand(len(blocks), -1)
    return Task(blocks, _flat(positions, blocks), blocks[:, 1:].flatten())


def masked_next(blocks: Tensor, masking: Masking, generator: Generator) -> Task:
    """Tell the next token wherever that is a hidden one, as the published decoders were trained.

    The masked-language collator was used with a causal model: its labels, shifted by one. The first
    token has none before it and is never chosen here.
    """
    chosen = _choose(blocks, masking.count(blocks.shape[1]), 1, generator)
    inputs = masking.hide(blocks, chosen, generator)
    return Task(inputs, _flat(chosen - 1, blocks), blocks.gather(1, chosen).flatten())


OBJECTIVES: dict[str, Callable[[Tensor, Masking, Generator], Task]] = {
    "masked": masked,
    "causal": causal,
    "masked-next": masked_next,
}


def _choose(blocks: Tensor, count: int, first: int, generator: Generator) -> Tensor:
    """``count`` different positions from ``first`` on in every block, (B, k)."""
    import torch

    batch, block = blocks.shape
    draws = torch.rand((batch, block - first), generator=generator, device=blocks.device)
    return draws.topk(count).indices + first


def _flat(positions: Tensor, blocks: Tensor) -> Tensor:
    """Positions within blocks, (B, k), as rows of the flattened batch, (B·k,)."""
    import torch

    batch, block = blocks.shape
    offsets = torch.arange(0, batch * block, block, device=blocks.device)
    return (positions + offsets[:, None]).flatten()


class RowSelection:
    """Lets only the rows that are predicted into a model's language-model head.

    A hook on the base model's output; head and model stay transformers' own. Logits come out as
    (1, P, vocabulary), and for all rows while ``rows`` is None.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: Tensor | None = None
        model.base_model.register_forward_hook(self._select)

    def _select(self, module: Any, arguments: Any, output: Any) -> Any:
        if self.rows is not None:
            hidden = output.last_hidden_state.flatten(0, 1)
            output.last_hidden_state = hidden.index_select(0, self.rows).unsqueeze(0)
        return output


def loss_of(model: Any, selection: RowSelection, task: Task) -> Tensor:
    """Mean cross-entropy in nats per predicted token; ``model`` may be a wrapped one."""
    import torch

    selection.rows = task.rows
    try:
        logits = model(input_ids=task.inputs).logits
    finally:
        selection.rows = None
    return torch.nn.functional.cross_entropy(logits[0].float(), task.targets)
