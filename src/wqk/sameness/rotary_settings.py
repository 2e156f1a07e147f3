"""Rotary positions that differ between two blocks, and the settings that restore them.

The reference's rotation is restored by base, scaling, share of rotated dimensions, or list of kinds
of layers, in the spelling of the candidate's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wqk.families import AttentionPlan, Rotary
from wqk.model import Model
from wqk.sameness.blocks import as_exact_as, same_rotation
from wqk.sameness.circuits import PlanPair
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Setting
from wqk.sameness.replanning import (
    RepairedPlan,
    RestoringSettings,
    attention_config,
    attention_configs,
    config_path,
    fewest_settings,
    find_restoring_settings,
    replanned,
)
from wqk.sameness.tolerances import SAME_FREQUENCY

# -- differences in words ----------------------------------------------------------------------


def other_rotary(expected: Rotary | None, actual: Rotary | None) -> str:
    """Describe the difference of two rotations in words."""
    if expected is None or actual is None:
        orders = [f"{rotary.order} order" if rotary else "none" for rotary in (expected, actual)]
        return f"rotary positions: {orders[0]} expected, {orders[1]} found"
    differences = []
    if expected.order != actual.order:
        differences.append(f"rotary order: stored {expected.order}, read as {actual.order}")
    difference = _differing_frequencies(expected.frequencies, actual.frequencies)
    if difference:
        differences.append(difference)
    if expected.amplitude != actual.amplitude:
        differences.append(
            f"attention factor of rotary positions: {expected.amplitude:.4g} expected, "
            f"{actual.amplitude:.4g} found"
        )
    return "; ".join(differences) or "other rotary positions"


def _differing_frequencies(expected: np.ndarray, actual: np.ndarray) -> str:
    """Describe the difference of two lists of frequencies in words; empty if equal."""
    if len(expected) != len(actual):
        return (
            f"share of rotated dimensions (partial_rotary_factor): {2 * len(expected)} of each "
            f"head's expected, {2 * len(actual)} found"
        )
    if np.allclose(expected, actual, rtol=SAME_FREQUENCY):
        return ""
    if np.allclose(expected, -actual, rtol=SAME_FREQUENCY):
        return "direction of rotation: the sine has the other sign"
    bases = base_of(expected), base_of(actual)
    if all(bases):
        return f"rotary base (rope_theta): {bases[0]:.8g} expected, {bases[1]:.8g} found"
    texts = []
    for frequencies, base in zip((expected, actual), bases, strict=True):
        scaled = "not scaled" if base else "scaled"
        texts.append(f"slowest frequency {float(np.abs(frequencies).min()):.3g}, {scaled}")
    return f"rotary scaling (rope_scaling): {texts[0]} expected, {texts[1]} found"


def base_of(frequencies: np.ndarray) -> float | None:
    """Return the base of the frequencies; None if the frequencies are not powers of one number.

    Examples
    --------
    >>> round(base_of(500.0 ** -(np.arange(0, 8, 2) / 8)))
    500
    """
    pairs = len(frequencies)
    if pairs < 2 or not (frequencies > 0).all() or abs(frequencies[0] - 1) > SAME_FREQUENCY:
        return None
    logarithms = np.log(frequencies)
    if not np.allclose(logarithms, logarithms[1] * np.arange(pairs), rtol=1e-5, atol=1e-9):
        return None
    base = math.exp(-logarithms[1] * pairs)
    return float(f"{base:.8g}")


# -- repairs -----------------------------------------------------------------------------------


def rotary_repaired(models: Sequence[Model], pair: PlanPair) -> RepairedPlan | None:
    """Return the settings that give the candidate's block the reference's rotary positions.

    If no setting is the cause, the difference is described, without steps. The order of rotary
    pairs is not changed.

    Returns
    -------
    RepairedPlan or None
        The cause, and the candidate's plan with the reference's rotation. None if the rotations are
        equal or unknown.
    """
    reference, candidate = pair
    if any(plan.rule.guess or plan.rotation_unknown for plan in pair):
        return None
    expected, actual = (plan.rotary or plan.axial for plan in pair)
    if expected is not None and actual is not None:
        expected = replace(expected, order=actual.order)
        actual = as_exact_as(expected, actual)
    if same_rotation(expected, actual):
        return None
    kind_of_layer = _other_kind_of_layer(models, pair, expected)
    if kind_of_layer is not None:
        return kind_of_layer
    if reference.rotary and candidate.rotary:
        repaired = _with_base_and_scaling(models, pair, reference.rotary, candidate.rotary)
        if repaired is not None:
            return repaired
    is_axial = expected is not None and expected.axes > 1
    plan = replace(
        candidate,
        rotary=None if is_axial else expected,
        axial=expected if is_axial else None,
    )
    restoring = find_restoring_settings(models, pair, _frequencies)
    if restoring is not None:
        steps = tuple(restoring.steps)
    else:
        steps = _steps_of_share(models[1], candidate, expected)
    return Mismatch(Kind.ROTARY, other_rotary(expected, actual), steps), plan


def _other_kind_of_layer(
    models: Sequence[Model], pair: PlanPair, expected: Rotary | None
) -> RepairedPlan | None:
    """Return the list of kinds of layers that gives a block the expected rotation, or None.

    Each kind of layer has its own rotary positions. These are right if only the list of kinds is
    wrong.
    """
    reference_config, candidate_config = attention_configs(models, pair)
    kinds = reference_config.get("layer_types")
    is_other = isinstance(kinds, list) and kinds != candidate_config.get("layer_types")
    if not is_other or expected is None:
        return None
    plan = replanned(models[1], pair[1], candidate_config | {"layer_types": kinds})
    if plan is None or plan.rotary is None:
        return None
    if not same_rotation(expected, as_exact_as(expected, plan.rotary)):
        return None
    step = Setting((*config_path(pair[1]), "layer_types"), kinds)
    return Mismatch(Kind.SETTING, "layers of another kind (layer_types)", (step,)), plan


def _steps_of_share(
    candidate: Model, plan: AttentionPlan, expected: Rotary | None
) -> tuple[Setting, ...]:
    """Return the setting of the share of rotated dimensions, by the key of the candidate's family.

    The result is empty if the block does not have the expected rotation with this setting.
    """
    if expected is None or plan.rule.rotary is None:
        return ()
    own_config = attention_config(candidate, plan)
    share = 2 * len(expected.frequencies) / plan.query.head_width
    for key in plan.rule.rotary.fraction:
        if key not in own_config:
            continue
        changed_plan = replanned(candidate, plan, own_config | {key: share})
        if changed_plan is not None and same_rotation(expected, changed_plan.rotary):
            return (Setting((*config_path(plan), key), share),)
    return ()


def _frequencies(plan: AttentionPlan) -> object:
    """Return the frequencies of a plan's rotation, for a comparison."""
    return plan.rotary and plan.rotary.frequencies.tobytes()


