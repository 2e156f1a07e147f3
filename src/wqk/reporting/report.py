"""Score tables, training runs and composed heads as one self-contained HTML file."""

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
from os.path import commonpath
from pathlib import Path, PurePath
from string import Template
from typing import Any, TypeAlias

import polars as pl

from wqk._console import Shown, counted, display_name
from wqk._files import check_output, write_atomically
from wqk._style import as_image
from wqk._version import __version__
from wqk.errors import DEMO_MODELS, MissingPackage, TableError, called_as, install
from wqk.reporting.payload import digits, in_script, payload, training_result
from wqk.reporting.pictures import composition_arcs, strongest_pairs
from wqk.reporting.summary import (
    groups,
    notes,
    page_number,
    pairs_sheet,
    placement_list,
    placements,
    points,
    provenance,
    short_names,
    summary_table,
)
from wqk.scanning.surveys.surveying import survey_table
from wqk.scanning.surveys.watch import WATCHED
from wqk.tables.details import Details
from wqk.tables.rendering import label, shades_of
from wqk.tables.run import METRICS, SCORES, SETTINGS, Run, open_run
from wqk.tables.run import read_table as read_scores
from wqk.tables.score_table import ScoreTable, Table, join, read_table
from wqk.tables.sheet import Sheet, SheetColumn

SCRIPTS = ("scores.js", "drawing.js", "sections.js", "matrices.js", "table.js", "page.js")
REPORT_ENDINGS = (".html", ".htm")

ReportSource: TypeAlias = ScoreTable | str | PathLike[str]

# Number of models in the heading.
MOST_NAMED = 12


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """Path of a written report; notebooks show the page."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def _shown(self, width: int) -> Iterable[Any]:
        yield f"{self.path} ({self.path.stat().st_size / 1e6:.1f} MB)"

    def _repr_html_(self) -> str:
        shown = escape(self.path.read_text("utf-8"))
        return f'<iframe srcdoc="{shown}" style="width:100%;height:45em;border:0"></iframe>'


@called_as("wqk.report(table, path)")
def write_report(
    tables: ReportSource | Sequence[ReportSource],
    path: str | PathLike[str] = "report.html",
    *,
    details: Details | Sequence[Details] = (),
    runs: Sequence[Run] = (),
    compositions: Sequence[Table] = (),
    title: str | None = None,
) -> Report:
    """Write score tables as one interactive HTML file that needs no network.

    Parameters
    ----------
    tables
        One or several tables, of different models or of one model at different steps; or files
        with tables; or folders of training runs, callbacks or surveys, or of runs that `wqk.watch`
        has scored.
    path
        The file, ``.html``, written atomically.
    details
        Details from files (`wqk.tables.details.read_details`), in addition to the tables' own
        (``wqk.scan(ref, details=True)``). A report without details contains a note.
    runs
        Training runs. Losses, results and recipe are the first section of the report.
    compositions
        Tables of `wqk.compose`. The report draws the strongest pairs of heads.
    title
        Heading; by default the models' names.

    Raises
    ------
    TableError
        The tables are empty, or details belong to no checkpoint of the tables.
    OutputError
        The file cannot be written.
    MissingPackage
        plotly is not installed; its script draws the figures.

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
    opened_runs, scores = [], []
    for source in sources:
        for content in opened_source(source):
            if isinstance(content, Run):
                opened_runs.append(content)
                scores.append(content.scores)
            else:
                scores.append(content)
    runs = [*opened_runs, *runs]
    details = [details] if isinstance(details, Details) else list(details)
    scored = set().union(*(table.frame["checkpoint"] for table in scores))
    for detail_set in details:
        names = sorted({block.key.checkpoint for block in detail_set.blocks})
        if names and scored.isdisjoint(names):
            raise TableError(
                f"details are of checkpoints in the tables, {', '.join(sorted(scored))}; these are "
                f"of {', '.join(names)}; leave them out, or add their table"
            )
    details += [table.details for table in scores if table.details is not None]
    if scores:
        join(scores).require_single_rows()
    write_atomically(path, page(scores, details, title, runs, compositions).encode())
    return Report(path)


