"""Family files of ``--family``: what a damaged file describes, read by a small interpreter."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tests import small
from tests.attacks.outcomes import VALUES, Case, Meaningless, are_equal, dense_scores, scores_of

import wqk
from wqk.errors import WqkError

HEADS, KEY_HEADS, WIDTH, INPUTS = 4, 2, 6, 24
FILE: dict[str, Any] = {
    "stack": "decoder",
    "query": "net.{layer}.wq",
    "key": "net.{layer}.wk",
    "value": "net.{layer}.wv",
    "output": "net.{layer}.wo",
    "input_norm": "net.{layer}.norm",
    "layers": "depth",
    "heads": "n_heads",
    "key_heads": "n_groups",
    "scale": ["head_width ** -0.5"],
    "causal": True,
}
CONFIG = {"model_type": "ours", "depth": 2, "n_heads": HEADS, "n_groups": KEY_HEADS, "factor": 0.5}
NAMES = ("net.{layer}.wq", "net.{layer}.wk", "net.{layer}.wv", "net.{layer}.wo", "net.{layer}.wx")
SCALES = (
    ["head_width ** -0.5", "factor"],
    ["factor"],
    ["factor ** 2", "3"],
    ["n_heads"],
    ["1 if factor else 2"],
    ["no_such_key"],
    ["head_width ** -0.5 if factor else factor"],
    [],
    "factor",
    ["__import__('os')"],
)
CHANGES: dict[str, tuple[Any, ...]] = {
    "query": (*NAMES, [NAMES[4], NAMES[0]], [NAMES[1], NAMES[0]], "net.0.wq", "{layer}", *VALUES),
    "key": (*NAMES, [NAMES[4], NAMES[1]], [NAMES[1], NAMES[0]], "net.1.wk", *VALUES),
    "value": (*NAMES, *VALUES),
    "output": NAMES,
    "stack": ("encoder", *VALUES),
    "kind": ("self", "cross", "linear", *VALUES),
    "layers": ("depth", "n_groups", "no_such_key", ["depth"], *VALUES),
    "heads": ("n_heads", "n_groups", "depth", "no_such_key", ["no", "n_heads"], *VALUES),
    "key_heads": ("n_heads", "n_groups", "depth", "no_such_key", [], *VALUES),
    "scale": (*SCALES, *VALUES),
    "causal": (True, False, "yes", 1),
    "layout": ("separate", "gated", "sectioned", "conv1d", "grouped", "stacked", "no such"),
    "fused": ("net.{layer}.wq", "net.{layer}.wx"),
    "every_layer": (True, False, 3),
    "only_if": ("factor", "not factor", "no_such_key", "factor ==", "1"),
    "no_such_key": (1, "a"),
    "query_norm": ("net.{layer}.qn", "net.{layer}.norm"),
    "norm": ("rms", "layer", "no such"),
    "prefix": ("", "net.", "model."),
    "softcap": ("factor", "no_such_key"),
    "rotary": ({"order": "half"}, {"order": "other"}, {"order": "half", "base": "factor"}, {}),
    "like": (0, 1, -1),
    "note": ("a note", 3),
}
# Settings that neither the form nor the scale depends on.
WITHOUT_EFFECT = {"value", "output", "stack", "causal", "input_norm", "norm", "softcap", "note"}


def toml(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        escaped = value.encode("ascii", "backslashreplace").decode().replace("\\", "\\\\")
        return f'"{escaped}"'
    return "nan" if isinstance(value, float) and math.isnan(value) else repr(value)


def names_of(value: Any) -> list[str]:
    """Spellings of a name."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise Meaningless(f"{value!r} is no name")
    return names


def number_of(value: Any, default: int | None = None) -> int:
    """The number that a key of the configuration holds."""
    if value == [] and default is not None:
        return default
    for name in names_of(value):
        if name in CONFIG and isinstance(CONFIG[name], int):
            return int(CONFIG[name])
    if default is None:
        raise Meaningless(f"no number under {value!r}")
    return default


