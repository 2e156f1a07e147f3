"""LitGPT's ``model_config.yaml``, damaged as text; PyYAML and LitGPT's own defaults decide."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml
from tests.attacks.outcomes import Case, Meaningless, Scores, are_equal, dense_scores, scan

HEADS, GROUPS, WIDTH, INPUTS = 4, 2, 6, 24
SETTINGS = {
    "name": "ours",
    "n_layer": 2,
    "n_head": HEADS,
    "n_query_groups": GROUPS,
    "head_size": WIDTH,
    "n_embd": INPUTS,
    "rotary_percentage": 1.0,
    "rope_base": 10000,
    "norm_class_name": "RMSNorm",
    "norm_eps": "1.0e-05",
}
SPELLINGS = (
    "0x4",
    "04",
    "0o4",
    "4_0",
    "4.0",
    "4e0",
    "'4'",
    "!!int 4",
    "!!str 4",
    "!!python/object/apply:os.getcwd []",
    "&a 4",
    "*a",
    "0:4",
    "yes",
    "null",
    "~",
    "[4]",
    "{a: 4}",
    ".inf",
    ".nan",
    "|\n  4",
    "4 # four",
    "2",
    "1",
    "8",
    "3",
    "0",
    "-4",
    "",
)
PIECES = (
    "\n",
    ":",
    "- ",
    "#",
    "\t",
    "{",
    "]",
    "&a ",
    "*a",
    "<<: ",
    "---\n",
    "...\n",
    "'",
    "\\",
    "é",
)


def truth(text: str, tensors: dict[str, np.ndarray]) -> Scores:
    """Scores of the model that the text describes."""
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise Meaningless(" ".join(str(error).split())) from None
    if not isinstance(settings, dict):
        raise Meaningless("not a mapping")
    heads = settings.get("n_head")
    groups = settings.get("n_query_groups") or heads
    for key, value in (("n_head", heads), ("n_query_groups", groups)):
        if type(value) is not int or value <= 0:
            raise Meaningless(f"{key} = {value!r}")
    if heads % groups:
        raise Meaningless(f"{groups} groups of {heads} heads")
    scores: dict[Any, Any] = {}
    for layer in range(2):
        weight = tensors[f"transformer.h.{layer}.attn.qkv.weight"].astype(np.float64)
        # LitGPT takes n_embd / n_head where the file is silent; the rows prove the width.
        width, remainder = divmod(len(weight), heads + 2 * groups)
        if remainder:
            raise Meaningless(f"{len(weight)} rows in {heads} heads and {groups} groups")
        if settings.get("head_size", width) not in (width, None):
            raise Meaningless(f"head_size = {settings['head_size']!r}")
        queries = weight[: heads * width].reshape(heads, width, -1)
        keys = weight[heads * width : (heads + groups) * width].reshape(groups, width, -1)
        for head in range(heads):
            key = keys[head * groups // heads]
            scores["self", layer, head] = dense_scores(queries[head], key)
    return scores


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """A model of LitGPT with a damaged configuration."""
    random, tensors = np.random.default_rng(0), {}
    for layer in range(2):
        at = f"transformer.h.{layer}"
        rows = (HEADS + 2 * GROUPS) * WIDTH
        weight = random.standard_normal((rows, INPUTS)).astype(np.float32)
        tensors[f"{at}.attn.qkv.weight"] = weight
        weight = random.standard_normal((INPUTS, HEADS * WIDTH)).astype(np.float32)
        tensors[f"{at}.attn.proj.weight"] = weight
        tensors[f"{at}.norm_1.weight"] = np.ones(INPUTS, np.float32)
    model = folder / "model"
    model.mkdir()
    torch.save({k: torch.from_numpy(v) for k, v in tensors.items()}, model / "lit_model.pth")
    while True:
        lines = [f"{key}: {value}" for key, value in SETTINGS.items()]
        descriptions = []
        for _ in range(dice.choice((1, 1, 2))):
            at = dice.randrange(len(lines))
            key = lines[at].partition(":")[0]
            kind = dice.choice(("value", "value", "value", "gone", "twice", "piece", "indent"))
            spelling = dice.choice(SPELLINGS)
            if kind == "value":
                lines[at] = f"{key}: {spelling}"
            elif kind == "gone":
                lines[at] = ""
            elif kind == "twice":
                lines.insert(dice.randrange(len(lines)), f"{key}: {spelling}")
            elif kind == "piece":
                place = dice.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:place] + dice.choice(PIECES) + lines[at][place:]
            else:
                lines[at] = dice.choice((" ", "  ", "\t")) + lines[at]
            descriptions.append(f"{kind} {key}: {lines[at]!r} {spelling!r}")
        text = "\n".join(lines) + "\n"
        (model / "model_config.yaml").write_text(text, encoding="utf-8")
        yield Case(
            "; ".join(descriptions),
            partial(scan, model, folder / "scores.parquet", dice),
            lambda scores, text=text: are_equal(scores, truth(text, tensors)),
        )
