"""Options of one value are refused if they are given twice; repeatable options take all values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.command import ENCODER, run

import wqk
from wqk.cli.main import LABORATORY, command
from wqk.cli.repetition import require_single_values

VERBS: dict[str, click.Command] = {
    **{name: verb for name, verb in command.verbs.items() if name != "lab"},  # type: ignore[attr-defined]
    **{f"lab {name}": verb for name, verb in LABORATORY.items()},
}
CONTEXT = click.Context(command, help_option_names=["-h", "--help"])


def options() -> Iterator[tuple[str, click.Option]]:
    for name, verb in VERBS.items():
        for parameter in verb.params:
            takes_value = isinstance(parameter, click.Option) and not (
                parameter.is_flag or parameter.count
            )
            if takes_value:
                yield name, parameter


@pytest.mark.parametrize(
    ("verb", "option"), [pytest.param(*each, id=f"{each[0]} {each[1].name}") for each in options()]
)
def test_an_option_of_one_value_is_refused_twice(verb: str, option: click.Option) -> None:
    first, second = (["1"] * option.nargs, ["2"] * option.nargs)
    for name in option.opts:
        line = [name, *first, name, *second]
        require_single_values(VERBS[verb], [name, *first, name, *first], CONTEXT)
        require_single_values(VERBS[verb], [*line, "--help"], CONTEXT)
        if option.multiple:
            require_single_values(VERBS[verb], line, CONTEXT)
            continue
        with pytest.raises(click.UsageError, match=f"{max(option.opts, key=len)} is given twice"):
            require_single_values(VERBS[verb], line, CONTEXT)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "scan E --layers 0 --layers 1",
            "--layers is given twice, 0 and 1; give it once: --layers 0,1",
        ),
        ("scan E --layers 0 --layer 1", "--layers is given twice, 0 and 1"),
        (
            "scan E --gamma 1 --gamma=2 --gamma 3",
            "--gamma is given three times, 1, 2 and 3; give it",
        ),
        ("compose E -o a.csv -ob.csv", "--out is given twice, a.csv and b.csv; give it once"),
        ("show E 0.2 --layer 1", "--layer is given twice, 0 and 1; give it once"),
        ("lab train --steps 3 --steps 4", "--steps is given twice, 3 and 4; give it once"),
    ],
)
def test_the_message_names_the_values(line: str, message: str) -> None:
    arguments = [ENCODER if word == "E" else word for word in line.split()]
    assert message in run(*arguments, exits=2).stderr


def test_the_same_value_twice_is_no_error() -> None:
    assert run("scan", ENCODER, "--layers", "0", "--layers", "0").stdout


def test_a_scan_writes_every_file(tmp_path: Path) -> None:
    files = [tmp_path / f"scores{ending}" for ending in (".csv", ".tex", ".md", ".parquet")]
    outputs = [argument for file in files for argument in ("-o", file)]
    done = run("scan", ENCODER, *outputs, "--out", "-.md", "-o", files[0])
    for file in files:
        assert file.exists()
        assert done.stderr.count(f"{file}: 4 rows") == 1
    assert done.stdout == (tmp_path / "scores.md").read_text("utf-8")
    assert len(wqk.read_table(files[0])) == len(wqk.read_table(files[3])) == 4
    message = run("scan", ENCODER, "-o", "-", "-o", "-.tex", exits=2).stderr
    assert "--out - and --out -.tex both go to standard output; choose one" in message
