"""Fixture `assert_same` for pytest, available in every environment with wqk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., Any]:
    """Return `wqk.assert_same`; a failure shows the sentence, the cause and the repair.

    >>> def test_the_conversion(assert_same):
    ...     assert_same("owner/original", "converted/", everything=True)
    """
    from wqk.sameness.same import assert_same

    return assert_same
