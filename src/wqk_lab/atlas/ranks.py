"""The table of published models, scores in the same columns, and a scan's rank among models."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import polars as pl

from wqk._console import display_name, last_part, number
from wqk.tables.schema import statuses
from wqk.tables.score_table import ScoreTable

ATLAS_FOLDER = Path(__file__).parent / "data"

# Published directionality is by excess.
SCORES = {"symmetry": "symmetry", "directionality": "directionality_excess"}

# Scores are medians over layers, with the distances to the quartiles below and above.
ATLAS_COLUMNS: dict[str, pl.DataType] = {
    "source": pl.String(),
    "name": pl.String(),
    "model": pl.String(),
    "stack": pl.String(),
    "modality": pl.String(),
    "parameters": pl.Int64(),
    "symmetry": pl.Float64(),
    "symmetry_below": pl.Float64(),
    "symmetry_above": pl.Float64(),
    "directionality": pl.Float64(),
    "directionality_below": pl.Float64(),
    "directionality_above": pl.Float64(),
    "flags": pl.List(pl.String()),
    "sound": pl.Boolean(),
    "printed": pl.Boolean(),
}


@dataclass(frozen=True)
class Flag:
    """A known problem of a row.

    Attributes
    ----------
    title, explanation
        The short and the full description.
    artifact
        Whether the row's numbers do not describe a trained model's own form.
    drawn
        Models with the same problem that the paper shows only in figures.
    """

    title: str
    explanation: str
    artifact: bool
    drawn: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        """The title and the explanation as one text."""
        return f"{self.title[:1].upper()}{self.title[1:]}. {self.explanation}"


@cache
def flags() -> dict[str, Flag]:
    """Return all flags by name.

    Examples
    --------
    >>> flags()["grouped-heads"].title
    'wrong pairs of heads'
    """
    entries = tomllib.loads((ATLAS_FOLDER / "flags.toml").read_text(encoding="utf-8"))
    return {name: Flag(**entry) for name, entry in entries.items()}


def published() -> pl.DataFrame:
    """Return the rows of Tables S2 and S3 in their order: the left half, then the right half.

    Returns
    -------
    polars.DataFrame
        ``source`` (``published``), ``name`` as printed, ``model`` (the checkpoint), medians over
        layers with their distances to the quartiles, to two decimals (directionality by excess),
        ``flags`` (see `flags`), ``sound``, false if a flag makes the row an artifact, and
        ``printed``, true for all rows of the tables. The directionality of GPT2-medium and Phi-2,
        which Table S3 lacks, is null.

    Examples
    --------
    >>> rows = published()
    >>> rows.height, rows.filter(~rows["sound"]).height
    (70, 19)
    """
    computed = ("flags", "sound", "printed")
    rows = pl.read_csv(
        ATLAS_FOLDER / "published.csv",
        comment_prefix="#",
        schema_overrides={k: v for k, v in ATLAS_COLUMNS.items() if k not in computed},
    )
    return with_flags(
        rows.with_columns(split_flags(), source=pl.lit("published"), printed=pl.lit(True))
    )


def split_flags() -> pl.Expr:
    """Return the words of the column ``flags`` as a list."""
    return pl.col("flags").fill_null("").str.extract_all(r"\S+")


def with_flags(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with the column ``sound``, in the order and types of `ATLAS_COLUMNS`."""
    artifacts = [name for name, flag in flags().items() if flag.artifact]
    rows = rows.with_columns(sound=pl.col("flags").list.set_intersection(artifacts).list.len() == 0)
    return rows.select(pl.col(name).cast(kind) for name, kind in ATLAS_COLUMNS.items())


