"""Print the lowest versions that pyproject.toml allows, as pip takes them: ``make floors``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def floors(requirements: list[str]) -> list[str]:
    """Each requirement at its lowest version.

    Examples
    --------
    >>> floors(["numpy>=2.1", "rich>=13.7"])
    ['numpy==2.1', 'rich==13.7']
    """
    return [re.sub(r"\s*>=\s*", "==", requirement) for requirement in requirements]


if __name__ == "__main__":
    project = Path(__file__).parents[1] / "pyproject.toml"
    print(*floors(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]))
