"""Runs and rows of score tables with known numbers, made without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wqk._files import append_lines
from wqk.tables.run import METRICS, SCORES, UPDATES, Run, create_run
from wqk.tables.schema import SCHEMA
from wqk.tables.score_table import ScoreTable

RECIPE = {
    "preset": "fast",
    "mode": "encoder",
    "objective": "masked",
    "layers": 3,
    "init": "random",
    "penalty": "none",
    "penalty_weight": 0.0,
    "steps": 40,
    "seed": 1,
    "dropout": 0.0,
    "width": 8,
    "batch": 4,
    "block": 16,
    "accumulation": 1,
}


def row(layer: int, **values: Any) -> dict[str, Any]:
    """A layer's row of a score table, with all its columns."""
    columns = {
        "checkpoint": "model",
        "parameters": 1_000_000,
        "stack": "encoder",
        "kind": "self",
        "layer": layer,
        "circuit": "qk",
        "distance": 0,
        "symmetry": 0.1,
        "directionality": 0.0,
        "directionality_excess": 0.0,
        "status": "ok",
    }
    return dict.fromkeys(SCHEMA) | columns | values


def table(*rows: dict[str, Any]) -> ScoreTable:
    return ScoreTable.from_rows(rows)


def logged(
    folder: Path, recipe: dict[str, Any], losses: Mapping[int, float], **settings: Any
) -> Run:
    """A run of this recipe with these losses by step."""
    base_settings = {"recipe": {"mode": "encoder"} | recipe, "corpus": {"folder": "/texts/a"}}
    run = create_run(folder, base_settings | settings)
    for step, loss in losses.items():
        append_lines(run.folder / METRICS, {"step": step, "held_out_loss": loss, "loss": loss})
    return run


def make_run(
    folder: Path, steps: Iterable[int] = (0, 20, 40), corpus: str = "wikipedia", **recipe: Any
) -> Run:
    """A run with scores, updates and losses that its seed decides."""
    settings = RECIPE | recipe
    if settings["mode"] == "decoder" and "objective" not in recipe:
        settings["objective"] = "causal"
    text = {"folder": f"/texts/{corpus}", "fingerprint": f"{corpus} itself"}
    run = create_run(folder, {"recipe": settings, "corpus": text})
    dice = np.random.default_rng(settings["seed"])
    for step in steps:
        append_lines(run.folder / METRICS, {"step": step, "held_out_loss": 3 - dice.uniform()})
        for layer in range(settings["layers"]):
            for name in (SCORES, UPDATES):
                symmetry, excess = dice.uniform(-1, 1, 2)
                place = {"step": step, "stack": settings["mode"], "checkpoint": run.name}
                scores = {"symmetry": symmetry, "directionality_excess": excess}
                append_lines(run.folder / name, row(layer, **place, **scores))
    return run
