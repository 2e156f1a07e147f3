"""The published models: their table, scores as rows like theirs, and a scan's rank among them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import polars as pl

from wqk._console import last_part, number
from wqk.tables.schema import statuses
from wqk.tables.score_table import ScoreTable

ATLAS_FOLDER = Path(__file__).parent / "data"

# Published directionality is by excess.
SCORES = {"symmetry": "symmetry", "directionality": "directionality_excess"}

# Scores are medians over layers, with the distances to the quartiles below and above.
ATLAS_COLUMNS: dict[str, pl.DataType] = {
    **dict.fromkeys(("source", "name", "model", "stack", "modality"), pl.String()),
    "parameters": pl.Int64(),
    **{f"{n}{side}": pl.Float64() for n in SCORES for side in ("", "_below", "_above")},
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
        Short and in full.
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
        """Title and explanation in one."""
        return f"{self.title[:1].upper()}{self.title[1:]}. {self.explanation}"


@cache
def flags() -> dict[str, Flag]:
    """All flags by name.

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
    """Rows with the column ``sound``, in the order and types of `ATLAS_COLUMNS`."""
    artifacts = [name for name, flag in flags().items() if flag.artifact]
    rows = rows.with_columns(sound=pl.col("flags").list.set_intersection(artifacts).list.len() == 0)
    return rows.select(pl.col(name).cast(kind) for name, kind in ATLAS_COLUMNS.items())