def local_folders(tables: Iterable[ScoreTable]) -> list[str]:
    """Return the local folders around the checkpoints of tables, longest first.

    If the checkpoints share a folder, only this folder is returned. The root folder is left out,
    because the name is empty.

    Examples
    --------
    >>> rows = [{"checkpoint": f"/home/ada/{name}", "layer": 0} for name in ("bert", "runs/gpt")]
    >>> local_folders([ScoreTable.from_rows(rows)])
    ['/home/ada']
    """
    folders = set()
    for table in tables:
        for name, step in table.frame.select("checkpoint", "step").unique().iter_rows():
            is_path = name and PurePath(name).is_absolute() and display_name(name) == name
            if is_path:
                # The label of a run is the folder around its steps.
                path = PurePath(name.rstrip("/"))
                folders.add(str(path.parent if step is None else path.parent.parent))
    shared = commonpath(folders) if folders else ""
    if len(PurePath(shared).parts) > 1:
        folders = {shared}
    named = [folder for folder in folders if len(PurePath(folder).parts) > 1]
    return sorted(named, key=len, reverse=True)


def without_folders(text: str, folders: Sequence[str]) -> str:
    """Return a part of a page with paths relative to these folders, and ``demo:NAME`` for demos.

    Reports are for other people, and absolute paths contain the names of users and machines.

    Examples
    --------
    >>> without_folders("<td>/home/ada/runs/bert</td>", ["/home/ada/runs"])
    '<td>bert</td>'
    """
    replacements = {f"{DEMO_MODELS}/": "demo:"} | {f"{folder}/": "" for folder in folders}
    for beginning, replacement in replacements.items():
        for spelling in {beginning, escape(beginning), in_script(beginning)}:
            text = text.replace(spelling, replacement)
    return text


def opened_source(source: Any) -> Sequence[Run | ScoreTable]:
    """Open the runs or the table in a file or a folder; a table is returned unchanged."""
    if isinstance(source, ScoreTable):
        return [source]
    if not isinstance(source, str | PathLike):
        raise TableError(
            f"a report shows score tables, got {type(source).__name__}; of a model, scan it first: "
            "wqk.report(wqk.scan(model), path)"
        )
    path = Path(source)
    if (path / SETTINGS).is_file():
        return [open_run(path)]
    if settings_files := sorted(path.glob(f"*/{SETTINGS}")):
        return [open_run(file.parent) for file in settings_files]
    if (path / SCORES).is_file():
        return [read_scores(path / SCORES)]
    if not path.is_dir():
        return [read_table(path)]
    watched = path / WATCHED
    try:
        return [survey_table(watched if watched.is_dir() else path)]
    except TableError:
        raise TableError(
            f"{path}: expected a score table, or the folder of a run, a callback or a survey; "
            "a model is scanned first: wqk scan REF --report FILE.html, or "
            "wqk.report(wqk.scan(model), path)"
        ) from None


def has_scores(folder: Path) -> bool:
    """Return whether a folder has scores: of a run, a callback, a survey or a watch."""
    if (folder / WATCHED).is_dir():
        return True  # damaged scores are an error, and are not replaced by a scan
    try:
        return bool(opened_source(folder))
    except TableError:
        return False


def check_report(path: Path) -> None:
    """Raise if no report can be written to this path, or plotly is missing."""
    check_output(path, "a report", REPORT_ENDINGS)
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

    shown_groups = groups(tables)
    placed = placements(shown_groups)
    rows = sum(group.rows.height for group in shown_groups)
    scripts = [_script(get_plotlyjs()), _script("\n".join(map(_asset, SCRIPTS)))]
    names = list(dict.fromkeys(group.label for group in shown_groups))
    if len(names) > MOST_NAMED:
        names[MOST_NAMED - 1 :] = [f"and {len(names) - MOST_NAMED + 1} more"]
    heading = title or " · ".join(names)
    parts = {
        "title": escape(heading),
        "runs": runs_section(runs),
        "feeding": feeding_section(compositions),
        "placement": placement_list(shown_groups, placed),
        "notes": notes(shown_groups, tables),
        "summary": summary_table(shown_groups),
        "provenance": provenance(tables),
        "payload": payload(shown_groups, details, points(placed), loss_curves(runs)),
    }
    folders = local_folders(tables)
    return Template(_asset("page.html")).substitute(
        {name: without_folders(part, folders) for name, part in parts.items()},
        policy=_policy(scripts),
        style=_asset("page.css"),
        made=f"{rows:,} rows · wqk {__version__}{_dates(runs)}",
        citation=escape(_asset("citation.bib")),
        plotly=scripts[0],
        script=scripts[1],
    )


