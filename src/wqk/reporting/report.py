"""Score tables, training runs, and which heads feed which, as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

import polars as pl

from wqk._console import Shown, counted, number
from wqk._files import check_output, write_atomically
from wqk._style import as_image
from wqk._version import __version__
from wqk.errors import MissingPackage, TableError, install
from wqk.reporting.payload import digits, payload, training_result
from wqk.reporting.pictures import composition_arcs, strongest_pairs
from wqk.reporting.summary import (
    groups,
    notes,
    pairs_sheet,
    placement_list,
    placements,
    points,
    provenance,
    summary_table,
)
from wqk.scanning.surveys.surveying import survey_table
from wqk.tables.details import Details
from wqk.tables.rendering import label
from wqk.tables.run import METRICS, SCORES, SETTINGS, Run, open_run
from wqk.tables.run import read_table as read_scores
from wqk.tables.score_table import ScoreTable, Table, read_table
from wqk.tables.sheet import Sheet, SheetColumn

SCRIPTS = ("scores.js", "drawing.js", "sections.js", "matrices.js", "table.js", "page.js")
ENDINGS = (".html", ".htm")

Source: TypeAlias = ScoreTable | str | PathLike[str]

# At most this many models are named in the heading.
NAMED = 12


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """A report that was written: the path of its file, whose page it is in a notebook."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def _shown(self, width: int) -> Iterable[Any]:
        yield f"{self.path} ({self.path.stat().st_size / 1e6:.1f} MB)"

    def _repr_html_(self) -> str:
        shown = escape(self.path.read_text("utf-8"))
        return f'<iframe srcdoc="{shown}" style="width:100%;height:45em;border:0"></iframe>'


def write_report(
    tables: Source | Sequence[Source],
    path: str | PathLike[str] = "report.html",
    *,
    details: Details | Sequence[Details] = (),
    runs: Sequence[Run] = (),
    compositions: Sequence[Table] = (),
    title: str | None = None,
) -> Report:
    """Write score tables as one interactive HTML file that needs no network; a notebook shows it.

    Parameters
    ----------
    tables
        One table, or several, of different models or of one at different steps; or their files,
        or the folders of a training run, of several, of a callback or of a survey.
    path
        The file, ``.html``, written atomically.
    details
        Details from files (`wqk.tables.details.read_details`), in addition to the tables' own
        (``wqk.scan(ref, details=True)``). Without any, the report says that they are missing.
    runs
        Training runs whose losses, results and recipe the report begins with.
    compositions
        Tables of `wqk.compose`, whose strongest pairs of heads are drawn.
    title
        Heading; the models' names otherwise.

    Raises
    ------
    TableError
        There are no rows, or some details are of none of the tables' checkpoints.
    OutputError
        The file cannot be written.
    MissingPackage
        plotly, whose script draws the figures, is not installed.

    Examples
    --------
    >>> import tempfile, wqk
    >>> path = Path(tempfile.mkdtemp()) / "encoder.html"
    >>> report = wqk.write_report(wqk.scan(wqk.demo_model("encoder")), path)
    >>> path.read_text(encoding="utf-8")[:15]
    '<!doctype html>'
    """
    path = Path(path)
    check_report(path)
    sources = tables if isinstance(tables, list | tuple) else [tables]
    opened = [one for source in sources for one in _opened(source)]
    runs = [*(one for one in opened if isinstance(one, Run)), *runs]
    scores = [one.scores if isinstance(one, Run) else one for one in opened]
    details = [details] if isinstance(details, Details) else list(details)
    scored = {name for table in scores for name in table.frame["checkpoint"]}
    for part in details:
        names = sorted({block.key.checkpoint for block in part.blocks})
        if names and scored.isdisjoint(names):
            raise TableError(
                f"details are of checkpoints in the tables, {', '.join(sorted(scored))}; these are "
                f"of {', '.join(names)}; leave them out, or add their table"
            )
    details += [table.details for table in scores if table.details is not None]
    write_atomically(path, page(scores, details, title, runs, compositions).encode())
    return Report(path)


def _opened(source: Any) -> Sequence[Run | ScoreTable]:
    """Return the runs or the table in a file or a folder; a table as it is."""
    if isinstance(source, ScoreTable):
        return [source]
    if not isinstance(source, str | PathLike):
        raise TableError(
            f"a report shows score tables, got {type(source).__name__}; of a model, scan it first: "
            "wqk.report(wqk.scan(model), path)"
        )
    place = Path(source)
    if runs := [place] if (place / SETTINGS).is_file() else sorted(place.glob(f"*/{SETTINGS}")):
        return [open_run(one if one.is_dir() else one.parent) for one in runs]
    if (place / SCORES).is_file():
        return [read_scores(place / SCORES)]
    if not place.is_dir():
        return [read_table(place)]
    try:
        return [survey_table(place)]
    except TableError:
        raise TableError(
            f"{place}: expected a score table, or the folder of a run, a callback or a survey; "
            "a model is scanned first: wqk scan REF --report FILE.html, or "
            "wqk.report(wqk.scan(model), path)"
        ) from None


