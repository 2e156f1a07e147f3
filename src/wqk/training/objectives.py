"""Objectives: what a model sees of a block, and which tokens it predicts at which positions.

Axis letters: B batch, N tokens of a block, K chosen tokens of a block, P predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import PreTrainedModel

OBJECTIVES = ("masked", "causal", "masked-next")

# A target that PyTorch's cross-entropy leaves out.
IGNORED = -100


class Task(NamedTuple):
    """Inputs (B, N), rows (P,) of the flattened output, and their targets (P,).

    ``visible`` (B, N) is false at padding; None without padding.
    """

    inputs: Tensor
    rows: Tensor
    targets: Tensor
    visible: Tensor | None = None

    @property
    def count(self) -> Tensor:
        """Number of targets that count."""
        return (self.targets != IGNORED).sum()


@dataclass(frozen=True)
class Objective:
    """A training objective with its parameters.

    ``masked`` predicts masked tokens from both sides, equally many in every block. ``causal``
    predicts each next token. ``masked-next`` predicts the next token wherever it is masked, as the
    published decoders were trained: a collator for masked language models with a causal model,
    whose labels are shifted by one. The first token, which nothing precedes, is never chosen.

    Random numbers are drawn separately, so that `task` is a pure function, which compiles as one
    graph, and so that a process can take its own rows of a batch's draws.

    Attributes
    ----------
    name
        One of `OBJECTIVES`.
    mask_share
        Share of a block's tokens that are chosen.
    corruption
        ``mask``: all chosen tokens become the mask token. ``bert``: 80 % do, 10 % become random
        tokens, and 10 % stay as they are.
    mask_token, vocabulary_size
        Of the token store.
    padding
        The token that pads rows, which is neither attended to nor predicted; None for full rows.
        In a padded row, ``mask_share`` is that of the other tokens.
    """

    name: str
    mask_share: float
    corruption: str
    mask_token: int
    vocabulary_size: int
    padding: int | None = None

    def draw(self, batch: int, block: int, generator: Generator) -> tuple[Tensor, ...]:
        """The random numbers of one batch: tensors with one row for each of B blocks."""
        import torch

        if self.name == "causal":
            return ()
        on: dict[str, Any] = {"generator": generator, "device": generator.device}
        order = torch.rand((batch, block - self._first), **on)
        if self.corruption == "mask":
            return (order,)
        chosen = (batch, round(self.mask_share * block))
        fate = torch.rand(chosen, **on)
        return order, fate, torch.randint(self.vocabulary_size, chosen, **on)

    def task(self, blocks: Tensor, draws: tuple[Tensor, ...]) -> Task:
        """The task for blocks (B, N), from as many rows of `draw`."""
        import torch

        block, first = blocks.shape[1], self._first
        visible = None if self.padding is None else blocks != self.padding
        if self.name == "causal":
            before = torch.arange(block - 1, device=blocks.device).expand(len(blocks), -1)
            targets = blocks[:, 1:]
            if visible is not None:
                targets = targets.masked_fill(~visible[:, 1:], IGNORED)
            return Task(blocks, _flat(before, blocks), targets.flatten(), visible)
        order, *corruption = draws
        if visible is not None:
            order = order.masked_fill(~visible[:, first:], -1)
        chosen = order.topk(round(self.mask_share * block)).indices + first  # (B, K)
        targets = blocks.gather(1, chosen)
        shown = self._corrupted(targets, *corruption)
        if visible is not None:
            lengths = visible[:, first:].sum(1, keepdim=True)
            wanted = (self.mask_share * lengths).round().clamp(min=1)
            rank = torch.arange(chosen.shape[1], device=blocks.device)
            counts = (rank < wanted) & visible.gather(1, chosen)
            shown = torch.where(counts, shown, targets)
            targets = targets.masked_fill(~counts, IGNORED)
        rows = _flat(chosen - first, blocks)
        return Task(blocks.scatter(1, chosen, shown), rows, targets.flatten(), visible)

    @property
    def _first(self) -> int:
        """First position that can be chosen; also the distance of a prediction from its row."""
        return 1 if self.name == "masked-next" else 0

    def _corrupted(self, targets: Tensor, *draws: Tensor) -> Tensor:
        """The replacements of the chosen tokens (B, K)."""
        import torch

        if not draws:
            return torch.full_like(targets, self.mask_token)
        fate, anything = draws
        shown = torch.where(fate < 0.9, anything, targets)
        return shown.masked_fill(fate < 0.8, self.mask_token)


def _flat(positions: Tensor, blocks: Tensor) -> Tensor:
    """Positions within blocks, (B, K), as rows of the flattened batch, (B·K,)."""
    import torch

    batch, block = blocks.shape
    offsets = torch.arange(0, batch * block, block, device=blocks.device)
    return (positions + offsets[:, None]).flatten()


class RowSelection:
    """Passes only the predicted rows to a model's language-model head.

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
    """Mean cross-entropy in nats per predicted token."""
    import torch

    selection.rows = task.rows
    try:
        hidden = {} if task.visible is None else {"attention_mask": task.visible}
        logits = model(input_ids=task.inputs, **hidden).logits
    finally:
        selection.rows = None
    return torch.nn.functional.cross_entropy(logits[0].float(), task.targets)
