"""A fixture for pytest, there wherever wqk is installed: `assert_same`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., Any]:
    """`wqk.assert_same`: fails with the sentence, the cause and its repair.

    >>> def test_the_conversion(assert_same):
    ...     assert_same("owner/original", "converted/", everything=True)
    """
    from wqk.sameness.same import assert_same

    return assert_same