def check_report(path: Path) -> None:
    """Raise if no report can be written to this path, or plotly is missing."""
    check_output(path, "a report", ENDINGS)
    if find_spec("plotly") is None:
        raise MissingPackage(
            f"a report needs plotly: {install('report')}", package="plotly", extra="report"
        )


def page(
    tables: Sequence[ScoreTable],
    details: Sequence[Details],
    title: str | None,
    runs: Sequence[Run] = (),
    compositions: Sequence[Table] = (),
) -> str:
    """Return the whole document."""
    from plotly.offline import get_plotlyjs

    shown = groups(tables)
    placed = placements(shown)
    rows = sum(group.rows.height for group in shown)
    scripts = [_script(get_plotlyjs()), _script("\n".join(map(_asset, SCRIPTS)))]
    names = list(dict.fromkeys(group.label for group in shown))
    if len(names) > NAMED:
        names[NAMED - 1 :] = [f"and {len(names) - NAMED + 1} more"]
    heading = title or " · ".join(names)
    return Template(_asset("page.html")).substitute(
        policy=_policy(scripts),
        title=escape(heading),
        style=_asset("page.css"),
        made=f"{rows:,} rows · wqk {__version__}{_dates(runs)}",
        runs=runs_section(runs),
        feeding=feeding_section(compositions),
        placement=placement_list(shown, placed),
        notes=notes(shown, tables),
        summary=summary_table(shown),
        provenance=provenance(tables),
        citation=escape(_asset("citation.bib")),
        payload=payload(shown, details, points(placed), loss_curves(runs)),
        plotly=scripts[0],
        script=scripts[1],
    )


def _dates(runs: Sequence[Run]) -> str:
    """Return the days on which runs last wrote."""
    days = [
        date.fromtimestamp((run.folder / METRICS).stat().st_mtime)
        for run in runs
        if (run.folder / METRICS).is_file()
    ]
    if not days:
        return ""
    first, last = min(days).isoformat(), max(days).isoformat()
    return f" · trained {first if first == last else f'{first} to {last}'}"


