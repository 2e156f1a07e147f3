"""Rotary positions that a family only names: the evidence on them that a comparison still has.

The rotation is not known; therefore forms are compared at distance 0 alone, where any order of rows
gives the same scores. Two models of one family can be told apart by their settings. Two models are
the same only if the rows of their queries and keys also lie in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wqk.families.model_types import default_values
from wqk.model import Model
from wqk.sameness.blocks import Rows, Scoring
from wqk.sameness.circuits import PlanPair
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Setting
from wqk.sameness.tolerances import ALIKE, QUANTIZED_ALIKE

# Settings of rotary positions, by one of the keys that lead to them.
OF_ROTATION = re.compile(r"(?i)rope|rotary|theta")
# Spellings of a rotation without scaling.
UNSCALED = ("default", None)
# Positions of a guessed family, in the list of what was not compared.
GUESSED = "rotary positions (a family was guessed, and does not name them)"


def is_guessed(pairs: Iterable[PlanPair]) -> bool:
    """Return whether the family of a block was guessed."""
    return any(reference.rule.guess or candidate.rule.guess for reference, candidate in pairs)


def positions_unknown(pair: PlanPair) -> bool:
    """Return whether the positions of one of two blocks may turn in a way that is not known."""
    return any(plan.rotation_unknown for plan in pair)


def named_settings(models: Sequence[Model], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield settings that differ, of positions that the one family of both blocks only names."""
    reference, candidate = pair
    of_one_family = reference.family == candidate.family
    is_guess = any(plan.rule.guess for plan in pair)
    if not positions_unknown(pair) or is_guess or not of_one_family:
        return
    settings = [
        _rotary_settings(model, plan.rule.config) for model, plan in zip(models, pair, strict=True)
    ]
    for path in sorted(settings[0].keys() | settings[1].keys()):
        expected, actual = (settings_of_model.get(path) for settings_of_model in settings)
        if expected == actual:
            continue
        nested = (*filter(None, [candidate.rule.config]), *path)
        reason = f"rotary positions: {'.'.join(path)}: {expected} expected, {actual} found"
        facts = {"name": ".".join(path), "value": expected, "other_value": actual}
        steps = (Setting(nested, expected),) if expected is not None else ()
        yield Mismatch(Kind.ROTARY, reason, steps, facts=facts)


def _rotary_settings(model: Model, nested: str) -> dict[tuple[str, ...], Any]:
    """Return settings of rotary positions by their keys, with the defaults of the model's type."""
    config: Mapping[str, Any] = model.checkpoint.config
    if nested:
        config = config.get(nested) or {}
    nested_settings: list[tuple[tuple[str, ...], Any]] = [
        ((), {**default_values(config.get("model_type")), **config})
    ]
    settings: dict[tuple[str, ...], Any] = {}
    while nested_settings:
        path, value = nested_settings.pop()
        if isinstance(value, Mapping):
            nested_settings += [((*path, str(key)), entry) for key, entry in value.items()]
        elif any(map(OF_ROTATION.search, path)) and value not in UNSCALED:
            settings[path] = value
    base = settings.pop(("rope_theta",), None)
    if base is not None:  # the older spelling of the same setting
        settings.setdefault(("rope_parameters", "rope_theta"), base)
    return settings


def undecided_positions(pair: PlanPair, forms: tuple[Scoring, Scoring] | None) -> str:
    """Return why the positions of two blocks are not decided; empty if they are.

    Parameters
    ----------
    pair
        The plans of the two blocks.
    forms
        Their scores; None for blocks that store the same bytes.
    """
    if not positions_unknown(pair):
        return ""
    is_guess = any(plan.rule.guess for plan in pair)
    in_order = forms is None or _same_order(*forms)
    if is_guess:
        name = "of a guessed family are not known"
    else:
        name = f"({next(p.position for p in pair if p.rotation_unknown)}) are only named"
        if pair[0].family != pair[1].family:
            return f"rotary positions {name}, and the two are of different families"
    if in_order:
        return ""
    return f"rotary positions {name}, and rows of queries and keys lie in another order"


def _same_order(reference: Scoring, candidate: Scoring) -> bool:
    """Return whether the rows of queries and keys of two blocks correspond one by one."""
    rounding = reference.rounding + candidate.rounding
    least = ALIKE if rounding < 1 - ALIKE else QUANTIZED_ALIKE
    sides = (
        (reference.query, candidate.query),
        (reference.key, candidate.key),
    )
    return all(_cosines(*side).min(initial=1.0) > least for side in sides)


def _cosines(reference: Rows, candidate: Rows) -> np.ndarray:
    """Absolute cosine similarity of corresponding rows; 1 where both are zero."""
    expected, actual = _with_gain(reference), _with_gain(candidate)
    if expected.shape != actual.shape:
        return np.zeros(1)
    products = np.abs(np.einsum("nd,nd->n", expected, actual))
    norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(actual, axis=1)
    cosines = products / np.where(norms > 0, norms, 1.0)
    are_zero = ~(expected.any(axis=1) | actual.any(axis=1))
    return np.asarray(np.where(are_zero, 1.0, cosines))


def _with_gain(rows: Rows) -> np.ndarray:
    """Rows (n, D) that read the stream, with the gain of the norm before them."""
    flat = np.asarray(rows.weight, np.float64).reshape(-1, rows.weight.shape[-1])
    return flat if rows.norm is None or rows.norm.gain is None else flat * rows.norm.gain
