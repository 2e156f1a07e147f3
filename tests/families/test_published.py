"""Configurations as people write them: lengths without bounds, keys of their own, or left out."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from tests.families.architectures import FURTHER
from tests.families.proving import edit_config, save
from tests.groups import has_share
from tests.limits import some
from tools.deriving.configured import configuration_faults
from tools.deriving.drawing import draw, outcome
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import wqk
from wqk.families import Norm


@pytest.mark.parametrize("name", ["bitnet", "mimo-v2-flash"])
def test_norms_and_factors_between_values_and_outputs_are_in_their_form(
    name: str, tmp_path: Path
) -> None:
    """A text of one token attends to itself alone: what comes out is the form, up to the norm."""
    model = save(FURTHER[name], tmp_path).double().eval()
    seen = {}
    module = model.layers[1].self_attn
    module.v_proj.register_forward_hook(
        lambda m, given, out: seen.update(given=given[0], values=out)
    )
    module.register_forward_hook(lambda m, given, out: seen.update(out=out[0]))
    torch.manual_seed(0)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 60, (4, 1)))
    block = wqk.open(tmp_path)[1]
    entering, out, values = (seen[key][:, 0].numpy() for key in ("given", "out", "values"))
    expected = entering @ block.ov.dense()
    if name == "bitnet":
        size = np.repeat(values.reshape(4, 2, -1), 3, axis=1).reshape(4, -1)
        expected /= np.sqrt((size**2).mean(axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_linear_part_of_a_norm_before_a_weight(kind: str) -> None:
    rng = np.random.default_rng(0)
    weight, gain = rng.standard_normal((3, 4, 5)), rng.standard_normal(12)
    vectors = rng.standard_normal((7, 12))
    folded, _ = Norm(kind, feeds=True).fold(weight, None, gain)
    centered = vectors - vectors.mean(axis=1, keepdims=True) if kind == "layer" else vectors
    np.testing.assert_allclose(
        vectors @ folded.reshape(12, 5), (centered * gain) @ weight.reshape(12, 5)
    )


def rows(name: str) -> list[dict[str, Any]]:
    """Entries of a file next to this file."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def by_type(rows: list[dict[str, Any]]) -> list[Any]:
    """Settings, called after their model types, which take turns."""
    kinds = [row["model_type"].replace("_", "-") for row in rows]
    return [
        pytest.param(row, id=f"{kind}-{kinds[:n].count(kind)}")
        for n, (row, kind) in enumerate(zip(rows, kinds, strict=True))
    ]


# Settings of which something was once read wrongly, or refused.
FOUND = rows("found.jsonl")
# The same; further widths are shrunk.
SETTINGS = rows("settings.jsonl")


@pytest.mark.parametrize("table", by_type(FOUND))
def test_settings_are_read_as_they_are_run(table: dict[str, Any], tmp_path: Path) -> None:
    assert configuration_faults(table, tmp_path / "model") == []
    assert {plan.family for plan in wqk.open(tmp_path / "model").plans if not plan.output} <= {
        "convbert"
    }


@pytest.mark.parametrize("drawn", by_type(SETTINGS))
def test_settings_that_were_read_wrongly(drawn: dict[str, Any], tmp_path: Path) -> None:
    settings = {key: value for key, value in drawn.items() if key != "model_type"}
    table = {"model_type": drawn["model_type"]}
    assert configuration_faults(table, tmp_path / "model", settings) == []


# What publishers wrote, as far as attention depends on it, and where it was seen.
ROWS = rows("published.jsonl")
PUBLISHED = {row["model"]: row["config"] for row in ROWS}
RUN = [name for name, config in PUBLISHED.items() if config["model_type"] in CONFIG_MAPPING_NAMES]
# Without a softmax, there is nothing that these proofs see: tests/families/test_mixers.py.
RUN = [name for name in RUN if PUBLISHED[name]["model_type"] != "falcon_mamba"]


@pytest.mark.parametrize("name", some(random.Random(39).sample(RUN, 8), RUN))
def test_published_configurations_are_read_as_they_are_run(name: str, tmp_path: Path) -> None:
    """Proven as it is; with its own lengths, it has the same windows under larger numbers."""
    config, folder = PUBLISHED[name], tmp_path / "model"
    assert configuration_faults(config, folder) == []
    small = [plan.window for plan in wqk.open(folder).plans]
    windows = {key: value for key, value in config.items() if "window" in key}
    edit_config(folder, {key: value for key, value in windows.items() if value is not None})
    large = [plan.window for plan in wqk.open(folder).plans]
    assert [window is None for window in large] == [window is None for window in small]


def test_every_published_configuration_that_can_be_run_is_run() -> None:
    assert len(PUBLISHED) == len(ROWS)
    assert {PUBLISHED[name]["model_type"] for name in PUBLISHED.keys() - set(RUN)} == {
        "baichuan",
        "chatglm",
        "deepseek",
        "falcon_mamba",
        "internlm",
        "kimi_k2",
        "kimi_k3",
        "mimo",
        "minicpm",
        "minimax_m3",
        "orion",
        "phi-msft",
        "qwen",
        "rwkv5",
    }


DRAWN = (
    "bert",
    "cohere2",
    "deepseek_v3",
    "electra",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mixtral",
    "olmo3",
    "qwen2",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
    "t5gemma2_text",
    "vit",
)


@pytest.mark.parametrize("model_type", DRAWN)
def test_a_share_of_drawn_settings_is_read_as_it_is_run(model_type: str, tmp_path: Path) -> None:
    drawn = draw(model_type, 0, seed=39)
    assert configuration_faults({"model_type": model_type}, tmp_path / "model", drawn) == [], drawn


OUTCOMES = Path(__file__).parents[2] / "docs" / "model-types.jsonl"


@pytest.mark.campaign
def test_at_most_one_in_a_hundred_drawn_settings_is_read_wrongly() -> None:
    """Settings of types that are read rightly without any; order and seed change each time.

    The test ends after eight minutes, with all settings that were run until then.
    """
    end = time.monotonic() + 480
    seed = random.SystemRandom().randrange(10**6)
    outcomes = map(json.loads, OUTCOMES.read_text(encoding="utf-8").splitlines()[1:])
    kinds = [row["type"] for row in outcomes if row["outcome"] in ("proven", "partial")]
    kinds = [kind for kind in kinds if has_share(kind)]
    random.Random(seed).shuffle(kinds)
    rows = [
        outcome(kind, draw(kind, 0, seed))
        for kind in kinds
        if time.monotonic() < end and outcome(kind, {}).get("faults") == []
    ]
    run = [row for row in rows if not "".join(row.get("faults", ["refused"])).startswith("refused")]
    wrong = [row for row in run if row["faults"]]
    assert run, f"seed {seed}"
    assert len(wrong) <= max(1, len(run) / 100), f"seed {seed}: {wrong}"
