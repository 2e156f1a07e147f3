"""The groups of a report: rows of one kind of attention in one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import polars as pl

from wqk.errors import TableError
from wqk.tables.schema import KEY
from wqk.tables.score_table import ScoreTable


@dataclass(frozen=True)
class Group:
    """One model's attention of one kind, at all its steps and distances, with a unique label."""

    label: str
    rows: pl.DataFrame
    metadata: Mapping[str, Any]

    @property
    def latest(self) -> pl.DataFrame:
        """The rows of the last step, at the smallest distance."""
        step, distance = self.rows["step"].max(), self.rows["distance"].min()
        return self.rows.filter(
            pl.col("step").eq_missing(step), pl.col("distance").eq_missing(distance)
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        """One row of the group, for the values that all rows share."""
        layers = self.latest.filter(pl.col("head").is_null())
        return (layers if layers.height else self.latest).row(0, named=True)


def groups(tables: Sequence[ScoreTable]) -> list[Group]:
    """The groups of all tables in order, with the shortest names that are distinct.

    Of rows with the same key, the first table's is kept.

    Examples
    --------
    >>> from wqk.tables.score_table import ScoreTable
    >>> rows = [{"checkpoint": f"runs/bert/checkpoint-{step}", "step": step} for step in (1, 2)]
    >>> [(group.label, len(group.rows)) for group in groups([ScoreTable.from_rows(rows)])]
    [('runs/bert', 2)]
    """
    if not any(map(len, tables)):
        raise TableError("a report needs at least one row of scores, got none")
    frame = pl.concat(
        table.frame.with_columns(model_name().alias("model"), pl.lit(number).alias("table"))
        for number, table in enumerate(tables)
    )
    frame = frame.unique(KEY, keep="first", maintain_order=True)
    parts = frame.partition_by("model", "stack", "kind", "circuit", maintain_order=True)
    firsts = [part.row(0, named=True) for part in parts]
    short = short_names(list(dict.fromkeys(first["model"] for first in firsts)))
    found = []
    for first, part in zip(firsts, parts, strict=True):
        label = short[first["model"]]
        others = [other for other in firsts if short[other["model"]] == label]
        for column in ("stack", "kind", "circuit"):
            if len({other[column] for other in others}) > 1:
                label += f", {first[column]}"
        found.append(Group(label, part.drop("model", "table"), tables[first["table"]].metadata))
    return found


# Stacks by the color that they have in every figure; colors that a report has for each.
KINDS = {"encoder": "encoder", "vision": "encoder", "decoder": "decoder"}
SHADES = 3


def colors(groups: Sequence[Group]) -> list[str]:
    """The names of the groups' colors: a shade of their stack's.

    Examples
    --------
    >>> from wqk.tables.score_table import ScoreTable
    >>> stacks = ("encoder", "decoder", "encoder")
    >>> rows = [{"checkpoint": str(i), "stack": stack} for i, stack in enumerate(stacks)]
    >>> colors(globals()["groups"]([ScoreTable.from_rows(rows)]))
    ['encoder-0', 'decoder-0', 'encoder-1']
    """
    seen: Counter[str] = Counter()
    names = []
    for group in groups:
        kind = KINDS.get(str(group.facts["stack"]), "other")
        names.append(f"{kind}-{seen[kind] % SHADES}")
        seen[kind] += 1
    return names


def model_name() -> pl.Expr:
    """The checkpoint without its step's folder, and the revision unless that is a step."""
    step = pl.concat_str(pl.lit("checkpoint-"), pl.col("step"))
    without = pl.col("checkpoint").str.strip_suffix(step).str.strip_chars_end("/\\")
    name = pl.when(pl.col("step").is_null()).then(pl.col("checkpoint")).otherwise(without)
    revision = pl.when(pl.col("step").is_null()).then(pl.format(" @ {}", "revision"))
    return pl.concat_str(name.fill_null("unnamed"), revision.fill_null(""))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """The shortest distinct suffix of each name; Hub ids stay whole.

    Examples
    --------
    >>> list(short_names(["/a/bert", "/b/bert", "/c/gpt", "owner/model"]).values())
    ['a/bert', 'b/bert', 'gpt', 'owner/model']
    """
    parts = {name: PurePath(name).parts or (name,) for name in names}

    def shorten(name: str) -> str:
        own = parts[name]
        is_hub_id = len(own) == 2 and own[0] != "/"
        for length in range(2 if is_hub_id else 1, len(own) + 1):
            suffix = own[-length:]
            if sum(other[-length:] == suffix for other in parts.values()) == 1:
                return "/".join(suffix)
        return name

    return {name: shorten(name) for name in names}
