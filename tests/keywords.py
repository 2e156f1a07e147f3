"""Calls that a type checker must refuse or accept: mypy reports an ignored error that is none."""

from typing import TYPE_CHECKING, Any, assert_type

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

    # A head is a form whose scores are numbers; what it lacks is an error.
    model = wqk.open("a")
    head = model[1, 2]
    assert_type(head.symmetry, float)
    assert_type(head.ov, wqk.BilinearForm)
    assert_type(model[:, 0], list[wqk.Head])
    assert_type([head.norm for head in model[1].heads], list[float])
    assert_type(model[1].form.symmetry, float)
    assert_type(wqk.BilinearForm([[1.0]], [[1.0]]).directionality, float)
    assert_type(model[1].heads.symmetry, Any)  # an array
    _ = head.q  # type: ignore[attr-defined]
    _ = model.heads  # type: ignore[attr-defined]
    _ = model[1].head  # type: ignore[attr-defined]
    _ = model[1].form.q  # type: ignore[attr-defined]
    _ = wqk.BilinearForm([[1.0]], [[1.0]]).q  # type: ignore[attr-defined]
    _ = wqk.scan("a").layer  # type: ignore[attr-defined]
    wqk.Head([[1.0]], [[1.0]])  # type: ignore[arg-type]
