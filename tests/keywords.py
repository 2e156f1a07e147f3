"""Calls that a type checker must refuse: mypy reports an ignored error that is none."""

from typing import TYPE_CHECKING

import wqk

if TYPE_CHECKING:  # never run
    wqk.open("a", nonsense=1)  # type: ignore[call-arg]
    wqk.open("a", token=1.5)  # type: ignore[arg-type]
    wqk.scan("a", nonsense=1)  # type: ignore[call-arg]
    wqk.scan("a", layer=3)  # type: ignore[call-arg]
    wqk.scan("a", revision="main")  # type: ignore[call-arg]
    wqk.survey("a", out="b", nonsense=1)  # type: ignore[call-arg]
    wqk.survey("a", out="b", subfolder="c")  # type: ignore[call-arg]

    # These it must accept.
    wqk.open("a", revision="main", token=True, cache_dir="b", local_files_only=True, subfolder="c")
    wqk.same(wqk.open("a", token="t", revision="main"), wqk.open("b", revision=None))
    wqk.survey(["a"], out="b", token="t", cache_dir="c", local_files_only=True)
