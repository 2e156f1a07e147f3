"""Settings in which two models differ, and the lines of a configuration that set them right.

What is beside the form of a score: rotary positions, mask, window, caps, numbers of heads, which
weights are quantized. A repair of a setting is applied and the model planned again before it is
said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.checkpoint import Overlay
from wqk.errors import CheckpointError, WqkError
from wqk.families import AttentionPlan, Composed, Norm, Rotary
from wqk.families.config import Config, default_values, keys_of, unread_settings
from wqk.families.naming import embedding_table
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.blocks import as_exact_as, same_rotation
from wqk.sameness.contents import copy_of
from wqk.sameness.mismatches import Kind, Mismatch, setting
from wqk.sameness.outside import ATTENDING, MIXERS
from wqk.sameness.repairs import Setting
from wqk.sameness.tolerances import SAME_FREQUENCY
from wqk.sameness.weight_pairs import short
from wqk.sameness.weights import Pair

# Of the mixing of tokens, as far as plans do not read them, and of norms anywhere.
OF_ATTENTION = re.compile(
    r"(?i)(?:^|_)(?:eps|epsilon)$|head|qkv|mrope|layers?_(?:block_)?types?$|"
    rf"{ATTENDING.pattern}|{MIXERS.pattern}"
)
# Kinds of layers that are attention with a window or without, which plans read.
WINDOWED = re.compile(r"(?:full|global|sliding|local|chunked)(?:_attention)?|attention")
# Terms of the norms of queries and keys, by the end of their names.
OF_NORMS = ("norm of queries", "norm of keys", "query and key norms")
# Compared by what they do.
SAID = ("layer_types", "tie_word_embeddings")
# Of one function, or so near that no one tells them apart.
SPELLINGS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


# -- rotary positions --------------------------------------------------------------------------


def other_rotary(wanted: Rotary | None, has: Rotary | None) -> str:
    """What a block has that would be the same with another rotation, in words."""
    if wanted is None or has is None:
        here, there = (f"{r.order} order" if r else "none" for r in (wanted, has))
        return f"rotary positions: {here} expected, {there} found"
    found = []
    if wanted.order != has.order:
        found.append(f"rotary order: stored {wanted.order}, read as {has.order}")
    pairs, other_pairs = len(wanted.frequencies), len(has.frequencies)
    if pairs != other_pairs:
        found.append(
            f"share of rotated dimensions (partial_rotary_factor): {2 * pairs} of each head's "
            f"expected, {2 * other_pairs} found"
        )
    elif np.allclose(wanted.frequencies, -has.frequencies, rtol=SAME_FREQUENCY):
        found.append("direction of rotation: the sine has the other sign")
    elif not np.allclose(wanted.frequencies, has.frequencies, rtol=SAME_FREQUENCY):
        name, texts = "rotary scaling (rope_scaling)", []
        bases = base_of(wanted.frequencies), base_of(has.frequencies)
        for one, base in zip((wanted, has), bases, strict=True):
            slowest = f"slowest frequency {float(np.abs(one.frequencies).min()):.3g}"
            texts.append(f"{base:.8g}" if all(bases) else f"{slowest}, {'not ' * bool(base)}scaled")
        name = "rotary base (rope_theta)" if all(bases) else name
        found.append(f"{name}: {texts[0]} expected, {texts[1]} found")
    if wanted.amplitude != has.amplitude:
        found.append(
            f"attention factor of rotary positions: {wanted.amplitude:.4g} expected, "
            f"{has.amplitude:.4g} found"
        )
    return "; ".join(found) or "other rotary positions"


def base_of(frequencies: np.ndarray) -> float | None:
    """The base, where the frequencies are powers of one; None where they are scaled.

    Examples
    --------
    >>> round(base_of(500.0 ** -(np.arange(0, 8, 2) / 8)))
    500
    """
    pairs = len(frequencies)
    if pairs < 2 or not (frequencies > 0).all() or abs(frequencies[0] - 1) > SAME_FREQUENCY:
        return None
    logarithms = np.log(frequencies)
    base = math.exp(-logarithms[1] * pairs)
    fits = np.allclose(logarithms, logarithms[1] * np.arange(pairs), rtol=1e-5, atol=1e-9)
    return float(f"{base:.8g}") if fits else None


def rotary_repaired(models: Sequence[Model], pair: Pair) -> tuple[Mismatch, AttentionPlan] | None:
    """What gives the second block the first one's rotary positions, and its plan with them.

    Its base, its scaling, or both, as its configuration spells them; or else what differs. The
    order of its pairs stays. None where the positions are the same, or not known.
    """
    ours, theirs = pair
    if any(plan.rule.guess or plan.rotation_unknown for plan in pair):
        return None
    wanted, has = (plan.rotary or plan.axial for plan in pair)
    if wanted is not None and has is not None:
        wanted, has = replace(wanted, order=has.order), as_exact_as(wanted, has)
    if same_rotation(wanted, has):
        return None
    found = ours.rotary and theirs.rotary and _configured(models, pair, ours.rotary, theirs.rotary)
    if found:
        return found
    reason = other_rotary(wanted, has)
    axial = wanted is not None and wanted.axes > 1
    plan = replace(theirs, rotary=None if axial else wanted, axial=wanted if axial else None)
    same = _restored(models, pair, lambda one: one.rotary and one.rotary.frequencies.tobytes())
    return Mismatch(Kind.ROTARY, reason, tuple(same[1]) if same else ()), plan


def _configured(
    models: Sequence[Model], pair: Pair, ours: Rotary, theirs: Rotary
) -> tuple[Mismatch, AttentionPlan] | None:
    """The fewest edits of the second configuration whose plan turns as the first one."""
    configs = [_own_config(*one) for one in zip(models, pair, strict=True)]
    kinds = [_kind_of_layer(*one) for one in zip(configs, pair, strict=True)]
    wanted, has = map(_rotary_settings, configs, kinds)
    for some, rotary in ((wanted, ours), (has, theirs)):
        if some.get("rope_theta") is None:
            some["rope_theta"] = base_of(rotary.frequencies)
    if wanted["rope_theta"] is None:
        return None
    turned = replace(ours, order=theirs.order)

    def edited(keys: Sequence[str]) -> tuple[list[Setting], AttentionPlan] | None:
        settings = has | {key: wanted.get(key) for key in keys}
        given = {key: value for key, value in settings.items() if value is not None}
        changed, steps = _respelled(configs[1], kinds[1], given)
        plan = _replanned(models[1], pair[1], changed)
        fits = plan is not None and same_rotation(as_exact_as(turned, plan.rotary), turned)
        return (steps, plan) if plan is not None and fits else None

    unlike = [key for key in wanted | has if wanted.get(key) != has.get(key)]
    found = _fewest(unlike, edited)
    if found is None:
        return None
    keys, (steps, plan) = found
    words, base = [], has["rope_theta"]
    if "rope_theta" in keys:
        other = f"{base:.8g}" if base else "another"
        words += [f"rotary base (rope_theta): {wanted['rope_theta']:.8g} expected, {other} found"]
    if scaled := [key for key in keys if key != "rope_theta"]:
        types = _type_of(wanted), _type_of(has)
        if types[0] == types[1]:
            one, two = (", ".join(f"{k} {some.get(k)}" for k in scaled) for some in (wanted, has))
            types = one, two
        words += [f"rotary scaling (rope_scaling): {types[0]} expected, {types[1]} found"]
    nested = [replace(step, path=(*_path_of(pair[1]), *step.path)) for step in steps]
    facts = {"base": wanted["rope_theta"], "other_base": base}
    return Mismatch(Kind.ROTARY, f"other {'; '.join(words)}", tuple(nested), facts=facts), plan


def _fewest(
    keys: Sequence[str], planned: Callable[[Sequence[str]], Any]
) -> tuple[Sequence[str], Any] | None:
    """The fewest keys that give what is wanted, and what they give; None where all do not."""
    found = planned(keys)
    for key in list(keys) if found is not None else ():
        fewer = [one for one in keys if one != key]
        if (other := planned(fewer)) is not None:
            keys, found = fewer, other
    return None if found is None else (keys, found)


def _type_of(scaling: Mapping[str, Any]) -> str:
    factor = f", factor {scaling['factor']:g}" if scaling.get("factor") else ""
    return f"{scaling.get('rope_type', scaling.get('type', 'none'))}{factor}"


def _kind_of_layer(config: Mapping[str, Any], plan: AttentionPlan) -> str:
    """The kind of a block's layer, if each kind has rotary parameters of its own; else nothing."""
    kinds, given = config.get("layer_types") or [], config.get("rope_parameters")
    listed = isinstance(kinds, list) and plan.layer < len(kinds)
    kind = str(kinds[plan.layer]) if listed else "full_attention"
    return kind if isinstance(given, Mapping) and isinstance(given.get(kind), Mapping) else ""


