"""Progress bars: a total that is not known yet is a question mark."""

from __future__ import annotations

from pathlib import Path

import wqk.cli


def test_no_bar_prints_a_total_that_may_be_none() -> None:
    files = Path(wqk.cli.__file__).parent.glob("*.py")
    assert not [path.name for path in files if "{task.total}" in path.read_text(encoding="utf-8")]
