"""Changes that leave attention unchanged raise no alarm, whatever the family and the layout."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import small
from tests.families.architectures import ALL, NAMED
from tests.families.proving import safetensors, save, torch

import wqk
from wqk.attention import Block
from wqk.checkpoints import Checkpoint, open_checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.families import AttentionPlan, Projection
from wqk.sameness.same import same

Tensors = dict[str, Any]
SHARE = 3


def read(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.load_file(file)
    return tensors


def plain(plan: AttentionPlan) -> bool:
    """Return whether queries and keys are one matrix each, without a norm."""
    sides = plan.query, plan.key
    return all(isinstance(s.projection, Projection) and s.norm is None for s in sides)


def edited(
    checkpoint: Checkpoint, plans: list[AttentionPlan], tensors: Tensors, change: Any
) -> Tensors:
    """Change the queries and keys of each block, (heads, R, D) with biases as a last column."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    done: set[str] = set()
    for plan in plans:
        names = {side.projection.tensor for side in (plan.query, plan.key)}
        if not plain(plan) or any(name not in tensors for name in names) or done & names:
            continue
        done |= names
        block = Block(checkpoint, plan)
        for part, side in ((block.query, plan.query), (block.key, plan.key)):
            edit = change(plan, "query" if side is plan.query else "key")
            weight, bias = part.stored_weight, part.stored_bias
            if bias is not None and side.bias is not None:
                weight = np.concatenate([weight, bias[..., None]], axis=-1)
            weight = edit(np.asarray(weight, np.float64))
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
        first_half, second_half = a * cosine - b * sine, a * sine + b * cosine
        weight[:, first], weight[:, second] = first_half, second_half
        return weight

    return apply


