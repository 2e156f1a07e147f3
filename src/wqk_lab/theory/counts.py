"""Numbers of tokens that each token predicts, and that predict it (Proposition S1.10).

In a model that reads from left to right, token k of N (from 1) is context for the N − k later
tokens, and is predicted from the k − 1 earlier tokens. In a model that fills in masked tokens, each
unmasked token is context for every masked token. Over all tokens, the sums of both counts are
equal.

Axes: N tokens, P pieces of text that are read as a whole, C chunks of pieces, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from wqk.errors import CorpusError
from wqk.live.held_out import IGNORED
from wqk_lab.theory.verdict import Sample

if TYPE_CHECKING:
    from wqk_lab.theory.evidence import Evidence, StatementMeasure

Cut = Literal["stream", "documents"]

# With fewer occurrences in a chunk of text, a ratio is mostly chance.
AT_LEAST = 8


class Pieces(NamedTuple):
    """Starts and stops of the pieces of a text in the stream of tokens, (P,) each."""

    starts: np.ndarray
    stops: np.ndarray


def cut(documents: np.ndarray, how: Cut, block: int) -> Pieces:
    """Cut a text into the pieces that a model reads: blocks of a ``stream``, or ``documents``.

    ``documents`` contains the start of each document, and the end of the last, (documents + 1,).
    Blocks of a stream have one length, and begin anywhere in a document.

    Raises
    ------
    CorpusError
        The text is shorter than a block of the stream.

    Examples
    --------
    >>> documents = np.array([0, 5, 7])
    >>> for how in ("stream", "documents"):
    ...     starts, stops = cut(documents, how, block=3)
    ...     print(how, list(zip(starts.tolist(), stops.tolist())))
    stream [(0, 3), (3, 6)]
    documents [(0, 5), (5, 7)]
    """
    if how == "documents":
        return Pieces(documents[:-1], documents[1:])
    total = int(documents[-1])
    if total < block:
        raise CorpusError(f"a block is {block} tokens; the whole text is {total}")
    starts = np.arange(0, total - block + 1, block)
    return Pieces(starts, starts + block)


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Pairs (predicted token, context token) by vocabulary entry, in chunks of the text.

    Attributes
    ----------
    context, prediction
        μ_c and μ_p: number of tokens that each entry was context for, and was predicted from, (C,
        V).
    occurrences
        Number of occurrences of each entry, (C, V).
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
    tokens: np.ndarray, pieces: Pieces, vocabulary_size: int, *, chunks: int = 32
) -> PairCounts:
    """Count the pairs of each entry as context and as prediction, from left to right (S72, S73).

    Both ``tokens``, (N,), of a pair are in one piece. The ``chunks``, C, are consecutive pieces
    with about equal numbers of tokens: the units of an interval.

    Examples
    --------
    >>> tokens = np.array([0, 1, 1, 0, 2, 1])
    >>> counts = count_pairs(tokens, cut(np.array([0, 6]), "stream", 3), 3, chunks=1)
    >>> counts.context.tolist(), counts.prediction.tolist()
    ([[4.0, 1.0, 1.0]], [[0.0, 5.0, 1.0]])
    """
    lengths = pieces.stops - pieces.starts
    begins = lengths.cumsum() - lengths
    chunk_of = begins * chunks // max(1, int(lengths.sum()))
    edges = np.searchsorted(chunk_of, np.arange(chunks + 1))
    counts_of_chunks = []
    for first, last in pairwise(edges):
        piece_lengths = lengths[first:last]
        begins_in_chunk = piece_lengths.cumsum() - piece_lengths
        # Numbers of tokens in the piece before and after each token.
        before = np.arange(piece_lengths.sum()) - np.repeat(begins_in_chunk, piece_lengths)
        after = np.repeat(piece_lengths - 1, piece_lengths) - before
        places = np.repeat(pieces.starts[first:last], piece_lengths) + before
        ids = np.asarray(tokens[places])
        counts_of_chunks.append(_counts(ids, after, before, vocabulary_size))
    return _joined_counts(counts_of_chunks)


def _counts(
    ids: np.ndarray, context: np.ndarray, prediction: np.ndarray, vocabulary_size: int
) -> PairCounts:
    """Sum the pairs of tokens by vocabulary entry, (V,) each.

    ``context`` and ``prediction`` are the numbers of pairs in which each token is the context, and
    in which each token is predicted.
    """
    return PairCounts(
        context=np.bincount(ids, context, vocabulary_size),
        prediction=np.bincount(ids, prediction, vocabulary_size),
        occurrences=np.bincount(ids, np.ones(len(ids)), vocabulary_size),
    )


def _joined_counts(counts: Sequence[PairCounts]) -> PairCounts:
    """Return the counts of several chunks, (V,) each, as counts (C, V)."""
    return PairCounts(
        context=np.array([chunk.context for chunk in counts]),
        prediction=np.array([chunk.prediction for chunk in counts]),
        occurrences=np.array([chunk.occurrences for chunk in counts]),
    )


def shares_above_one(counts: PairCounts, at_least: int = AT_LEAST) -> dict[str, np.ndarray]:
    """Return, for each chunk, the share that is context more often than prediction, (C,).

    ``entries``: the share of vocabulary entries with a ratio above 1, which is above ½ by the
    assumption of Theorem S1.12; ties count half. ``mass``: the share weighted by occurrences. In
    each chunk, entries with less than ``at_least`` occurrences are left out.

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
    often = often[kept]
    surplus = counts.context[kept] - counts.prediction[kept]
    above = np.where(surplus == 0, 0.5, surplus > 0)
    weights = np.where(often, counts.occurrences[kept], 0)
    weighted = above * weights
    return {
        "entries": np.asarray(above.mean(axis=1, where=often)),
        "mass": np.asarray(weighted.sum(axis=1) / weights.sum(axis=1)),
    }