def _with_base_and_scaling(
    models: Sequence[Model], pair: PlanPair, reference: Rotary, candidate: Rotary
) -> RepairedPlan | None:
    """Return the fewest edits of base and scaling that restore the reference's rotation.

    None if no edit does.
    """
    reference_config, candidate_config = attention_configs(models, pair)
    candidate_kind = _kind_of_layer(candidate_config, pair[1])
    expected = _rotary_settings(reference_config, _kind_of_layer(reference_config, pair[0]))
    actual = _rotary_settings(candidate_config, candidate_kind)
    for settings, rotary in ((expected, reference), (actual, candidate)):
        if settings.get("rope_theta") is None:
            settings["rope_theta"] = base_of(rotary.frequencies)
    if expected["rope_theta"] is None:
        return None
    expected_rotary = replace(reference, order=candidate.order)

    def restore(keys: Sequence[str]) -> RestoringSettings | None:
        """Plan the candidate with the reference's settings of these keys.

        None if the plan does not have the reference's rotation.
        """
        settings = actual | {key: expected.get(key) for key in keys}
        settings = {key: value for key, value in settings.items() if value is not None}
        config, steps = _respelled(candidate_config, candidate_kind, settings)
        plan = replanned(models[1], pair[1], config)
        if plan is None:
            return None
        rotary = as_exact_as(expected_rotary, plan.rotary)
        if not same_rotation(rotary, expected_rotary):
            return None
        return RestoringSettings(keys, steps, plan)

    differing = [key for key in expected | actual if expected.get(key) != actual.get(key)]
    restoring = fewest_settings(differing, restore)
    if restoring is None:
        return None
    prefix = config_path(pair[1])
    steps = tuple(replace(step, path=(*prefix, *step.path)) for step in restoring.steps)
    facts = {"base": expected["rope_theta"], "other_base": actual["rope_theta"]}
    reason = f"other {_differing_settings(expected, actual, restoring.keys)}"
    return Mismatch(Kind.ROTARY, reason, steps, facts=facts), restoring.plan