def _rotary_settings(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The scaling, and the base if it is said; in either of the spellings of transformers."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = given[kind] if kind else given
    given = dict(given) if isinstance(given, Mapping) else {}
    given.setdefault("rope_theta", config.get("rope_theta"))
    if given.get("rope_type") == "default":
        del given["rope_type"]
    return given


def _respelled(
    config: Mapping[str, Any], kind: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Setting]]:
    """A configuration with these settings as it spells them, and the steps that change it."""
    had: Any = config.get("rope_parameters")
    if isinstance(had, Mapping):
        value: dict[str, Any] = {"rope_type": "default", **settings}
        path = ("rope_parameters", kind) if kind else ("rope_parameters",)
        old: Any = had[kind] if kind else had
        changed = {**config, "rope_parameters": {**had, kind: value} if kind else value}
        if {k for k in value | old if value.get(k) != old.get(k)} <= {"rope_theta"}:
            return changed, [Setting((*path, "rope_theta"), settings["rope_theta"])]
        return changed, [Setting(path, value)]
    scaling = {key: value for key, value in settings.items() if key != "rope_theta"}
    edits = {"rope_theta": settings.get("rope_theta"), "rope_scaling": scaling or None}
    steps = [Setting((key,), value) for key, value in edits.items() if value != config.get(key)]
    return {**config, **edits}, steps


