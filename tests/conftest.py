"""What all tests share: seeded hypothesis, and real data that may be absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "wqk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("wqk")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real weights and texts beside the project; where they are not, the test skips."""
    default = Path(__file__).parents[2] / "shared"
    folder = Path(os.environ.get("WQK_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"needs real data in {folder} (or WQK_SHARED)")
    return folder