def _differing_settings(
    expected: Mapping[str, Any], actual: Mapping[str, Any], keys: Sequence[str]
) -> str:
    """Describe the base and the scaling of two configurations, as far as their keys are listed."""
    texts = []
    if "rope_theta" in keys:
        base = actual["rope_theta"]
        base_text = f"{base:.8g}" if base else "another"
        texts.append(
            f"rotary base (rope_theta): {expected['rope_theta']:.8g} expected, {base_text} found"
        )
    scaling_keys = [key for key in keys if key != "rope_theta"]
    if scaling_keys:
        expected_text, actual_text = _scaling_texts(expected, actual, scaling_keys)
        texts.append(
            f"rotary scaling (rope_scaling): {expected_text} expected, {actual_text} found"
        )
    return "; ".join(texts)


def _scaling_texts(
    expected: Mapping[str, Any], actual: Mapping[str, Any], keys: Sequence[str]
) -> tuple[str, str]:
    """Describe two scalings: by their types, or by the differing keys if the types are equal."""
    expected_type = _type_of(expected)
    actual_type = _type_of(actual)
    if expected_type != actual_type:
        return expected_type, actual_type
    expected_values = ", ".join(f"{key} {expected.get(key)}" for key in keys)
    actual_values = ", ".join(f"{key} {actual.get(key)}" for key in keys)
    return expected_values, actual_values


def _type_of(scaling: Mapping[str, Any]) -> str:
    """Return the type and the factor of a scaling, in words."""
    scaling_type = scaling.get("rope_type", scaling.get("type", "none"))
    factor = f", factor {scaling['factor']:g}" if scaling.get("factor") else ""
    return f"{scaling_type}{factor}"


def _kind_of_layer(config: Mapping[str, Any], plan: AttentionPlan) -> str:
    """Return the kind of a block's layer if kinds have separate rotary parameters; else empty.

    A kind is an entry of ``layer_types``, such as ``sliding_attention``.
    """
    kinds = config.get("layer_types") or []
    kind = "full_attention"
    if isinstance(kinds, list) and plan.layer < len(kinds):
        kind = str(kinds[plan.layer])
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get(kind), Mapping):
        return kind
    return ""


def _rotary_settings(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the scaling and the base of a configuration, in either spelling of transformers.

    The base is None if not set. ``kind`` is a result of `_kind_of_layer`.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind:
        parameters = parameters[kind]
    settings = dict(parameters) if isinstance(parameters, Mapping) else {}
    settings.setdefault("rope_theta", config.get("rope_theta"))
    if settings.get("rope_type") == "default":
        del settings["rope_type"]
    return settings


def _respelled(
    config: Mapping[str, Any], kind: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Setting]]:
    """Return a configuration with new rotary settings in the same spelling, and the steps to it.

    Parameters
    ----------
    config
        The attention configuration.
    kind
        The kind of layer that has separate rotary parameters; else empty.
    settings
        Scaling and base, as `_rotary_settings` returns them.
    """
    parameters: Any = config.get("rope_parameters")
    if isinstance(parameters, Mapping):
        return _respelled_by_kind(config, parameters, kind, settings)
    scaling = {key: value for key, value in settings.items() if key != "rope_theta"}
    edits = {"rope_theta": settings.get("rope_theta"), "rope_scaling": scaling or None}
    steps = [Setting((key,), value) for key, value in edits.items() if value != config.get(key)]
    return {**config, **edits}, steps


def _respelled_by_kind(
    config: Mapping[str, Any],
    parameters: Mapping[str, Any],
    kind: str,
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Setting]]:
    """Return a configuration with new ``rope_parameters``, and the steps to it; see `_respelled`.

    With ``kind``, only the parameters of this kind of layers are new.
    """
    value: dict[str, Any] = {"rope_type": "default", **settings}
    path: tuple[str, ...] = ("rope_parameters",)
    previous: Mapping[str, Any] = parameters
    respelled: dict[str, Any] = value
    if kind:
        path = ("rope_parameters", kind)
        previous = parameters[kind]
        respelled = {**parameters, kind: value}
    changed = {**config, "rope_parameters": respelled}
    keys = value.keys() | previous.keys()
    differing = {key for key in keys if value.get(key) != previous.get(key)}
    if differing <= {"rope_theta"}:
        return changed, [Setting((*path, "rope_theta"), settings["rope_theta"])]
    return changed, [Setting(path, value)]
