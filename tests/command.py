"""The command `wqk`, called without a process of its own, or in a shell."""

from __future__ import annotations

import os
import subprocess
import sys

from click.testing import CliRunner, Result

import wqk
from wqk.cli.main import command

ENCODER = str(wqk.demo_model("encoder"))


def run(
    *arguments: object,
    exits: int | None = 0,
    width: int = 80,
    catch_exceptions: bool = True,
    **environment: str,
) -> Result:
    """Run the command on a terminal of this width; the command has to end with this status."""
    runner = CliRunner(env={"COLUMNS": str(width), **environment})
    done = runner.invoke(command, [*map(str, arguments)], catch_exceptions=catch_exceptions)
    assert exits in (None, done.exit_code), done.output
    return done


def refuse(*arguments: object, **options: int) -> str:
    """Return the line with which the command refuses; the command prints nothing else."""
    done = run(*arguments, exits=2, **options)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("wqk: ")
    return line


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line; ``wqk`` stands for this interpreter's, ENCODER for the demo model."""
    line = line.replace("wqk ", '"$PYTHON" -m wqk ').replace("ENCODER", '"$ENCODER"')
    variables = {**os.environ, "PYTHON": sys.executable, "ENCODER": ENCODER, **environment}
    return subprocess.run(["bash", "-c", line], env=variables, capture_output=True, text=True)
