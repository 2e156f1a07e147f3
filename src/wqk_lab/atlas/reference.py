"""Values that the paper plots but does not print: scores of layers, and training curves.

The numbers are from the result files of the reference implementation, which its authors published
under the MIT license (``data/README.md``). Directionality is by excess, as everywhere in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from wqk._console import last_part
from wqk.scanning.surveys.model_sets import model_set, model_sets
from wqk_lab.atlas.ranks import SCORES, flags, published, spreads_of, with_flags

REFERENCE_FOLDER = Path(__file__).parent / "data"

# Result files, and beginnings of models in them that recur in other files with other numbers of
# parameters.
REPEATED = {"DINO": ("dinov2", "dit-"), "BERT": ("beit",)}

# No layer of an untrained model of these sizes has a symmetry of this magnitude.
UNTRAINED = 0.002


def published_layers() -> pl.DataFrame:
    """Return symmetry and directionality of every layer of the models in the paper's figures.

    Returns
    -------
    polars.DataFrame
        ``modality``, ``file`` (the result file), ``model`` (the name in this file), ``stack``,
        ``layer``, ``symmetry``, ``directionality``, ``parameters``.

    Examples
    --------
    >>> layers = published_layers().filter(model="bert-base-uncased")
    >>> [round(value, 2) for value in layers["symmetry"].head(3)]
    [0.54, 0.61, -0.09]
    """
    return pl.read_parquet(REFERENCE_FOLDER / "published_layers.parquet")


def published_training() -> pl.DataFrame:
    """Return scores of every layer in the paper's training runs from random starts.

    Returns
    -------
    polars.DataFrame
        ``size`` (``4-layer`` or ``12-layer``), ``mode``, ``dataset``, ``step``, ``layer``,
        ``symmetry``, ``directionality``.
    """
    return pl.read_parquet(REFERENCE_FOLDER / "published_training.parquet")


def published_losses() -> pl.DataFrame:
    """Return the training losses of the paper's runs in nats, every 200 steps.

    Returns
    -------
    polars.DataFrame
        ``size``, ``mode``, ``dataset``, ``initialization`` (``random`` or ``symmetric``), ``step``,
        ``loss``.

    Examples
    --------
    >>> ends = published_losses().filter(
    ...     size="4-layer", mode="encoder", dataset="Wikipedia", step=200_000
    ... )
    >>> {row["initialization"]: round(row["loss"], 2) for row in ends.iter_rows(named=True)}
    {'symmetric': 0.81, 'random': 0.98}
    """
    return pl.read_parquet(REFERENCE_FOLDER / "published_losses.parquet")


@cache
def drawn_models() -> pl.DataFrame:
    """Return the models in figures without printed scores, as rows of `published`.

    The column ``printed`` is false.

    Examples
    --------
    >>> rows = drawn_models()
    >>> rows.height, rows.filter("sound").height
    (128, 108)
    """
    layers = published_layers().with_columns(
        pl.col("model").str.split("/").list.last().str.to_lowercase().alias("key")
    )
    for file, repeated in REPEATED.items():
        is_repeated = pl.any_horizontal(pl.col("key").str.starts_with(start) for start in repeated)
        layers = layers.filter(~((pl.col("file") == file) & is_repeated))
    ids = {}
    for set_name in model_sets():
        for hub_id in model_set(set_name):
            ids[last_part(hub_id).lower()] = hub_id
    model = pl.col("model")
    rows = (
        layers.with_columns(model=pl.col("key").replace_strict(ids, default=None))
        .filter(model.is_not_null() & ~model.is_in(published()["model"].implode()))
        .group_by("modality", "file", "model", "stack", maintain_order=True)
        .agg(
            pl.col("parameters").first(),
            *spreads_of({score: score for score in SCORES}),
            untrained=pl.col("symmetry").abs().max() < UNTRAINED,
        )
        .unique(["model", "stack"], keep="last", maintain_order=True)
    )
    return with_flags(
        rows.with_columns(
            pl.Series("name", map(last_part, rows["model"])),
            pl.Series("flags", [_flags(row) for row in rows.iter_rows(named=True)]),
            source=pl.lit("published"),
            printed=pl.lit(False),
        )
    )


def _flags(row: Mapping[str, Any]) -> list[str]:
    names = [
        name
        for name, flag in flags().items()
        if row["model"] in flag.drawn
        and not (name == "cross-attention" and row["stack"] == "encoder")
    ]
    if row["untrained"] and "random-looking" not in names:
        names.append("random-looking")
    return names
