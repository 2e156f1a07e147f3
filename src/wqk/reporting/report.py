"""Score tables as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import date
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from string import Template
from typing import TypeAlias

from wqk._files import check_output, write_atomically
from wqk._version import __version__
from wqk.errors import MissingPackage, TableError, install
from wqk.reporting.feeding import feeding_section
from wqk.reporting.payload import payload
from wqk.reporting.runs import loss_curves, runs_section
from wqk.reporting.summary import (
    groups,
    notes,
    placement_list,
    placements,
    points,
    provenance,
    summary_table,
)
from wqk.scanning.surveys.surveying import survey_table
from wqk.tables.details import Details
from wqk.tables.run import METRICS, SCORES, SETTINGS, Run, open_run
from wqk.tables.run import read_table as read_scores
from wqk.tables.score_table import ScoreTable, Table, read_table

SCRIPTS = ("scores.js", "drawing.js", "sections.js", "matrices.js", "table.js", "page.js")
ENDINGS = (".html", ".htm")

Source: TypeAlias = ScoreTable | str | PathLike[str]

# At most this many models are named in the heading.
NAMED = 12


def write_report(
    tables: Source | Sequence[Source],
    path: str | PathLike[str] = "report.html",
    *,
    details: Details | Sequence[Details] = (),
    runs: Sequence[Run] = (),
    compositions: Sequence[Table] = (),
    title: str | None = None,
) -> None:
    """Write score tables as one interactive HTML file that needs no network.

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
    >>> wqk.write_report(wqk.scan(wqk.demo_model("encoder")), path)
    >>> path.read_text(encoding="utf-8")[:15]
    '<!doctype html>'
    """
    path = Path(path)
    check_report(path)
    sources = [tables] if isinstance(tables, ScoreTable | str | PathLike) else list(tables)
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


def _opened(source: Source) -> Sequence[Run | ScoreTable]:
    """The runs or the table in a file or a folder; a table as it is."""
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
            "of a model, scan it first: wqk.report(wqk.scan(model), path)"
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
    """The whole document."""
    shown = groups(tables)
    placed = placements(shown)
    rows = sum(group.rows.height for group in shown)
    scripts = [_script(_plotly()), _script("\n".join(map(_asset, SCRIPTS)))]
    heading = title or _heading([group.label for group in shown])
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
    """The days on which runs last wrote."""
    days = [
        date.fromtimestamp((run.folder / METRICS).stat().st_mtime)
        for run in runs
        if (run.folder / METRICS).is_file()
    ]
    if not days:
        return ""
    first, last = min(days).isoformat(), max(days).isoformat()
    return f" · trained {first if first == last else f'{first} to {last}'}"


def _heading(labels: Sequence[str]) -> str:
    """The names of all models, or of the first and the number of the others."""
    names = list(dict.fromkeys(labels))
    if len(names) > NAMED:
        names[NAMED - 1 :] = [f"and {len(names) - NAMED + 1} more"]
    return " · ".join(names)


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return files("wqk.reporting").joinpath(name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """A script as the browser reads it from its element, so that the hashes agree."""
    return text.replace("\r\n", "\n").replace("</script", "<\\/script")


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy without connections, and with these scripts only."""
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