def own_masks(evidence: Evidence) -> PairCounts:
    """Count pairs with the subject's masks, batch by batch (Equations S77, S78)."""
    subject = evidence.subject
    counts_of_batches = []
    for tokens, (_, labels) in zip(subject.blocks, subject.examples(), strict=True):
        masked = labels != IGNORED
        ids = tokens.repeat(len(masked) // len(tokens), axis=0)
        masked_count = masked.sum(axis=1, keepdims=True)
        visible_count = masked.shape[1] - masked_count
        context = np.where(masked, 0, masked_count)
        prediction = np.where(masked, visible_count, 0)
        counts_of_batches.append(
            _counts(
                ids.ravel(),
                context.ravel(),
                prediction.ravel(),
                evidence.text.vocabulary_size,
            )
        )
    return _joined_counts(counts_of_batches)


def _in_total(evidence: Evidence) -> Sample:
    """Measure μ_c/μ_p − 1 of all entries together, with the shares of `shares_above_one`."""
    counts = own_masks(evidence)
    total = counts.context.sum(axis=1) / counts.prediction.sum(axis=1) - 1
    shares = {name: share[:, None] for name, share in shares_above_one(counts, 1).items()}
    return Sample(total[:, None], "batches", (), shares)


def _above_one(evidence: Evidence, how: Cut) -> Sample:
    """Return `shares_above_one` of the chunks of the text, cut in one of the two ways."""
    text, block = evidence.text, evidence.subject.blocks.shape[-1]
    counts = count_pairs(text.tokens, cut(text.documents, how, block), text.vocabulary_size)
    shares = shares_above_one(counts)
    return Sample(shares["entries"][:, None], "chunks", (), {"mass": shares["mass"][:, None]})


MEASURES: dict[str, StatementMeasure] = {
    "stream": lambda evidence: _above_one(evidence, "stream"),
    "documents": lambda evidence: _above_one(evidence, "documents"),
    "in_total": _in_total,
}