def product_of(factors: Any, width: int) -> float:
    """The scale: a product of expressions of the configuration's keys."""
    total, names = 1.0, {**CONFIG, "head_width": width}
    factors = str(factors) if type(factors) in (int, float) else factors
    for factor in names_of(factors) if factors != [] else []:
        head, _, condition = factor.partition(" if ")
        if condition:
            key, _, alternative = condition.partition(" else ")
            head = head if names.get(key) else alternative
        key, _, power = head.partition(" ** ")
        value = names.get(key) if key in names else _number(key)
        if value is None or isinstance(value, str):
            raise Meaningless(f"scale {factor!r}")
        total *= float(value) ** (float(power) if power else 1)
    return total


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def truth(text: str, tensors: dict[str, np.ndarray]) -> tuple[Any, float]:
    """Scores and scale that the text of a family file describes.

    A file with keys that this interpreter does not follow has no truth here.
    """
    try:
        (table,) = tomllib.loads(text)["attention"]
    except Exception as error:
        raise Meaningless(str(error)) from None
    unknown = set(table) - set(FILE) - WITHOUT_EFFECT - {"kind", "layout", "every_layer", "only_if"}
    is_centered = "query_norm" in table and table.get("norm") == "layer"
    if unknown - {"rotary", "query_norm", "prefix"} or is_centered:
        raise Meaningless(f"keys {unknown}")
    heads = number_of(table.get("heads", "num_attention_heads"))
    key_heads = number_of(table.get("key_heads", "num_key_value_heads"), 0)
    scores: dict[Any, Any] = {}
    by_role = {role: names_of(table[role]) for role in ("query", "key") if role in table}
    if len(by_role) != 2:
        raise Meaningless("no queries or no keys")
    width = 0
    for layer in range(2):
        sides = []
        for role, count in (("query", heads), ("key", key_heads)):
            # A number may have any name.
            spellings = (re.sub(r"\{\w+\}", str(layer), name) for name in by_role[role])
            names = [f"{name}.weight" for name in spellings if f"{name}.weight" in tensors]
            if not names:
                raise Meaningless(f"no {role} in layer {layer}")
            rows = len(tensors[names[0]])
            if not count:  # the file names no key with the number of key heads: the widths decide
                count = rows // sides[0].shape[1]
            if rows % count:
                raise Meaningless(f"{rows} rows in {count} heads")
            sides.append(tensors[names[0]].reshape(count, -1, INPUTS))
        query, key = sides
        if table.get("layout") == "gated":
            query = query[:, : query.shape[1] // 2]
        if query.shape[1] != key.shape[1] or len(query) % len(key):
            raise Meaningless("queries and keys of different widths")
        width = query.shape[1]
        for head in range(heads):
            weight = key[head * len(key) // heads]
            scores[table.get("kind", "self"), layer, head] = dense_scores(query[head], weight)
    return scores, product_of(table.get("scale", ["head_width ** -0.5"]), width)


def read(folder: Path, family: Path) -> tuple[Any, float]:
    """Scores and scale with a family file."""
    model = wqk.open(folder, family=family)
    scales = {block.plan.scale for block in model}
    if len(scales) != 1:
        raise WqkError("several scales")
    return scores_of(wqk.scan(model)), scales.pop()


def is_right(result: tuple[Any, float], text: str, tensors: dict[str, np.ndarray]) -> bool:
    """Compare with what the text describes."""
    scores, scale = truth(text, tensors)
    return are_equal(result[0], scores) and math.isclose(result[1], scale, rel_tol=1e-9)


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """A model of an unknown type, whose family file is damaged."""
    random = np.random.default_rng(0)
    shapes = {"wq": HEADS * WIDTH, "wk": KEY_HEADS * WIDTH, "wv": KEY_HEADS * WIDTH, "wo": INPUTS}
    tensors = {}
    for layer in range(2):
        for name, rows in shapes.items():
            weight = random.standard_normal((rows, INPUTS)).astype(np.float32)
            tensors[f"net.{layer}.{name}.weight"] = weight
        tensors[f"net.{layer}.norm.weight"] = np.ones(INPUTS, np.float32)
    model = small.save(folder / "model", tensors, CONFIG)
    family = folder / "family.toml"
    while True:
        table, descriptions = dict(FILE), []
        for _ in range(dice.choice((1, 1, 2))):
            if dice.random() < 0.15:
                key = dice.choice(sorted(FILE))
                table.pop(key, None)
                descriptions.append(f"without {key}")
            else:
                key = dice.choice(sorted(CHANGES))
                table[key] = dice.choice(CHANGES[key])
                descriptions.append(f"{key} = {table[key]!r}")
        items = ((key, value) for key, value in table.items() if value is not None)
        lines = [f"{key} = {toml(value)}" for key, value in items]
        text = "\n".join(['name = "ours"', "[[attention]]", *lines, ""])
        if dice.random() < 0.25:
            at = dice.randrange(len(text))
            piece = dice.choice(('"', "[", "]", "=", "\n", "{", "#", "true", "¹", "\\", "'''"))
            text = text[:at] + piece + text[at + dice.randrange(3) :]
            descriptions.append(f"{piece!r} at {at}")
        family.write_text(text)
        yield Case(
            "; ".join(descriptions),
            partial(read, model, family),
            lambda result, text=text: is_right(result, text, tensors),
        )