def marks(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a letter for each flag of some rows, in order of appearance.

    Examples
    --------
    >>> marks([{"flags": []}, {"flags": ["fused-tensor"]}, {"flags": ["mislabeled"]}])
    {'fused-tensor': 'a', 'mislabeled': 'b'}
    """
    names = dict.fromkeys(chain.from_iterable(row["flags"] for row in rows))
    return dict(zip(names, ascii_lowercase, strict=False))


# Metadata of tables comparable with the published scores; missing entries count as these.
PLAIN = {"gamma": 2.0, "folded_norms": False, "biases": False}


def summarize(table: ScoreTable) -> pl.DataFrame:
    """Return a row in the columns of `published` for each checkpoint and stack of a score table.

    Only comparable scores are used: self-attention, the query-key circuit at distance 0, gamma 2,
    without folded norms and biases. Other tables give no rows.

    Returns
    -------
    polars.DataFrame
        The columns of `published`; ``source`` is ``own``, ``name`` the last part of the
        checkpoint's name with its revision and step, ``flags`` the layers' statuses, and
        ``printed`` is false.

    Examples
    --------
    >>> import wqk
    >>> rows = summarize(wqk.scan(wqk.demo_model("encoder")))
    >>> rows.select("name", "stack", "sound").rows()
    [('demo:encoder', 'encoder', True)]
    """
    if any(table.metadata.get(key, value) != value for key, value in PLAIN.items()):
        return pl.DataFrame(schema=ATLAS_COLUMNS)
    plain = plain_layers(table)
    rows = plain.frame.group_by("checkpoint", "revision", "step", "stack", maintain_order=True).agg(
        pl.col("parameters").first(),
        *spreads_of(SCORES),
        flags=statuses().explode().unique(maintain_order=True),
    )
    return with_flags(
        rows.with_columns(
            pl.Series("name", [_name(row) for row in rows.iter_rows(named=True)], pl.String()),
            pl.col("flags").list.set_difference(["ok"]),
            source=pl.lit("own"),
            model="checkpoint",
            modality=pl.lit(None, pl.String()),
            printed=pl.lit(False),
        )
    )


def plain_layers(table: ScoreTable) -> ScoreTable:
    """Return the rows of layers with plain self-attention: query-key circuit, distance 0."""
    return table.layers.filter(
        pl.col("kind") == "self", pl.col("circuit") == "qk", pl.col("distance") == 0
    )


def spreads_of(columns: Mapping[str, str]) -> list[pl.Expr]:
    """Return medians of scores over layers with distances to the quartiles, as published.

    ``columns`` has the column of each score.
    """
    spreads = []
    for score, column in columns.items():
        values = pl.col(column).cast(pl.Float64).fill_nan(None)
        first_quartile = values.quantile(0.25, "linear")
        median = values.quantile(0.5, "linear")
        third_quartile = values.quantile(0.75, "linear")
        spreads += [
            median.alias(score),
            (median - first_quartile).alias(f"{score}_below"),
            (third_quartile - median).alias(f"{score}_above"),
        ]
    return spreads


def _name(row: Mapping[str, Any]) -> str:
    """Return the checkpoint's name, with its revision and step."""
    name = last_part(display_name(row["checkpoint"]))
    if row["revision"]:
        name += f" @ {row['revision']}"
    if row["step"] is not None and str(row["step"]) not in name:
        name += f", step {row['step']}"
    return name


def of_model(rows: pl.DataFrame, row: Mapping[str, Any]) -> pl.DataFrame:
    """Return the `summarize` rows of a published row's model, if possible of its stack.

    Models are identified by the Hub id, or by the last part of the id, for example for a local
    folder.
    """
    hub_id = pl.col("model").str.to_lowercase()
    rows_of_model = rows.filter(hub_id == row["model"].lower())
    if rows_of_model.is_empty():
        last_part_of_id = hub_id.str.split("/").list.last()
        rows_of_model = rows.filter(last_part_of_id == last_part(row["model"]).lower())
    rows_of_stack = rows_of_model.filter(stack=row["stack"])
    return rows_of_model if rows_of_stack.is_empty() else rows_of_stack


def spread(row: Mapping[str, Any], score: str) -> str:
    """Return a score as the paper prints it: the median, and the distances to the quartiles.

    Examples
    --------
    >>> from wqk_lab.atlas.ranks import published
    >>> spread(published().row(0, named=True), "directionality")
    '-0.79 ± [0.11, 0.11]'
    """
    if row[score] is None:
        return "–"
    return f"{number(row[score], 2)} ± {interquartile(row, score)}"


def interquartile(row: Mapping[str, Any], score: str) -> str:
    """Return the distances from the median to the quartiles, ``[below, above]``."""
    return f"[{row[f'{score}_below']:.2f}, {row[f'{score}_above']:.2f}]"


# A larger symmetry exceeds a smaller one; a smaller directionality exceeds a larger one.
SCORE_SIGNS = {"symmetry": 1, "directionality": -1}


@dataclass(frozen=True)
class Standing:
    """Number of published models with scores below a value."""

    exceeded: int
    models: int

    def __str__(self) -> str:
        return f"{self.exceeded} of {self.models}"


@dataclass(frozen=True)
class Position:
    """A median over layers, and how many published encoders and decoders it exceeds.

    Attributes
    ----------
    value
        The scan's median. A symmetry exceeds smaller symmetries. A directionality, by excess,
        exceeds larger directionalities: columns dominate less in these models.
    encoders, decoders
        Numbers of exceeded models, compared at the two printed decimals; equal values are not
        exceeded.
    """

    value: float
    encoders: Standing
    decoders: Standing


@dataclass(frozen=True)
class Placement:
    """The ranks of one stack of a scan among the sound published models; as text, one sentence.

    Attributes
    ----------
    name, stack
        The checkpoint and the stack.
    symmetry, directionality
        The rank of each median; None without a median.
    """

    name: str
    stack: str
    symmetry: Position | None
    directionality: Position | None

    def __str__(self) -> str:
        positions = {
            "more symmetric than": self.symmetry,
            "columns more dominant than in": self.directionality,
        }
        return "; ".join(
            f"{relation} {position.encoders} published encoders and {position.decoders} decoders"
            for relation, position in positions.items()
            if position is not None
        )

    @property
    def others(self) -> list[dict[str, Any]]:
        """The published models in the comparison: ``name``, ``stack`` and both scores."""
        columns = ("name", "stack", *SCORE_SIGNS)
        return sound_models().select(columns).drop_nulls().to_dicts()

    @property
    def meaning(self) -> str:
        """Sentence that compares the symmetry with published models; empty without a symmetry.

        Values between the 10 % and the 90 % quantile are typical.
        """
        if self.symmetry is None:
            return ""
        value = round(self.symmetry.value, 2) + 0.0
        encoder_low, encoder_high = typical_symmetry("encoder")
        decoder_low, decoder_high = typical_symmetry("decoder")
        is_like_encoders = encoder_low <= value <= encoder_high
        is_like_decoders = decoder_low <= value <= decoder_high
        encoders = f"encoders ({encoder_low:.2f} to {encoder_high:.2f})"
        decoders = f"decoders ({decoder_low:.2f} to {decoder_high:.2f})"
        if is_like_encoders and is_like_decoders:
            judgment = f"found among both published {encoders} and {decoders}"
        elif is_like_encoders:
            judgment = f"typical of published {encoders}, not of {decoders}"
        elif is_like_decoders:
            judgment = f"typical of published {decoders}, not of {encoders}"
        elif value > max(encoder_high, decoder_high):
            judgment = f"above most published {encoders} and {decoders}"
        elif value < min(encoder_low, decoder_low):
            judgment = f"below most published {encoders} and {decoders}"
        else:
            judgment = f"between published {encoders} and {decoders}"
        return f"A median symmetry of {value:.2f} is {judgment}."


@cache
def typical_symmetry(stack: str) -> tuple[float, float]:
    """Return the 10 % and the 90 % quantile of the median symmetries of published models.

    Examples
    --------
    >>> typical_symmetry("decoder")[1] < typical_symmetry("encoder")[0]
    True
    """
    symmetries = sound_models().filter(stack=stack)["symmetry"].drop_nulls()
    low = symmetries.quantile(0.1, "linear")
    high = symmetries.quantile(0.9, "linear")
    assert low is not None
    assert high is not None
    return round(low, 2) + 0.0, round(high, 2) + 0.0


def place(table: ScoreTable) -> list[Placement]:
    """Rank a scan's medians among the medians of `sound_models`.

    Returns
    -------
    list of Placement
        One entry for each checkpoint and stack with plain self-attention scores. Left out are
        scores of other forms (folded norms, biases, another circuit, distance or gamma), models of
        a guessed family, models with half of the layers looking untrained, and scans of chosen
        layers, because the published medians are of all layers.

    Examples
    --------
    >>> import wqk
    >>> for placement in place(wqk.scan(wqk.demo_model("encoder"))):
    ...     print(placement)
    more symmetric than 18 of 24 published encoders and 15 of 15 decoders;
    columns more dominant than in 9 of 24 published encoders and 0 of 13 decoders
    """
    untrained = statuses().list.contains("random-looking").mean()
    comparable = table.filter(
        pl.col("family").ne_missing("inferred"),
        untrained.over("checkpoint", "revision", "step", "stack", "kind") < 0.5,
        ~pl.col("checkpoint").fill_null("").is_in([*(table.metadata.get("layers_of_model") or {})]),
    )
    placements = []
    for row in summarize(comparable).iter_rows(named=True):
        positions = [_position(row[score], score) for score in SCORE_SIGNS]
        if any(positions):
            placements.append(Placement(row["name"], row["stack"], *positions))
    return placements


def _position(value: float | None, score: str) -> Position | None:
    if value is None:
        return None
    standings = []
    for stack in ("encoder", "decoder"):
        scores = sound_models().filter(stack=stack)[score].drop_nulls()
        sign = SCORE_SIGNS[score]
        is_exceeded = sign * scores < sign * round(value, 2)
        standings.append(Standing(int(is_exceeded.sum()), len(scores)))
    return Position(value, *standings)


@cache
def sound_models() -> pl.DataFrame:
    """Return the last row of every sound published model.

    Examples
    --------
    >>> sound_models()["stack"].value_counts(sort=True).rows()
    [('encoder', 24), ('decoder', 15)]
    """
    return published().filter("sound").unique("model", keep="last", maintain_order=True)
