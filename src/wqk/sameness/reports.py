"""Reports of a comparison for test runners: lines of a failed assertion, and JUnit's XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from xml.etree import ElementTree

from wqk.sameness.answer import CheckpointComparison
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.tensor_comparisons import TensorComparison
from wqk.sameness.verdicts import Verdict

# Characters that XML 1.0 does not allow.
NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
# Attributes of JUnit's suites that count cases, and the path of the elements to count.
COUNTED = {
    "tests": "*",
    "failures": "*/failure",
    "errors": "*/error",
    "skipped": "*/skipped",
}


def failure(comparison: CheckpointComparison) -> Iterator[str]:
    """Yield lines of a failed assertion: the sentence, causes, tensors, and the repair."""
    yield comparison.sentence
    for cause in comparison.causes:
        yield f"{cause.where}: {cause.mismatch.reason}"
    yield from map(str, comparison.differing)
    if comparison.repair:
        for line in comparison.commented_repair.splitlines():
            yield f"    {line}"


class Case(NamedTuple):
    """A case of a JUnit suite; it passed, unless there is a failure or a reason to skip it."""

    name: str
    failure: str = ""
    skipped: str = ""


def junit(comparison: CheckpointComparison) -> bytes:
    """Return the comparison as JUnit's XML: a case for each block and each other tensor.

    Parts that were not compared are skipped cases.
    """
    suite = _suite(comparison.reference, comparison.candidate)
    for case in _cases(comparison):
        _add_case(suite, case)
    return _encoded(suite)


def junit_error(reference: str, candidate: str, message: str) -> bytes:
    """Return JUnit's XML with one case: the error that prevented a comparison.

    Examples
    --------
    >>> b'errors="1"' in junit_error("a", "b", "b: no weights here")
    True
    """
    suite = _suite(reference, candidate)
    case = ElementTree.SubElement(suite, "testcase", classname="wqk.same", name="comparison")
    ElementTree.SubElement(case, "error", message=in_xml(message))
    return _encoded(suite)


def _suite(reference: str, candidate: str) -> ElementTree.Element:
    """Return an empty suite for the comparison of two models."""
    return ElementTree.Element("testsuite", name=in_xml(f"{reference} = {candidate}"))


def _encoded(suite: ElementTree.Element) -> bytes:
    """Return a suite as XML, with the numbers of its cases."""
    for attribute, path in COUNTED.items():
        suite.set(attribute, str(len(suite.findall(path))))
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite)


def _cases(comparison: CheckpointComparison) -> Iterator[Case]:
    """Yield a case for each part of both models."""
    yield from map(_case_of_block, comparison.blocks)
    for blocks in comparison.alone:
        for place in blocks.places:
            yield Case(str(place), failure=f"only in {blocks.model}")
    for setting in comparison.settings:
        name = f"config.{setting.facts['name']}"
        yield Case(name, failure=f"{setting.reason}\n{setting.repair}")
    yield from map(_case_of_tensor, comparison.tensors)
    keys = [f"config.{key}" for key in comparison.settings_not_compared]
    for name in (*comparison.unknown, *comparison.not_compared, *keys):
        yield Case(name, skipped="not compared")


def _case_of_block(block: BlockComparison) -> Case:
    name = str(block.place)
    if block.verdict is Verdict.DIFFERENT:
        return Case(name, failure=f"{block.reason}\n{block.repair}")
    if block.undecided:
        return Case(name, skipped=f"not decided: {block.undecided}")
    return Case(name)


def _case_of_tensor(tensor: TensorComparison) -> Case:
    return Case(tensor.title, failure=str(tensor) if tensor.outcome.differs else "")


def _add_case(suite: ElementTree.Element, case: Case) -> None:
    """Add an element for a case to the element of a suite."""
    attributes = {"classname": "wqk.same", "name": in_xml(case.name)}
    element = ElementTree.SubElement(suite, "testcase", attributes)
    if case.failure:
        text = in_xml(case.failure)
        message = text.splitlines()[0]
        ElementTree.SubElement(element, "failure", message=message).text = text
    elif case.skipped:
        ElementTree.SubElement(element, "skipped", message=in_xml(case.skipped))


def in_xml(text: str) -> str:
    r"""Return text with the characters that XML does not allow spelled out.

    Examples
    --------
    >>> in_xml("a\x1bb")
    'a\\x1bb'
    """
    return NOT_IN_XML.sub(lambda match: ascii(match[0])[1:-1], text)
