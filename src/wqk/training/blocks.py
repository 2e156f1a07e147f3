"""Blocks: pieces of equal length from one stream of tokens, without padding.

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

# Independent streams of random numbers that a run draws from.
BLOCKS, MASKS, HELD_OUT_MASKS, DROPOUT = range(4)


def stream_seed(seed: int, stream: int, index: int) -> int:
    """A seed for one draw of one stream of a run."""
    state = np.random.SeedSequence((seed, stream, index)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def places(tokens: npt.NDArray[Any], block: int) -> int:
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
    starts = generator.integers(places(tokens, block), size=batch)
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
    starts = np.linspace(0, places(tokens, block) - 1, count).round().astype(np.int64)
    return _gather(tokens, starts, block)


def _gather(
    tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64], block: int
) -> npt.NDArray[np.int64]:
    blocks: npt.NDArray[np.int64] = tokens[starts[:, None] + np.arange(block)].astype(np.int64)
    return blocks
