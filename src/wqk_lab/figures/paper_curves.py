"""Curves of the paper's training runs: Figures 3, S3, S4 and S5."""

from __future__ import annotations

import polars as pl

from wqk_lab.atlas import published_losses, published_training
from wqk_lab.figures.curves import from_layers, of_cells, over_seeds

# Corpora of the figures that show the 12-layer models; S5 shows a 4-layer one.
CORPORA = {
    "fig3": ("Wikipedia",),
    "s3": ("Jigsaw", "Red Pajama"),
    "s4": ("Jigsaw", "Red Pajama"),
}
SIZE = "12-layer"
STARTS = {"size": "4-layer", "dataset": "Red Pajama", "mode": "encoder"}


def published_pairs(figure: str) -> pl.DataFrame:
    """Return scores along the training of the paper's encoders and decoders, from random starts.

    Columns are ``comparison`` (size and corpus), ``mode`` and the columns of
    `wqk_lab.figures.curves`.

    Examples
    --------
    >>> published_pairs("fig3")["mode"].unique(maintain_order=True).to_list()
    ['encoder', 'decoder']
    """
    curves_by_comparison = {}
    for dataset in CORPORA[figure]:
        curves_by_mode = {
            mode: _score_curves(size=SIZE, dataset=dataset, mode=mode)
            for mode in ("encoder", "decoder")
        }
        comparison = f"published: {dataset}, {SIZE}"
        curves_by_comparison[comparison] = of_cells(curves_by_mode, "mode")
    return of_cells(curves_by_comparison, "comparison")


def published_starts() -> pl.DataFrame:
    """Return the published part of Figure S5: losses, and scores from random initialization.

    Columns are ``start`` and the columns of `wqk_lab.figures.curves`; losses are ``training_loss``.

    Examples
    --------
    >>> published_starts().group_by("start", maintain_order=True).len().rows()
    [('random', 3200), ('symmetric', 1000)]
    """
    losses = published_losses().filter(**STARTS)
    curves = {}
    for start in ("random", "symmetric"):
        losses_of_start = losses.filter(initialization=start).select(
            "step", quantity=pl.lit("training_loss"), value="loss"
        )
        curves[start] = over_seeds([losses_of_start])
    curves["random"] = pl.concat([_score_curves(**STARTS), curves["random"]])
    return of_cells(curves, "start")


def _score_curves(**run: str) -> pl.DataFrame:
    """Return the curves of one run, by layer and over layers."""
    scores = published_training().filter(**run)
    return over_seeds([from_layers(scores.rename({"directionality": "directionality_excess"}))])