# -- other settings ----------------------------------------------------------------------------


def other_settings(models: Sequence[Model], pair: Pair) -> Iterator[Mismatch]:
    """The settings besides the form and its rotation that differ, as far as both are known."""
    ours, theirs = pair
    configs = [_own_config(*one) for one in zip(models, pair, strict=True)]
    if not any(plan.rule.guess for plan in pair):
        known = _terms(theirs)
        unknown: set[Any] = {None}
        if ours.family != theirs.family and not all(map(is_configured, configs)):
            unknown.add(_epsilons(Norm("layer", epsilon=1e-5)))  # what a silent layout is taken for
        for name, value in _terms(ours).items():
            if theirs.missing and name.endswith(OF_NORMS):
                continue  # the tensors of these norms are missing, which is a cause of its own
            silent = name.startswith("epsilon") and not unknown.isdisjoint((value, known[name]))
            if value != known[name] and not silent:
                found = _restored(models, pair, lambda one: _terms(one)[name])  # noqa: B023
                yield setting(name, value, known[name], found[1] if found else ())
    yield from _untold([model.checkpoint for model in models], pair)
    yield from _misplaced(models[1].checkpoint, theirs)


def further_settings(models: Sequence[Model], everything: bool = True) -> Iterator[Mismatch]:
    """Settings that both configurations contain, that differ, and that no plan reads."""
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
    values, key = (expected, actual), path[-1]
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
    """Ties of embeddings that one configuration alone contains, where heads differ."""
    for path in sorted(reference.keys() ^ candidate.keys()):
        tied = (reference.get(path), candidate.get(path))
        if path[-1] == "tie_word_embeddings" and True in tied and not _same_heads(models, tied):
            yield setting(".".join(path), *tied)


