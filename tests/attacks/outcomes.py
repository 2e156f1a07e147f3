"""Cases of an attack, and their outcomes: right, refused in one line, or one of the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tests.command import run
from tests.limits import within

import wqk
from wqk.errors import WqkError
from wqk.tables.score_table import ScoreTable, read_table

MOST_SECONDS = 30.0  # processor time of one case
MOST_DIFFERENCE = 1e-4  # of scores in single precision from those in float64


class Outcome(StrEnum):
    """End of a case."""

    RIGHT = "right"
    REFUSED = "refused by name"
    NAMED = "read, damage named"
    WRONG = "wrong"
    TRACEBACK = "traceback"
    HANG = "hang"
    PARTIAL = "partial file"


FAULTS = (Outcome.WRONG, Outcome.TRACEBACK, Outcome.HANG, Outcome.PARTIAL)


class Meaningless(Exception):
    """The independent computation finds no meaning in the damaged input."""


class Unclean(Exception):
    """The command ended in another way than a result, or one line and exit status 2."""


class Named(Exception):
    """The result reports the damage, such as a tensor that is missing."""


class LeftBehind(Exception):
    """A refused command wrote a file."""


@dataclass(frozen=True)
class Case:
    """One damaged input.

    Attributes
    ----------
    description
        The damage, for reports.
    result
        Computes the result with wqk.
    is_right
        Compares that result with an independent computation.
    """

    description: str
    result: Callable[[], Any]
    is_right: Callable[[Any], bool]


@dataclass(frozen=True)
class Finding:
    """The outcome of one case, with the error or the result of a fault."""

    outcome: Outcome
    description: str
    detail: str = ""


def outcome_of(case: Case) -> Finding:
    """Run one case."""
    try:
        with within(MOST_SECONDS):
            result = case.result()
    except WqkError as error:
        message = str(error)
        outcome = Outcome.REFUSED if message and "\n" not in message else Outcome.TRACEBACK
        return Finding(outcome, case.description, message)
    except Named as error:
        return Finding(Outcome.NAMED, case.description, str(error))
    except LeftBehind as error:
        return Finding(Outcome.PARTIAL, case.description, str(error))
    except AssertionError as error:
        return Finding(Outcome.HANG, case.description, str(error))
    except Exception as error:
        return Finding(Outcome.TRACEBACK, case.description, f"{type(error).__name__}: {error}")
    try:
        is_right = case.is_right(result)
    except Meaningless as error:
        return Finding(Outcome.WRONG, case.description, f"read, but meaningless: {error}")
    outcome = Outcome.RIGHT if is_right else Outcome.WRONG
    return Finding(outcome, case.description, "" if is_right else repr(result))


Attack = Callable[[Path, Random], Iterator[Case]]


def findings(attack: Attack, folder: Path, count: int, seed: int = 0) -> list[Finding]:
    """Run a number of cases of an attack."""
    return [outcome_of(case) for case in islice(attack(folder, Random(seed)), count)]


def counted(case_findings: list[Finding]) -> Counter[Outcome]:
    """Number of cases by outcome."""
    return Counter(finding.outcome for finding in case_findings)


# Scores of forms, in wqk and in float64: of each kind, layer and head the symmetry and the norm.
Address = tuple[str, int, int]
Scores = Mapping[Address, tuple[float, float]]


def scores_of(table: ScoreTable) -> Scores:
    """Symmetry and norm of every head of a table.

    Raises
    ------
    Named
        The table reports that the file is incomplete, or that its family is a guess.
    """
    for note in table.metadata.get("partial", {}).values():
        if note.startswith("incomplete"):
            raise Named(note)
    if any("guessed" in status for status in table.frame["status"]):
        raise Named("the family is guessed")
    heads = table.frame.drop_nulls("head").select("kind", "layer", "head", "symmetry", "norm")
    return {(kind, layer, head): (s, n) for kind, layer, head, s, n in heads.rows()}


def scan(ref: object, out: Path, dice: Random, *options: object, **keywords: Any) -> Scores:
    """Scan from Python, or one time in eight by the command that writes a file."""
    if dice.random() < 0.875:
        return scores_of(wqk.scan(ref, **keywords))
    out.unlink(missing_ok=True)
    line = [f"--{name.replace('_', '-')}={value}" for name, value in keywords.items()]
    done = run("scan", ref, "--heads", "-o", out, *options, *line, exits=None)
    if done.exit_code == 0:
        return scores_of(read_table(out))
    refused_in_one_line(done)
    if out.exists():
        raise LeftBehind(str(out))
    raise WqkError(done.stderr.strip())


def refused_in_one_line(done: Any) -> None:
    """Require exit status 2 and one line of a command that did not succeed."""
    lines = done.stderr.splitlines()
    if done.exit_code != 2 or len(lines) != 1 or "unexpected" in done.stderr:
        raise Unclean(f"exit status {done.exit_code}: {done.output[-500:]}")


def dense_scores(query: np.ndarray, key: np.ndarray) -> tuple[float, float]:
    """Symmetry and norm of W_q W_kᵀ for one head, from the dense form in float64.

    Parameters
    ----------
    query, key
        Shape (head width, width): weights as stored.
    """
    form = query.astype(np.float64).T @ key.astype(np.float64)
    square = float((form * form).sum())
    if form.shape[0] != form.shape[1]:
        raise Meaningless("queries and keys read inputs of different widths")
    return float((form * form.T).sum()) / square if square else np.nan, square**0.5


def are_equal(actual: Scores, expected: Scores) -> bool:
    """Return whether two sets of scores have the same heads and nearly the same values."""
    if actual.keys() != expected.keys():
        return False
    for address, (symmetry, norm) in expected.items():
        values = actual[address]
        if None in values:
            return False
        if abs(values[0] - symmetry) > MOST_DIFFERENCE:
            return False
        if abs(values[1] - norm) > MOST_DIFFERENCE * abs(norm):
            return False
    return True


# Values for settings: some are plausible, most are not.
NUMBERS = (0, -1, 1, 2, 3, 4, 8, 2**31, 2**63, 10**30, 0.5, 1e-9, 1e308, float("nan"), True, False)
TEXTS = ("", "2", "a", "{layer}", "../..", "full_attention", "\ud800")
VALUES = (*NUMBERS, *TEXTS, None, [], {}, [0], [[2]], {"a": 1})


def changed_setting(settings: dict[str, Any], dice: Random) -> tuple[dict[str, Any], str]:
    """Change, take out or exchange one setting; the settings, and a description."""
    changed = dict(settings)
    key = dice.choice(sorted(settings))
    kind = dice.choice(("value", "value", "near", "gone", "list"))
    value = settings[key]
    if kind == "gone":
        del changed[key]
        return changed, f"without {key}"
    if kind == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        changed[key] = dice.choice((value + 1, value * 2, value // 2, -value, float(value)))
    elif kind == "list" and isinstance(value, list) and value:
        changed[key] = dice.choice((value[1:], value * 2, value[::-1], [value[0]] * len(value)))
    else:
        changed[key] = dice.choice(VALUES)
    return changed, f"{key} = {str(changed[key])[:60]!r} for {str(value)[:60]!r}"
