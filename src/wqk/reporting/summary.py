"""Text and tables of a report, without figures, as escaped HTML, by groups of rows.

Installed packages may add the rank of the scores among other models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import polars as pl

from wqk._console import count, display_name, kind_in_words, number
from wqk.errors import TableError
from wqk.tables.rendering import HEADLINE, STATUS_MEANINGS, distinct_ends, label, place, shades_of
from wqk.tables.rendering import notes as notes_of
from wqk.tables.schema import GROUP, KEY, statuses
from wqk.tables.score_table import ScoreTable
from wqk.tables.sheet import Cell, Sheet, SheetColumn


@dataclass(frozen=True)
class Group:
    """Attention of one kind of one model, at all steps and distances, with a unique label."""

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
        """First row of the group, for common values of all rows."""
        layers = self.latest.filter(pl.col("head").is_null())
        return (layers if layers.height else self.latest).row(0, named=True)


def groups(tables: Sequence[ScoreTable]) -> list[Group]:
    """Return the groups of all tables in order, with the shortest distinct names.

    If several rows have the same key, the row of the first table is kept.

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
    distinct = []
    for first, part in zip(firsts, parts, strict=True):
        label = short[first["model"]]
        namesakes = [row for row in firsts if short[row["model"]] == label]
        for column in ("stack", "kind", "circuit"):
            if len({namesake[column] for namesake in namesakes}) > 1:
                label += f", {first[column]}"
        metadata = tables[first["table"]].metadata
        distinct.append(Group(label, part.drop("model", "table"), metadata))
    return distinct


def colors(groups: Sequence[Group]) -> list[str]:
    """Return the name of each group's color, a shade of the color of its stack.

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
    """Return an expression for a checkpoint's name, without the folder or revision of a step."""
    checkpoint = pl.col("checkpoint")
    is_step = pl.col("step").is_not_null()
    step_folder = pl.concat_str(pl.lit("checkpoint-"), pl.col("step"))
    run_folder = checkpoint.str.strip_suffix(step_folder).str.strip_chars_end("/\\")
    name = pl.when(is_step).then(run_folder).otherwise(checkpoint)
    revision = pl.when(~is_step).then(pl.format(" @ {}", "revision"))
    return pl.concat_str(name.fill_null("unnamed"), revision.fill_null(""))


# A Hub id with an owner, and perhaps with a revision.
OWNED = re.compile(r"[^/]+/[^/]+")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the shortest distinct suffix of each name; Hub ids stay whole.

    Examples
    --------
    >>> list(short_names(["/a/bert", "/b/bert", "/c/gpt", "owner/model"]).values())
    ['a/bert', 'b/bert', 'gpt', 'owner/model']
    """
    displayed = [display_name(name) for name in names]
    end_by_displayed = distinct_ends(displayed)
    short_names = {}
    for name, displayed_name in zip(names, displayed, strict=True):
        short_names[name] = end_by_displayed[displayed_name]
        if OWNED.fullmatch(name):
            short_names[name] = name
    return short_names


PARTIAL = {"partial": "not the model's whole attention score"}


def summary_table(groups: Sequence[Group]) -> str:
    """Return a table with a row for each group: facts, medians and quartiles over layers."""
    headings = ["model", "attention", "parameters stored", "layers", "heads", "width"]
    headings += [label(score) for score in HEADLINE]
    sheet = Sheet([SheetColumn(name, text=name in ("model", "attention")) for name in headings])
    for group, color in zip(groups, colors(groups), strict=True):
        facts, layers = group.facts, ScoreTable(group.latest).layers
        medians = layers.summary()
        attention = f"{facts['stack']} {kind_in_words(facts['kind'])}"
        if facts["family"] is not None:
            attention = f"{facts['family']} · {attention}"
        if facts["circuit"] != "qk":
            attention += f" · {facts['circuit']} circuit"
        if facts["step"] is not None:
            attention += f" · step {facts['step']:,}"
        name = (
            f'<span class="key" style="--color: var(--{color})"></span>'
            f'<span title="{escape(facts["checkpoint"] or "unnamed")}">{escape(group.label)}</span>'
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
    """Return the values of two columns over the layers, as one text if they are equal."""
    first_span = _span(layers[first].drop_nulls().to_list())
    second_span = _span(layers[second].drop_nulls().to_list())
    if first_span == second_span:
        return first_span
    operator = "over" if first == "heads" else "×"
    return f"{first_span} {operator} {second_span}"


def _span(values: Sequence[int]) -> str:
    low, high = min(values, default=None), max(values, default=None)
    if low is None:
        return "–"
    return str(low) if low == high else f"{low} to {high}"


def _median(summary: pl.DataFrame, score: str) -> Cell:
    """Return the median and the quartiles in the first row of a summary."""
    if not summary.height or summary[f"{score}_median"][0] is None:
        return Cell("–")

    low, median, high = (
        page_number(summary[f"{score}_{name}"][0], 2) for name in ("q25", "median", "q75")
    )
    return Cell(median, aside=f"{low} to {high}")


def page_number(value: float | None, digits: int = 3) -> str:
    """Format a number as in the page's script, with a minus sign instead of a hyphen.

    Examples
    --------
    >>> page_number(-0.25, 2), page_number(None)
    ('−0.25', '–')
    """
    return with_minus_signs(number(value, digits))


def with_minus_signs(text: str) -> str:
    """Replace hyphens at the beginning of numbers by minus signs.

    Examples
    --------
    >>> with_minus_signs("bert-2: -0.25 (-.5)")
    'bert-2: −0.25 (−.5)'
    """
    return re.sub(r"(?<![\w.)\]-])-(?=\.?\d)", "−", text)


def placements(groups: Sequence[Group]) -> dict[int, Any]:
    """Return the place of each comparable group among other models, by the group's number."""
    placed = {}
    for index, group in enumerate(groups):
        places = place(ScoreTable(group.latest, group.metadata))
        if places:
            placed[index] = places[0]
    return placed