def _asset(name: str) -> str:
    return files("wqk.reporting").joinpath(name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """Return a script as the browser reads it from its element, so that the hashes agree."""
    return text.replace("\r\n", "\n").replace("</script", "<\\/script")


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy without connections, and with these scripts only."""
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


# Arcs and rows of each table, which bound the size of the page.
ARCS, ROWS = 40, 20


def feeding_section(tables: Sequence[Table]) -> str:
    """A picture and a table for each table of `wqk.compose`, as HTML; empty if there are none."""
    if not tables:
        return ""
    parts = "".join(_part(table.frame) for table in tables)
    return (
        f'<section id="feeding"><h2>Heads that feed heads</h2>{parts}<p class="caption">The pairs '
        "whose composition exceeds chance most: the later head reads what the earlier one writes, "
        "with its queries (Q), keys (K) or values (V). Layers across, heads down; thicker arcs "
        "exceed chance by more. p is the probability of such a score by chance, corrected for all "
        "pairs. A large score says that the weights fit, not that a text makes use of "
        "them.</p></section>"
    )


def _part(frame: pl.DataFrame) -> str:
    if frame.filter(pl.col("excess") > 0).is_empty():
        return "<p>No pair of heads has a score above chance.</p>"
    sheet = pairs_sheet(strongest_pairs(frame, ROWS))
    return (
        f"<h3>{escape(label(frame['checkpoint'][0]))}</h3>"
        f"{_wide('Arcs', as_image(composition_arcs(frame, ARCS), 'The strongest pairs'))}"
        "<details><summary>The strongest pairs, in numbers</summary>"
        f"{_wide('Pairs of heads', sheet.html())}</details>"
    )


def _wide(name: str, content: str) -> str:
    return f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{content}</div>'


# What differs between runs of one recipe.
SEED = "seed"

# Packages tell what they find in runs with an entry point of this group: a function of the runs
# that returns sentences.
RESULTS = "wqk.results"


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs that differ only in their seed, by a name that says what else differs."""
    cells: defaultdict[tuple[tuple[str, str], ...], list[Run]] = defaultdict(list)
    for run in runs:
        cells[tuple((k, str(v)) for k, v in run.recipe.items() if k != SEED)].append(run)
    varied = _varied([group[0].recipe for group in cells.values()])
    named = {}
    for group in cells.values():
        words = [f"{name.replace('_', ' ')} {group[0].recipe.get(name)}" for name in varied]
        named[", ".join(words) or str(group[0].recipe.get("mode") or group[0].name)] = group
    return named


def _varied(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the entries in which recipes differ, besides the seed."""
    names = dict.fromkeys(name for recipe in recipes for name in recipe if name != SEED)
    return [name for name in names if len({str(recipe.get(name)) for recipe in recipes}) > 1]


def runs_section(runs: Sequence[Run]) -> str:
    """Results in words, a table of the runs, the recipe and the environment, as HTML."""
    if not runs:
        return ""
    results = [_result(name, group) for name, group in by_recipe(runs).items()]
    results += [said for found in entry_points(group=RESULTS) for said in found.load()(runs)]
    told = "".join(f"<li>{escape(said)}</li>" for said in results)
    return (
        '<section id="runs"><h2>Results</h2>'
        f"<ul>{told}</ul>"
        '<div class="panels" id="losses"></div>'
        '<p class="caption">Losses in nats per token, and the median symmetry over layers: '
        "the mean over seeds, and a band from the lowest to the highest, where all seeds have one."
        f"</p>{_wide('Runs', _table(runs).html())}"
        f"<details><summary>Recipe and environment</summary>{_recipe(runs)}</details></section>"
    )


def _result(name: str, runs: Sequence[Run]) -> str:
    """Return the outcome of runs with one recipe, at the last step that all of them reached."""
    losses = _common(runs, "held_out_loss")
    losses = losses if losses.height else _common(runs, "loss")
    symmetries = _common(runs, "symmetry")
    return training_result(
        name,
        int(losses["step"][-1]) if losses.height else 0,
        *([list(losses["values"][place]) for place in (0, -1)] if losses.height else ([], [])),
        *([list(symmetries["values"][i]) for i in (0, -1)] if symmetries.height > 1 else ([], [])),
    )


def _common(runs: Sequence[Run], column: str) -> pl.DataFrame:
    """Return the steps at which all runs have a value, and the ``values``, one for each run."""
    rows = pl.concat([_curve(run, column) for run in runs])
    together = rows.group_by("step").agg(pl.col("value").alias("values"))
    return together.filter(pl.col("values").list.len() == len(runs)).sort("step")


def _curve(run: Run, column: str) -> pl.DataFrame:
    """Return a column of the metrics, or the median ``symmetry`` over layers, by step."""
    if column == "symmetry":
        layers = run.scores.layers.frame.group_by("step").agg(pl.median("symmetry").alias("value"))
        return layers.drop_nulls().sort("step")
    return run.metrics.select("step", pl.col(column).alias("value")).drop_nulls()


def _table(runs: Sequence[Run]) -> Sheet:
    """Return a row for each run."""
    names = ("step", "tokens", "loss", "held-out loss", "median symmetry", "minutes")
    sheet = Sheet([SheetColumn("run", text=True), *map(SheetColumn, names)])
    for run in runs:
        last = {
            name: values[-1] if len(values := run.metrics[name].drop_nulls()) else None
            for name in ("step", "tokens", "loss", "held_out_loss", "seconds")
        }
        symmetry = _curve(run, "symmetry")["value"]
        sheet.add(
            run.name,
            *("–" if last[name] is None else f"{last[name]:,}" for name in ("step", "tokens")),
            *(number(last[name]) for name in ("loss", "held_out_loss")),
            number(symmetry[-1] if len(symmetry) else None, 2),
            "–" if last["seconds"] is None else f"{last['seconds'] / 60:.1f}",
        )
    return sheet


def _recipe(runs: Sequence[Run]) -> str:
    """What all runs share, and what they were made with."""
    recipes = [run.recipe for run in runs]
    varied = {*_varied(recipes), SEED}
    shared = {n: v for n, v in recipes[0].items() if n not in varied and v is not None}
    environment = runs[0].settings.get("environment") or {}
    shared |= {str(n): v for n, v in environment.items() if isinstance(v, str | int | float)}
    seeds = sorted({str(recipe.get(SEED)) for recipe in recipes})
    shared |= {"corpus": str(runs[0].corpus.get("folder", "–")), "seeds": ", ".join(seeds)}
    told = "".join(
        f"<dt>{escape(label(str(name)).replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in shared.items()
    )
    return f"<p>Shared by {counted(len(runs), 'run')}:</p><dl>{told}</dl>"


def loss_curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Losses and symmetry over the steps that all seeds of a recipe have: mean and range."""
    curves = []
    kinds = {"training loss": "loss", "held-out loss": "held_out_loss", "symmetry": "symmetry"}
    for name, group in by_recipe(runs).items():
        for kind, column in kinds.items():
            found = _common(group, column)
            if found.height:
                values = pl.col("values").list
                spread = {"mean": values.mean(), "low": values.min(), "high": values.max()}
                drawn = found.select("step", **spread)
                curves.append(
                    {"name": name, "kind": kind, "mode": group[0].recipe.get("mode")}
                    | {"step": drawn["step"].to_list()}
                    | {n: [digits(v) for v in drawn[n]] for n in spread}
                )
    return curves
