"""JUnit's XML: a report of cases, which test runners and continuous integration display."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree

# Characters that XML 1.0 does not allow.
NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
# Attributes of JUnit's suites that count cases, and the path of the elements to count.
COUNTED = {
    "tests": "*",
    "failures": "*/failure",
    "errors": "*/error",
    "skipped": "*/skipped",
}


class Case(NamedTuple):
    """A case of a JUnit suite, passed if not failed, skipped or stopped by an error."""

    name: str
    failure: str = ""
    skipped: str = ""
    error: str = ""


def junit_report(suite: str, classname: str, cases: Iterable[Case]) -> bytes:
    """Return a suite of cases as JUnit's XML.

    Parameters
    ----------
    suite
        Name of the suite.
    classname
        Name of the function that made the cases.
    cases
        The cases, in order.

    Examples
    --------
    >>> b'errors="1"' in junit_report("a = b", "wqk.same", [Case("all", error="b: no weights")])
    True
    """
    root = ElementTree.Element("testsuite", name=in_xml(suite))
    for case in cases:
        _add_case(root, classname, case)
    for attribute, path in COUNTED.items():
        root.set(attribute, str(len(root.findall(path))))
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root)


def _add_case(root: ElementTree.Element, classname: str, case: Case) -> None:
    """Add an element for a case to the element of a suite."""
    attributes = {"classname": classname, "name": in_xml(case.name)}
    element = ElementTree.SubElement(root, "testcase", attributes)
    if case.failure:
        text = in_xml(case.failure)
        message = text.splitlines()[0]
        ElementTree.SubElement(element, "failure", message=message).text = text
    elif case.skipped:
        ElementTree.SubElement(element, "skipped", message=in_xml(case.skipped))
    elif case.error:
        ElementTree.SubElement(element, "error", message=in_xml(case.error))


def in_xml(text: str) -> str:
    r"""Return text with descriptions in place of characters that XML does not allow.

    Examples
    --------
    >>> in_xml("a\x1bb")
    'a\\x1bb'
    """
    return NOT_IN_XML.sub(lambda match: ascii(match[0])[1:-1], text)