def _stores_head(model: Model) -> bool:
    """Return whether a file stores an output head besides its embeddings."""
    checkpoint = model.checkpoint
    plan = (*model.plans, *model.mixers)[0]
    projection = plan.query.projection
    if isinstance(projection, Composed):
        projection = projection.inner
    shape = checkpoint.info(projection.tensor).shape
    try:
        table = embedding_table(checkpoint, shape[0] if projection.transposed else shape[-1])
    except CheckpointError:
        return False
    size = checkpoint.info(table).shape
    stored = checkpoint.tensors().items()
    return any(name != table and info.shape == size for name, info in stored)


def _unread(models: Sequence[Model]) -> list[dict[tuple[str, ...], Any]]:
    """What each configuration says besides what the plans of either read, by keys."""
    rules = {repr(plan.rule) for model in models for plan in model.plans}
    return [unread_settings(model.checkpoint.config, rules) for model in models]


def lost_settings(models: Sequence[Model]) -> list[str]:
    """What one configuration says, and another of its model type leaves to the class.

    Both as `transformers` writes them; what is off, or the type's own value, is not lost.
    """
    configs = [model.checkpoint.config for model in models]
    kind, other = (config.get("model_type") for config in configs)
    if kind != other or not all("architectures" in config for config in configs):
        return []
    ours, theirs = _unread(models)
    told, usual = ours | theirs, default_values(kind)
    return [
        ".".join(path)
        for path in sorted(ours.keys() ^ theirs.keys())
        if path[-1] not in SAID and told[path] and told[path] != usual.get(path[-1])
    ]


def _kinds(model: Model, kinds: Any) -> Any:
    """Kinds of layers, without what plans tell of them: windows, where families read these."""
    known = all(plan.rule.window and not plan.rule.guess for plan in model.plans)
    if not (known and isinstance(kinds, list)):
        return kinds
    return ["attention" if WINDOWED.fullmatch(str(kind)) else kind for kind in kinds]


def _same_heads(models: Sequence[Model], tied: Sequence[Any]) -> bool:
    """Whether both make outputs by their embeddings: tied, or stored once more.

    Where a configuration does not tell, what is not stored is tied. Some decoders beside an encoder
    scale what they feed to tied ones (T5).
    """
    for model, told in zip(models, tied, strict=True):
        checkpoint, plan = model.checkpoint, (*model.plans, *model.mixers)[0]
        one = plan.query.projection
        one = one.inner if isinstance(one, Composed) else one
        shape = checkpoint.info(one.tensor).shape
        try:
            table = embedding_table(checkpoint, shape[0] if one.transposed else shape[-1])
        except CheckpointError:
            return False
        shape = checkpoint.info(table).shape
        heads = [n for n, i in checkpoint.tensors().items() if i.shape == shape and n != table]
        copied = all(copy_of(checkpoint, name, [table]) for name in heads)
        if told is not True and not (copied and (heads or told is None)):
            return False
    return False not in tied or len({plan.stack for plan in models[0].plans}) < 2


def of_attention(name: str, models: Sequence[Model]) -> bool:
    """Whether attention may depend on a setting: by its name, or as seen in the models' types."""
    path, _, key = name.rpartition(".")
    parts = (Config(model.checkpoint.config, path) for model in models)
    return bool(OF_ATTENTION.search(name)) or any(key in part.switched for part in parts)


