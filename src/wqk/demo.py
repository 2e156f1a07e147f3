"""Two small models that come with the package: one encoder and one decoder, trained alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from wqk.attention import read_attention
from wqk.scanning import scan
from wqk.tables import ScoreTable, join

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "demo_models"
MODELS = ("encoder", "decoder")


def demo_model(name: Literal["encoder", "decoder"]) -> Path:
    """Folder of a model that comes with the package: its query and key weights and configuration.

    Both were trained on the same text, with the same shape and recipe, one to fill in masked
    characters and one to predict the next (``examples/train_demo_pair.py``).

    Examples
    --------
    >>> sorted(path.name for path in demo_model("decoder").iterdir())
    ['config.json', 'model.safetensors']
    """
    return FOLDER / name


def demo_training() -> dict[str, Any]:
    """How the demo pair was trained: text, steps, losses."""
    training: dict[str, Any] = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    return training


def demo_table() -> ScoreTable:
    """Scores of the encoder and the decoder, in one table, under these names."""
    tables = [scan(FOLDER / name) for name in MODELS]
    return join(
        [
            ScoreTable(table.frame.with_columns(checkpoint=pl.lit(name)), table.metadata)
            for name, table in zip(MODELS, tables, strict=True)
        ]
    )


def demo_figure(table: ScoreTable) -> Figure:
    """Score curves of both models, and one layer's matrix of each (needs matplotlib)."""
    from wqk.figures import contrast

    # The layers in which each model shows its structure most.
    layers = table.layers.frame
    encoder = layers.filter(checkpoint="encoder").sort("symmetry")["layer"][-1]
    decoder = layers.filter(checkpoint="decoder").sort("directionality_excess")["layer"][0]
    matrices = {
        f"encoder, layer {encoder}": read_attention(demo_model("encoder"), encoder).form.dense(),
        f"decoder, layer {decoder}": read_attention(demo_model("decoder"), decoder).form.dense(),
    }
    return contrast(table, matrices)
