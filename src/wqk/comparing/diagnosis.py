"""Why a block differs: repairs of its settings and stored weights, applied, and compared again.

What the first checkpoint holds is written in the second one's layout, which is what the second
should hold. `rewrites.search` proposes; a repair counts if the block with it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wqk.attention import Block
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.comparing.blocks import as_exact_as, same_rotation
from wqk.comparing.mistakes import ROTARY, SETTING, Mismatch, base_of, to_order
from wqk.comparing.rewrites import Finding, Sizes, search
from wqk.comparing.scope import form_parts
from wqk.errors import WqkError
from wqk.families import AttentionPlan, Projection, Side
from wqk.model import Model
from wqk.model import open as open_model

Pair = tuple[AttentionPlan, AttentionPlan]


class Overlay(Checkpoint):
    """A checkpoint in which some tensors have other values, or with another configuration."""

    def __init__(
        self,
        base: Checkpoint,
        values: Mapping[str, np.ndarray],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._base, self._values = base.name, base, values
        self.config = base.config if config is None else config

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The base's."""
        return self._base.tensors()

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The other values where there are some."""
        found = []
        for part in parts:
            value = self._values.get(part.name)
            if value is None:
                found += self._base.read([part])
            else:
                ranges = part.row_ranges(value.shape)
                found.append(np.concatenate([value[start:stop] for start, stop in ranges]))
        return found


def rotary_repaired(models: Sequence[Model], pair: Pair) -> tuple[Mismatch, AttentionPlan] | None:
    """The settings whose repair gives the second block the first one's rotary positions.

    Its base, its scaling, or both, as its configuration spells them; and its plan with these.
    """
    ours, theirs = pair
    if ours.rotary is None or theirs.rotary is None or ours.rotary.order != theirs.rotary.order:
        return None
    configs = [_own_config(*one) for one in zip(models, pair, strict=True)]
    bases, scalings = zip(*map(_rotary_settings, configs), strict=True)
    wanted = base_of(ours.rotary.frequencies) if bases[0] is None else bases[0]
    has = base_of(theirs.rotary.frequencies) if bases[1] is None else bases[1]
    if bases[0] is None and wanted is None:
        return None
    found = f"{has:.8g}" if has else "another"
    base = f"rotary base (rope_theta): {wanted:.8g} expected, {found} found"
    types = _type_of(scalings[0]), _type_of(scalings[1])
    if types[0] == types[1]:
        unlike = [k for k in scalings[0] | scalings[1] if scalings[0].get(k) != scalings[1].get(k)]
        first, second = (", ".join(f"{k} {some.get(k)}" for k in unlike) for some in scalings)
        types = first, second
    scaling = f"rotary scaling (rope_scaling): {types[0]} expected, {types[1]} found"
    for words, edit in (
        ((base,), (wanted, scalings[1])),
        ((scaling,), (bases[1], scalings[0])),
        ((base, scaling), (wanted, scalings[0])),
    ):
        changed, code = _respelled(configs[1], *edit)
        plan = _replanned(models[1], theirs, changed)
        exact = None if plan is None else as_exact_as(ours.rotary, plan.rotary)
        if plan is not None and same_rotation(exact, ours.rotary):
            prefix = _named("config", theirs)
            repair = "; ".join(f"{prefix}{line}" for line in code)
            reason = f"other {'; '.join(words)}"
            return Mismatch(ROTARY, reason, repair, facts={"base": wanted, "other_base": has}), plan
    return None


def terms(plan: AttentionPlan) -> dict[str, Any]:
    """The terms of a score besides the form and its rotation."""
    position = None if plan.position.startswith("rotary") else plan.position or None
    return {
        "mask": "causal" if plan.causal else "none",
        "window": plan.window,
        "softcap": plan.softcap,
        "limit of queries and keys": plan.clip,
        "positions added to the score": position,
        "norm of queries": plan.query.norm.kind if plan.query.norm else None,
        "norm of keys": plan.key.norm.kind if plan.key.norm else None,
        "sinks": "learned" if plan.sinks else None,
    }


def setting_repaired(models: Sequence[Model], pair: Pair, one: Mismatch) -> Mismatch:
    """The mismatch with the lines that give the second model this term, where there are some.

    A model whose type does not use a setting needs the type of the original, too.
    """
    ours, theirs = pair
    rule, name = ours.rule, one.facts.get("name")
    keys = {
        "window": (*rule.window, "layer_types"),
        "softcap": (rule.softcap,),
        "limit of queries and keys": (rule.clip,),
    }
    if one.verdict != SETTING or name not in keys or rule.config != theirs.rule.config:
        return one
    original, config = (_own_config(*given) for given in zip(models, pair, strict=True))
    own = [key for key in keys[name] if key and key in original | config]
    for also in ((), ("model_type", "architectures")):
        whole = dict(models[1].checkpoint.config)
        whole |= {key: models[0].checkpoint.config.get(key) for key in also}
        changed = {key: value for key, value in config.items() if key not in own}
        changed |= {key: original[key] for key in own if key in original}
        plan = _replanned(models[1], theirs, changed, whole)
        if plan is not None and terms(plan)[name] == terms(ours)[name]:
            left, right = _named("config", theirs), _named("original", theirs)
            lines = [f'config["{key}"] = original["{key}"]' for key in also]
            for key in own:
                if key in original and original[key] != config.get(key):
                    lines.append(f'{left}["{key}"] = {right}["{key}"]')
                elif key not in original:
                    lines.append(f'{left}.pop("{key}")')
            return replace(one, repair="; ".join(lines))
    return one


def _own_config(model: Model, plan: AttentionPlan) -> dict[str, Any]:
    """The part of a configuration that describes the attention of a plan."""
    config, nested = model.checkpoint.config, plan.rule.config
    return dict((config.get(nested) or {}) if nested else config)


def _named(config: str, plan: AttentionPlan) -> str:
    return f'{config}["{plan.rule.config}"]' if plan.rule.config else config


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
    if plan.rule.config:
        config = {**around, plan.rule.config: own}
    else:
        config = dict(own)
        config |= {key: around[key] for key in ("model_type", "architectures") if key in around}
    try:
        plans = open_model(Overlay(model.checkpoint, {}, config), family=model.family_file).plans
    except WqkError:
        return None
    place = plan.stack, plan.kind, plan.layer
    return next((p for p in plans if (p.stack, p.kind, p.layer) == place), None)


def _type_of(scaling: Mapping[str, Any]) -> str:
    factor = f", factor {scaling['factor']:g}" if scaling.get("factor") else ""
    return f"{scaling.get('rope_type', scaling.get('type', 'some'))}{factor}" if scaling else "none"


def _rotary_settings(config: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
    """The base, if it is said, and the scaling; in either of the spellings of transformers."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = dict(given) if isinstance(given, Mapping) else {}
    base = given.pop("rope_theta", config.get("rope_theta"))
    return base, {} if given.get("rope_type") == "default" else given


