"""At which steps of a training run to compute scores."""

from __future__ import annotations

from collections.abc import Iterable

from wqk.errors import RunError


class Cadence:
    """Multiples of ``every`` and single ``steps``, or 1, 2, 4, 8, ... if these are ``"log"``."""

    def __init__(self, every: int | None = None, steps: Iterable[int] | str = ()) -> None:
        if every is not None and every < 1:
            raise RunError(f"a monitor scores every N steps with N at least 1, got every={every}")
        self._powers = isinstance(steps, str)
        if self._powers and steps != "log":
            raise RunError(f"steps must be numbers, or 'log' for 1, 2, 4, 8, ...; got {steps!r}")
        self._every, self._steps = every, frozenset(() if self._powers else steps)

    def is_due(self, step: int) -> bool:
        """Whether scores are due after this many optimizer steps.

        Examples
        --------
        >>> cadence = Cadence(every=10, steps="log")
        >>> [step for step in range(24) if cadence.is_due(step)]
        [0, 1, 2, 4, 8, 10, 16, 20]
        """
        is_multiple = self._every is not None and step % self._every == 0
        is_power = self._powers and step > 0 and step & (step - 1) == 0
        return is_multiple or is_power or step in self._steps
