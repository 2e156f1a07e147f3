"""Settings in which two models differ, and the lines of a configuration that set them right.

Settings concern everything besides the form of a score: rotary positions, mask, window, caps,
numbers of heads, which weights are quantized. Before the repair of a setting is reported, it is
applied and the model is planned again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.checkpoint import Overlay
from wqk.checkpoints.quantization.float8 import FLOAT8
from wqk.errors import CheckpointError, WqkError
from wqk.families import AttentionPlan, Composed, Norm, Rotary
from wqk.families.config import Config
from wqk.families.model_types import default_values, keys_of, unread_settings
from wqk.families.naming import embedding_table
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.blocks import as_exact_as, same_rotation
from wqk.sameness.contents import copy_of
from wqk.sameness.mismatches import Kind, Mismatch, setting
from wqk.sameness.repairs import Setting
from wqk.sameness.tensor_roles import ATTENDING, MIXERS
from wqk.sameness.tolerances import SAME_FREQUENCY
from wqk.sameness.weight_pairs import short
from wqk.sameness.weights import PlanPair

# Settings of the mixing of tokens that plans do not read, and of norms anywhere.
OF_ATTENTION = re.compile(
    r"(?i)(?:^|_)(?:eps|epsilon)$|head|qkv|mrope|layers?_(?:block_)?types?$|"
    rf"{ATTENDING.pattern}|{MIXERS.pattern}"
)
# Kinds of layers that are attention with a window or without, which plans read.
WINDOWED = re.compile(r"(?:full|global|sliding|local|chunked)(?:_attention)?|attention")
# Terms of the norms of queries and keys, by the end of their names.
OF_NORMS = ("norm of queries", "norm of keys", "query and key norms")
# Settings that are compared by their effect.
COMPARED_BY_EFFECT = ("layer_types", "tie_word_embeddings")
# Names of one function, or of functions that differ by less than rounding.
SPELLINGS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}

# A differing setting, and the candidate's plan once it is repaired.
RepairedPlan = tuple[Mismatch, AttentionPlan]


# -- rotary positions --------------------------------------------------------------------------


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
    """Describe the difference of two lists of frequencies in words; empty without a difference."""
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
    """Return the base of the frequencies; None if they are not powers of one number.

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


def rotary_repaired(models: Sequence[Model], pair: PlanPair) -> RepairedPlan | None:
    """Return the settings that give the candidate's block the reference's rotary positions.

    The settings are the base, the scaling, or both, as the configuration spells them. If no setting
    is the cause, the difference is described. The order of the pairs remains. None if the positions
    are the same, or not known.
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
        repaired = _configured(models, pair, reference.rotary, candidate.rotary)
        if repaired is not None:
            return repaired
    is_axial = expected is not None and expected.axes > 1
    plan = replace(
        candidate,
        rotary=None if is_axial else expected,
        axial=expected if is_axial else None,
    )
    restored = _restored(models, pair, _frequencies)
    if restored is not None:
        steps = tuple(restored.steps)
    else:
        steps = _steps_of_share(models[1], pair[1], expected)
    return Mismatch(Kind.ROTARY, other_rotary(expected, actual), steps), plan


def _other_kind_of_layer(
    models: Sequence[Model], pair: PlanPair, expected: Rotary | None
) -> RepairedPlan | None:
    """Return the list of kinds of layers that gives the block the expected rotation, if one does.

    Kinds of layers have rotary positions of their own, which are right where the list is wrong.
    """
    own_configs = [_own_config(model, plan) for model, plan in zip(models, pair, strict=True)]
    kinds, actual = (config.get("layer_types") for config in own_configs)
    if not isinstance(kinds, list) or kinds == actual or expected is None:
        return None
    plan = _replanned(models[1], pair[1], own_configs[1] | {"layer_types": kinds})
    if plan is None or plan.rotary is None:
        return None
    if not same_rotation(expected, as_exact_as(expected, plan.rotary)):
        return None
    step = Setting((*_path_of(pair[1]), "layer_types"), kinds)
    return Mismatch(Kind.SETTING, "layers of another kind (layer_types)", (step,)), plan


def _steps_of_share(
    candidate: Model, plan: AttentionPlan, expected: Rotary | None
) -> tuple[Setting, ...]:
    """Return the setting of the share of rotated dimensions, by the key of the candidate's family.

    Nothing is returned unless the block has the expected rotation with this setting.
    """
    if expected is None or plan.rule.rotary is None:
        return ()
    own_config = _own_config(candidate, plan)
    share = 2 * len(expected.frequencies) / plan.query.head_width
    for key in plan.rule.rotary.fraction:
        if key not in own_config:
            continue
        replanned = _replanned(candidate, plan, own_config | {key: share})
        if replanned is not None and same_rotation(expected, replanned.rotary):
            return (Setting((*_path_of(plan), key), share),)
    return ()


def _frequencies(plan: AttentionPlan) -> object:
    """Return the frequencies of a plan's rotation, to be compared."""
    return plan.rotary and plan.rotary.frequencies.tobytes()


