"""Calls that a type checker must refuse: mypy reports an ignored error that is none."""

from typing import TYPE_CHECKING

import wqk

if TYPE_CHECKING:  # never run
    wqk.scan("a", nonsense=1)  # type: ignore[call-arg]
    wqk.scan("a", layer=3)  # type: ignore[call-arg]
    wqk.scan("a", token=1.5)  # type: ignore[arg-type]
    wqk.explain("a", nonsense=1)  # type: ignore[call-arg]
    wqk.verify("a", nonsense=1)  # type: ignore[call-arg]
    wqk.show("a", 0, nonsense=1)  # type: ignore[call-arg]
    wqk.read_attention("a", 0, nonsense=1)  # type: ignore[call-arg]
    wqk.diff("a", "b", revision="main")  # type: ignore[call-arg]
    wqk.same("a", "b", nonsense=1)  # type: ignore[call-arg]
    wqk.same("a", "b", revisions="main")  # type: ignore[arg-type]
    wqk.survey("a", out="b", nonsense=1)  # type: ignore[call-arg]
    wqk.survey("a", out="b", subfolder="c")  # type: ignore[call-arg]
    wqk.match_tokens("a", 0, 0, nonsense=1)  # type: ignore[call-arg]

    # These it must accept.
    wqk.scan("a", revision="main", token=True, cache_dir="b", local_files_only=True, subfolder="c")
    wqk.same("a", "b", revisions=("main", None), token="t", subfolder="c")
    wqk.survey(["a"], out="b", token="t", cache_dir="c", local_files_only=True)
