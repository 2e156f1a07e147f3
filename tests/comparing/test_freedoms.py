"""Changes that leave attention unchanged raise no alarm, whatever the family and the layout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.families.architectures import ALL, NAMED
from tests.families.proving import safetensors, save, torch

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.comparing.sameness import same
from wqk.families import Projection

if TYPE_CHECKING:
    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan

Tensors = dict[str, Any]
SHARE = 3


def read(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in safetensors.load_file(file).items()}


def plain(plan: AttentionPlan) -> bool:
    """Whether both sides are one matrix each, of which no other block has a part."""
    sides = plan.query, plan.key
    return all(isinstance(s.projection, Projection) and s.norm is None for s in sides)


def edited(
    checkpoint: Checkpoint, plans: list[AttentionPlan], tensors: Tensors, change: Any
) -> Tensors:
    """The tensors with each block's queries and keys (heads, R, D), biases beside them, changed."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    done: set[str] = set()
    for plan in plans:
        names = {side.projection.tensor for side in (plan.query, plan.key)}
        if not plain(plan) or any(name not in tensors for name in names) or done & names:
            continue
        done |= names
        block = Block(checkpoint, plan)
        for part, side in ((block.query, plan.query), (block.key, plan.key)):
            other = change(plan, "query" if side is plan.query else "key")
            weight, bias = part.stored_weight, part.stored_bias
            if bias is not None and side.bias is not None:
                weight = np.concatenate([weight, bias[..., None]], axis=-1)
            weight = other(np.asarray(weight, np.float64))
            if bias is not None and side.bias is not None:
                weight, bias = weight[..., :-1], weight[..., -1]
                rows = side.bias.rows or ((0, bias.size),)
                flat, start = torch.tensor(bias.reshape(-1)), 0
                for first, last in rows:
                    target = tensors[side.bias.name]
                    target[first:last] = flat[start : start + last - first].to(target.dtype)
                    start += last - first
            target = tensors[side.projection.tensor]
            side.projection.put(target, torch.tensor(weight).to(target.dtype))
    return tensors


def moved(plan: AttentionPlan, side: str) -> Any:
    """A factor from queries to keys."""
    factor = {"query": 1.7, "key": 1 / 1.7}[side]
    return lambda weight: weight * factor


def turned(plan: AttentionPlan, side: str) -> Any:
    """Each rotary plane by an angle of its own; without positions, all heads by a rotation."""

    def apply(weight: np.ndarray) -> np.ndarray:
        weight, rotary = weight.copy(), plan.rotary
        if rotary is None and not plan.rule.guess and plan.axial is None and not plan.positional:
            width = weight.shape[1]
            basis = np.linalg.qr(np.random.default_rng(width).standard_normal((width, width)))[0]
            return basis @ weight
        if rotary is None or len(rotary.frequencies) == 0:
            return weight
        first, second = rotary.planes
        angles = np.random.default_rng(1).uniform(0, 6, len(rotary.frequencies))[:, None]
        a, b = weight[:, first], weight[:, second]
        cosine, sine = np.cos(angles), np.sin(angles)
        one, other = a * cosine - b * sine, a * sine + b * cosine
        weight[:, first], weight[:, second] = one, other
        return weight

    return apply


def norms_folded(plans: list[AttentionPlan], tensors: Tensors) -> Tensors:
    """Gains and biases of norms twice as large, the weights behind them half."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    halved: set[tuple[str, Any]] = set()
    for plan in plans:
        for side in (plan.query, plan.key):
            norm = side.input_norm
            if norm is None or not isinstance(side.projection, Projection):
                continue
            place = side.projection.tensor, side.projection.outputs
            if place in halved:
                continue
            halved.add(place)
            target, rows = tensors[side.projection.tensor], side.projection.part.rows
            chosen = target[torch.cat([torch.arange(*ends) for ends in rows])] if rows else target
            side.projection.put(target, 0.5 * side.projection.take(chosen))
            for part, offset in ((norm.gain[0], norm.offset), *((b, 0.0) for b in norm.bias)):
                if (part.name, None) not in halved:
                    halved.add((part.name, None))
                    tensors[part.name] = 2 * (tensors[part.name] + offset) - offset
    return tensors


def checked(name: str, folder: Path) -> dict[str, str]:
    """What is said of each harmless change of an architecture; nothing is right."""
    save(NAMED[name], folder)
    original, tensors = open_checkpoint(folder), read(folder)
    plans, config = wqk.open(original).plans, dict(original.config)
    copies: dict[str, Any] = {"reloaded": StateDict(tensors, config, "reloaded")}
    for kind in (torch.bfloat16, torch.float16):
        short = {n: v.to(kind) for n, v in tensors.items()}
        copies[str(kind)] = StateDict(short, config, str(kind))
        wide = {n: v.float() for n, v in short.items()}
        copies[f"{kind}, stored as float32"] = StateDict(wide, config, str(kind))
    for what, change in (("a factor moved", moved), ("turned", turned)):
        copies[what] = StateDict(edited(original, plans, tensors, change), config, what)
    if all(plain(plan) for plan in plans):
        copies["norms folded"] = StateDict(norms_folded(plans, tensors), config, "norms folded")
    said = {}
    for what, copy in copies.items():
        for pair in ((original, copy), (copy, original)):
            comparison = same(*pair)
            if not comparison.same:
                said[what] = comparison.sentence
    return said


@pytest.mark.parametrize(
    "name", random.Random(4).sample([a.name for a in ALL], SHARE)
)  # of all, in the campaign
def test_harmless_changes_of_some_families_raise_no_alarm(name: str, tmp_path: Path) -> None:
    assert checked(name, tmp_path / "model") == {}


@pytest.mark.campaign
@pytest.mark.parametrize("name", [a.name for a in ALL])
def test_harmless_changes_of_every_family_raise_no_alarm(name: str, tmp_path: Path) -> None:
    assert checked(name, tmp_path / "model") == {}
