"""What the paper plots without printing it: scores of every layer, and training curves.

Numbers of the reference implementation's result files, which its authors published under the MIT
license (``data/README.md``). Directionality is by excess, as in all published numbers.
"""

from __future__ import annotations

from functools import cache

import polars as pl

from wqk.atlas.published import DATA, flags, last_part, published, with_flags
from wqk.scanning.surveys.model_sets import model_set, model_sets

# Files with rows that recur in files of their own, with other numbers of parameters.
REPEATED = {"DINO": ("dinov2", "dit-"), "BERT": ("beit",)}

# No layer of an untrained model of these sizes has a larger symmetry.
UNTRAINED = 0.002


def published_layers() -> pl.DataFrame:
    """Symmetry and directionality of every layer of the models that the paper shows.

    Returns
    -------
    polars.DataFrame
        ``modality``, ``file`` (the result file), ``model`` (as it is called there), ``stack``,
        ``layer``, ``symmetry``, ``directionality``, ``parameters``.

    Examples
    --------
    >>> layers = published_layers().filter(model="bert-base-uncased")
    >>> [round(value, 2) for value in layers["symmetry"].head(3)]
    [0.54, 0.61, -0.09]
    """
    return pl.read_parquet(DATA / "published_layers.parquet")


def published_training() -> pl.DataFrame:
    """Scores of every layer along the paper's training runs, from random starts.

    Returns
    -------
    polars.DataFrame
        ``size`` (``4-layer`` or ``12-layer``), ``mode``, ``dataset``, ``step``, ``layer``,
        ``symmetry``, ``directionality``.
    """
    return pl.read_parquet(DATA / "published_training.parquet")


def published_losses() -> pl.DataFrame:
    """Training losses of the paper's runs in nats, every 200 steps: Table 1's numbers are the last.

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
    return pl.read_parquet(DATA / "published_losses.parquet")


@cache
def drawn_models() -> pl.DataFrame:
    """Models that the paper shows in figures without printing their scores, as `published` rows.

    Medians over layers with their distances to the quartiles; ``source`` is ``published``.

    Examples
    --------
    >>> rows = drawn_models()
    >>> rows.height, rows.filter("sound").height
    (128, 108)
    """
    ids = {last_part(m).lower(): m for some in model_sets() for m in model_set(some)}
    printed = published()["model"].implode()
    layers = published_layers().with_columns(
        pl.col("model").str.split("/").list.last().str.to_lowercase().alias("key")
    )
    for file, repeated in REPEATED.items():
        again = pl.any_horizontal(pl.col("key").str.starts_with(start) for start in repeated)
        layers = layers.filter(~((pl.col("file") == file) & again))
    layers = layers.with_columns(
        pl.col("key").replace_strict(ids, default=None).alias("model")
    ).filter(pl.col("model").is_not_null() & ~pl.col("model").is_in(printed))
    index = ["modality", "file", "model", "stack"]
    rows = layers.group_by(index, maintain_order=True).agg(
        pl.col("parameters").first(),
        *(expression for score in ("symmetry", "directionality") for expression in _spread(score)),
        (pl.col("symmetry").abs().max() < UNTRAINED).alias("untrained"),
    )
    rows = rows.unique(["model", "stack"], keep="last", maintain_order=True)
    return with_flags(
        rows.with_columns(
            pl.lit("published").alias("source"),
            pl.Series("name", [last_part(model) for model in rows["model"]]),
            pl.Series(
                "flags",
                [
                    _flags(model, stack, untrained)
                    for model, stack, untrained in rows.select("model", "stack", "untrained").rows()
                ],
            ),
        )
    )


def _spread(score: str) -> list[pl.Expr]:
    column, median = pl.col(score).cast(pl.Float64), pl.col(score).cast(pl.Float64).median()
    return [
        median.alias(score),
        (median - column.quantile(0.25, "linear")).alias(f"{score}_below"),
        (column.quantile(0.75, "linear") - median).alias(f"{score}_above"),
    ]


def _flags(model: str, stack: str, untrained: bool) -> list[str]:
    names = [
        name
        for name, flag in flags().items()
        if model in flag.drawn and not (name == "cross-attention" and stack == "encoder")
    ]
    return [*names, *["random-looking"] * (untrained and "random-looking" not in names)]
