"""The record of a repaired copy of a candidate."""

from __future__ import annotations

from dataclasses import dataclass

from wqk._console import counted, few
from wqk.sameness.verdicts import Verdict


@dataclass(frozen=True)
class WrittenRepair:
    """A repaired copy of the candidate.

    Attributes
    ----------
    folder
        The folder that was written.
    changed
        Tensors that were changed, by name.
    added
        Tensors that the candidate lacked.
    supplied
        Tensors with numbers from the reference.
    settings
        Whether the configuration was changed.
    removed
        Tensors that were removed.
    verdict
        Verdict of the comparison of the copy with the reference.
    sentence
        The outcome of the comparison of the copy with the reference.
    """

    folder: str
    changed: tuple[str, ...]
    added: tuple[str, ...]
    supplied: tuple[str, ...]
    settings: bool
    removed: tuple[str, ...] = ()
    verdict: Verdict = Verdict.NOT_DECIDED
    sentence: str = ""

    @property
    def summary(self) -> str:
        """The files, the changes, and the outcome, in sentences."""
        changes = [counted(len(self.changed), "tensor")] if self.changed else []
        if self.settings:
            changes.append("the configuration")
        text = f"Repaired: {self.folder}, with {' and '.join(changes)} changed."
        moved = [name for name in self.added if name not in self.supplied]
        if moved:
            text += f" Added: {few(moved)}."
        added = [name for name in self.added if name in self.supplied]
        if added:
            text += f" Added from the reference: {few(added)}."
        if self.removed:
            text += f" Removed: {few(self.removed)}."
        supplied = [name for name in self.supplied if name not in self.added]
        if supplied:
            text += f" Taken from the reference: {few(supplied)}."
        return f"{text} Compared with the reference: {self.sentence}"
