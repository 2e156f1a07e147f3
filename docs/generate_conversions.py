"""The table of the page "Check a conversion", from the mistakes that the tests plant.

Each row makes its mistake on a tiny model, compares the two, and prints the cause and the repair.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk.sameness.repairs import Change

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.sameness.mismatches import Mismatch

ROOT = Path(__file__).parents[1]

HEAD = """\
| what was done | reported in | cause that `wqk same` names | repair |
|:--|:--|:--|:--|
"""


def rows() -> Iterator[str]:
    """A line of the table for each mistake."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.sameness.conversions import MISTAKES, right
    finally:
        sys.path.pop(0)
    from wqk.checkpoints.modules import StateDict
    from wqk.sameness.same import same

    for mistake in MISTAKES:
        tensors, config = right(mistake.model)
        mistake.change(tensors, config)
        originals = StateDict(*right(mistake.model), "original")
        mismatch = same(originals, StateDict(tensors, config, "copy")).causes[0].mismatch
        threads = ", ".join(map(_link, mistake.threads)) or "–"
        code = statement(mismatch)
        yield f"| {mistake.description} | {threads} | {_cell(mismatch.reason)} | `{_cell(code)}` |"


def statement(mismatch: Mismatch) -> str:
    """Return the statements of a repair: of one weight ``w``, one layer, or one setting."""
    step = mismatch.steps[0]
    code = step.edit.code() if isinstance(step, Change) else step.code()
    statements = [line.strip() for line in code.splitlines() if not line.startswith("for layer")]
    return "; ".join(statements)


def _link(thread: str) -> str:
    repository, _, number = thread.partition("#")
    return f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(path: Path, **_: Any) -> None:
    """Write the table into a file that the page includes."""
    path.write_text(HEAD + "\n".join(rows()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(HEAD + "\n".join(rows()))
