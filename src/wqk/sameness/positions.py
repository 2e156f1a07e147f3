"""Rotary positions with unknown rotation: the remaining evidence for a comparison.

The rotation is unknown. Therefore forms are compared only at distance 0, where any order of rows
results in the same scores. Two models of one family differ if their settings differ. Two models are
the same only if the rows of their queries and keys also have the same order.
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
from wqk.sameness.matching import cosines
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Setting
from wqk.sameness.replanning import config_path
from wqk.sameness.tolerances import ALIKE, QUANTIZED_ALIKE

# Settings of rotary positions, by one of their keys.
OF_ROTATION = re.compile(r"(?i)rope|rotary|theta")
# Spellings of a rotation without scaling.
UNSCALED = ("default", None)
# Positions of a guessed family, in the list of what was not compared.
GUESSED = "rotary positions (a family was guessed, and does not name them)"


def is_guessed(pairs: Iterable[PlanPair]) -> bool:
    """Return whether the family of a block was guessed."""
    return any(reference.rule.guess or candidate.rule.guess for reference, candidate in pairs)


def positions_unknown(pair: PlanPair) -> bool:
    """Return whether the rotation by positions of either block is unknown."""
    return any(plan.rotation_unknown for plan in pair)


def named_settings(models: Sequence[Model], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield differing rotary settings, for blocks of one family with unknown rotations."""
    reference, candidate = pair
    of_one_family = reference.family == candidate.family
    is_guess = any(plan.rule.guess for plan in pair)
    if not positions_unknown(pair) or is_guess or not of_one_family:
        return
    expected_settings, actual_settings = (
        _rotary_settings(model, plan.rule.config) for model, plan in zip(models, pair, strict=True)
    )
    for path in sorted(expected_settings.keys() | actual_settings.keys()):
        expected, actual = expected_settings.get(path), actual_settings.get(path)
        if expected == actual:
            continue
        name = ".".join(path)
        reason = f"rotary positions: {name}: {expected} expected, {actual} found"
        facts = {"name": name, "value": expected, "other_value": actual}
        steps: tuple[Setting, ...] = ()
        if expected is not None:
            steps = (Setting((*config_path(candidate), *path), expected),)
        yield Mismatch(Kind.ROTARY, reason, steps, facts=facts)


def _rotary_settings(model: Model, section: str) -> dict[tuple[str, ...], Any]:
    """Return settings of rotary positions by their paths, with the defaults of the model's type.

    ``section`` is the key of the part of the configuration that describes the attention; empty for
    the whole configuration.
    """
    config: Mapping[str, Any] = model.checkpoint.config
    if section:
        config = config.get(section) or {}
    with_defaults = {**default_values(config.get("model_type")), **config}
    unvisited: list[tuple[tuple[str, ...], Any]] = [((), with_defaults)]
    settings: dict[tuple[str, ...], Any] = {}
    while unvisited:
        path, value = unvisited.pop()
        if isinstance(value, Mapping):
            unvisited += [((*path, str(key)), entry) for key, entry in value.items()]
        elif any(map(OF_ROTATION.search, path)) and value not in UNSCALED:
            settings[path] = value
    settle_rotary_base(settings)
    return settings


def settle_rotary_base(settings: dict[tuple[str, ...], Any]) -> None:
    """Move the base of rotary positions from its older path to its present path, in place."""
    base = settings.pop(("rope_theta",), None)
    if base is not None:
        settings.setdefault(("rope_parameters", "rope_theta"), base)


def undecided_positions(pair: PlanPair, forms: tuple[Scoring, Scoring] | None) -> str:
    """Return the reason why the positions of two blocks are undecided; empty if decided.

    Parameters
    ----------
    pair
        The plans of the two blocks.
    forms
        The scores of the blocks; None for blocks that store the same bytes.
    """
    if not positions_unknown(pair):
        return ""
    is_guess = any(plan.rule.guess for plan in pair)
    in_order = forms is None or _same_order(*forms)
    if is_guess:
        name = "of a guessed family are not known"
    else:
        position = next(plan.position for plan in pair if plan.rotation_unknown)
        name = f"({position}) are only named"
        if pair[0].family != pair[1].family:
            return f"rotary positions {name}, and the two are of different families"
    if in_order:
        return ""
    return f"rotary positions {name}, and rows of queries and keys lie in another order"


def _same_order(reference: Scoring, candidate: Scoring) -> bool:
    """Return whether the rows of queries and keys of two blocks correspond one by one."""
    rounding = reference.rounding + candidate.rounding
    least_cosine = ALIKE if rounding < 1 - ALIKE else QUANTIZED_ALIKE
    sides = (
        (reference.query, candidate.query),
        (reference.key, candidate.key),
    )
    return all(_correspond(*side, least_cosine) for side in sides)


def _correspond(reference: Rows, candidate: Rows, least_cosine: float) -> bool:
    """Return whether the rows of one side of two blocks correspond one by one."""
    expected, actual = _with_gain(reference), _with_gain(candidate)
    if expected.shape != actual.shape:
        return False
    return bool((cosines(expected, actual) > least_cosine).all())


def _with_gain(rows: Rows) -> np.ndarray:
    """Return the rows of all heads, (n, D), times the gain of the norm before them."""
    weight = np.asarray(rows.weight, np.float64).reshape(-1, rows.weight.shape[-1])
    if rows.norm is None or rows.norm.gain is None:
        return weight
    return np.asarray(weight * rows.norm.gain)
