"""Tables of cases that are data and no code: in a TOML file next to the tests that read them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def cases(tests: str, name: str) -> Any:
    """A table of the file that lies next to a file of tests and has the name of that file."""
    return tomllib.loads(Path(tests).with_suffix(".toml").read_text("utf-8"))[name]
