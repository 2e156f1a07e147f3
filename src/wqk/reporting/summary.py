"""The text and numbers of a report outside its figures, as escaped HTML, by groups of rows.

Installed packages may know the place of scores among those of other models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import PurePath
from typing import Any

import polars as pl

from wqk._console import count, kind_in_words, number
from wqk.errors import TableError
from wqk.tables.rendering import HEADLINE, STATUS_MEANINGS, label, place, shades_of
from wqk.tables.rendering import notes as notes_of
from wqk.tables.score_table import GROUP, KEY, ScoreTable, statuses
from wqk.tables.sheet import Cell, Sheet, SheetColumn


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
    """Return the groups of all tables in order, with the shortest names that are distinct.

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


def colors(groups: Sequence[Group]) -> list[str]:
    """Return the names of the groups' colors: a shade of their stack's.

    Examples
    --------
    >>> from wqk.tables.score_table import ScoreTable
    >>> stacks = ("encoder", "decoder", "encoder")
    >>> rows = [{"checkpoint": str(i), "stack": stack} for i, stack in enumerate(stacks)]
    >>> colors(globals()["groups"]([ScoreTable.from_rows(rows)]))
    ['encoder-0', 'decoder-0', 'encoder-1']
    """
    stacks = (str(group.facts["stack"]) for group in groups)
    return [f"{kind}-{shade}" for kind, shade in shades_of(stacks)]


def model_name() -> pl.Expr:
    """Return the checkpoint without its step's folder, and the revision unless that is a step."""
    step = pl.concat_str(pl.lit("checkpoint-"), pl.col("step"))
    without = pl.col("checkpoint").str.strip_suffix(step).str.strip_chars_end("/\\")
    name = pl.when(pl.col("step").is_null()).then(pl.col("checkpoint")).otherwise(without)
    revision = pl.when(pl.col("step").is_null()).then(pl.format(" @ {}", "revision"))
    return pl.concat_str(name.fill_null("unnamed"), revision.fill_null(""))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the shortest distinct suffix of each name; Hub ids stay whole.

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


PARTIAL = {"partial": "not the model's whole attention score"}


def summary_table(groups: Sequence[Group]) -> str:
    """A table with a row for each group: what it is, medians and quartiles over its layers."""
    sheet = Sheet(
        [SheetColumn(name, text=True) for name in ("model", "attention")]
        + [SheetColumn(name) for name in ("parameters stored", "layers", "heads", "width")]
        + [SheetColumn(label(score)) for score in HEADLINE]
    )
    for group, color in zip(groups, colors(groups), strict=True):
        facts, layers = group.facts, ScoreTable(group.latest).layers
        medians = layers.summary()
        attention = f"{facts['family']} · {facts['stack']} {kind_in_words(facts['kind'])}"
        if facts["circuit"] != "qk":
            attention += f" · {facts['circuit']} circuit"
        if facts["step"] is not None:
            attention += f" · step {facts['step']:,}"
        name = (
            f'<span class="key" style="--color: var(--{color})"></span>'
            f'<span title="{escape(str(facts["checkpoint"]))}">{escape(group.label)}</span>'
        )
        sheet.add(
            Cell(group.label, html=name),
            attention,
            count(facts["parameters"]),
            str(len(layers)),
            _several(layers.frame, "heads", "key_heads"),
            _several(layers.frame, "d_query", "d_key"),
            *(_median(medians, score) for score in HEADLINE),
        )
    return sheet.html()


def _several(layers: pl.DataFrame, first: str, second: str) -> str:
    """Return the values of two columns over the layers, joined unless they are equal."""
    one, other = (_span(layers[column].drop_nulls().to_list()) for column in (first, second))
    if one == other:
        return one
    return f"{one} over {other}" if first == "heads" else f"{one} × {other}"


def _span(values: Sequence[int]) -> str:
    low, high = min(values, default=None), max(values, default=None)
    if low is None:
        return "–"
    return str(low) if low == high else f"{low} to {high}"


def _median(summary: pl.DataFrame, score: str) -> Cell:
    """Median and quartiles in the first row of a summary."""
    if not summary.height or summary[f"{score}_median"][0] is None:
        return Cell("–")
    middle, low, high = (summary[f"{score}_{name}"][0] for name in ("median", "q25", "q75"))
    middle, low, high = (number(value, 2).replace("-", "−") for value in (middle, low, high))
    return Cell(middle, aside=f"{low} to {high}")


def placements(groups: Sequence[Group]) -> dict[int, Any]:
    """By number, each comparable group's place among other models."""
    placed = {
        number: place(ScoreTable(group.latest, group.metadata))
        for number, group in enumerate(groups)
    }
    return {number: found[0] for number, found in placed.items() if found}


