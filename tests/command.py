"""The command `wqk`, called without a process of its own."""

from __future__ import annotations

from click.testing import CliRunner, Result

from wqk.cli.main import command


def run(
    *arguments: object, width: int = 80, catch_exceptions: bool = True, **environment: str
) -> Result:
    """What the command prints, and its exit status; on a terminal as wide as said."""
    runner = CliRunner(env={"COLUMNS": str(width), **environment})
    return runner.invoke(command, [*map(str, arguments)], catch_exceptions=catch_exceptions)