def _configured(
    models: Sequence[Model], pair: PlanPair, reference: Rotary, candidate: Rotary
) -> RepairedPlan | None:
    """Return the fewest edits of the candidate's configuration that give the reference's rotation.

    None if no edit does.
    """
    configs = [_own_config(model, plan) for model, plan in zip(models, pair, strict=True)]
    kinds = [_kind_of_layer(config, plan) for config, plan in zip(configs, pair, strict=True)]
    expected, actual = map(_rotary_settings, configs, kinds)
    for settings, rotary in ((expected, reference), (actual, candidate)):
        if settings.get("rope_theta") is None:
            settings["rope_theta"] = base_of(rotary.frequencies)
    if expected["rope_theta"] is None:
        return None
    rotary_of_reference = replace(reference, order=candidate.order)

    def edited(keys: Sequence[str]) -> _RestoredSettings | None:
        """Return the plan with these of the reference's settings, if it has the rotation."""
        settings = actual | {key: expected.get(key) for key in keys}
        settings = {key: value for key, value in settings.items() if value is not None}
        config, steps = _respelled(configs[1], kinds[1], settings)
        plan = _replanned(models[1], pair[1], config)
        if plan is None:
            return None
        rotary = as_exact_as(rotary_of_reference, plan.rotary)
        return (
            _RestoredSettings(keys, steps, plan)
            if same_rotation(rotary, rotary_of_reference)
            else None
        )

    differing = [key for key in expected | actual if expected.get(key) != actual.get(key)]
    restored = _fewest(differing, edited)
    if restored is None:
        return None
    texts = []
    base = actual["rope_theta"]
    if "rope_theta" in restored.keys:
        base_text = f"{base:.8g}" if base else "another"
        texts.append(
            f"rotary base (rope_theta): {expected['rope_theta']:.8g} expected, {base_text} found"
        )
    scaling_keys = [key for key in restored.keys if key != "rope_theta"]
    if scaling_keys:
        expected_text, actual_text = _scaling_texts(expected, actual, scaling_keys)
        texts.append(
            f"rotary scaling (rope_scaling): {expected_text} expected, {actual_text} found"
        )
    prefix = _path_of(pair[1])
    steps = tuple(replace(step, path=(*prefix, *step.path)) for step in restored.steps)
    facts = {"base": expected["rope_theta"], "other_base": base}
    reason = f"other {'; '.join(texts)}"
    return Mismatch(Kind.ROTARY, reason, steps, facts=facts), restored.plan


class _RestoredSettings(NamedTuple):
    """Settings after which a plan agrees with the reference's.

    Attributes
    ----------
    keys
        Keys of the settings.
    steps
        Changes of the candidate's configuration.
    plan
        The candidate's plan after these changes.
    """

    keys: Sequence[str]
    steps: list[Setting]
    plan: AttentionPlan


def _fewest(
    keys: Sequence[str], restore: Callable[[Sequence[str]], _RestoredSettings | None]
) -> _RestoredSettings | None:
    """Restore a plan by the fewest of some settings; None if all of them together do not."""
    restored = restore(keys)
    if restored is None:
        return None
    for key in keys:
        fewer = [kept for kept in restored.keys if kept != key]
        restored = restore(fewer) or restored
    return restored


def _scaling_texts(
    expected: Mapping[str, Any], actual: Mapping[str, Any], keys: Sequence[str]
) -> list[str]:
    """Describe two scalings: by their types, or by the differing keys if the types are equal."""
    texts = [_type_of(expected), _type_of(actual)]
    if texts[0] != texts[1]:
        return texts
    return [
        ", ".join(f"{key} {settings.get(key)}" for key in keys) for settings in (expected, actual)
    ]


