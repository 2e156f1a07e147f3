"""Records to compare with the paper's claims: published models, and runs of this project.

Published scores come from the atlas. Records of our own runs are extracts of the records of
``docs/results``; ``python docs/generate_results.py`` writes them into ``data/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import polars as pl

from wqk_lab.atlas import (
    all_published,
    published_layers,
    published_losses,
    published_training,
    sound_models,
)
from wqk_lab.atlas.reference import REFERENCE_FOLDER as PUBLISHED
from wqk_lab.runs.contrasts import MeasuredContrast, evaluate, read_definition

DATA = Path(__file__).parent / "data"

# Result files of the encoder and of the decoder of encoder-decoders. MusicGen is left out: its
# decoders' numbers describe cross-attention, and its encoders are one model.
ENCODER_DECODERS = {
    "BART": ("BARTEncoder", "BARTDecoder"),
    "T5": ("T5Encoder", "T5Decoder"),
    "SpeechT5": ("SpeechT5Encoder", "SpeechT5Decoder"),
    "Whisper": ("whisper-encoder", "whisper-decoder"),
    "Whisper v2": ("whisperv2-encoder", "whisperv2-decoder"),
    "Whisper v3": ("whisperv3-encoder", "whisperv3-decoder"),
    "DETR": ("DETR-Encoder", "DETR-Decoder"),
}

# The beginning of the names of the vision models that predict pixel after pixel.
AUTOREGRESSIVE_VISION = "imagegpt"

LAST_STEP = 200_000

SCORES = ("symmetry", "directionality")


def language_models() -> pl.DataFrame:
    """Return the medians of sound published language models, one row for each model.

    Examples
    --------
    >>> language_models()["stack"].value_counts(sort=True).rows()
    [('encoder', 17), ('decoder', 15)]
    """
    return sound_models().filter(modality="language")


def vision_models() -> pl.DataFrame:
    """Return the medians of the vision models of Figure S1, one row for each model.

    DETR is left out: it is an encoder-decoder.

    Examples
    --------
    >>> vision_models()["stack"].value_counts(sort=True).rows()
    [('encoder', 29), ('decoder', 8)]
    """
    drawn = all_published().filter("sound", modality="vision")
    one_each = drawn.unique(["model", "stack"], keep="last", maintain_order=True)
    return one_each.filter(~pl.col("name").str.starts_with("detr"))


def encoder_decoders() -> pl.DataFrame:
    """Return the medians over layers of published encoder-decoders, one row for each model.

    Returns
    -------
    polars.DataFrame
        ``family``, ``model``, ``symmetry_encoder``, ``symmetry_decoder``,
        ``directionality_encoder``, ``directionality_decoder``.

    Examples
    --------
    >>> encoder_decoders().height
    23
    """
    layers = published_layers()
    families = []
    for family, (encoder_file, decoder_file) in ENCODER_DECODERS.items():
        encoders = _medians(layers.filter(file=encoder_file), "encoder")
        decoders = _medians(layers.filter(file=decoder_file), "decoder")
        families.append(encoders.join(decoders, on="model").with_columns(family=pl.lit(family)))
    return pl.concat(families).sort("family", "model")


def _medians(layers: pl.DataFrame, stack: str) -> pl.DataFrame:
    """Return the medians over layers of each model's scores, in columns named after the stack."""
    medians = [pl.col(score).cast(float).median().alias(f"{score}_{stack}") for score in SCORES]
    return layers.group_by("model").agg(medians)


def published_pairs() -> pl.DataFrame:
    """Return the medians over layers of the paper's own encoders and decoders at the last step.

    Returns
    -------
    polars.DataFrame
        ``size``, ``dataset``, and the columns of scores of `encoder_decoders`.

    Examples
    --------
    >>> published_pairs().height
    6
    """
    keys = ["size", "dataset"]
    ends = (
        published_training()
        .filter(step=LAST_STEP)
        .group_by(*keys, "mode")
        .agg(pl.col(score).cast(float).median() for score in SCORES)
    )
    return ends.pivot("mode", index=keys, values=list(SCORES)).sort(keys)


def published_ends(mode: str) -> pl.DataFrame:
    """Return the last training losses of the paper's runs of a mode, from both starts.

    Returns
    -------
    polars.DataFrame
        ``size``, ``dataset``, ``random``, ``symmetric`` (nats).

    Examples
    --------
    >>> ends = published_ends("decoder").filter(size="4-layer", dataset="Wikipedia")
    >>> ends.select(pl.col("random", "symmetric").round(4)).rows()
    [(1.9035, 1.8069)]
    """
    ends = published_losses().filter(step=LAST_STEP, mode=mode)
    keys = ["size", "dataset"]
    return (
        ends.pivot("initialization", index=keys, values="loss")
        .cast({"random": pl.Float64, "symmetric": pl.Float64})
        .sort(keys)
    )


def printed_speedups() -> dict[str, float]:
    """Return the largest speed-up that Table 1 prints, by size of the model.

    Examples
    --------
    >>> printed_speedups()
    {'4-layer': 0.73, '12-layer': 0.35}
    """
    table = pl.read_csv(PUBLISHED / "table1.csv", comment_prefix="#")
    largest = table.group_by("size", maintain_order=True).agg(pl.col("speed_up").max())
    return dict(largest.iter_rows())


def trained() -> pl.DataFrame:
    """Return the scores of this project's encoders and decoders that were trained in the same way.

    Returns
    -------
    polars.DataFrame
        ``recipe``, ``mode``, ``seed``, and the means over layers at the end of training,
        ``symmetry`` and ``directionality`` (excess).

    Examples
    --------
    >>> trained().group_by("recipe", maintain_order=True).len().rows()[0]
    ('pre-norm, Wikipedia', 10)
    """
    return pl.read_csv(DATA / "trained.csv")


def start_contrasts() -> dict[str, MeasuredContrast]:
    """Return the contrasts of encoders' starts by their names, as on the page of results.

    Examples
    --------
    >>> round(start_contrasts()["published"].value, 2)
    -0.14
    """
    records: dict[str, dict[str, dict[int, float]]] = {}
    for measure, start, seed, value in pl.read_csv(DATA / "starts.csv").iter_rows():
        records.setdefault(measure, {}).setdefault(start, {})[seed] = value
    return {result.contrast.name: result for result in evaluate(read_definition(DATA)[0], records)}


def start_symmetries(start: str, quantity: Literal["median", "range"]) -> dict[int, float]:
    """Return the median or the range over layers of a start's symmetry at step 1,000, by seed.

    Examples
    --------
    >>> sorted(start_symmetries("published", "median"))
    [1, 2, 3, 4, 5]
    """
    rows = pl.read_csv(DATA / "symmetries.csv").filter(start=start)
    return dict(rows.select("seed", quantity).iter_rows())