def _dates(runs: Sequence[Run]) -> str:
    """Return the first and the last day of the metrics of runs."""
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
    """Return a script as a browser hashes it."""
    return text.replace("\r\n", "\n").replace("</script", "<\\/script")


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy that allows only the given scripts and no connections."""
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


# Numbers of arcs and rows for each table, which limit the size of the page.
ARCS, ROWS = 40, 20


def feeding_section(tables: Sequence[Table]) -> str:
    """Return a picture and a table for each table of `wqk.compose`, as HTML; else empty."""
    if not tables:
        return ""
    checkpoints = [table.frame["checkpoint"][0] for table in tables if table.frame.height]
    names = short_names(list(dict.fromkeys(checkpoints)))
    parts = "".join(_part(table.frame, names) for table in tables)
    return (
        f'<section id="feeding"><h2>Heads that feed heads</h2>{parts}<p class="caption">The pairs '
        "whose composition exceeds chance most: the later head reads what the earlier one writes, "
        "with its queries (Q), keys (K) or values (V). Layers across, heads down; thicker arcs "
        "exceed chance by more. p is the probability of such a score by chance, corrected for all "
        "pairs. A large score shows that the weights fit; a text need not use the "
        "connection.</p></section>"
    )


def _part(frame: pl.DataFrame, names: Mapping[str, str]) -> str:
    if frame.filter(pl.col("excess") > 0).is_empty():
        return "<p>No pair of heads has a score above chance.</p>"
    sheet = pairs_sheet(strongest_pairs(frame, ROWS), page_number)
    checkpoint = frame["checkpoint"][0]
    return (
        f'<h3 title="{escape(checkpoint)}">{escape(names[checkpoint])}</h3>'
        f"{_wide('Arcs', as_image(composition_arcs(frame, ARCS), 'The strongest pairs'))}"
        "<details><summary>The strongest pairs, in numbers</summary>"
        f"{_wide('Pairs of heads', sheet.html())}</details>"
    )


def _wide(name: str, content: str) -> str:
    return f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{content}</div>'


# The setting that differs between runs of one recipe.
SEED_KEY = "seed"

# Packages add results of runs with an entry point of this group: a function of the runs that
# returns sentences.
RESULTS_GROUP = "wqk.results"


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in seed; names of groups list other differences."""
    cells: defaultdict[tuple[tuple[str, str], ...], list[Run]] = defaultdict(list)
    for run in runs:
        settings = [(name, str(value)) for name, value in run.recipe.items() if name != SEED_KEY]
        cells[tuple(settings)].append(run)
    varied = _varied([group[0].recipe for group in cells.values()])
    groups = {}
    for group in cells.values():
        run = group[0]
        differences = [f"{name.replace('_', ' ')} {run.recipe.get(name)}" for name in varied]
        name = ", ".join(differences) or str(run.recipe.get("mode") or run.name)
        groups[name] = group
    return groups


