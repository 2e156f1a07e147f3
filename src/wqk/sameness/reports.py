"""Reports of a comparison for test runners: lines of a failed assertion, and JUnit's XML."""

from __future__ import annotations

from collections.abc import Iterator

from wqk._junit import Case, junit_report
from wqk.sameness.answer import CheckpointComparison
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.tensor_comparisons import TensorComparison
from wqk.sameness.verdicts import Verdict


def failure(comparison: CheckpointComparison) -> Iterator[str]:
    """Yield lines of a failed assertion: sentence, causes, tensors, and repair.

    The first line begins with the first cause, because test runners shorten the line.
    """
    first = f"{comparison.causes[0].reason}. " if comparison.causes else ""
    yield f"{first}{comparison.sentence}"
    for cause in comparison.causes:
        yield f"{cause.where}: {cause.mismatch.reason}"
    yield from map(str, comparison.differing)
    if comparison.repair:
        for line in comparison.commented_repair.splitlines():
            yield f"    {line}"


def junit(comparison: CheckpointComparison) -> bytes:
    """Return the comparison as JUnit's XML: a case for each block and each further tensor.

    Parts that were not compared are skipped cases.
    """
    return junit_report(
        f"{comparison.reference} = {comparison.candidate}", "wqk.same", _cases(comparison)
    )


def junit_error(reference: str, candidate: str, message: str) -> bytes:
    """Return JUnit's XML with one case: the error that prevented a comparison.

    Examples
    --------
    >>> b'errors="1"' in junit_error("a", "b", "b: no weights here")
    True
    """
    case = Case("comparison", error=message)
    return junit_report(f"{reference} = {candidate}", "wqk.same", [case])


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
