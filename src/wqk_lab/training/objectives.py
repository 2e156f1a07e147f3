"""Batches: rows of tokens, the visible tokens of a model, and the tokens to predict.

A batch is a function only of the seed and its number. Therefore a run that resumes after an
interruption, or with more processes, reads the same rows, with the same masks, in the same order.

Axis letters: B batch, N tokens of a row, K chosen tokens of a row, P predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.errors import CorpusError
from wqk.live.held_out import IGNORED
from wqk_lab.training.corpus.store import TokenStore
from wqk_lab.training.recipe import Recipe

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Generator, Tensor
    from transformers import PreTrainedModel

# Independent streams of random numbers of a run.
BLOCKS, MASKS, HELD_OUT_MASKS, DROPOUT = range(4)


def stream_seed(seed: int, stream: int, index: int) -> int:
    """Return a seed for one draw of one stream of a run."""
    state = np.random.SeedSequence((seed, stream, index)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


@dataclass(frozen=True)
class TokenRows:
    """The rows of batches: blocks at any position of a stream, or single documents, cut or padded.

    Examples
    --------
    >>> TokenRows(np.arange(100), 4).drawn(2, seed=1, index=0)
    array([[ 1,  2,  3,  4],
           [49, 50, 51, 52]])
    >>> TokenRows(np.arange(1, 8), 3, documents=np.array([0, 2, 7]), padding=0).spaced(2)
    array([[1, 2, 0],
           [3, 4, 5]])
    """

    tokens: npt.NDArray[Any]  # read from the memory map, once for each batch
    block: int  # N, the length of a row
    documents: npt.NDArray[np.int64] | None = None  # offsets and the end; None for blocks
    padding: int | None = None  # the token for padding of documents

    @classmethod
    def of(cls, store: TokenStore, split: str, recipe: Recipe) -> TokenRows:
        """Return the rows of a split for a recipe; documents need a padding token."""
        if recipe.rows == "blocks":
            return cls(store.tokens(split), recipe.block)
        if "padding" not in store.special:
            raise CorpusError(
                f"{store.folder}: rows=documents needs a vocabulary with a padding token; train "
                "with rows=blocks"
            )
        padding = store.special["padding"]
        return cls(store.tokens(split), recipe.block, store.documents(split), padding)

    @property
    def count(self) -> int:
        """Number of different rows; `CorpusError` if there is none."""
        if self.documents is not None and len(self.documents) > 1:
            return len(self.documents) - 1
        if self.documents is not None or len(self.tokens) < self.block:
            raise CorpusError(
                f"a block needs {self.block} tokens, but the stream has {len(self.tokens)}; use "
                "shorter blocks or more text"
            )
        return len(self.tokens) - self.block + 1

    def drawn(self, batch: int, *, seed: int, index: int) -> npt.NDArray[np.int64]:
        """Return batch number ``index``, (B, N): rows drawn at random with equal probability."""
        generator = np.random.default_rng(stream_seed(seed, BLOCKS, index))
        return self._take(generator.integers(self.count, size=batch))

    def spaced(self, most: int) -> npt.NDArray[np.int64]:
        """Return at most this many different rows, evenly spaced, and always the same rows."""
        number = min(most, self.count)
        return self._take(np.linspace(0, self.count - 1, number).round().astype(np.int64))

    def _take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tokens of rows, (B, N): of blocks at any place, or of padded documents."""
        offsets = np.arange(self.block)
        if self.documents is None:
            return np.asarray(self.tokens[rows[:, None] + offsets], np.int64)
        starts = self.documents[rows]
        stops = self.documents[rows + 1]
        positions = starts[:, None] + offsets
        is_inside = positions < stops[:, None]
        last_position = len(self.tokens) - 1
        tokens = self.tokens[np.minimum(positions, last_position)]
        return np.asarray(np.where(is_inside, tokens, self.padding), np.int64)


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

    ``masked`` predicts masked tokens from both sides, with an equal number in every block.
    ``causal`` predicts each next token. ``masked-next`` predicts the next token only if it is
    masked, as in the training of the published decoders: a collator for masked language models with
    a causal model, which shifts labels by one. The first token has no preceding token, and is never
    chosen.

    With the corruption ``mask``, all chosen tokens become the mask token; with ``bert``, 80 %
    become the mask token, 10 % become random tokens, and 10 % are not changed.

    Random numbers are drawn separately. Therefore `task` is a pure function that compiles as one
    graph, and a process can use its rows of a batch's random numbers.
    """

    name: str
    mask_share: float  # of a block's tokens, in a padded row of those that are no padding
    corruption: str
    mask_token: int
    vocabulary_size: int
    padding: int | None = None  # pads rows, is neither attended to nor predicted

    @classmethod
    def of(cls, recipe: Recipe, store: TokenStore) -> Objective:
        """Return the objective of a recipe on the tokens of a store."""
        return cls(
            name=recipe.objective,
            mask_share=recipe.mask_share,
            corruption=recipe.corruption,
            mask_token=store.special["mask"],
            vocabulary_size=store.vocabulary_size,
            padding=TokenRows.of(store, "train", recipe).padding,
        )

    def draw(self, batch: int, block: int, generator: Generator) -> tuple[Tensor, ...]:
        """Return the random numbers of one batch: tensors with one row for each of B blocks."""
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
        """Return the task for blocks (B, N), from the same number of rows of `draw`."""
        import torch

        block, first = blocks.shape[1], self._first
        visible = None if self.padding is None else blocks != self.padding
        if self.name == "causal":
            before = torch.arange(block - 1, device=blocks.device).expand(len(blocks), -1)
            targets = blocks[:, 1:]
            if visible is not None:
                targets = targets.masked_fill(~visible[:, 1:], IGNORED)
            return Task(blocks, _flat(before, blocks), targets.flatten(), visible)
        order, *fates = draws
        if visible is not None:
            order = order.masked_fill(~visible[:, first:], -1)
        chosen = order.topk(round(self.mask_share * block)).indices + first  # (B, K)
        targets = blocks.gather(1, chosen)
        shown = torch.full_like(targets, self.mask_token)
        if fates:
            fate, anything = fates
            kept_or_random = torch.where(fate < 0.9, anything, targets)
            shown = torch.where(fate < 0.8, shown, kept_or_random)
        if visible is not None:
            lengths = visible[:, first:].sum(1, keepdim=True)
            count = (self.mask_share * lengths).round().clamp(min=1)
            rank = torch.arange(chosen.shape[1], device=blocks.device)
            counts = (rank < count) & visible.gather(1, chosen)
            shown = torch.where(counts, shown, targets)
            targets = targets.masked_fill(~counts, IGNORED)
        rows = _flat(chosen - first, blocks)
        return Task(blocks.scatter(1, chosen, shown), rows, targets.flatten(), visible)

    @property
    def _first(self) -> int:
        """First position that can be chosen; also the distance of a prediction from its row."""
        return 1 if self.name == "masked-next" else 0


def _flat(positions: Tensor, blocks: Tensor) -> Tensor:
    """Return positions within blocks, (B, K), as rows of the flattened batch, (B·K,)."""
    import torch

    batch, block = blocks.shape
    offsets = torch.arange(0, batch * block, block, device=blocks.device)
    return (positions + offsets[:, None]).flatten()


class RowSelection:
    """Passes only the predicted rows to a model's language-model head.

    This is a hook on the base model's output; head and model do not change. Logits are (1, P,
    vocabulary); if ``rows`` is None, logits are for all rows.
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
    """Return the mean cross-entropy in nats per predicted token."""
    import torch

    selection.rows = task.rows
    try:
        hidden = {} if task.visible is None else {"attention_mask": task.visible}
        logits = model(input_ids=task.inputs, **hidden).logits
    finally:
        selection.rows = None
    return torch.nn.functional.cross_entropy(logits[0].float(), task.targets)