def _varied(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the entries that differ between recipes, except the seed."""
    values_by_name: dict[str, set[str]] = {}
    for recipe in recipes:
        values_by_name |= {name: set() for name in recipe if name != SEED_KEY}
    for name, values in values_by_name.items():
        values |= {str(recipe.get(name)) for recipe in recipes}
    return [name for name, values in values_by_name.items() if len(values) > 1]


def runs_section(runs: Sequence[Run]) -> str:
    """Return results, a table of the runs, the recipe and the environment, as HTML."""
    if not runs:
        return ""
    results = [_result(name, group) for name, group in by_recipe(runs).items()]
    for entry_point in entry_points(group=RESULTS_GROUP):
        results += entry_point.load()(runs)
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in results)
    return (
        '<section id="runs"><h2>Results</h2>'
        f"<ul>{items}</ul>"
        '<div class="panels" id="losses"></div>'
        '<p class="caption">Losses in nats per token, and the median symmetry over layers: '
        "the mean over seeds, and a band from the lowest to the highest, where all seeds have one."
        f"</p>{_wide('Runs', _table(runs).html())}"
        f"<details><summary>Recipe and environment</summary>{_recipe(runs)}</details></section>"
    )


def _result(name: str, runs: Sequence[Run]) -> str:
    """Describe the outcome of a recipe's runs, at the last common step."""
    losses = _common_steps(runs, "held_out_loss")
    if not losses.height:
        losses = _common_steps(runs, "loss")
    step, first_losses, last_losses = 0, [], []
    if losses.height:
        step = int(losses["step"][-1])
        first_losses, last_losses = list(losses["values"][0]), list(losses["values"][-1])
    symmetries = _common_steps(runs, "symmetry")
    first_symmetries, last_symmetries = [], []
    if symmetries.height > 1:
        first_symmetries = list(symmetries["values"][0])
        last_symmetries = list(symmetries["values"][-1])
    return training_result(name, step, first_losses, last_losses, first_symmetries, last_symmetries)


def _common_steps(runs: Sequence[Run], column: str) -> pl.DataFrame:
    """Return the steps with a value in all runs, and the ``values`` of all runs."""
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
        step, tokens, seconds = (_last(run.metrics[n]) for n in ("step", "tokens", "seconds"))
        sheet.add(
            run.name,
            "–" if step is None else f"{step:,}",
            "–" if tokens is None else f"{tokens:,}",
            page_number(_last(run.metrics["loss"])),
            page_number(_last(run.metrics["held_out_loss"])),
            page_number(_last(_curve(run, "symmetry")["value"]), 2),
            "–" if seconds is None else f"{seconds / 60:.1f}",
        )
    return sheet


def _last(values: pl.Series) -> Any:
    """Return the last value that is not null; None if all values are null."""
    values = values.drop_nulls()
    return values[-1] if len(values) else None


def _recipe(runs: Sequence[Run]) -> str:
    """List the common settings and the common environment of all runs, as HTML."""
    recipes = [run.recipe for run in runs]
    varied = {*_varied(recipes), SEED_KEY}
    shared = {}
    for name, value in recipes[0].items():
        if name not in varied and value is not None:
            shared[name] = value
    environment = runs[0].settings.get("environment") or {}
    for name, value in environment.items():
        if isinstance(value, str | int | float):
            shared[str(name)] = value
    seeds = sorted({str(recipe.get(SEED_KEY)) for recipe in recipes})
    shared |= {"corpus": str(runs[0].corpus.get("folder", "–")), "seeds": ", ".join(seeds)}
    items = "".join(
        f"<dt>{escape(label(str(name)).replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in shared.items()
    )
    return f"<p>Shared by {counted(len(runs), 'run')}:</p><dl>{items}</dl>"


def loss_curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Draw losses and symmetry at the common steps of a recipe's seeds: mean and range."""
    curves = []
    kinds = {"training loss": "loss", "held-out loss": "held_out_loss", "symmetry": "symmetry"}
    groups = by_recipe(runs)
    shades = shades_of(str(group[0].recipe.get("mode") or "encoder") for group in groups.values())
    for (name, group), (mode, shade) in zip(groups.items(), shades, strict=True):
        for kind, column in kinds.items():
            common = _common_steps(group, column)
            if common.height:
                values = pl.col("values").list
                spread = {"mean": values.mean(), "low": values.min(), "high": values.max()}
                summary = common.select("step", **spread)
                curve: dict[str, Any] = {"name": name, "kind": kind, "color": f"{mode}-{shade}"}
                curve["step"] = summary["step"].to_list()
                for statistic in spread:
                    curve[statistic] = [digits(value) for value in summary[statistic]]
                curves.append(curve)
    return curves
