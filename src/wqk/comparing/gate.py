"""`same` as a gate: an assertion, and a report that continuous integration reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from wqk.comparing.sameness import same

if TYPE_CHECKING:
    from wqk.comparing.answer import CheckpointComparison


def assert_same(ref: Any, other: Any, **options: Any) -> CheckpointComparison:
    """Require that two models are the same; of one that is not, the cause and its repair are said.

    Parameters
    ----------
    ref, other
        Models, or what `wqk.open` takes: folders, files, hub ids, live modules.
    **options
        Those of `wqk.same`, such as ``everything=True`` for every tensor.

    Returns
    -------
    CheckpointComparison
        As `wqk.same` returns it.

    Raises
    ------
    AssertionError
        They are not the same.

    Examples
    --------
    >>> import wqk
    >>> model = wqk.demo_model("decoder")
    >>> wqk.assert_same(model, model).same
    True
    """
    __tracebackhide__ = True
    comparison = same(ref, other, **options)
    if not comparison.same:
        raise AssertionError("\n".join(failure(comparison)))
    return comparison


def failure(comparison: CheckpointComparison) -> Iterator[str]:
    """What is wrong, line by line: the sentence, then each cause with its repair, and tensors."""
    yield comparison.sentence
    for cause in comparison.causes:
        yield f"{', '.join(map(str, cause.places)) or 'configuration'}: {cause.mismatch.reason}"
        yield from (f"    {line}" for line in cause.mismatch.repair.splitlines())
    yield from map(str, comparison.differing)


def junit(comparison: CheckpointComparison) -> bytes:
    """The comparison as JUnit's XML: a case for each block, and for each tensor outside them.

    What was not compared is a case that was skipped.
    """
    suite = ElementTree.Element("testsuite", name=f"{comparison.checkpoint} = {comparison.other}")
    counts = {"tests": 0, "failures": 0, "skipped": 0}

    def case(name: str, wrong: str = "", skipped: bool = False) -> None:
        one = ElementTree.SubElement(suite, "testcase", classname="wqk.same", name=name)
        if wrong:
            ElementTree.SubElement(one, "failure", message=wrong.splitlines()[0]).text = wrong
        elif skipped:
            ElementTree.SubElement(one, "skipped", message="not compared")
        for what, count in (("tests", 1), ("failures", wrong != ""), ("skipped", skipped)):
            counts[what] += count

    for block in comparison.blocks:
        wrong = "" if block.same else f"{block.reason}\n{block.repair}"
        case(f"{block.stack} {block.kind} {block.layer}", wrong)
    for name, places, _ in comparison.alone:
        for place in places:
            case(str(place), f"only in {name}")
    for setting in comparison.settings:
        case(f"config.{setting.facts['name']}", f"{setting.reason}\n{setting.repair}")
    for tensor in comparison.tensors:
        case(tensor.name or tensor.other, str(tensor) if tensor.outcome.differs else "")
    keys = (f"config.{name}" for name in comparison.settings_not_compared)
    for name in (*comparison.unknown, *comparison.not_compared, *keys):
        case(name, skipped=True)
    for what, count in counts.items():
        suite.set(what, str(count))
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite)
