"""The slow group is what its list says, and every case of a test by turns has a day."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from tests import groups
from tests.families.architectures import NAMED


@pytest.mark.parametrize("name", [*groups.SLOW, *groups.BY_TURNS])
def test_what_is_listed_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    text = (groups.ROOT / file).read_text(encoding="utf-8")
    assert f"def {function.partition('[')[0]}" in text


def test_every_family_has_a_turn_within_ten_days_and_when_its_file_changes() -> None:
    days = [[has for has in NAMED if groups.has_turn(has, day, frozenset())] for day in range(10)]
    assert sorted(name for day in days for name in day) == sorted(NAMED)
    assert max(map(len, days)) < len(NAMED) / 5
    changed = frozenset({"deepseek-v3"})
    assert all(groups.has_turn("deepseek-v3-yarn", day, changed) for day in range(10))
    assert not all(groups.has_turn("deepseek-v2", day, changed) for day in range(10))


def test_files_of_the_other_group_are_not_imported() -> None:
    def left_out(name: str, marks: str) -> bool:
        return groups.has_none(groups.ROOT / name, marks)

    fast, slow = "not campaign and not slow", "slow and not campaign"
    whole, some = "tests/reporting/test_browser.py", "tests/scanning/test_surveys.py"
    assert left_out(whole, fast)
    assert not left_out(whole, slow)
    assert not any(left_out(some, marks) for marks in (fast, slow))
    assert left_out("tests/test_errors.py", slow)
    assert not left_out("tests/test_errors.py", fast)
    for name in ("tests", "tests/conftest.py", whole, some):
        assert not any(left_out(name, marks) for marks in ("", "not campaign", "campaign"))


def test_settings_are_fast_where_the_code_that_reads_them_differs(monkeypatch):
    name = f"{groups.OF_SETTINGS}::test_settings_are_read_as_they_are_run[no-such-type-0]"
    item = Mock(spec=pytest.Function, nodeid=name, callspec=None)
    monkeypatch.setattr(groups, "has_turn", lambda *_: False)
    for found, slow in (([], True), ([groups.ROOT / "src/wqk/families/config.py"], False)):
        monkeypatch.setattr(groups, "changed_files", lambda _, found=found: found)
        assert groups.is_slow(item) is slow
