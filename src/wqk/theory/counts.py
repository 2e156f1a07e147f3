"""How many tokens each token predicts, and how many predict it (paper, Proposition S1.10).

A token at position k of N (from 1) is context to the N − k tokens after it and is predicted from
the k − 1 before it, where a model reads from left to right. Where masked tokens are filled in, each
unmasked token is context to every masked one. Summed over all tokens both counts are equal: what
some tokens have more of the one, others have less.

Axes: N tokens, P pieces of text that are read as a whole, C chunks of pieces, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from wqk.errors import CorpusError
from wqk.theory.subject import IGNORED
from wqk.theory.verdict import Sample, Statement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wqk.theory.evidence import Evidence

Cut = Literal["stream", "documents", "aligned", "starts"]

# Tokens that are counted at once: what is in work fits in a processor's cache, or nearly.
CHUNK = 1 << 18

# Fewer occurrences in a chunk of text make a ratio an accident.
AT_LEAST = 8

# A share of the vocabulary that differs from one half enough to matter.
MOST = 0.05


class Pieces(NamedTuple):
    """Where each piece of text starts and stops in the stream of tokens, both (P,)."""

    starts: np.ndarray
    stops: np.ndarray


def cut(documents: np.ndarray, how: Cut, block: int) -> Pieces:
    """Cut a stream of documents into the pieces that a model reads.

    Parameters
    ----------
    documents
        Where documents start, and where the last one ends, (documents + 1,).
    how
        ``stream``: blocks of one length, wherever documents begin. ``documents``: each as a whole.
        ``aligned``: each document in blocks from its start, the last one shorter. ``starts``: only
        the first block of each document, as texts are cut to a model's length.
    block
        Tokens in a block.

    Raises
    ------
    CorpusError
        The text is shorter than a block of the stream.

    Examples
    --------
    >>> documents = np.array([0, 5, 7])
    >>> for how in ("stream", "documents", "aligned", "starts"):
    ...     starts, stops = cut(documents, how, block=3)
    ...     print(how, list(zip(starts.tolist(), stops.tolist())))
    stream [(0, 3), (3, 6)]
    documents [(0, 5), (5, 7)]
    aligned [(0, 3), (3, 5), (5, 7)]
    starts [(0, 3), (5, 7)]
    """
    starts, stops = documents[:-1], documents[1:]
    if how == "stream":
        total = int(documents[-1])
        if total < block:
            raise CorpusError(f"a block is {block} tokens; the whole text is {total}")
        starts = np.arange(0, total - block + 1, block)
        return Pieces(starts, starts + block)
    if how == "starts":
        return Pieces(starts, np.minimum(stops, starts + block))
    if how == "aligned":
        blocks = -((starts - stops) // block)
        first = np.repeat(starts, blocks) + block * _within(blocks)
        return Pieces(first, np.minimum(first + block, np.repeat(stops, blocks)))
    return Pieces(starts, stops)


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Pairs (predicted token, context token) by vocabulary entry, in chunks of the text.

    Attributes
    ----------
    context
        μ_c: how many tokens each entry was context to, (C, V).
    prediction
        μ_p: how many tokens each entry was predicted from, (C, V).
    occurrences
        How often each entry was read, (C, V).
    """

    context: np.ndarray
    prediction: np.ndarray
    occurrences: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """μ_c / μ_p over the whole text, (V,): infinite if never predicted, NaN if unseen."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.context.sum(axis=0) / self.prediction.sum(axis=0))


def count_pairs(
    tokens: np.ndarray,
    pieces: Pieces,
    vocabulary_size: int,
    *,
    mask_share: float | None = None,
    seed: int = 0,
    chunks: int = 32,
) -> PairCounts:
    """Count, for each vocabulary entry, what it predicts and what it is predicted from.

    Parameters
    ----------
    tokens
        The stream, (N,): whole numbers below ``vocabulary_size``.
    pieces
        What is read as a whole; no pair spans two pieces.
    vocabulary_size
        V.
    mask_share
        Probability that a token is masked and predicted from all unmasked ones (Equations S77,
        S78); without it every token is predicted from all before it (S72, S73).
    seed
        Of the masks.
    chunks
        C: runs of pieces with about as many tokens each, the units of an interval.

    Examples
    --------
    >>> tokens = np.array([0, 1, 1, 0, 2, 1])
    >>> counts = count_pairs(tokens, cut(np.array([0, 6]), "stream", 3), 3, chunks=1)
    >>> counts.context.tolist(), counts.prediction.tolist()
    ([[4.0, 1.0, 1.0]], [[0.0, 5.0, 1.0]])
    """
    weights = _causal_weights if mask_share is None else _masked_weights(mask_share, seed)
    context, prediction = np.zeros((2, chunks, vocabulary_size))
    occurrences = np.zeros((chunks, vocabulary_size), np.int64)
    for chunk, some in _runs(pieces, chunks):
        ids, lengths = _read(tokens, some)
        as_context, as_prediction = weights(lengths)
        context[chunk] += np.bincount(ids, as_context, vocabulary_size)
        prediction[chunk] += np.bincount(ids, as_prediction, vocabulary_size)
        occurrences[chunk] += np.bincount(ids, minlength=vocabulary_size)
    return PairCounts(context, prediction, occurrences)


def shares_above_one(counts: PairCounts, at_least: int = AT_LEAST) -> dict[str, np.ndarray]:
    """Of how much of each chunk tokens are context more often than prediction, (C,) each.

    ``entries``: share of the vocabulary entries with a ratio above 1, ties counting half; ``mass``:
    the same, each entry counted as often as it occurs. Theorem S1.12 assumes that they are most.

    Parameters
    ----------
    counts
        In chunks, each of which is looked at by itself: they are the units of an interval.
    at_least
        Entries that occur more rarely in a chunk are left out of it: their ratio is an accident.

    Raises
    ------
    CorpusError
        No entry occurs often enough in two chunks.

    Examples
    --------
    >>> tokens = np.tile(np.repeat(np.arange(3), 2), 200)
    >>> counts = count_pairs(tokens, cut(np.array([0, len(tokens)]), "stream", 6), 3, chunks=4)
    >>> shares_above_one(counts)["entries"]  # the first of the three entries; the second is even
    array([0.5, 0.5, 0.5, 0.5])
    """
    often = counts.occurrences >= at_least
    kept = often.any(axis=1)
    if kept.sum() < 2:
        raise CorpusError(f"no token occurs {at_least} times in two chunks; count more text")
    surplus, often = (counts.context - counts.prediction)[kept], often[kept]
    above = np.where(surplus == 0, 0.5, surplus > 0)
    weights = np.where(often, counts.occurrences[kept], 0)
    return {
        "entries": np.asarray(above.mean(axis=1, where=often)),
        "mass": np.asarray((above * weights).sum(axis=1) / weights.sum(axis=1)),
    }


def _causal_weights(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens stand after and before each one, of pieces laid end to end."""
    before = _within(lengths)
    return np.repeat(lengths - 1, lengths) - before, before


