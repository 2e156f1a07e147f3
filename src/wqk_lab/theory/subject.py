"""Subject of the statements: a model, blocks of a text, and the objective of the model.

Axes: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from wqk.errors import CorpusError
from wqk.live.held_out import IGNORED, choose

ObjectiveName = Literal["masked", "each", "causal"]

NO_MASK = "masking needs a mask token; the tokenizer or token store of this text has none"


@dataclass(frozen=True, eq=False)
class Subject:
    """A language model and blocks of tokens for it.

    Attributes
    ----------
    name, model
        A `transformers` model with a language-model head, in evaluation mode, and its name.
    objective
        Objective of the model. ``causal``: every token from the earlier tokens (S7). ``masked``:
        masked tokens from the unmasked tokens (S10). ``each``: every token from all others (S9),
        with one token of a block masked at a time.
    blocks
        Token ids of the text, (batches, B, N).
    mask_token
        Id that replaces a token to predict; None for ``causal``.
    mask_share, seed
        The fraction of tokens to predict in each block for ``masked``, at least one token, and the
        seed of their choice.
    step
        The training step of a saved model; None if unknown.
    missing
        Names of the tensors that the checkpoint lacks; they were drawn at random.
    caveat
        A reason to doubt every finding, such as a text in an unknown vocabulary.
    shortened
        The reason why blocks are shorter than by default; else empty.
    is_fresh
        True if all weights were freshly drawn, with ``seed``; no checkpoint was read.

    Examples
    --------
    >>> import numpy as np
    >>> subject = Subject("none", None, "masked", np.arange(12).reshape(1, 2, 6), mask_token=99)
    >>> (inputs, labels), = subject.examples()
    >>> bool(((inputs == 99) == (labels != -100)).all()), (labels != -100).sum(axis=1).tolist()
    (True, [1, 1])
    """

    name: str
    model: Any
    objective: ObjectiveName
    blocks: np.ndarray
    mask_token: int | None = None
    mask_share: float = 0.15
    seed: int = 0
    step: int | None = None
    missing: tuple[str, ...] = ()
    caveat: str = ""
    shortened: str = ""
    is_fresh: bool = False

    def __post_init__(self) -> None:
        if self.objective != "causal" and self.mask_token is None:
            raise CorpusError(NO_MASK)
        if not 0 < self.mask_share < 1:
            raise CorpusError(f"the share of masked tokens lies in (0, 1), got {self.mask_share:g}")

    def examples(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield inputs and labels of each batch, (B, N), or (B·N, N) for ``each``.

        Labels are −100 for tokens that are not predicted. Causal labels are equal to the inputs,
        because `transformers` models shift them by one.
        """
        for index, tokens in enumerate(self.blocks):
            if self.objective == "causal":
                yield tokens, tokens
                continue
            if self.objective == "each":
                tokens = tokens.repeat(tokens.shape[1], axis=0)
                masked = np.tile(np.eye(tokens.shape[1], dtype=bool), (len(self.blocks[0]), 1))
            else:
                random = np.random.default_rng((self.seed, index))
                masked = choose(random, tokens.shape, self.mask_share)
            hidden: np.ndarray = np.where(masked, self.mask_token or 0, tokens)
            yield hidden, np.where(masked, tokens, IGNORED)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield keyword arguments for the model: ``input_ids`` and ``labels`` as tensors."""
        import torch

        device = self.model.device
        for inputs, labels in self.examples():
            yield {
                "input_ids": torch.tensor(inputs, device=device),
                "labels": torch.tensor(labels, device=device),
            }
