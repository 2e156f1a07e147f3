"""Counts against a loop over all pairs, and the shares that statements are about."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk.errors import CorpusError
from wqk_lab.theory.counts import PairCounts, Pieces, count_pairs, cut, own_masks, shares_above_one
from wqk_lab.theory.evidence import Evidence
from wqk_lab.theory.subject import Subject
from wqk_lab.theory.text import Text

CUTS = ("stream", "documents")


def by_loop(tokens: np.ndarray, pieces: Pieces, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every pair (i, j) with j before i in one piece: j is context, i is predicted."""
    context, prediction = np.zeros((2, size))
    for start, stop in zip(*pieces, strict=True):
        for i in range(start, stop):
            for j in range(start, i):
                context[tokens[j]] += 1
                prediction[tokens[i]] += 1
    return context, prediction


streams = st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=6)


@pytest.mark.parametrize("how", CUTS)
@given(documents=streams, block=st.integers(1, 7), chunks=st.integers(1, 4))
def test_counts_are_those_of_a_loop_over_pairs(how, documents, block, chunks):
    tokens = np.array([*itertools.chain.from_iterable(documents)], np.uint16)
    offsets = np.cumsum([0, *map(len, documents)])
    if how == "stream" and len(tokens) < block:
        with pytest.raises(CorpusError, match="whole text"):
            cut(offsets, how, block)
        return
    pieces = cut(offsets, how, block)
    counts = count_pairs(tokens, pieces, 5, chunks=chunks)
    context, prediction = by_loop(tokens, pieces, 5)
    assert counts.context.shape == (chunks, 5)
    np.testing.assert_array_equal(counts.context.sum(axis=0), context)
    np.testing.assert_array_equal(counts.prediction.sum(axis=0), prediction)
    assert counts.context.sum() == counts.prediction.sum()
    read = np.concatenate([tokens[a:b] for a, b in zip(*pieces, strict=True)] or [tokens[:0]])
    np.testing.assert_array_equal(counts.occurrences.sum(axis=0), np.bincount(read, minlength=5))


@given(streams, st.integers(1, 7))
def test_whole_documents_keep_every_token(documents: list[list[int]], block: int) -> None:
    offsets = np.cumsum([0, *map(len, documents)])
    starts, stops = cut(offsets, "documents", block)
    assert (stops - starts).sum() == offsets[-1]
    assert starts.tolist() == offsets[:-1].tolist()


def masked(share: float, blocks: int = 2000, seed: int = 0) -> Evidence:
    """Five batches of blocks in which every token has a place of its own."""
    tokens = np.tile(np.arange(10), (5, blocks, 1))
    subject = Subject("none", None, "masked", tokens, 10, mask_share=share, seed=seed)
    return Evidence(subject, Text("t", np.arange(10), np.array([0, 10]), 11, 10))


def test_masked_counts_are_equal_on_average_and_have_the_expected_size() -> None:
    # (N − 1) times the chance to be masked and another not to be, without the further N of
    # Equations S79 and S80; of exactly k masked tokens that is k (N − k) / N.
    counts = own_masks(masked(0.3))
    expected = 10_000 * 3 * 7 / 10
    for side in (counts.context, counts.prediction):
        np.testing.assert_allclose(side.sum(axis=0)[:10], expected, rtol=0.05)
    np.testing.assert_allclose(counts.ratio[:10], 1, rtol=0.05)
    assert counts.occurrences.sum(axis=0).tolist() == [10_000] * 10 + [0]
    # The same tokens in the same places, read from left to right, are nothing like equal.
    stream = np.tile(np.arange(10), 100)
    causal = count_pairs(stream, cut(np.array([0, 1000]), "stream", 10), 10)
    assert causal.ratio[[0, -1]].tolist() == [np.inf, 0]


def test_masks_are_those_of_the_seed() -> None:
    masks, repeated, of_other_seed = (
        own_masks(masked(0.2, 10, seed)).context for seed in (0, 0, 1)
    )
    assert (masks == repeated).all()
    assert (masks != of_other_seed).any()


def test_shares_above_one_are_those_of_plain_counting() -> None:
    random = np.random.default_rng(3)
    context, prediction = random.poisson(100.0, (2, 8, 40)).astype(float)
    occurrences = random.integers(1, 30, (8, 40))
    shares = shares_above_one(PairCounts(context, prediction, occurrences), at_least=10)
    for chunk in range(8):
        seen = occurrences[chunk] >= 10
        above = np.sign(context[chunk] - prediction[chunk])[seen] / 2 + 0.5
        assert shares["entries"][chunk] == pytest.approx(above.mean())
        weights = occurrences[chunk][seen]
        assert shares["mass"][chunk] == pytest.approx((above * weights).sum() / weights.sum())


def test_too_little_text_is_refused() -> None:
    counts = count_pairs(np.arange(10), cut(np.array([0, 10]), "stream", 5), 10)
    with pytest.raises(CorpusError, match="no token occurs 8 times in two chunks"):
        shares_above_one(counts)
    counts = count_pairs(np.zeros(100, int), cut(np.array([0, 100]), "documents", 5), 1)
    with pytest.raises(CorpusError, match="in two chunks; count more text"):
        shares_above_one(counts)