def _masked_weights(
    share: float, seed: int
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)

    def weights(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        masked = random.random(int(lengths.sum()), np.float32) < share
        hidden = np.add.reduceat(masked.astype(np.int64), lengths.cumsum() - lengths)
        to_predict = np.where(masked, 0, np.repeat(hidden, lengths))
        seen = np.where(masked, np.repeat(lengths - hidden, lengths), 0)
        return np.asarray(to_predict), np.asarray(seen)

    return weights


def _runs(pieces: Pieces, chunks: int) -> Iterator[tuple[int, Pieces]]:
    """Runs of pieces small enough to be counted at once, and the chunk that each belongs to."""
    lengths = pieces.stops - pieces.starts
    starts, lengths = pieces.starts[lengths > 0], lengths[lengths > 0]
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    chunk_of = np.minimum((ends - lengths) * chunks // max(1, total), chunks - 1)
    run_of = (ends - lengths) // CHUNK
    breaks = np.flatnonzero(np.diff(chunk_of) | np.diff(run_of)) + 1
    for first, last in zip([0, *breaks], [*breaks, len(starts)], strict=True):
        if last > first:
            some = Pieces(starts[first:last], starts[first:last] + lengths[first:last])
            yield int(chunk_of[first]), some


def _read(tokens: np.ndarray, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of some pieces end to end, and the pieces' lengths."""
    lengths = pieces.stops - pieces.starts
    first, last = int(pieces.starts[0]), int(pieces.stops[-1])
    ids = np.asarray(tokens[first:last])
    if len(ids) != lengths.sum():  # there are gaps
        ids = ids[np.repeat(pieces.starts - first, lengths) + _within(lengths)]
    return ids, lengths


def _within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, … of each length in turn."""
    ends = lengths.cumsum()
    places: np.ndarray = np.arange(int(ends[-1]) if len(ends) else 0)
    return np.asarray(places - np.repeat(ends - lengths, lengths))


def own_masks(evidence: Evidence) -> Sample:
    """Counts on the subject's own masks, batch by batch."""
    rows, size = [], evidence.text.vocabulary_size
    for tokens, (_, labels) in zip(
        evidence.subject.blocks, evidence.subject.examples(), strict=True
    ):
        masked = labels != IGNORED
        ids = tokens.repeat(len(masked) // len(tokens), axis=0)
        hidden = masked.sum(axis=1, keepdims=True)
        seen = masked.shape[1] - hidden
        sides = np.where(masked, 0, hidden), np.where(masked, seen, 0), np.ones(masked.shape)
        rows.append([np.bincount(ids.ravel(), side.ravel(), size) for side in sides])
    context, prediction, occurrences = np.array(rows).swapaxes(0, 1)
    counts = PairCounts(context, prediction, occurrences)
    # In all batches together both sides are as large; the shares are shown beside that.
    total = counts.context.sum(axis=1) / counts.prediction.sum(axis=1) - 1
    shares = {name: share[:, None] for name, share in shares_above_one(counts, 1).items()}
    return Sample(total[:, None], "batches", (), shares)


def _above_one(evidence: Evidence, how: Cut) -> Sample:
    """Of each chunk of the text, cut one way, the share of entries with a ratio above 1."""
    text, block = evidence.text, evidence.subject.blocks.shape[-1]
    counts = count_pairs(text.tokens, cut(text.documents, how, block), text.vocabulary_size)
    shares = shares_above_one(counts)
    return Sample(shares["entries"][:, None], "chunks", (), {"mass": shares["mass"][:, None]})


STREAM = Statement(
    "Theorem S1.12, Equation S96",
    "most tokens are context more often than prediction, in blocks cut from a stream",
    "a token's place in its block tells which token it is",
    "share of the vocabulary with μ_c/μ_p > 1",
    "above",
    MOST,
    lambda evidence: _above_one(evidence, "stream"),
    null=0.5,
    needs="text",
    objectives=("causal",),
)

STATEMENTS = (
    STREAM,
    replace(
        STREAM,
        says="most tokens are context more often than prediction, in whole documents",
        assumes="a token's place in its document tells which token it is",
        measure=lambda evidence: _above_one(evidence, "documents"),
    ),
    Statement(
        "Proposition S1.10, Equation S69",
        "masked tokens are context as often as prediction",
        "masks do not depend on the token, as the model's own here do not",
        "μ_c/μ_p − 1 of all tokens, on the model's own masks",
        "identity",
        1e-6,
        own_masks,
        needs="text",
        objectives=("masked", "each"),
    ),
)
