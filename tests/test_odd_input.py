"""Odd models and arguments: each verb gives a result or one error of wqk's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import small
from tests.command import run

import wqk

D, V = 32, 50
GAIN = "model.layers.0.input_layernorm.weight"


def folder(path: Path, tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A small LLaMA, with other tensors or another configuration."""
    sizes = {"key_heads": 4, "head_width": 8, "width": D, "sides": "qkvo", "norms": True}
    made = small.llama(
        **sizes, vocab_size=V, rms_norm_eps=1e-5, max_position_embeddings=64, **config
    )
    embeddings = np.random.default_rng(1).standard_normal((2, V, D))
    ends = dict(zip(("model.embed_tokens.weight", "lm_head.weight"), embeddings, strict=True))
    return small.save(path, {**made._arrays, **ends, **(tensors or {})}, made.config)


ODD: dict[str, dict[str, Any]] = {
    "no embeddings": {"model.embed_tokens.weight": np.zeros((0, D))},
    "short outputs": {"lm_head.weight": np.zeros((3, D))},
    "narrow outputs": {"lm_head.weight": np.zeros((V, D // 2))},
    "embeddings in one dimension": {"model.embed_tokens.weight": np.zeros(D)},
    "gains in two dimensions": {GAIN: np.ones((D, D))},
    "gains in a grid": {GAIN: np.ones((2, D // 2))},
    "gains that are NaN": {GAIN: np.full(D, np.nan)},
    "no gains": {GAIN: np.zeros(0)},
    "few gains": {GAIN: np.ones(D - 1)},
    "a gain": {GAIN: np.ones(())},
}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn, factor": {"rope_type": "yarn", "factor": 0.0},
    "yarn, length": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 0,
        "low_freq_factor": 0,
        "high_freq_factor": 0,
        "original_max_position_embeddings": 0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [0, 0, 0, 0],
        "long_factor": [0, 0, 0, 0],
        "original_max_position_embeddings": 0,
    },
    "linear": {"rope_type": "linear", "factor": 0},
}
LINES = [
    "tokens {odd} --layer 0 --head 1",
    "tokens {odd} --layer 0 --head 1 --circuit ov --top 999999999",
    "tokens {odd} --layer 0 --head 1 --fold-norm",
    "scan {odd} --fold-norm",
    "scan {odd} --distance 0,1,5",
    "same {odd} {plain}",
    "same {plain} {odd}",
    "kin {odd} {plain}",
    "compose {odd} --top 99999999999999999999999",
]


@pytest.mark.parametrize("name", [*ODD, *SCALINGS])
def test_odd_models_are_a_result_or_a_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr("wqk.kinship.kin.RENUMBERINGS", 999)
    plain = folder(tmp_path / "plain")
    more = {"rope_scaling": SCALINGS[name]} if name in SCALINGS else {}
    odd = folder(tmp_path / "odd", ODD.get(name), **more)
    for line in LINES:
        done = run(*line.format(odd=odd, plain=plain).split(), exits=None)
        assert "unexpected" not in done.stderr, (line, done.stderr)
        assert "nan" not in done.stdout, (line, done.stdout)


def test_names_of_families_have_a_limit(tmp_path: Path):
    path = tmp_path / "family.toml"
    for text in ('query = "{layer}%s"', "%s = 1", 'name = "%s"'):
        path.write_text(text % ("a" * 50_000))
        with pytest.raises(wqk.errors.UnknownFamily, match="too long"):
            wqk.open(wqk.demo_model("encoder"), family=path)
