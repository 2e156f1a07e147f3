"""Loss of predictions by token frequencies: the plateau that a model must leave to learn anything.

Axis letters: V entries of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from wqk.errors import CorpusError, WqkError
from wqk.tables.run import Run
from wqk_lab.training.corpus.store import TokenStore
from wqk_lab.training.objectives import TokenRows
from wqk_lab.training.recipe import Recipe

# Tokens counted at once; a split is a memory map of any size.
TOKENS_AT_ONCE = 1 << 24

# Share of the frequencies' loss by which a loss has to be lower. The held-out loss is a mean over
# some thousands of tokens, and its sampling error is up to about one percent.
CLEARLY = 0.03


@dataclass(frozen=True, eq=False)
class TokenFrequencies:
    """Log-probabilities, (V,), of tokens in the training split of a store, each counted once more.

    Examples
    --------
    >>> frequencies = TokenFrequencies(np.log([0.5, 0.25, 0.25]))
    >>> round(float(frequencies.loss(np.array([0, 0, 1, 2])) / np.log(2)), 6)
    1.5
    """

    log_probabilities: np.ndarray

    @classmethod
    def of(cls, store: TokenStore) -> TokenFrequencies:
        """Count the tokens of a store's training split."""
        tokens = store.tokens("train")
        counts = np.ones(store.vocabulary_size, np.int64)
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            part = tokens[start : start + TOKENS_AT_ONCE]
            counts += np.bincount(part, minlength=store.vocabulary_size)
        return cls(np.log(counts / counts.sum()))

    def loss(self, tokens: np.ndarray) -> float:
        """Return the mean loss, in nats, of predicting tokens by these frequencies alone."""
        return float(-self.log_probabilities[tokens].mean())

    def held_out_loss(self, store: TokenStore, recipe: Recipe) -> float:
        """Return the loss of these frequencies on the held-out rows of a recipe."""
        rows = TokenRows.of(store, "held_out", recipe)
        tokens = rows.spaced(recipe.held_out_blocks)
        return self.loss(tokens[tokens != rows.padding] if rows.padding is not None else tokens)


@lru_cache(maxsize=8)
def _counted_once(folder: Path, fingerprint: str) -> TokenFrequencies:
    """Return the frequencies of a store, which many runs may share."""
    store = TokenStore.open(folder)
    if store.fingerprint != fingerprint:
        raise CorpusError(f"{folder}: expected the corpus {fingerprint[:12]}")
    return TokenFrequencies.of(store)


def frequency_loss(run: Run) -> float | None:
    """Return the loss of token frequencies on a run's held-out rows; None without its corpus."""
    try:
        recipe = Recipe.from_json(run.recipe)
        store = TokenStore.open(run.corpus["folder"])
        frequencies = _counted_once(store.folder, run.corpus["fingerprint"])
        return frequencies.held_out_loss(store, recipe)
    except (WqkError, LookupError):
        return None


def plateau_note(run: Run) -> str:
    """Return a note if a run's last held-out loss is not clearly below that of frequencies.

    The note is empty if the run has learnt more, or its corpus or its held-out loss is missing.
    """
    losses = run.metrics["held_out_loss"].drop_nulls()
    if losses.is_empty():
        return ""
    loss_of_frequencies = frequency_loss(run)
    if loss_of_frequencies is None:
        return ""
    return plateau_sentence(losses[-1], loss_of_frequencies)


def plateau_sentence(held_out_loss: float, loss_of_frequencies: float) -> str:
    """Return the note on a loss that is not clearly below the loss of frequencies; else nothing.

    Examples
    --------
    >>> plateau_sentence(3.15, 3.23)[:67]
    'the model has learnt little more than the frequencies of tokens (he'
    >>> plateau_sentence(3.25, 3.23)[:63]
    'the model has learnt no more than the frequencies of tokens (he'
    >>> plateau_sentence(2.5, 3.25)
    ''
    """
    if held_out_loss < (1 - CLEARLY) * loss_of_frequencies:
        return ""
    amount = "little" if held_out_loss < loss_of_frequencies else "no"
    return (
        f"the model has learnt {amount} more than the frequencies of tokens (held-out loss "
        f"{held_out_loss:.2f}; by the frequencies of tokens alone {loss_of_frequencies:.2f}): "
        "train longer, on shorter blocks, or with another learning rate"
    )
