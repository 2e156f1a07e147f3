"""The training step in the name of a revision or a folder."""

from __future__ import annotations

import re

# step1000, checkpoint-1000, stage1-step1000-tokens5B, global_step1000, iter_0001000; not step1.5M.
STEP = re.compile(
    r"(?:^|[-_])(?:global_?)?(?:step|checkpoint|iter)[-_]?([0-9]{1,18})(?![0-9A-Za-z.])"
)


def step_in(name: str | None) -> int | None:
    """The training step that a revision or a folder is named after.

    Examples
    --------
    >>> [step_in(name) for name in ("step1000", "checkpoint-20", "stage1-step150-tokens1B", "v2.0")]
    [1000, 20, 150, None]
    """
    match = STEP.search(name or "")
    return int(match[1]) if match else None
