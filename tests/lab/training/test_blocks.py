"""Blocks: pieces of the stream, a function of seed and number alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk.errors import CorpusError
from wqk_lab.training.objectives import TokenRows


@given(
    size=st.integers(5, 300),
    block=st.integers(2, 5),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    index=st.integers(0, 2**40),
)
def test_every_block_is_a_piece_of_the_stream(size, block, batch, seed, index):
    tokens = np.arange(size, dtype=np.uint16)
    blocks = TokenRows(tokens, block).drawn(batch, seed=seed, index=index)
    assert blocks.shape == (batch, block)
    assert blocks.dtype == np.int64
    assert (np.diff(blocks, axis=1) == 1).all()
    assert (blocks == TokenRows(tokens, block).drawn(batch, seed=seed, index=index)).all()


def test_all_beginnings_are_equally_likely() -> None:
    tokens = np.arange(13)
    starts = [TokenRows(tokens, 4).drawn(50, seed=3, index=n)[:, 0] for n in range(400)]
    counts = np.bincount(np.concatenate(starts), minlength=10)
    assert len(counts) == 10
    expected = 400 * 50 / 10
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees, p = .001


@given(size=st.integers(3, 200), block=st.integers(2, 3), count=st.integers(2, 50))
def test_spaced_blocks_reach_from_end_to_end(size: int, block: int, count: int) -> None:
    blocks = TokenRows(np.arange(size), block).spaced(count)
    assert blocks.shape == (min(count, size - block + 1), block)
    assert blocks[0, 0] == 0
    assert len(blocks) == 1 or blocks[-1, -1] == size - 1
    gaps = np.diff(blocks[:, 0])
    assert (gaps > 0).all()
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_a_stream_shorter_than_a_block() -> None:
    tokens = np.arange(3)
    assert TokenRows(tokens, 3).drawn(2, seed=1, index=0).tolist() == [[0, 1, 2]] * 2
    with pytest.raises(CorpusError, match="a block needs 4 tokens, but the stream has 3"):
        TokenRows(tokens, 4).drawn(2, seed=1, index=0)
    with pytest.raises(CorpusError, match="the stream has 3"):
        TokenRows(tokens, 4).spaced(1)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    block=st.integers(2, 7),
    index=st.integers(0, 2**40),
)
def test_every_row_is_the_head_of_a_document(lengths: list[int], block: int, index: int) -> None:
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint16)
    heads = {
        (*range(begin + 1, min(end, begin + block) + 1), *[0] * (block - (end - begin)))
        for begin, end in pairwise(offsets)
    }
    rows = TokenRows(tokens, block, offsets, padding=0)
    drawn = rows.drawn(8, seed=2, index=index)
    assert drawn.shape == (8, block)
    assert set(map(tuple, drawn.tolist())) <= heads
    assert set(map(tuple, rows.spaced(99).tolist())) == heads
