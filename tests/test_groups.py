"""The slow group follows from its list, and every case of a test by turns has a turn."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest
from tests import groups
from tests.families.architectures import NAMED


@pytest.mark.parametrize("name", [*groups.SLOW, *groups.BY_TURNS])
def test_what_is_listed_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    text = (groups.ROOT / file).read_text(encoding="utf-8")
    assert f"def {function.partition('[')[0]}" in text


def test_no_test_marks_itself_as_slow() -> None:
    """Files without a test in the list are not collected: their own marks would have no effect."""
    mark = "mark." + "slow"
    marked = [file.name for file in groups.ROOT.glob("tests/**/*.py") if mark in file.read_text()]
    assert marked == []


def test_every_family_has_one_turn_of_ten_and_each_one_when_its_file_changes() -> None:
    cases_by_turn = [
        [case for case in NAMED if groups.has_turn(case, turn, frozenset())]
        for turn in range(groups.TURNS)
    ]
    assert sorted(itertools.chain(*cases_by_turn)) == sorted(NAMED)
    assert max(map(len, cases_by_turn)) < len(NAMED) / 5
    changed = frozenset({"deepseek-v3"})
    turns = range(groups.TURNS)
    assert all(groups.has_turn("deepseek-v3-yarn", turn, changed) for turn in turns)
    assert not all(groups.has_turn("deepseek-v2", turn, changed) for turn in turns)


def test_heavy_cases_have_a_turn_only_where_their_family_changes() -> None:
    turns = range(groups.TURNS)
    for case in groups.HEAVY:
        assert not any(groups.has_turn(case, turn, frozenset()) for turn in turns)
        family = case.removesuffix("-0")
        assert all(groups.has_turn(case, turn, frozenset({family})) for turn in turns)


def test_the_turn_follows_from_the_commit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(groups.TURN)
    monkeypatch.setattr(groups, "_output_of_git", lambda *_: ["00000ff"])
    groups.choose_turn()
    assert groups.turn() == 255
    monkeypatch.delenv(groups.TURN)
    monkeypatch.setattr(groups, "_output_of_git", lambda *_: [])  # no git, as in an archive
    groups.choose_turn()
    assert groups.turn() == 0


def test_the_command_that_repeats_a_failure_sets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(groups.TURN, "7")
    command = groups.repeating_command("tests/test_a.py::test_b[c]")
    assert command == "WQK_TEST_TURN=7 python -m pytest 'tests/test_a.py::test_b[c]'"


def test_files_of_the_other_group_are_not_imported() -> None:
    def left_out(name: str, marks: str) -> bool:
        return groups.has_none(groups.ROOT / name, marks)

    fast, slow = "not campaign and not slow", "slow and not campaign"
    slow_file, mixed_file = "tests/reporting/test_browser.py", "tests/scanning/test_surveys.py"
    assert left_out(slow_file, fast)
    assert not left_out(slow_file, slow)
    assert not any(left_out(mixed_file, marks) for marks in (fast, slow))
    assert left_out("tests/test_errors.py", slow)
    assert not left_out("tests/test_errors.py", fast)
    for name in ("tests", "tests/conftest.py", slow_file, mixed_file):
        assert not any(left_out(name, marks) for marks in ("", "not campaign", "campaign"))


def test_settings_are_fast_where_the_code_that_reads_them_differs(monkeypatch):
    name = f"{groups.OF_SETTINGS}::test_settings_are_read_as_they_are_run[no-such-type-0]"
    item = Mock(spec=pytest.Function, nodeid=name, callspec=Mock())
    monkeypatch.setattr(groups, "has_turn", lambda *_: False)
    for changed, slow in (([], True), ([groups.ROOT / "src/wqk/families/config.py"], False)):
        monkeypatch.setattr(groups, "changed_files", lambda _, changed=changed: changed)
        assert groups.is_slow(item) is slow
