"""Absent keys and older spellings of a configuration mean what `transformers` makes of them.

A key is left out, changed, or set under an older name. The plan of this configuration has to equal
the plan of the complete configuration into which `transformers` turns it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import wqk.families
from wqk.checkpoints import Checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.errors import WqkError
from wqk.families import Family, plan_attention
from wqk.families.plans import AttentionPlan
from wqk.families.rotary import Rotary
from wqk.families.sides import Side

Config = dict[str, Any]

# A number that no default is.
ODD = 7
# Of any kind of rotary positions: one of them said anew replaces all that were said before.
ROTARY = re.compile("rope|rotary|theta")
# Differences that are known, by model type and key, and why no file has them.
KNOWN = {
    ("gemma3_text", "use_bidirectional_attention"): "halves the window at every reading",
    ("modernbert-decoder", "sliding_window"): "follows from local_attention, which all files have",
    ("ultrabert", "partial_rotary_factor"): "all files have bases",
    ("olmo3", "rope_theta"): "goes to full layers alone; files have the value of the others",
    ("qwen2", "sliding_window"): "no default where windows are off, which they are by default",
    ("qwen2_moe", "sliding_window"): "no default where windows are off, which they are by default",
}


@cache
def words() -> frozenset[str]:
    """Every word that a family file may have for a key of a configuration."""
    folder = Path(wqk.families.__file__).parent / "data"
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("*.toml"))
    return frozenset(word for text in texts for word in re.findall(r"[a-z][a-z0-9_]+", text))


def misread(checkpoint: Checkpoint, family: Family) -> Iterator[str]:
    """Keys of whose absence, or other names, the family makes something else."""
    config = {k: v for k, v in checkpoint.config.items() if k != "architectures"}
    kind = str(config.get("model_type"))
    if standard({"model_type": kind}) is None or standard(config) is None:
        return
    tensors = zeros(checkpoint)
    seen: dict[str, Any] = {}

    def planned(config: Config) -> Any:
        text = json.dumps(config, sort_keys=True)
        if text not in seen:
            try:
                plans = plan_attention(StateDict(tensors, config, "made"), family)
            except WqkError:
                seen[text] = None
            else:
                seen[text] = [essence(plan) for plan in plans]
        return seen[text]

    for key, changed in variants(config):
        completed = standard(changed)
        if completed is None or (kind, key) in KNOWN:
            continue
        read, expected = planned(changed), planned(completed)
        if read is not None and expected is not None and read != expected:
            yield f"without, with another, or with an older {key}, the plan is another"
            return
        if read is None and expected is not None and key in _aliases(kind) - changed.keys():
            yield f"without {key}, which is another key's second name, there is no plan"
            return


def zeros(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """As large as a checkpoint's tensors, without its memory."""
    shapes = {name: info.shape for name, info in checkpoint.tensors().items()}
    return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}


def variants(config: Config) -> Iterator[tuple[str, Config]]:
    """The configuration without a key, with another value, or with an older name for one."""
    kind = config["model_type"]
    plain = standard({"model_type": kind}) or {}
    scaled = (plain.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    for key in sorted(words() & (config.keys() | _own(kind))):
        if key in config:
            yield key, {k: v for k, v in config.items() if k != key}
            for value in _others(config[key]):
                yield key, config | {key: value}
            continue
        for value in (ODD, 0.5):
            written = standard({"model_type": kind, key: value}) or {}
            meant = {k for k in written if k != key and written.get(k) != plain.get(k)}
            if not meant or ("rope_parameters" in meant and scaled):
                continue
            meant |= set(filter(ROTARY.search, config)) if "rope_parameters" in meant else set()
            yield key, {k: v for k, v in config.items() if k not in meant} | {key: value}


def _others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [2 * value]
        case list():
            return [[]]
    return []


def standard(config: Config) -> Config | None:
    """The whole configuration that `transformers` makes of it; None if it makes none."""
    from transformers import CONFIG_MAPPING

    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        config_of_class: Config = json.loads(json.dumps(made.to_dict()))
    except Exception:  # a type of another library, or values that it refuses in its own ways
        return None
    return {
        key: config_of_class[key] for key in config_of_class.keys() - {"architectures", "dtype"}
    }


@cache
def _own(kind: str) -> frozenset[str]:
    """The keys that a model type has, or had."""
    older = {word for word in words() if ROTARY.search(word)}
    return frozenset(older | _aliases(kind) | (standard({"model_type": kind}) or {}).keys())


def _aliases(kind: str) -> set[str]:
    """Second names of keys."""
    from transformers import CONFIG_MAPPING

    return set(CONFIG_MAPPING[kind].attribute_map)


def essence(plan: AttentionPlan) -> tuple[Any, ...]:
    """Facts that are read about an attention, without its tensors."""
    return (
        *(plan.stack, plan.kind, plan.layer, plan.applications, plan.causal, plan.position),
        *(plan.query.heads, plan.key.heads, plan.query.head_width),
        *(round(plan.score_scale, 12), plan.softcap, plan.clip, plan.window),
        *map(_turning, (plan.rotary, plan.axial)),
        *map(norms_of, (plan.query, plan.key)),
    )


def _turning(rotary: Rotary | None) -> Any:
    if rotary is None:
        return None
    return rotary.frequencies.round(12).tolist(), rotary.amplitude, rotary.order


def norms_of(side: Side) -> Mapping[str, Any]:
    norms = {"of its input": side.input_norm, "of its own": side.norm}
    return {name: (norm.kind, norm.epsilon) for name, norm in norms.items() if norm}
