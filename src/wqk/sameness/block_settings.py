"""Settings of two blocks that differ, and the lines of a configuration that restore them.

Plans read these settings: settings of the form (numbers of heads, scale, norms), and of the terms
of the score besides the form (mask, window, caps, positions added to the score). Rotary positions
are in `wqk.sameness.rotary_settings`, settings that no plan reads in
`wqk.sameness.further_settings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wqk.checkpoints import Checkpoint
from wqk.families import AttentionPlan, Norm
from wqk.families.config import Config
from wqk.model import Model
from wqk.sameness.circuits import PlanPair
from wqk.sameness.mismatches import Mismatch, setting
from wqk.sameness.quantized_modules import misquantized_weights
from wqk.sameness.repairs import Setting
from wqk.sameness.replanning import (
    RepairedPlan,
    attention_configs,
    config_path,
    find_restoring_settings,
)
from wqk.sameness.tensor_names import title_in_block

# Terms of the norms of queries and keys, by the end of their names.
OF_NORMS = ("norm of queries", "norm of keys", "query and key norms")


# -- terms of the score besides the form -------------------------------------------------------


def other_settings(models: Sequence[Model], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield the settings that differ, besides settings of the form and its rotation.

    Terms of a guessed family are unknown, and are not compared.
    """
    if not any(plan.rule.guess for plan in pair):
        yield from _differing_terms(models, pair)
    yield from _absent_head_counts([model.checkpoint for model in models], pair)
    yield from misquantized_weights(models[1].checkpoint, pair[1])


