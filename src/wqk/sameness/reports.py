"""Reports of a comparison for test runners: lines of a failed assertion, and JUnit's XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from wqk.sameness.answer import CheckpointComparison
from wqk.sameness.verdicts import Verdict

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
    title = in_xml(f"{comparison.reference} = {comparison.candidate}")
    suite = ElementTree.Element("testsuite", name=title)

    def case(name: str, wrong: str = "", skipped: str = "") -> None:
        attributes = {"classname": "wqk.same", "name": in_xml(name)}
        element = ElementTree.SubElement(suite, "testcase", attributes)
        if wrong:
            text = in_xml(wrong)
            failed = ElementTree.SubElement(element, "failure", message=text.splitlines()[0])
            failed.text = text
        elif skipped:
            ElementTree.SubElement(element, "skipped", message=in_xml(skipped))

    for block in comparison.blocks:
        is_different = block.verdict is Verdict.DIFFERENT
        wrong = f"{block.reason}\n{block.repair}" if is_different else ""
        case(str(block.place), wrong, f"not decided: {block.undecided}" if block.undecided else "")
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
