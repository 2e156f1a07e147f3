"""Limits of waiting for a server."""

from __future__ import annotations

import random
from typing import NamedTuple


class Patience(NamedTuple):
    """Limits of waiting for a server; times are in seconds."""

    attempts: int = 9  # failures in a row before giving up, which takes up to two minutes
    attempts_to_connect: int = 3  # the same if the server has never been reached
    attempts_if_slow: int = 2  # the same if answers are missing or too slow
    first: float = 0.5  # wait after the first failure, doubling from there
    longest: float = 30.0
    connect: float = 5.0  # until there is a connection
    silence: float = 10.0  # without a byte
    answer: float = 20.0  # until the headers of an answer are there
    slowest: float = 2.0**13  # bytes a second

    def wait(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row."""
        # Random, so that parallel requests are not repeated at the same time.
        return min(self.longest, self.first * 2.0 ** (failures - 1)) * random.uniform(0.5, 1)


# Limits of all transfers; the tests put less patient ones in their place.
PATIENCE = Patience()
