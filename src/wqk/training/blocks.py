"""Rows of a batch: blocks from one stream of tokens, or single documents with padding.

Axis letters: B batch, N tokens of a block.

A batch is a function of the seed and its number alone, so a run that resumes after an interruption,
or on more processes, sees the same blocks in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.errors import CorpusError

if TYPE_CHECKING:
    import numpy.typing as npt

    from wqk.training.corpus.store import TokenStore
    from wqk.training.recipe import Recipe

# Independent streams of random numbers of a run.
BLOCKS, MASKS, HELD_OUT_MASKS, DROPOUT = range(4)


def stream_seed(seed: int, stream: int, index: int) -> int:
    """A seed for one draw of one stream of a run."""
    state = np.random.SeedSequence((seed, stream, index)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


@dataclass(frozen=True)
class Rows:
    """The rows of batches: blocks at any position of a stream, or single documents.

    Attributes
    ----------
    tokens
        The stream, read from its memory map in one gather per batch.
    block
        N, the length of a row.
    documents
        Offsets at which documents begin, followed by the end: each row is a document, cut or
        padded. None for blocks.
    padding
        The token that pads rows; None for blocks.

    Examples
    --------
    >>> Rows(np.arange(100), 4).drawn(2, seed=1, index=0)
    array([[ 1,  2,  3,  4],
           [49, 50, 51, 52]])
    >>> Rows(np.arange(1, 8), 3, documents=np.array([0, 2, 7]), padding=0).spaced(2)
    array([[1, 2, 0],
           [3, 4, 5]])
    """

    tokens: npt.NDArray[Any]
    block: int
    documents: npt.NDArray[np.int64] | None = None
    padding: int | None = None

    @classmethod
    def of(cls, store: TokenStore, split: str, recipe: Recipe) -> Rows:
        """The rows that a recipe makes of a store's split; documents need a padding token."""
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
        """Number of different rows; CorpusError if there is not even one."""
        if self.documents is not None and len(self.documents) > 1:
            return len(self.documents) - 1
        if self.documents is not None or len(self.tokens) < self.block:
            raise CorpusError(
                f"a block takes {self.block} tokens, but the stream has {len(self.tokens)}; use "
                "shorter blocks or more text"
            )
        return len(self.tokens) - self.block + 1

    def drawn(self, batch: int, *, seed: int, index: int) -> npt.NDArray[np.int64]:
        """Batch number ``index``, (B, N): rows drawn at random, all equally likely."""
        generator = np.random.default_rng(stream_seed(seed, BLOCKS, index))
        return self._take(generator.integers(self.count, size=batch))

    def spaced(self, most: int) -> npt.NDArray[np.int64]:
        """At most this many different rows, evenly spaced; always the same ones."""
        number = min(most, self.count)
        return self._take(np.linspace(0, self.count - 1, number).round().astype(np.int64))

    def _take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        begins = rows if self.documents is None else self.documents[rows]
        positions = begins[:, None] + np.arange(self.block)
        if self.documents is None:
            return np.asarray(self.tokens[positions], np.int64)
        inside = positions < self.documents[rows + 1][:, None]
        taken = self.tokens[np.minimum(positions, len(self.tokens) - 1)]
        return np.asarray(np.where(inside, taken, self.padding), np.int64)
