"""What a type checker tells somebody who writes a script with wqk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import wqk

SCRIPT = """
import wqk

form = wqk.open("a")[1].form
reveal_type(form.symmetry)
reveal_type(wqk.open("a")[1, 2].directionality)
form.q
"""


def test_scores_are_numbers_and_unknown_attributes_are_errors(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = (sys.executable, "-m", "mypy", "--strict", "--config-file=", script.name)
    environment = os.environ | {"MYPYPATH": str(Path(wqk.__file__).parents[1])}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = [line for line in told.stdout.splitlines() if line.startswith(script.name)]
    assert [line.split(" ", 1)[1] for line in lines] == [
        'note: Revealed type is "float"',
        'note: Revealed type is "float"',
        'error: "BilinearForm" has no attribute "q"  [attr-defined]',
    ], told.stdout + told.stderr