def _differing_terms(models: Sequence[Model], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield the terms of the score in which two blocks differ."""
    reference, candidate = pair
    expected_terms, actual_terms = _terms(reference), _terms(candidate)
    configs = attention_configs(models, pair)
    unknown_epsilons: set[Any] = {None}
    if reference.family != candidate.family and not all(map(is_configured, configs)):
        # The epsilon that is assumed for a layout without a configuration.
        unknown_epsilons.add(_epsilons(Norm("layer", epsilon=1e-5)))
    for name, expected in expected_terms.items():
        actual = actual_terms[name]
        if candidate.missing and name.endswith(OF_NORMS):
            continue  # missing tensors of norms are a separate cause
        if name.startswith("epsilon") and {expected, actual} & unknown_epsilons:
            continue
        if expected != actual:
            restoring = find_restoring_settings(models, pair, partial(_term, name))
            steps = () if restoring is None else restoring.steps
            yield setting(name, expected, actual, steps)


def _term(name: str, plan: AttentionPlan) -> Any:
    """Return the term of a plan with a name."""
    return _terms(plan)[name]


def _terms(plan: AttentionPlan) -> dict[str, Any]:
    """Return the terms of a score besides the form and its rotation, by name."""
    position = None
    if plan.position and not plan.position.startswith("rotary"):
        position = plan.position
        if plan.position_uses:
            position += f" with the {' and the '.join(plan.position_uses)}"
    return {
        "mask": "causal" if plan.causal else "none",
        "window": None if plan.window is None else str(plan.window),
        "softcap": plan.softcap,
        "limit of queries and keys": plan.clip,
        "positions added to the score": position,
        "norm of queries": _norm_and_place(plan, plan.query.norm),
        "norm of keys": _norm_and_place(plan, plan.key.norm),
        "sinks": "learned" if plan.sinks else None,
        "epsilon of input norms": _epsilons(plan.query.input_norm, plan.key.input_norm),
        "epsilon of query and key norms": _epsilons(plan.query.norm, plan.key.norm),
    }


def _norm_and_place(plan: AttentionPlan, norm: Norm | None) -> str | None:
    """Return the kind of a norm, and its place if the norm follows the rotation by positions."""
    if norm is None:
        return None
    return f"{norm.kind}, after the rotation" if plan.turns_gains else norm.kind


def _epsilons(*norms: Norm | None) -> str | None:
    """Describe the epsilons that norms add to a mean square or variance; None if any is unknown."""
    texts = []
    for norm in norms:
        if norm is None or not norm.epsilon:
            return None
        added_to = " added to the variance" if norm.kind == "layer" else ""
        texts.append(f"{norm.epsilon:.3g}{added_to}")
    return ", ".join(dict.fromkeys(texts))


# -- the form ----------------------------------------------------------------------------------


def _form(plan: AttentionPlan) -> object:
    """Return all parts of a form that settings determine: factors, heads, norms, rotations."""
    sides = [side for side in (plan.query, plan.key, plan.value, plan.output) if side is not None]
    norms = []
    for side in sides:
        norms += [_form_of_norm(side.norm), _form_of_norm(side.input_norm)]
    rotations: list[object] = []
    if plan.rotary:
        rotations.append(plan.rotary.order)
    if plan.positional:
        if plan.positional.rotary:
            rotations.append(plan.positional.rotary.order)
        rotations.append(plan.positional.rotary.frequencies.tobytes())
    heads = [(side.heads, side.head_width, side.factor) for side in sides]
    return plan.score_scale, rotations, norms, heads


def _form_of_norm(norm: Norm | None) -> object:
    """Return the kind, the offset and the places of a norm; None without a norm."""
    if norm is None:
        return None
    return norm.kind, norm.offset, [_place_of_norm(part.name) for part in norm.gain]


def _place_of_norm(name: str) -> tuple[str, bool]:
    """Return the short name of a norm's gain, and whether the norm lies in a layer.

    Examples
    --------
    >>> _place_of_norm("encoder.layer_norm.weight"), _place_of_norm("layers.0.layer_norm.weight")
    (('layer_norm', False), ('layer_norm', True))
    """
    return title_in_block(name), any(word.isdigit() for word in name.split("."))


def form_restored(models: Sequence[Model], pair: PlanPair) -> RepairedPlan | None:
    """Return the settings that make the plan of the candidate's form equal to the reference's.

    None if the plans are equal, or if no settings suffice.
    """
    reference, candidate = pair
    if _form(reference) == _form(candidate):
        return None
    restoring = find_restoring_settings(models, pair, _form)
    if restoring is None:
        return None
    keys = restoring.keys
    configs = attention_configs(models, pair)
    if not keys:  # the type of the model alone decides
        keys = ("model_type",)
        configs = [dict(model.checkpoint.config) for model in models]
    reference_config, candidate_config = configs
    expected = ", ".join(str(reference_config.get(key)) for key in keys)
    actual = ", ".join(str(candidate_config.get(key)) for key in keys)
    cause = setting(", ".join(keys), expected, actual, restoring.steps)
    return cause, replace(restoring.plan, rotary=candidate.rotary, axial=candidate.axial)


# -- numbers of heads --------------------------------------------------------------------------


def _absent_head_counts(checkpoints: Sequence[Checkpoint], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield numbers of heads, and head widths, that only one configuration contains.

    In this package, the shapes of the weights determine these numbers; other programs may use a
    default. If the number is the default of every program, its absence is no difference. A file
    without any configuration lacks no setting.
    """
    reference, candidate = pair
    if reference.family != candidate.family or any(plan.rule.guess for plan in pair):
        return
    if not all(is_configured(checkpoint.config) for checkpoint in checkpoints):
        return
    configs = [
        Config(checkpoint.config, plan.rule.config)
        for checkpoint, plan in zip(checkpoints, pair, strict=True)
    ]
    heads = reference.query.heads
    # The spellings of each number, and the default of every program.
    implied_by_spellings = (
        (reference.rule.heads, None),
        (reference.rule.key_heads, heads),
        (("head_dim",), _shared_width(configs[0], heads)),
    )
    for spellings, implied in implied_by_spellings:
        expected_name, actual_name = (_first_set(config, spellings) for config in configs)
        is_in_one = (expected_name is None) != (actual_name is None)
        if not is_in_one:
            continue
        name = expected_name or actual_name or ""
        expected, actual = (config.get(name) for config in configs)
        if implied is not None and implied in (expected, actual):
            continue
        steps = []
        if expected is not None:
            steps.append(Setting((*config_path(candidate), name), expected))
        yield setting(name, _or_absent(expected), _or_absent(actual), steps)


def _or_absent(value: Any) -> Any:
    """Return a setting's value, or a phrase if the configuration does not contain the setting."""
    return "not in the configuration" if value is None else value


def _shared_width(config: Config, heads: int) -> int | None:
    """Return the model's width divided by the number of heads; None if it does not divide."""
    width = config.get("hidden_size")
    return width // heads if isinstance(width, int) and width % heads == 0 else None


def _first_set(config: Config, spellings: Sequence[str]) -> str | None:
    """Return the first spelling of a setting that a configuration contains."""
    return next((name for name in spellings if config.get(name) is not None), None)


def is_configured(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration contains more than a type; tensors alone may show a type."""
    return any(value is not None for key, value in config.items() if key != "model_type")