def _respelled(
    config: Mapping[str, Any], base: float | None, scaling: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """A configuration with these settings as it spells them, and the lines that change it."""
    changed, code = dict(config), []
    if isinstance(config.get("rope_parameters"), Mapping):
        value = {"rope_type": "default", **scaling}
        if base is not None:
            value["rope_theta"] = base
        old = dict(config["rope_parameters"])
        if {k: v for k, v in value.items() if k != "rope_theta"} == {
            k: v for k, v in old.items() if k != "rope_theta"
        }:
            code.append(f'["rope_parameters"]["rope_theta"] = {base!r}')
        else:
            code.append(f'["rope_parameters"] = {value!r}')
        changed["rope_parameters"] = value
        return changed, code
    for name, setting in (("rope_theta", base), ("rope_scaling", dict(scaling) or None)):
        if setting != config.get(name):
            changed[name] = setting
            code.append(f'["{name}"] = {setting!r}')
    return changed, code


def averaged(pair: Pair, ours: Block, theirs: Block) -> Mismatch | None:
    """Key and value heads that are means of several of the first block's."""
    for name in ("key", "value"):
        sides = getattr(pair[0], name), getattr(pair[1], name)
        if None in sides or any(not isinstance(s.projection, Projection) for s in sides):
            return None
        if sides[0].heads % sides[1].heads or sides[0].heads == sides[1].heads:
            return None
        first, second = (
            side.projection.weight({part: block.read([part])[0]})
            for side, block in zip(sides, (ours, theirs), strict=True)
            for part in side.projection.roles.values()
        )
        means = first.reshape(len(second), -1, *first.shape[1:]).mean(axis=1)
        if means.shape != second.shape or not np.allclose(means, second, atol=1e-2 * means.std()):
            return None
    counts = pair[0].key.heads, pair[1].key.heads
    reason = f"{counts[0]} key and value heads were averaged to {counts[1]}, which loses them"
    keys = pair[1].rule.key_heads
    repair = f'w = original; config["{keys[0]}"] = {counts[0]}' if keys else "w = original"
    return Mismatch("heads averaged", reason, repair, ("key",))


def diagnose(
    checkpoints: Sequence[Checkpoint],
    pair: Pair,
    names: Mapping[str, str],
    neighbors: Sequence[AttentionPlan],
    compare: Callable[[Checkpoint], Sequence[Mismatch]],
) -> tuple[Mismatch, ...] | None:
    """What was done to the second block's weights; None if nothing is found that undoes it.

    Parameters
    ----------
    names
        What the second checkpoint calls the first one's tensors.
    neighbors
        The first one's other blocks whose weights it may hold.
    compare
        How the first block differs from the second with other weights.
    """
    wanted, stored, gains = _laid_out(checkpoints, pair, names)
    if not wanted:
        return None
    query = pair[1].query
    sizes = Sizes(query.heads, pair[1].key.heads, query.head_width)
    others = {
        part.name: checkpoints[0].read([Part(part.name)])[0]
        for plan in neighbors
        for side in (plan.query, plan.key, plan.value, plan.output)
        if side is not None
        for part in side.projection.roles.values()
    }
    tensors = checkpoints[1].tensors()
    grids = {name: grid for name in stored if (grid := tensors[name].grid) is not None}
    regroupings = checkpoints[1].regrouping
    found = search(others | wanted, stored, sizes, _sections(pair[1]), gains, grids, regroupings)
    if not found:
        return None
    repaired = {one.tensor: one.repaired for one in found}
    left = compare(Overlay(checkpoints[1], repaired))
    if any(one.verdict != SETTING for one in left):
        return None
    return (*(_mismatch(one) for one in found), *left)


def _mismatch(one: Finding) -> Mismatch:
    facts = {"tensor": one.tensor, "cause": one.kind}
    return Mismatch(one.title, one.words, one.code, (), facts=facts)


def _laid_out(
    checkpoints: Sequence[Checkpoint], pair: Pair, names: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By the second's names: what it should hold, what it holds, and the gains before a weight."""
    ours, theirs = pair
    back = {other: name for name, other in names.items()}
    parts = {part.name for part in form_parts(theirs)}
    stored = {name: checkpoints[1].read([Part(name)])[0] for name in sorted(parts)}
    gains = {}
    for side in (theirs.query, theirs.key, theirs.value):
        if side is not None and side.input_norm is not None:
            (norm,) = side.input_norm.gain
            gains[side.tensor] = stored[norm.name] + side.input_norm.offset
    if _same_layout(ours, theirs):
        wanted = {n: checkpoints[0].read([Part(back[n])])[0] for n in stored if n in back}
        return wanted, stored, gains
    wanted = {}
    block = Block(checkpoints[0], ours)
    for name in ("query", "key", "value", "output"):
        first, second = getattr(ours, name), getattr(theirs, name)
        if first is None or second is None or second.tensor not in stored:
            continue
        if not isinstance(first.projection, Projection):
            return {}, {}, {}
        if (
            not isinstance(second.projection, Projection)
            or second.heads % first.heads
            or (second.head_width != first.head_width)
        ):
            return {}, {}, {}
        target = wanted.setdefault(second.tensor, stored[second.tensor].copy())
        second.projection.put(target, _ordered(block, first, second, pair, name))
    return wanted, stored, gains


def _ordered(block: Block, first: Side, second: Side, pair: Pair, name: str) -> np.ndarray:
    """A side's weight (heads, R, D) in the rotary order and with the heads of the second block."""
    (part,) = first.projection.roles.values()
    weight = first.projection.weight({part: block.read([part])[0]})
    turns = [plan.rotary for plan in pair]
    if name in ("query", "key") and turns[0] and turns[1] and turns[0].order != turns[1].order:
        rows = to_order(
            turns[1].order, first.heads, first.head_width, 2 * len(turns[1].frequencies)
        ).rows
        weight = weight.reshape(-1, weight.shape[-1])[rows].reshape(weight.shape)
    return np.asarray(weight.repeat(second.heads // first.heads, axis=0))


def _same_layout(ours: AttentionPlan, theirs: AttentionPlan) -> bool:
    """Whether both blocks are stored the same way, whatever their tensors are called."""

    def shape(side: Side | None) -> object:
        if side is None:
            return None
        one = side.projection
        return replace(one, tensor="") if isinstance(one, Projection) else type(one)

    def order(plan: AttentionPlan) -> str:
        return plan.rotary.order if plan.rotary is not None else ""

    sides = ("query", "key", "value", "output")
    alike = all(shape(getattr(ours, side)) == shape(getattr(theirs, side)) for side in sides)
    return alike and order(ours) == order(theirs)


def _sections(plan: AttentionPlan) -> dict[str, tuple[int, ...]]:
    """Where the parts of a fused weight begin."""
    sides = [side.projection for side in (plan.query, plan.key, plan.value) if side is not None]
    found: dict[str, list[int]] = {}
    for one in sides:
        if isinstance(one, Projection) and [s.tensor for s in sides].count(one.tensor) > 1:
            found.setdefault(one.tensor, []).extend(start for start, _ in one.outputs or ())
    return {name: tuple(sorted(starts)) for name, starts in found.items()}