def placement_list(groups: Sequence[Group], placed: dict[int, Any]) -> str:
    """List a sentence for each group, as HTML."""
    items = (
        f"<li>{escape(groups[number].label)}: {escape(str(placement))}. "
        f"{escape(with_minus_signs(placement.meaning))}</li>"
        for number, placement in placed.items()
    )
    return f"<ul>{''.join(items)}</ul>"


def points(placed: dict[int, Any]) -> dict[str, Any] | None:
    """Return the points of other models and of the report's models, for the page's script."""
    own_points = [
        {
            "group": number,
            "symmetry": placement.symmetry.value,
            "directionality": placement.directionality.value,
        }
        for number, placement in placed.items()
        if placement.symmetry and placement.directionality
    ]
    if not own_points:
        return None
    any_placement = next(iter(placed.values()))
    return {"models": any_placement.others, "own": own_points}


def notes(groups: Sequence[Group], tables: Sequence[ScoreTable]) -> str:
    """List the caveats as HTML; empty without caveats."""
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
        concerns_all = len(headless) == len(groups) > 1
        subject = "" if concerns_all else f"{', '.join(headless)}: "
        yield f"{subject}no rows of single heads; scan with --heads."
    for table in tables:
        # In a table of several checkpoints, each note already begins with a name.
        many_checkpoints = table.frame["checkpoint"].n_unique() > 1
        subject = "" if many_checkpoints else f"{', '.join(_sources(table))}: "
        yield from (f"{subject}{line}." for line in notes_of(table))
    gammas = {table.metadata.get("gamma", 2.0) for table in tables}
    if len(gammas) > 1:
        listed = ", ".join(map(str, sorted(gammas, key=str)))
        yield f"Directionality was computed with different gammas ({listed}); do not compare it."


def _layers(numbers: Sequence[int], of: int) -> str:
    """Name some layers, as the subject of a sentence in the singular."""
    if len(numbers) == of:
        return "every layer's form"
    listed = ", ".join(map(str, numbers[:12]))
    if len(numbers) > 12:
        listed += ", …"
    return f"the form of {'layer' if len(numbers) == 1 else 'each of the layers'} {listed}"


def provenance(tables: Sequence[ScoreTable]) -> str:
    """List the options of the scores as HTML, for each distinct set of options."""
    sources_by_settings: dict[str, list[str]] = {}
    for table in tables:
        settings = json.dumps(dict(table.metadata), ensure_ascii=False, sort_keys=True, default=str)
        sources_by_settings.setdefault(settings, []).extend(_sources(table))
    parts = []
    for settings, sources in sources_by_settings.items():
        title = "; ".join(dict.fromkeys(sources)) or "an empty table"
        parts.append(f"<h4>{escape(title)}</h4><dl>")
        for name, value in json.loads(settings).items():
            heading = escape(name.replace("_", " "))
            parts.append(f"<dt>{heading}</dt><dd>{escape(_setting(value))}</dd>")
        parts.append("</dl>")
    return "".join(parts)


def _sources(table: ScoreTable) -> list[str]:
    """Return the checkpoints and revisions of a table."""
    rows = table.frame.select(GROUP[:2]).unique(maintain_order=True).iter_rows()
    return [f"{name or 'unnamed'}{f' @ {revision}' if revision else ''}" for name, revision in rows]


def _setting(value: Any) -> str:
    """Return a readable value of the metadata.

    Examples
    --------
    >>> _setting({"measures": ["symmetry", "norm"], "heads": True, "options": [], "seed": None})
    'measures: symmetry; norm; heads: yes; options: none; seed: –'
    >>> _setting([["a", "b"], ["c", "d"]])
    'a, b; c, d'
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_setting(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        groups = [item if isinstance(item, list) else [item] for item in value]
        return "; ".join(", ".join(map(_setting, group)) for group in groups) or "none"
    return "–" if value is None else str(value)


def pairs_sheet(
    frame: pl.DataFrame, formatted: Callable[[float | None, int], str] = number
) -> Sheet:
    """Return a line for each pair of heads of `wqk.compose`, with numbers in a format."""
    headings = ("kind", "writer", "reader", "score", "expected", "excess", "z", "p")
    sheet = Sheet.of(*headings, text=headings[:3])
    for row in frame.iter_rows(named=True):
        p = row["p_corrected"]
        sheet.add(
            row["kind"].upper(),
            *(head_name(row, end) for end in ("writer", "reader")),
            *(formatted(row[name], 3) for name in ("score", "expected", "excess")),
            formatted(row["z"], 1),
            "–" if p is None else f"{p:.1g}",
        )
    return sheet


def head_name(row: Mapping[str, Any], end: str) -> str:
    """Return a writing or reading head as LAYER.HEAD, after its stack or kind if ambiguous."""
    parts = []
    if row["writer_stack"] != row["reader_stack"]:
        parts.append(row[f"{end}_stack"])
    if row[f"{end}_attention"] == "cross":
        parts.append("cross")
    parts.append(f"{row[f'{end}_layer']}.{row[f'{end}_head']}")
    return " ".join(parts)
