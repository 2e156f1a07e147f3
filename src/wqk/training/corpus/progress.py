"""How far a build has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusProgress:
    """How far a build has come.

    Attributes
    ----------
    stage
        ``reading``, ``learning``, ``tokenizing`` or ``writing``.
    documents, characters, tokens
        Done by this run in this stage.
    share
        Of the stage, from 0 to 1, where it is known; what earlier runs did is counted.
    """

    stage: str
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    share: float | None = None

    def plus(
        self, documents: int, characters: int, tokens: int = 0, share: float | None = None
    ) -> CorpusProgress:
        """The same stage, so much later.

        Examples
        --------
        >>> CorpusProgress("reading", 2, 90).plus(1, 10)
        CorpusProgress(stage='reading', documents=3, characters=100, tokens=0, share=None)
        """
        return CorpusProgress(
            self.stage,
            self.documents + documents,
            self.characters + characters,
            self.tokens + tokens,
            share,
        )