def norms_folded(plans: list[AttentionPlan], tensors: Tensors) -> Tensors:
    """Gains and biases of norms twice as large, the weights behind them half."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    halved: set[tuple[str, Any]] = set()
    for plan in plans:
        for side in filter(None, (plan.query, plan.key, plan.value)):
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


def in_shards(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """The tensors spread over three files, with their index."""
    files = {name: f"model-{1 + i % 3:05d}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        tensors_of_file = {n: v.contiguous() for n, v in tensors.items() if files[n] == file}
        folder.mkdir(exist_ok=True)
        safetensors.save_file(tensors_of_file, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_eight_bits(
    folder: Path, tensors: Tensors, config: dict[str, Any], plans: list[AttentionPlan], block: int
) -> Path:
    """Queries' and keys' weights as float8, with a scale for each block, or one if it is 0."""
    matrices: set[str] = set()
    for plan in plans:
        for side in (plan.query, plan.key):
            matrices |= {part.name for part in side.projection.roles.values()}
    matrices = {name for name in matrices if name in tensors and tensors[name].ndim == 2}
    stored = {name: value.contiguous() for name, value in tensors.items() if name not in matrices}
    for name in matrices:
        weight = tensors[name].float().clone()
        rows, columns = (-(-n // block) if block else 1 for n in weight.shape)
        high, wide = (block, block) if block else weight.shape
        scales = torch.empty(rows, columns)
        for i, j in product(range(rows), range(columns)):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[place].abs().max().clip(1e-6) / 448
            weight[place] /= scales[i, j]
        stored[name] = weight.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv" if block else f"{name}_scale"] = (
            scales if block else scales.reshape(())
        )
    about = {"quant_method": "fp8"} | ({"weight_block_size": [block, block]} if block else {})
    return small.save(folder, stored, config | {"quantization_config": about})


def keys_repeated(
    plans: list[AttentionPlan], tensors: Tensors, config: dict[str, Any]
) -> tuple[Tensors, dict[str, Any]] | None:
    """Each key and value head stored once for every query head; None where none is shared."""
    tensors, config = dict(tensors), json.loads(json.dumps(config))
    done: set[str] = set()
    for plan in plans:
        value = plan.value
        share = plan.query.heads // plan.key.heads
        within = config.get(plan.rule.config) if plan.rule.config else config
        key = next((k for k in plan.rule.key_heads if isinstance(within, dict) and k in within), "")
        has_projections = isinstance(plan.key.projection, Projection) and value is not None
        if share == 1 or not has_projections or plan.rule.layout != "separate" or not key:
            return None
        if plan.key.norm and len(plan.key.norm.gain) != 1:
            return None
        if plan.key.norm and tensors[plan.key.norm.gain[0].name].numel() != plan.key.head_width:
            return None
        within[key] = plan.query.heads
        for side in (plan.key, value):
            names = [side.projection.tensor] + ([side.bias.name] if side.bias else [])
            for name in names:
                if name in done:
                    continue
                done.add(name)
                heads = tensors[name].reshape(side.heads, side.head_width, -1)
                shape = (side.heads * share * side.head_width, *tensors[name].shape[1:])
                tensors[name] = heads.repeat_interleave(share, 0).reshape(shape)
    return (tensors, config) if done else None


Copies = dict[str, Any]


def rewritten(name: str, folder: Path) -> tuple[Any, Copies]:
    """An architecture, and it with values that are rounded, moved, turned or folded."""
    save(NAMED[name], folder)
    original, tensors = open_checkpoint(folder), read(folder)
    plans, config = wqk.open(original).plans, dict(original.config)
    copies: dict[str, Any] = {"reloaded": StateDict(tensors, config, "reloaded")}
    for kind in (torch.bfloat16, torch.float16):
        short = {n: v.to(kind) for n, v in tensors.items()}
        copies[str(kind)] = StateDict(short, config, str(kind))
        wide = {n: v.float() for n, v in short.items()}
        copies[f"{kind}, stored as float32"] = StateDict(wide, config, str(kind))
    for description, change in (("a factor moved", moved), ("turned", turned)):
        copies[description] = StateDict(
            edited(original, plans, tensors, change), config, description
        )
    if all(plain(plan) for plan in plans):
        copies["norms folded"] = StateDict(norms_folded(plans, tensors), config, "norms folded")
    return original, copies


def stored_otherwise(name: str, folder: Path) -> tuple[Any, Copies]:
    """An architecture, and it in shards, in 8 bits, or with its keys repeated."""
    save(NAMED[name], folder)
    original, tensors = open_checkpoint(folder), read(folder)
    plans = wqk.open(original).plans
    config = json.loads((folder / "config.json").read_text())
    copies: Copies = {"shards": in_shards(folder.parent / "shards", tensors, config)}
    for block in (16, 0):
        place = folder.parent / f"eight-{block}"
        copies[f"8 bits, blocks of {block}"] = in_eight_bits(place, tensors, config, plans, block)
    repeated = keys_repeated(plans, tensors, config)
    if repeated is not None:
        copies["keys repeated"] = StateDict(*repeated, "keys repeated")
    return original, copies


def alarms(original: Any, copies: Copies) -> dict[str, str]:
    """Sentence of each harmless change that is reported as a difference; right if empty."""
    sentences = {}
    for description, copy in copies.items():
        for pair in ((original, copy), (copy, original)):
            comparison = same(*pair)
            if not comparison.same:
                sentences[description] = comparison.sentence
    return sentences


MATRIX = pytest.mark.parametrize("changes", [rewritten, stored_otherwise])


@MATRIX
@pytest.mark.parametrize(
    "name", random.Random(4).sample([a.name for a in ALL], SHARE)
)  # of all, in the campaign
def test_harmless_changes_of_some_families_raise_no_alarm(name, changes, tmp_path):
    assert alarms(*changes(name, tmp_path / "model")) == {}


@pytest.mark.campaign
@MATRIX
@pytest.mark.parametrize("name", [a.name for a in ALL])
def test_harmless_changes_of_every_family_raise_no_alarm(name, changes, tmp_path):
    assert alarms(*changes(name, tmp_path / "model")) == {}


def test_a_weight_of_cross_attention_reads_the_norm_of_the_other_stack(tmp_path: Path) -> None:
    """Its columns were rescaled with the norm before it in its layer, where such norms fold."""
    save(NAMED["t5"], tmp_path)
    original = open_checkpoint(tmp_path)
    tensors, plans = read(tmp_path), wqk.open(original).plans
    folded = StateDict(norms_folded(plans, tensors), dict(original.config), "norms folded")
    assert alarms(original, {"norms folded": folded}) == {}


def test_keys_are_repeated_and_planes_turned_in_a_family_that_has_both(tmp_path: Path) -> None:
    """The changes of the matrix are made in a family that permits them."""
    save(NAMED["mistral"], tmp_path)
    original, tensors = open_checkpoint(tmp_path), read(tmp_path)
    plans, config = wqk.open(original).plans, dict(original.config)
    repeated = keys_repeated(plans, tensors, config)
    assert repeated
    copies = [(edited(original, plans, tensors, change), config) for change in (moved, turned)]
    copies.append((norms_folded(plans, tensors), config))
    checkpoints = {str(n): StateDict(*copy, str(n)) for n, copy in enumerate([*copies, repeated])}
    assert alarms(original, checkpoints) == {}
    name = plans[0].key.projection.tensor
    assert not any(torch.equal(tensors[name], copy[name]) for copy, _ in [*copies, repeated])
