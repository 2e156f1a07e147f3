"""Rows of a batch: blocks from one stream of tokens, or single documents with padding.

Axis letters: B batch, N tokens of a block.

A batch is a function of the seed and its number alone, so a run that resumes after an interruption,
or on more processes, sees the same blocks in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.errors import CorpusError

if TYPE_CHECKING:
    import numpy.typing as npt

    from wqk.training.corpus.store import TokenStore

# Independent streams of random numbers that a run draws from.
BLOCKS, MASKS, HELD_OUT_MASKS, DROPOUT = range(4)


def stream_seed(seed: int, stream: int, index: int) -> int:
    """A seed for one draw of one stream of a run."""
    state = np.random.SeedSequence((seed, stream, index)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def possible_starts(tokens: npt.NDArray[Any], block: int) -> int:
    """Number of possible starting positions of a block.

    Raises
    ------
    CorpusError
        The stream is shorter than a block.
    """
    if len(tokens) < block:
        raise CorpusError(
            f"a block takes {block} tokens, but the stream has {len(tokens)}; use shorter blocks "
            "or more text"
        )
    return len(tokens) - block + 1


def draw_blocks(
    tokens: npt.NDArray[Any], block: int, batch: int, *, seed: int, index: int
) -> npt.NDArray[np.int64]:
    """Batch number ``index``: blocks at uniformly random positions of the stream.

    Returns (B, N) token numbers, read from the memory map in one gather.

    Raises
    ------
    CorpusError
        The stream is shorter than a block.

    Examples
    --------
    >>> draw_blocks(np.arange(100), 4, 2, seed=1, index=0)
    array([[ 1,  2,  3,  4],
           [49, 50, 51, 52]])
    """
    generator = np.random.default_rng(stream_seed(seed, BLOCKS, index))
    starts = generator.integers(possible_starts(tokens, block), size=batch)
    return _gather(tokens, starts, block)


def spaced_blocks(tokens: npt.NDArray[Any], block: int, count: int) -> npt.NDArray[np.int64]:
    """Blocks evenly spaced over a stream; always the same.

    Raises
    ------
    CorpusError
        The stream is shorter than a block.

    Examples
    --------
    >>> spaced_blocks(np.arange(10), 3, 2).tolist()
    [[0, 1, 2], [7, 8, 9]]
    """
    starts = np.linspace(0, possible_starts(tokens, block) - 1, count).round().astype(np.int64)
    return _gather(tokens, starts, block)


def padding_of(rows: str, store: TokenStore) -> int | None:
    """The token that pads a batch's rows; None for ``blocks``, which are full.

    Raises
    ------
    CorpusError
        The rows are ``documents``, and the vocabulary has no token for padding.
    """
    if rows == "blocks":
        return None
    if "padding" not in store.special:
        raise CorpusError(
            f"{store.folder}: rows=documents needs a vocabulary with a padding token; train with "
            "rows=blocks"
        )
    return store.special["padding"]


def draw_documents(
    tokens: npt.NDArray[Any],
    documents: npt.NDArray[np.int64],
    block: int,
    batch: int,
    padding: int,
    *,
    seed: int,
    index: int,
) -> npt.NDArray[np.int64]:
    """Batch number ``index``: the heads of random documents, (B, N), padded.

    Parameters
    ----------
    documents
        Offsets at which they begin, followed by the end, as of a token store.
    padding
        The token that fills the rows of shorter documents.

    Examples
    --------
    >>> draw_documents(np.arange(1, 8), np.array([0, 2, 7]), 3, 2, padding=0, seed=1, index=0)
    array([[1, 2, 0],
           [3, 4, 5]])
    """
    generator = np.random.default_rng(stream_seed(seed, BLOCKS, index))
    chosen = generator.integers(len(documents) - 1, size=batch)
    return _padded(tokens, documents, chosen, block, padding)


def spaced_documents(
    tokens: npt.NDArray[Any],
    documents: npt.NDArray[np.int64],
    block: int,
    count: int,
    padding: int,
) -> npt.NDArray[np.int64]:
    """As `draw_documents`, evenly spaced; always the same, and each document once at most."""
    number = len(documents) - 1
    chosen = np.linspace(0, number - 1, min(count, number)).round().astype(np.int64)
    return _padded(tokens, documents, chosen, block, padding)


def _padded(
    tokens: npt.NDArray[Any],
    documents: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.int64],
    block: int,
    padding: int,
) -> npt.NDArray[np.int64]:
    positions = documents[chosen][:, None] + np.arange(block)
    inside = positions < documents[chosen + 1][:, None]
    kept = tokens[np.minimum(positions, len(tokens) - 1)].astype(np.int64)
    return np.where(inside, kept, padding)


def _gather(
    tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64], block: int
) -> npt.NDArray[np.int64]:
    blocks: npt.NDArray[np.int64] = tokens[starts[:, None] + np.arange(block)].astype(np.int64)
    return blocks