def marks(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a letter for each flag of some rows, in the order in which they appear.

    Examples
    --------
    >>> marks([{"flags": []}, {"flags": ["fused-tensor"]}, {"flags": ["mislabeled"]}])
    {'fused-tensor': 'a', 'mislabeled': 'b'}
    """
    names = dict.fromkeys(name for row in rows for name in row["flags"])
    return dict(zip(names, ascii_lowercase, strict=False))


# Metadata of tables comparable with the published scores; missing entries count as these.
PLAIN = {"gamma": 2.0, "folded_norms": False, "biases": False}


def summarize(table: ScoreTable) -> pl.DataFrame:
    """Return a row like the published ones for each checkpoint and stack of a score table.

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
    [('encoder', 'encoder', True)]
    """
    if any(table.metadata.get(key, value) != value for key, value in PLAIN.items()):
        return pl.DataFrame(schema=ATLAS_COLUMNS)
    plain = plain_layers(table)
    rows = plain.frame.group_by("checkpoint", "revision", "step", "stack", maintain_order=True).agg(
        pl.col("parameters").first(),
        *(each for name, column in SCORES.items() for each in spread_of(name, column)),
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
    """Return the layers' rows of plain self-attention: the query-key circuit at distance 0."""
    return table.layers.filter(
        pl.col("kind") == "self", pl.col("circuit") == "qk", pl.col("distance") == 0
    )


def spread_of(score: str, column: str) -> Iterator[pl.Expr]:
    """Median of a column over layers, and the distances to the quartiles, as in published rows."""
    values = pl.col(column).cast(pl.Float64).fill_nan(None)
    low, median, high = (values.quantile(q, "linear") for q in (0.25, 0.5, 0.75))
    yield median.alias(score)
    yield (median - low).alias(f"{score}_below")
    yield (high - median).alias(f"{score}_above")


def _name(row: Mapping[str, Any]) -> str:
    """Return the checkpoint's name, with its revision and step."""
    name = last_part(row["checkpoint"])
    if row["revision"]:
        name += f" @ {row['revision']}"
    if row["step"] is not None and str(row["step"]) not in name:
        name += f", step {row['step']}"
    return name


def of_model(rows: pl.DataFrame, row: Mapping[str, Any]) -> pl.DataFrame:
    """Return the `summarize` rows of a published row's model, if possible of its stack.

    Models are identified by their Hub id or, as for a local folder, by its last part.
    """
    model = pl.col("model").str.to_lowercase()
    named = rows.filter(model == row["model"].lower())
    if named.is_empty():
        named = rows.filter(model.str.split("/").list.last() == last_part(row["model"]).lower())
    of_stack = named.filter(stack=row["stack"])
    return of_stack if of_stack.height else named


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
    """Number of published models whose score a value exceeds."""

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
        The scan's median. A symmetry exceeds smaller ones; a directionality, by excess, exceeds
        larger ones, of models whose columns dominate less.
    encoders, decoders
        Compared at the two printed decimals; equal values are not exceeded.
    """

    value: float
    encoders: Standing
    decoders: Standing


@dataclass(frozen=True)
class Placement:
    """One stack of a scan among the sound published models; as text, one sentence.

    Attributes
    ----------
    name, stack
        The checkpoint, and which stack of it.
    symmetry, directionality
        The ranks of its medians; None without a median.
    """

    name: str
    stack: str
    symmetry: Position | None
    directionality: Position | None

    def __str__(self) -> str:
        return "; ".join(
            f"{relation} {position.encoders} published encoders and {position.decoders} decoders"
            for relation, position in (
                ("more symmetric than", self.symmetry),
                ("columns more dominant than in", self.directionality),
            )
            if position is not None
        )

    @property
    def others(self) -> list[dict[str, Any]]:
        """The models that it is placed among: ``name``, ``stack`` and both scores."""
        columns = ("name", "stack", *SCORE_SIGNS)
        return sound_models().select(columns).drop_nulls().to_dicts()

    @property
    def meaning(self) -> str:
        """Sentence on the published models for which such a symmetry is typical.

        Typical is what lies between the 10 % and the 90 % quantile. Empty without a symmetry.
        """
        if self.symmetry is None:
            return ""
        value = round(self.symmetry.value, 2) + 0.0
        ranges = {stack: typical_symmetry(stack) for stack in ("encoder", "decoder")}
        range_by_stack = {
            stack: f"{stack}s ({low:.2f} to {high:.2f})" for stack, (low, high) in ranges.items()
        }
        holds = [stack for stack, (low, high) in ranges.items() if low <= value <= high]
        other_stacks = [stack for stack in ranges if stack not in holds]
        both_ranges = f"published {range_by_stack['encoder']} and {range_by_stack['decoder']}"
        if not other_stacks:
            judgment = f"found among both {both_ranges}"
        elif holds:
            typical, untypical = range_by_stack[holds[0]], range_by_stack[other_stacks[0]]
            judgment = f"typical of published {typical}, not of {untypical}"
        elif value > max(high for _, high in ranges.values()):
            judgment = f"above most {both_ranges}"
        elif value < min(low for low, _ in ranges.values()):
            judgment = f"below most {both_ranges}"
        else:
            judgment = f"between {both_ranges}"
        return f"A median symmetry of {value:.2f} is {judgment}."


@cache
def typical_symmetry(stack: str) -> tuple[float, float]:
    """Return the 10 % and the 90 % quantile of the median symmetries of published models.

    Examples
    --------
    >>> typical_symmetry("decoder")[1] < typical_symmetry("encoder")[0]
    True
    """
    values = sound_models().filter(stack=stack)["symmetry"].drop_nulls()
    low, high = (values.quantile(q, "linear") for q in (0.1, 0.9))
    assert low is not None
    assert high is not None
    return round(low, 2) + 0.0, round(high, 2) + 0.0


def place(table: ScoreTable) -> list[Placement]:
    """Rank a scan's medians among those of `sound_models`.

    Returns
    -------
    list of Placement
        One for each checkpoint and stack with plain self-attention scores. Tables of other forms
        (folded norms, biases, another circuit, distance or gamma) give none, nor do models whose
        family was guessed or of which half the layers look untrained.

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
        is_exceeded = SCORE_SIGNS[score] * scores < SCORE_SIGNS[score] * round(value, 2)
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
