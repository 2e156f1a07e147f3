"""Reports of a comparison for test runners: lines of a failed assertion, and JUnit's XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from wqk.sameness.answer import CheckpointComparison

# Characters that XML 1.0 does not allow.
NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def failure(comparison: CheckpointComparison) -> Iterator[str]:
    """Yield lines of a failed assertion: the sentence, causes, tensors, and the repair."""
    yield comparison.sentence
    for cause in comparison.causes:
        yield f"{cause.where}: {cause.mismatch.reason}"
    yield from map(str, comparison.differing)
    for line in comparison.commented_repair.splitlines() if comparison.repair else ():
        yield f"    {line}"


def in_xml(text: str) -> str:
    r"""Return text with the characters that XML does not allow spelled out.

    Examples
    --------
    >>> in_xml("a\x1bb")
    'a\\x1bb'
    """
    return NOT_IN_XML.sub(lambda match: ascii(match[0])[1:-1], text)


def junit(comparison: CheckpointComparison) -> bytes:
    """Return the comparison as JUnit's XML: a case for each block and each other tensor.

    What was not compared is a case that was skipped.
    """
    suite = ElementTree.Element(
        "testsuite", name=f"{comparison.reference} = {comparison.candidate}"
    )

    def case(name: str, wrong: str = "", skipped: bool = False) -> None:
        one = ElementTree.SubElement(suite, "testcase", classname="wqk.same", name=name)
        if wrong:
            ElementTree.SubElement(one, "failure", message=wrong.splitlines()[0]).text = wrong
        elif skipped:
            ElementTree.SubElement(one, "skipped", message="not compared")

    for block in comparison.blocks:
        wrong = "" if block.same else f"{block.reason}\n{block.repair}"
        case(str(block.place), wrong)
    for name, places, _ in comparison.alone:
        for place in places:
            case(str(place), f"only in {name}")
    for setting in comparison.settings:
        case(f"config.{setting.facts['name']}", f"{setting.reason}\n{setting.repair}")
    for tensor in comparison.tensors:
        case(tensor.name or tensor.other, str(tensor) if tensor.outcome.differs else "")
    keys = (f"config.{name}" for name in comparison.settings_not_compared)
    for name in (*comparison.unknown, *comparison.not_compared, *keys):
        case(name, skipped="not compared")
    for what, path in (("tests", "*"), ("failures", "*/failure"), ("skipped", "*/skipped")):
        suite.set(what, str(len(suite.findall(path))))
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite)