def _type_of(scaling: Mapping[str, Any]) -> str:
    """Return the type and the factor of a scaling, in words."""
    factor = f", factor {scaling['factor']:g}" if scaling.get("factor") else ""
    return f"{scaling.get('rope_type', scaling.get('type', 'none'))}{factor}"


def _kind_of_layer(config: Mapping[str, Any], plan: AttentionPlan) -> str:
    """Return the kind of a block's layer if kinds have rotary parameters of their own; else ""."""
    kinds = config.get("layer_types") or []
    kind = "full_attention"
    if isinstance(kinds, list) and plan.layer < len(kinds):
        kind = str(kinds[plan.layer])
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get(kind), Mapping):
        return kind
    return ""


def _rotary_settings(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return scaling and base, None if not set, in either of the spellings of transformers."""
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
    """Return a configuration with these settings in its spelling, and the steps that change it."""
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
    """Return the same for ``rope_parameters``, of all layers or of one kind of layers."""
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


# -- other settings ----------------------------------------------------------------------------


def other_settings(models: Sequence[Model], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield differing settings besides the form and its rotation, as far as both are known."""
    if not any(plan.rule.guess for plan in pair):
        yield from _differing_terms(models, pair)
    yield from _absent_head_counts([model.checkpoint for model in models], pair)
    yield from _misplaced(models[1].checkpoint, pair[1])


def _differing_terms(models: Sequence[Model], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield the terms of the score in which two blocks differ."""
    reference, candidate = pair
    expected_terms, actual_terms = _terms(reference), _terms(candidate)
    configs = [_own_config(model, plan) for model, plan in zip(models, pair, strict=True)]
    unknown_epsilons: set[Any] = {None}
    if reference.family != candidate.family and not all(map(is_configured, configs)):
        # The epsilon that is assumed for a layout without a configuration.
        unknown_epsilons.add(_epsilons(Norm("layer", epsilon=1e-5)))
    for name, expected in expected_terms.items():
        actual = actual_terms[name]
        if candidate.missing and name.endswith(OF_NORMS):
            continue  # the tensors of these norms are missing, which is a cause of its own
        if name.startswith("epsilon") and {expected, actual} & unknown_epsilons:
            continue
        if expected != actual:
            restored = _restored(models, pair, partial(_term, name))
            yield setting(name, expected, actual, restored.steps if restored is not None else ())


def _term(name: str, plan: AttentionPlan) -> Any:
    """Return one of the terms of a plan."""
    return _terms(plan)[name]


def further_settings(models: Sequence[Model], everything: bool = True) -> Iterator[Mismatch]:
    """Yield settings that both configurations contain, that differ, and that no plan reads."""
    reference, candidate = _unread(models)
    for path in sorted(reference.keys() & candidate.keys()):
        expected, actual = reference[path], candidate[path]
        if _are_alike(models, path, expected, actual, everything):
            continue
        steps = [Setting(path, expected)]
        unties = path[-1] == "tie_word_embeddings" and expected is not True
        if unties and not _stores_head(models[1]):
            steps = []  # without a stored head, the setting would leave it random
        yield setting(".".join(path), expected, actual, steps)
    if everything:
        yield from _tied_in_one(models, reference, candidate)


def _are_alike(
    models: Sequence[Model], path: Sequence[str], expected: Any, actual: Any, everything: bool
) -> bool:
    """Return whether two values of a setting are one function, or one is the class's own."""
    values = (expected, actual)
    key = path[-1]
    if key == "tie_word_embeddings" and everything:
        return expected == actual or True not in values or _same_heads(models, values)
    if None in values and not isinstance(expected or actual, float):
        return True  # a whole number or a name that is null is the class's own
    if key == "layer_types":
        return bool(_kinds(models[0], expected) == _kinds(models[1], actual))
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=SAME_FREQUENCY)
    names = [SPELLINGS.get(str(value), value) for value in values]
    return bool(expected == actual or names[0] == names[1])


def _tied_in_one(
    models: Sequence[Model],
    reference: Mapping[tuple[str, ...], Any],
    candidate: Mapping[tuple[str, ...], Any],
) -> Iterator[Mismatch]:
    """Yield ties of embeddings that one configuration alone contains, where heads differ."""
    for path in sorted(reference.keys() ^ candidate.keys()):
        tied = (reference.get(path), candidate.get(path))
        if path[-1] == "tie_word_embeddings" and True in tied and not _same_heads(models, tied):
            yield setting(".".join(path), *tied)


def _embeddings(model: Model) -> str | None:
    """Return the name of the table of token embeddings; None if it is not known."""
    plan = (*model.plans, *model.mixers)[0]
    projection = plan.query.projection
    if isinstance(projection, Composed):
        projection = projection.inner
    shape = model.checkpoint.info(projection.tensor).shape
    width = shape[0] if projection.transposed else shape[-1]
    try:
        return embedding_table(model.checkpoint, width)
    except CheckpointError:
        return None


def _tables_of_one_shape(checkpoint: Checkpoint, table: str) -> list[str]:
    """Return the names of further tensors with the shape of a table, such as output heads."""
    shape = checkpoint.info(table).shape
    tensors = checkpoint.tensors().items()
    return [name for name, info in tensors if info.shape == shape and name != table]


def _stores_head(model: Model) -> bool:
    """Return whether a file stores an output head besides its embeddings."""
    table = _embeddings(model)
    return table is not None and bool(_tables_of_one_shape(model.checkpoint, table))


def _unread(models: Sequence[Model]) -> list[dict[tuple[str, ...], Any]]:
    """Return the settings of each configuration that the plans of neither model read, by keys."""
    rules = {repr(plan.rule) for model in models for plan in model.plans}
    return [unread_settings(model.checkpoint.config, rules) for model in models]


def lost_settings(models: Sequence[Model]) -> list[str]:
    """Return settings that only one of two configurations of a model type contains.

    Both configurations have to be those of `transformers`. A setting that is off, or that has the
    default value of the type, is not lost.
    """
    configs = [model.checkpoint.config for model in models]
    model_type = configs[0].get("model_type")
    if any(config.get("model_type") != model_type for config in configs):
        return []
    if not all("architectures" in config for config in configs):
        return []
    reference, candidate = _unread(models)
    values = reference | candidate
    defaults = default_values(model_type)
    lost = []
    for path in sorted(reference.keys() ^ candidate.keys()):
        key, value = path[-1], values[path]
        if key not in COMPARED_BY_EFFECT and value and value != defaults.get(key):
            lost.append(".".join(path))
    return lost


def _kinds(model: Model, kinds: Any) -> Any:
    """Return kinds of layers without windows, if the model's plans contain the windows."""
    is_planned = all(plan.rule.window and not plan.rule.guess for plan in model.plans)
    if not is_planned or not isinstance(kinds, list):
        return kinds
    return ["attention" if WINDOWED.fullmatch(str(kind)) else kind for kind in kinds]


def _same_heads(models: Sequence[Model], tied: Sequence[Any]) -> bool:
    """Return whether both models use their embeddings as output head: tied, or stored again.

    If a configuration does not contain the setting, a head that is not stored is tied. Some
    encoder-decoder models scale the inputs of tied heads (T5).
    """
    for model, is_tied in zip(models, tied, strict=True):
        table = _embeddings(model)
        if table is None:
            return False
        if is_tied is True:
            continue
        heads = _tables_of_one_shape(model.checkpoint, table)
        if not heads and is_tied is not None:
            return False
        if not all(copy_of(model.checkpoint, name, [table]) for name in heads):
            return False
    if False not in tied:
        return True
    return len({plan.stack for plan in models[0].plans}) < 2


def of_attention(name: str, models: Sequence[Model]) -> bool:
    """Return whether attention may depend on a setting: by its name, or by the models' types."""
    path, _, key = name.rpartition(".")
    if OF_ATTENTION.search(name):
        return True
    return any(key in Config(model.checkpoint.config, path).switched for model in models)


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
    """Describe what norms add to a mean square or to a variance; None if one is not known."""
    texts = []
    for norm in norms:
        if norm is None or not norm.epsilon:
            return None
        added_to = " added to the variance" if norm.kind == "layer" else ""
        texts.append(f"{norm.epsilon:.3g}{added_to}")
    return ", ".join(dict.fromkeys(texts))


def _form(plan: AttentionPlan) -> object:
    """Return everything that settings determine of a form: factors, heads, norms, rotations."""
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
    return short(name), any(word.isdigit() for word in name.split("."))


def form_restored(models: Sequence[Model], pair: PlanPair) -> RepairedPlan | None:
    """Return the settings after which the candidate's form is planned as the reference's."""
    if _form(pair[0]) == _form(pair[1]):
        return None
    restored = _restored(models, pair, _form)
    if restored is None:
        return None
    keys = restored.keys
    configs = [_own_config(model, plan) for model, plan in zip(models, pair, strict=True)]
    if not keys:  # the type of the model alone decides
        keys = ("model_type",)
        configs = [dict(model.checkpoint.config) for model in models]
    expected, actual = (", ".join(str(config.get(key)) for key in keys) for config in configs)
    cause = setting(", ".join(keys), expected, actual, restored.steps)
    return cause, replace(restored.plan, rotary=pair[1].rotary, axial=pair[1].axial)


# Settings that a candidate of another type needs in addition.
OF_TYPE = ("model_type", "architectures")


def _restored(
    models: Sequence[Model], pair: PlanPair, view: Callable[[AttentionPlan], Any]
) -> _RestoredSettings | None:
    """Return the fewest of the reference's settings after which ``view`` of both plans is equal.

    If the candidate's model type does not use a setting, the candidate needs the reference's type,
    too.
    """
    reference, candidate = pair
    if reference.rule.config != candidate.rule.config:
        return None
    expected, actual = (_own_config(model, plan) for model, plan in zip(models, pair, strict=True))
    read = {*keys_of(reference.rule), "pruned_heads"}
    differing = [
        key for key in expected | actual if key in read and expected.get(key) != actual.get(key)
    ]
    reference_config = models[0].checkpoint.config
    candidate_config = models[1].checkpoint.config
    prefix = _path_of(candidate)
    for type_keys in ((), OF_TYPE):
        whole = {**candidate_config, **{key: reference_config.get(key) for key in type_keys}}
        type_steps = [Setting((key,), reference_config.get(key)) for key in type_keys]

        def restore(keys: Sequence[str]) -> _RestoredSettings | None:
            """Return the plan of the candidate with some settings of the reference.

            None where the plan still differs from that of the reference.
            """
            config = {key: value for key, value in actual.items() if key not in keys}
            config |= {key: expected[key] for key in keys if key in expected}
            plan = _replanned(models[1], candidate, config, whole)  # noqa: B023
            if plan is None or view(plan) != view(reference):
                return None
            steps = [
                Setting((*prefix, key), expected.get(key), removed=key not in expected)
                for key in keys
            ]
            return _RestoredSettings(keys, [*type_steps, *steps], plan)  # noqa: B023

        restored = _fewest(differing, restore)
        if restored is not None:
            return restored
    return None


def _own_config(model: Model, plan: AttentionPlan) -> dict[str, Any]:
    """Return the part of a configuration that describes the attention of a plan."""
    config = model.checkpoint.config
    if not plan.rule.config:
        return dict(config)
    return dict(config.get(plan.rule.config) or {})


def _path_of(plan: AttentionPlan) -> tuple[str, ...]:
    """Return the keys that lead to the part of a configuration that describes a block."""
    return (plan.rule.config,) if plan.rule.config else ()


def _replanned(
    model: Model,
    plan: AttentionPlan,
    own_config: Mapping[str, Any],
    whole: Mapping[str, Any] | None = None,
) -> AttentionPlan | None:
    """Plan the same block with another configuration; None if the configuration cannot be read.

    ``own_config`` is the part that describes this attention; ``whole`` replaces the configuration
    around it.
    """
    config = dict(model.checkpoint.config if whole is None else whole)
    if plan.rule.config:
        config[plan.rule.config] = own_config
    else:
        config = {**own_config, **{key: config[key] for key in OF_TYPE if key in config}}
    try:
        plans = open_model(Overlay(model.checkpoint, {}, config), family=model.family_file).plans
    except WqkError:
        return None
    return next((replanned for replanned in plans if replanned.place == plan.place), None)


def _absent_head_counts(checkpoints: Sequence[Checkpoint], pair: PlanPair) -> Iterator[Mismatch]:
    """Yield numbers of heads, and their width, that only one of two configurations contains.

    The shapes of the weights still determine these numbers here; other programs may use a default.
    A number that every program takes where it is absent is no difference. A file without any
    configuration lacks no setting.
    """
    if pair[0].family != pair[1].family or any(plan.rule.guess for plan in pair):
        return
    if not all(is_configured(checkpoint.config) for checkpoint in checkpoints):
        return
    configs = [
        Config(checkpoint.config, plan.rule.config)
        for checkpoint, plan in zip(checkpoints, pair, strict=True)
    ]
    heads = pair[0].query.heads
    implied_by_names = (
        (pair[0].rule.heads, None),
        (pair[0].rule.key_heads, heads),
        (("head_dim",), _shared_width(configs[0], heads)),
    )
    for spellings, implied in implied_by_names:
        expected_name, actual_name = (_first_set(config, spellings) for config in configs)
        if (expected_name is None) == (actual_name is None):
            continue
        name = expected_name or actual_name or ""
        expected, actual = (config.get(name) for config in configs)
        if implied is not None and implied in (expected, actual):
            continue
        steps = []
        if expected is not None:
            steps.append(Setting((*_path_of(pair[1]), name), expected))
        expected_text, actual_text = (
            "not in the configuration" if value is None else value for value in (expected, actual)
        )
        yield setting(name, expected_text, actual_text, steps)


def _shared_width(config: Config, heads: int) -> int | None:
    """Return the width of heads that share the model's width; None if it does not divide."""
    width = config.get("hidden_size")
    return width // heads if isinstance(width, int) and width % heads == 0 else None


def _first_set(config: Config, spellings: Sequence[str]) -> str | None:
    """Return the first of several spellings of a setting that a configuration contains."""
    return next((name for name in spellings if config.get(name) is not None), None)


def is_configured(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration contains more than a type, which tensors may show, too."""
    return any(value is not None for key, value in config.items() if key != "model_type")


def _is_left_plain(config: Mapping[str, Any], module: str) -> bool | None:
    """Return whether a configuration excludes the weight of a linear module from quantization.

    None if the configuration has no list of such modules, or rules that are not read.
    """
    match config.get("quantization_config"):
        case {"quant_method": "awq", "modules_to_not_convert": [*listed]}:
            pass
        case {"quant_method": "bitsandbytes", "llm_int8_skip_modules": [*listed]}:
            pass
        case {
            "quant_method": "compressed-tensors",
            "ignore": [*listed],
            "config_groups": dict(groups),
        }:
            targets = [group.get("targets") for group in groups.values() if isinstance(group, dict)]
            if targets != [["Linear"]]:
                return None
        case _:
            return None
    is_listed = []
    for pattern in map(_module_pattern, map(str, listed)):
        try:
            is_listed.append(re.search(pattern, module) is not None)
        except re.error:
            return None
    return any(is_listed)


def _module_pattern(text: str) -> str:
    """Return the regular expression of an entry of a list of modules."""
    if text.startswith("re:"):
        expression = text[3:].removeprefix("^")
    else:
        # Names in a file may have another prefix than in the model that the list was made for.
        expression = rf"{re.escape(text.removeprefix('model.'))}(?:\.|$)"
    return rf"(?:^|\.)(?:{expression})"


def _misplaced(checkpoint: Checkpoint, plan: AttentionPlan) -> Iterator[Mismatch]:
    """Yield weights that are quantized where the configuration excludes them, or the reverse."""
    names_by_kind: dict[str, set[str]] = {}
    sides = [plan.query, plan.key, plan.value, plan.output]
    for side in sides:
        if side is None:
            continue
        for part in side.projection.roles.values():
            info = checkpoint.info(part.name)
            quantized = info.quantized or (info.dtype if info.dtype in FLOAT8 else "")
            is_left_plain = _is_left_plain(checkpoint.config, part.name.removesuffix(".weight"))
            if is_left_plain is bool(quantized):
                names_by_kind.setdefault(quantized, set()).add(short(part.name))
    for quantized, names in names_by_kind.items():
        name = "the wrong layers are quantized"
        configured, stored = ("plain", f"as {quantized}") if quantized else ("quantized", "plain")
        reason = (
            f"{name}: {', '.join(sorted(names))}: {configured} by the configuration, "
            f"stored {stored}"
        )
        facts = {"name": name, "tensors": sorted(names), "other_value": quantized or "none"}
        yield Mismatch(Kind.SETTING, reason, facts=facts)
