"""The curves of the paper's own training runs: Figures 3, S3, S4 and S5."""

from __future__ import annotations

import polars as pl

from wqk.atlas import published_losses, published_training
from wqk.figures.curves import CURVE, from_layers, of_cells

# Corpora of the figures that show the 12-layer models; S5 shows a 4-layer one.
CORPORA = {
    "fig3": ("Wikipedia",), "s3": ("Jigsaw", "Red Pajama"), "s4": ("Jigsaw", "Red Pajama"),
}  # fmt: skip
SIZE = "12-layer"
STARTS = {"size": "4-layer", "dataset": "Red Pajama", "mode": "encoder"}


def published_pairs(figure: str) -> pl.DataFrame:
    """Scores along the training of the paper's encoders and decoders, from random starts.

    Returns
    -------
    polars.DataFrame
        ``comparison`` (size and corpus), ``mode``, and the columns of `wqk.figures.curves`.

    Examples
    --------
    >>> published_pairs("fig3")["mode"].unique(maintain_order=True).to_list()
    ['encoder', 'decoder']
    """
    training = published_training()
    return of_cells(
        {
            f"published: {dataset}, {SIZE}": of_cells(
                {
                    mode: _curves(training.filter(size=SIZE, dataset=dataset, mode=mode))
                    for mode in ("encoder", "decoder")
                },
                "mode",
            )
            for dataset in CORPORA[figure]
        },
        "comparison",
    )


def published_starts() -> pl.DataFrame:
    """Figure S5 as far as it was published: both losses, and the scores from random initialization.

    The losses are ``training_loss``. Returns ``start``, and the columns of `wqk.figures.curves`.

    Examples
    --------
    >>> published_starts().group_by("start", maintain_order=True).len().rows()
    [('random', 3200), ('symmetric', 1000)]
    """
    losses = published_losses().filter(**STARTS)
    scores = published_training().filter(**STARTS)
    frames = {
        start: losses.filter(initialization=start).select(
            pl.lit("training_loss").alias("quantity"), "step", pl.col("loss").alias("value")
        )
        for start in ("random", "symmetric")
    }
    curves = {start: _one_run(frame) for start, frame in frames.items()}
    curves["random"] = pl.concat([_curves(scores), curves["random"]])
    return of_cells(curves, "start")


def _curves(scores: pl.DataFrame) -> pl.DataFrame:
    """From a run's layers to curves, by layer and over layers."""
    renamed = scores.rename({"directionality": "directionality_excess"})
    return _one_run(from_layers(renamed.with_columns(pl.col("layer").cast(pl.Int64))))


def _one_run(curves: pl.DataFrame) -> pl.DataFrame:
    """Curves without bands, since there is one run of each."""
    value = pl.col("value")
    typed = curves.cast({"value": pl.Float64, "step": pl.Int64})
    whole = pl.concat([pl.DataFrame(schema=CURVE), typed], how="diagonal_relaxed")
    return (
        whole.with_columns(low=value, high=value, runs=pl.lit(1, pl.UInt32))
        .select(pl.col(name).cast(kind) for name, kind in CURVE.items())
        .sort("quantity", "layer", "step")
    )