def placement_list(groups: Sequence[Group], placed: dict[int, Any]) -> str:
    """One sentence for each group, as HTML."""
    items = (
        f"<li>{escape(groups[number].label)}: {escape(str(placement))}. "
        f"{escape(placement.meaning)}</li>"
        for number, placement in placed.items()
    )
    return f"<ul>{''.join(items)}</ul>"


def points(placed: dict[int, Any]) -> dict[str, Any] | None:
    """Return the other models and the report's own, as data for the page's script."""
    own = [
        {"group": number, "symmetry": p.symmetry.value, "directionality": p.directionality.value}
        for number, p in placed.items()
        if p.symmetry and p.directionality
    ]
    return {"models": next(iter(placed.values())).others, "own": own} if own else None


def notes(groups: Sequence[Group], tables: Sequence[ScoreTable]) -> str:
    """Caveats as an HTML list; empty if there are none."""
    lines = [escape(line) for line in dict.fromkeys(_notes(groups, tables))]
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _notes(groups: Sequence[Group], tables: Sequence[ScoreTable]) -> Iterator[str]:
    for group in groups:
        layers = group.latest.filter(pl.col("head").is_null())
        for status, meaning in {**STATUS_MEANINGS, **PARTIAL}.items():
            concerned = layers.filter(statuses().list.contains(status))["layer"].to_list()
            if concerned:
                yield f"{group.label}: {_layers(concerned, layers.height)} is {status}: {meaning}."
        if layers.height and layers["symmetry"].is_null().all():
            yield f"{group.label}: the two sides have different widths, so there is no symmetry."
    headless = [group.label for group in groups if group.rows["head"].is_null().all()]
    if headless:
        whose = "" if len(headless) == len(groups) > 1 else f"{', '.join(headless)}: "
        yield f"{whose}no rows of single heads; scan with --heads."
    for table in tables:
        several = table.frame["checkpoint"].n_unique() > 1  # then each line names its own
        of = "" if several else f"{', '.join(_sources(table))}: "
        yield from (f"{of}{line}." for line in notes_of(table))
    gammas = {table.metadata.get("gamma", 2.0) for table in tables}
    if len(gammas) > 1:
        listed = ", ".join(map(str, sorted(gammas, key=str)))
        yield f"Directionality was computed with different gammas ({listed}); do not compare it."


def _layers(numbers: Sequence[int], of: int) -> str:
    """Some layers, as the subject of a sentence in the singular."""
    if len(numbers) == of:
        return "every layer's form"
    listed = ", ".join(map(str, numbers[:12])) + (", …" if len(numbers) > 12 else "")
    return f"the form of {'layer' if len(numbers) == 1 else 'each of the layers'} {listed}"


def provenance(tables: Sequence[ScoreTable]) -> str:
    """How the scores were computed: one list for each distinct set of options."""
    made: dict[str, list[str]] = {}
    for table in tables:
        settings = json.dumps(dict(table.metadata), ensure_ascii=False, sort_keys=True, default=str)
        made.setdefault(settings, []).extend(_sources(table))
    return "".join(
        f"<h4>{escape('; '.join(dict.fromkeys(sources)) or 'an empty table')}</h4><dl>"
        + "".join(
            f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_setting(value))}</dd>"
            for name, value in json.loads(settings).items()
        )
        + "</dl>"
        for settings, sources in made.items()
    )


def _sources(table: ScoreTable) -> list[str]:
    """Return the checkpoints and revisions of a table."""
    rows = table.frame.select(GROUP[:2]).unique(maintain_order=True).iter_rows()
    return [f"{name}{f' @ {revision}' if revision else ''}" for name, revision in rows]


def _setting(value: Any) -> str:
    """Return a readable value of the metadata.

    Examples
    --------
    >>> _setting({"measures": ["symmetry", "norm"], "heads": True, "options": [], "seed": None})
    'measures: symmetry; norm; heads: yes; options: none; seed: –'
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_setting(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_setting, value)) or "none"
    return "–" if value is None else str(value)


def pairs_sheet(frame: pl.DataFrame) -> Sheet:
    """Return a line for each pair of heads of `wqk.compose`."""
    headings = ("kind", "writer", "reader", "score", "expected", "excess", "z", "p")
    sheet = Sheet.of(*headings, text=headings[:3])
    for row in frame.iter_rows(named=True):
        p = row["p_corrected"]
        sheet.add(
            row["kind"].upper(),
            *(head_name(row, end) for end in ("writer", "reader")),
            *(number(row[name]) for name in ("score", "expected", "excess")),
            number(row["z"], 1),
            "–" if p is None else f"{p:.1g}",
        )
    return sheet


def head_name(row: Mapping[str, Any], end: str) -> str:
    """Return a writing or reading head as LAYER.HEAD, with what distinguishes its attention."""
    words = [row[f"{end}_stack"]] if row["writer_stack"] != row["reader_stack"] else []
    words += ["cross"] if row[f"{end}_attention"] == "cross" else []
    return " ".join([*words, f"{row[f'{end}_layer']}.{row[f'{end}_head']}"])
