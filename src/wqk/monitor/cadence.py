"""At which steps of a training run to compute scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Cadence:
    """Multiples of ``every``, single ``steps``, and with ``powers`` 1, 2, 4, 8, ... as well."""

    every: int | None = None
    steps: frozenset[int] = frozenset()
    powers: bool = False

    def is_due(self, step: int) -> bool:
        """Whether scores are due after this many optimizer steps.

        Examples
        --------
        >>> cadence = Cadence(every=10, steps=frozenset({3}), powers=True)
        >>> [step for step in range(24) if cadence.is_due(step)]
        [0, 1, 2, 3, 4, 8, 10, 16, 20]
        """
        is_multiple = self.every is not None and step % self.every == 0
        is_power = self.powers and step > 0 and step & (step - 1) == 0
        return is_multiple or is_power or step in self.steps


def cadence(every: int | None, steps: Iterable[int] | str) -> Cadence:
    """A cadence from a user's arguments.

    Raises
    ------
    RunError
        ``every`` is not a positive number, or ``steps`` are neither numbers nor ``"log"``.
    """
    if every is not None and every < 1:
        raise RunError(f"a monitor scores every N steps with N at least 1, got every={every}")
    if not isinstance(steps, str):
        return Cadence(every, frozenset(steps))
    if steps != "log":
        raise RunError(f"steps must be numbers, or 'log' for 1, 2, 4, 8, ...; got {steps!r}")
    return Cadence(every, powers=True)
