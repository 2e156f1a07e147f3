"""Comparisons of models whose sizes differ end with a verdict, or with an error in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.command import run
from tests.limits import failing
from tests.small import save

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError

SIZES: dict[str, Any] = {"width": 32, "neurons": 48, "layers": 2, "key_heads": 2, "vocabulary": 50}
OTHER_SIZES = {"width": 48, "neurons": 64, "layers": 3, "key_heads": 4, "vocabulary": 60}
HEADS, HEAD_WIDTH = 4, 8


def complete(
    *, width: int, neurons: int, layers: int, key_heads: int, vocabulary: int, tied: bool = True
) -> StateDict:
    """A complete LLaMA of the given sizes, with embeddings, norms and feed-forward networks."""
    random = np.random.default_rng(0)
    queries, keys = HEADS * HEAD_WIDTH, key_heads * HEAD_WIDTH
    tensors = {"model.embed_tokens.weight": random.standard_normal((vocabulary, width))}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (neurons, width),
            "mlp.up_proj": (neurons, width),
            "mlp.down_proj": (width, neurons),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        for name, shape in shapes.items():
            tensors[f"{at}.{name}.weight"] = random.standard_normal(shape)
    tensors["model.norm.weight"] = random.standard_normal(width)
    if not tied:
        tensors["lm_head.weight"] = random.standard_normal((vocabulary, width))
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": neurons,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": key_heads,
        "head_dim": HEAD_WIDTH,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    return StateDict(tensors, config, "complete")


def compared(reference: StateDict, candidate: StateDict, up_to: Collection[str]) -> str:
    """The verdict of a comparison; of sizes that cannot be compared, the word *refused*."""
    try:
        comparison = wqk.same(reference, candidate, everything=True, up_to=up_to)
    except CheckpointError as error:
        return "refused" if "only equal ones can be compared" in str(error) else str(error)
    assert str(comparison)
    return comparison.sentence


ONE_OR_TWO = [*combinations(SIZES, 1), *combinations(SIZES, 2)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("up_to", [(), ("heads",), ("neurons",), ("stream",)])
@pytest.mark.parametrize("changed", ONE_OR_TWO)
def test_models_of_other_sizes_are_not_the_same(
    changed: Sequence[str], up_to: Collection[str], tied: bool
) -> None:
    other_sizes = SIZES | {name: OTHER_SIZES[name] for name in changed}
    models = [complete(**SIZES), complete(**other_sizes, tied=tied)]
    for reference, candidate in (models, models[::-1]):
        assert compared(reference, candidate, up_to).startswith(("Not the same", "refused"))


def test_a_comparison_of_all_tensors_names_the_unequal_sizes(tmp_path: Path) -> None:
    wide = SIZES | {"width": 48}
    for name, sizes in (("a", SIZES), ("b", wide)):
        model = complete(**sizes)
        save(tmp_path / name, model._arrays, model.config)
    report = tmp_path / "report.xml"
    done = run("same", tmp_path / "a", tmp_path / "b", "--all", "--junit", report, exits=2)
    assert "on 32 dimensions in one checkpoint" in done.stderr
    message = str(ElementTree.parse(report).getroot().find("testcase/error").get("message"))
    assert "on 32 dimensions in one checkpoint" in message


@pytest.mark.parametrize("line", [("same", "a", "a"), ("verify", "a")])
def test_an_unexpected_error_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: Sequence[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = complete(**SIZES)
    save(tmp_path / "a", model._arrays, model.config)
    monkeypatch.setattr("wqk.checkpoints.open_local", failing(ZeroDivisionError("by nothing")))
    done = run(*line, "--junit", "report.xml", exits=2)
    assert "unexpected ZeroDivisionError: by nothing" in done.stderr
    suite = ElementTree.parse("report.xml").getroot()  # our own file
    assert suite.get("errors") == "1"
    assert "by nothing" in str(suite.find("testcase/error").get("message"))
