"""What people type first: guesses written down before looking at the reference, best first.

A goal is met if its guess gives something and no error. Those that fail must say what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests import small
from tests.cases import cases

import wqk

GOALS = cases(__file__, "goals")

FIRST, ANY = 66, 74

# Calls that cannot mean anything, and what their errors say.
MISTAKES = cases(__file__, "mistakes")


@pytest.fixture
def names(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    import torch

    monkeypatch.chdir(tmp_path)
    ref, random = wqk.demo_model("encoder"), np.random.default_rng(0)
    return {
        "wqk": wqk,
        "np": np,
        "ref": ref,
        "model": wqk.open(ref),
        "other": wqk.demo_model("decoder"),
        "pair": wqk.demo_model("induction"),
        "rotary": wqk.open(small.llama(sides="qkvo", name="llama")),
        "json": json,
        "torch": torch,
        "batch": torch.arange(8)[None] % 9,
        "tokens": torch.arange(64).reshape(2, 32) % 9,
        "a": random.standard_normal((8, 2)),
        "b": random.standard_normal((8, 2)),
        "x": np.ones(128),
        "net": small.running(key_heads=2),
    }


def tried(goals: str, names: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each goal with what its guesses raised."""
    for line in goals.strip().splitlines():
        goal, *guesses = line.split(" | ")
        errors = []
        for guess in guesses:
            try:
                eval(guess, dict(names))
                errors.append("")
            except Exception as error:
                errors.append(f"{guess}: {type(error).__name__}: {error}")
        yield goal, errors


@pytest.mark.usefixtures("unchecked_arguments")
def test_first_guesses_work(names):
    found = dict(tried(GOALS, names))
    failed = "\n".join(error for errors in found.values() for error in errors if error)
    assert sum(not errors[0] for errors in found.values()) >= FIRST, failed
    assert sum("" in errors for errors in found.values()) >= ANY, failed


@pytest.mark.usefixtures("unchecked_arguments")
def test_a_mistaken_call_is_told_what_to_do(names):
    for line in MISTAKES.strip().splitlines():
        call, kind, words = line.split(" | ")
        ((_, (message,)),) = tried(f"{call} | {call}", names)
        assert f"{kind}: " in message, message or call
        assert words in message, message