def _terms(plan: AttentionPlan) -> dict[str, Any]:
    """The terms of a score besides the form and its rotation."""
    sides = f" with the {' and the '.join(plan.position_uses)}" if plan.position_uses else ""
    position = plan.position and not plan.position.startswith("rotary") and plan.position + sides
    return {
        "mask": "causal" if plan.causal else "none",
        "window": None if plan.window is None else str(plan.window),
        "softcap": plan.softcap,
        "limit of queries and keys": plan.clip,
        "positions added to the score": position or None,
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
    """What norms add to a mean square or to a variance; None if that is not known of each."""
    if not all(norm is not None and norm.epsilon for norm in norms):
        return None
    to = {"rms": "", "layer": " added to the variance"}
    each = (f"{norm.epsilon:.3g}{to[norm.kind]}" for norm in norms if norm is not None)
    return ", ".join(dict.fromkeys(each))


def _form(plan: AttentionPlan) -> object:
    """What settings say of a form: factors, heads, and the norms of its sides."""
    sides = [side for side in (plan.query, plan.key, plan.value, plan.output) if side is not None]
    norms = [
        (norm.kind, norm.offset, [_place_of_norm(part.name) for part in norm.gain])
        if norm
        else None
        for side in sides
        for norm in (side.norm, side.input_norm)
    ]
    turns = [one.rotary.order for one in (plan, plan.positional) if one and one.rotary]
    turns += [plan.positional.rotary.frequencies.tobytes()] if plan.positional else []
    heads = [(one.heads, one.head_width, one.factor) for one in sides]
    return plan.score_scale, turns, norms, heads


def _place_of_norm(name: str) -> tuple[str, bool]:
    """Return the short name of a norm's gain, and whether the norm lies in a layer.

    Examples
    --------
    >>> _place_of_norm("encoder.layer_norm.weight"), _place_of_norm("layers.0.layer_norm.weight")
    (('layer_norm', False), ('layer_norm', True))
    """
    return short(name), any(word.isdigit() for word in name.split("."))


def form_restored(models: Sequence[Model], pair: Pair) -> tuple[Mismatch, AttentionPlan] | None:
    """The settings after which the second block's form is planned as the first one's."""
    found = None if _form(pair[0]) == _form(pair[1]) else _restored(models, pair, _form)
    if found is None:
        return None
    keys, steps, plan = found
    configs = [_own_config(*one) for one in zip(models, pair, strict=True)]
    if not keys:  # the type of the model alone decides
        configs = [dict(model.checkpoint.config) for model in models]
        keys = ("model_type",)
    one, other = (", ".join(str(config.get(key)) for key in keys) for config in configs)
    said = setting(", ".join(keys), one, other, steps)
    return said, replace(plan, rotary=pair[1].rotary, axial=pair[1].axial)


def _restored(
    models: Sequence[Model], pair: Pair, view: Callable[[AttentionPlan], Any]
) -> tuple[Sequence[str], list[Setting], AttentionPlan] | None:
    """The fewest settings of the first model that give the second one's plan this of the first's.

    A model whose type does not use a setting needs the type of the original, too.
    """
    ours, theirs = pair
    if ours.rule.config != theirs.rule.config:
        return None
    original, config = (_own_config(*given) for given in zip(models, pair, strict=True))
    read = {*keys_of(ours.rule), "pruned_heads"}
    own = [key for key in original | config if key in read and original.get(key) != config.get(key)]

    def planned(keys: Sequence[str]) -> AttentionPlan | None:
        changed = {key: value for key, value in config.items() if key not in keys}
        changed |= {key: original[key] for key in keys if key in original}
        plan = _replanned(models[1], theirs, changed, whole)
        return plan if plan is not None and view(plan) == view(ours) else None

    for also in ((), ("model_type", "architectures")):
        whole = dict(models[1].checkpoint.config)
        whole |= {key: models[0].checkpoint.config.get(key) for key in also}
        if found := _fewest(own, planned):
            outer = models[0].checkpoint.config
            steps = [Setting((key,), outer.get(key)) for key in also]
            for key in found[0]:
                path = (*_path_of(theirs), key)
                steps.append(Setting(path, original.get(key), removed=key not in original))
            return found[0], steps, found[1]
    return None


def _own_config(model: Model, plan: AttentionPlan) -> dict[str, Any]:
    """The part of a configuration that describes the attention of a plan."""
    config, nested = model.checkpoint.config, plan.rule.config
    return dict((config.get(nested) or {}) if nested else config)


def _path_of(plan: AttentionPlan) -> tuple[str, ...]:
    """Keys that lead to the part of a configuration that describes a block."""
    return (plan.rule.config,) if plan.rule.config else ()


def _replanned(
    model: Model,
    plan: AttentionPlan,
    own: Mapping[str, Any],
    whole: Mapping[str, Any] | None = None,
) -> AttentionPlan | None:
    """The plan of the same block with another configuration; None if that cannot be read.

    ``own`` is the part that describes this attention; ``whole`` replaces what is around it.
    """
    around = dict(model.checkpoint.config if whole is None else whole)
    beside = {k: v for k, v in around.items() if k in ("model_type", "architectures")}
    config = {**around, plan.rule.config: own} if plan.rule.config else {**own, **beside}
    try:
        plans = open_model(Overlay(model.checkpoint, {}, config), family=model.family_file).plans
    except WqkError:
        return None
    return next((p for p in plans if p.place == plan.place), None)


def _untold(checkpoints: Sequence[Checkpoint], pair: Pair) -> Iterator[Mismatch]:
    """Numbers of heads, and their width, that one configuration of two alike does not have.

    The shapes of the weights still tell them here; other programs may take a default. A file
    without any configuration lacks nothing of one.
    """
    alike = pair[0].family == pair[1].family and not any(plan.rule.guess for plan in pair)
    if not (alike and all(is_configured(checkpoint.config) for checkpoint in checkpoints)):
        return
    configs = [Config(c.config, p.rule.config) for c, p in zip(checkpoints, pair, strict=True)]
    for names in (pair[0].rule.heads, pair[0].rule.key_heads, ("head_dim",)):
        told = [next((n for n in names if one.get(n) is not None), None) for one in configs]
        if (told[0] is None) == (told[1] is None):
            continue
        name = told[0] or told[1] or ""
        values = [config.get(name) for config in configs]
        shown = ["not in the configuration" if value is None else value for value in values]
        steps = [Setting((*_path_of(pair[1]), name), values[0])] if values[0] is not None else []
        yield setting(name, shown[0], shown[1], steps)


def is_configured(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says more than a model's type, which may be known by its tensors."""
    return any(value is not None for key, value in config.items() if key != "model_type")


def _is_left_plain(config: Mapping[str, Any], module: str) -> bool | None:
    """Whether a configuration says that the weight of a linear module is not quantized.

    None where it does not tell: without a list, or by rules that are not read.
    """
    match config.get("quantization_config"):
        case {"quant_method": "awq", "modules_to_not_convert": [*listed]}:
            pass
        case {"quant_method": "bitsandbytes", "llm_int8_skip_modules": [*listed]}:
            pass
        case {"quant_method": "compressed-tensors", "ignore": [*listed], "config_groups": dict(by)}:
            targets = [group.get("targets") for group in by.values() if isinstance(group, dict)]
            if targets != [["Linear"]]:
                return None
        case _:
            return None
    found = []
    for text in map(str, listed):
        # Names in a file may begin otherwise than in the model for which the list was written.
        whole = rf"{re.escape(text.removeprefix('model.'))}(?:\.|$)"
        named = text[3:].removeprefix("^") if text.startswith("re:") else whole
        try:
            found.append(re.search(rf"(?:^|\.)(?:{named})", module) is not None)
        except re.error:
            return None
    return any(found)


def _misplaced(checkpoint: Checkpoint, plan: AttentionPlan) -> Iterator[Mismatch]:
    """Weights that are quantized where the configuration leaves them plain, or the reverse."""
    found: dict[str, set[str]] = {}
    for side in (plan.query, plan.key, plan.value, plan.output):
        for part in side.projection.roles.values() if side is not None else ():
            kind = checkpoint.info(part.name).quantized
            if _is_left_plain(checkpoint.config, part.name.removesuffix(".weight")) is bool(kind):
                found.setdefault(kind, set()).add(short(part.name))
    for kind, names in found.items():
        name, which = "the wrong layers are quantized", ", ".join(sorted(names))
        told = ("plain", f"as {kind}") if kind else ("quantized", "plain")
        reason = f"{name}: {which}: {told[0]} by the configuration, stored {told[1]}"
        facts = {"name": name, "tensors": sorted(names), "other_value": kind or "none"}
        yield Mismatch(Kind.SETTING, reason, facts=facts)
