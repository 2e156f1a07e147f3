"""What the verbs print: tables for people on standard output, everything else on standard error."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from wqk.atlas import place
from wqk.scanning.tables import SUMMARIZED, records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wqk.attention.explanation import Explanation
    from wqk.attention.verification import Verification
    from wqk.checkpoints import Checkpoint
    from wqk.scanning.scan import Progress as ScanProgress
    from wqk.scanning.tables import ScoreTable

# polars' own handler lets a main thread that waits for others sleep on through Ctrl-C.
if hasattr(signal, "siginterrupt"):
    signal.siginterrupt(signal.SIGINT, True)

# What gives way where a terminal is too narrow: the heads' terms first, then the bars, the null.
EXTRAS = (("null", "bars", "terms"), ("null", "bars"), ("null",), ())

# Half a bar, in cells; a score of ±1 fills it.
HALF_BAR = 6

POSITIVE, NEGATIVE = "dodger_blue2", "dark_orange"


class _Output(Console):
    """A console whose broken pipe is the command's to deal with, as every other's is."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output() -> Console:
    """Standard output as it is now; numbers are not colored by guesswork."""
    return _Output(highlight=False, markup=False)


def say(message: str) -> None:
    """One line beside the output proper."""
    Console(stderr=True, highlight=False, markup=False).print(message, soft_wrap=True)


def say_traffic(checkpoint: Checkpoint) -> None:
    """How much of a remote checkpoint came over the network; nothing about others."""
    fetched = checkpoint.bytes_fetched
    if fetched is not None:
        stored = sum(info.nbytes for info in checkpoint.tensors().values())
        rest = "" if fetched else "; all that was read was in the cache"
        say(f"{checkpoint.name}: fetched {size(fetched)} of {size(stored)}{rest}")


@contextmanager
def progress(name: str) -> Iterator[Callable[[ScanProgress], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} blocks, {task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(name, total=None, rate="")

        def update(done: ScanProgress) -> None:
            rate = f"{size(done.bytes_read / max(done.seconds, 1e-9))}/s"
            bar.update(task, total=done.blocks, completed=done.blocks_done, rate=rate)

        yield update


def size(count: float) -> str:
    """Bytes for people, in decimal units.

    Examples
    --------
    >>> size(28_311_552)
    '28.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def print_json(table: ScoreTable) -> None:
    """Metadata, summary and rows as one JSON object."""
    print_object(
        {
            "metadata": dict(table.metadata),
            "summary": records(table.summary()),
            "rows": records(table.frame),
        }
    )


def print_object(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def print_table(table: ScoreTable) -> None:
    """The layers of a checkpoint, each kind of attention in a table of its own, and its heads."""
    console = output()
    for frame in table.frame.partition_by("stack", "kind", maintain_order=True):
        layers = frame.filter(pl.col("head").is_null())
        nearest = layers.filter(pl.col("distance") == layers["distance"][0])
        console.print(_title(nearest.row(0, named=True), nearest.height))
        console.print(_layer_table(nearest, console))
        heads = frame.filter(
            pl.col("head").is_not_null(), pl.col("distance") == layers["distance"][0]
        )
        for score in ("symmetry", "directionality"):
            if heads.height:
                _print_across(console, heads, score, "head")
            if nearest.height < layers.height:
                _print_across(console, layers, score, "distance")
    for line in _summary_lines(table):
        console.print(line)
    placements = place(table)
    for placement in placements:
        where = f" {placement.stack}" if len(placements) > 1 else ""
        console.print(Text.assemble((f"atlas{where}: ", "dim"), str(placement)))
    console.print(Text(_footnote(table), style="dim"))


def _title(row: Mapping[str, Any], layers: int) -> Text:
    heads = f"{row['heads']} heads"
    if row["key_heads"] != row["heads"]:
        heads += f" over {row['key_heads']} key heads"
    width = str(row["d_query"])
    if row["d_key"] != row["d_query"]:
        width += f" × {row['d_key']}"
    name = row["checkpoint"] + (f" @ {row['revision']}" if row["revision"] else "")
    return Text.assemble(
        "\n",
        (name, "bold"),
        f"\n{row['family']} · {row['stack']} {row['kind']}-attention · {layers} layers · {heads} "
        f"· d {width}",
    )


def _layer_table(layers: pl.DataFrame, console: Console) -> Table:
    """One line for each layer, with as many columns as there is room for."""
    unbounded = console.options.update(max_width=1000)
    tables = [_layer_columns(layers, extras) for extras in EXTRAS]
    widths = (console.measure(table, options=unbounded).maximum for table in tables)
    fitting = (table for table, w in zip(tables, widths, strict=True) if w <= console.width)
    return next(fitting, tables[-1])


def _layer_columns(layers: pl.DataFrame, extras: tuple[str, ...]) -> Table:
    bars = "bars" in extras
    square = layers["symmetry"].is_not_null().any()
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str | Text]]] = [
        ("layer", lambda row: str(row["layer"]))
    ]
    if layers["window"].is_not_null().any():
        columns.append(("window", lambda row: row["window"] or ""))
    if square:
        columns.append(("symmetry", lambda row: number(row["symmetry"])))
        if bars:
            columns.append(("", lambda row: bar(row["symmetry"])))
        if "null" in extras:
            columns.append(("null", lambda row: number(row["symmetry_null"])))
        if "terms" in extras:
            columns.append(("in heads", lambda row: number(row["symmetry_within_heads"])))
            columns.append(("(dealt)", lambda row: number(row["symmetry_within_random"])))
    columns.append(("directionality", lambda row: number(row["directionality"])))
    if bars:
        columns.append(("", lambda row: bar(row["directionality"])))
    columns.append(("(excess)", lambda row: number(row["directionality_excess"])))
    if (layers["status"] != "ok").any():
        columns.append(("status", lambda row: row["status"]))
    result = Table(box=None, padding=(0, 1), header_style="dim")
    for heading, _ in columns:
        result.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in layers.iter_rows(named=True):
        result.add_row(*(cell(row) for _, cell in columns))
    return result


def number(value: float | None) -> str:
    """A score to three digits; a dash where there is none."""
    if value is None:
        return "–"
    return "nan" if value != value else f"{value:.3f}"


def bar(value: float | None) -> Text:
    """A score in [-1, 1] as a small bar about the middle, in half cells.

    Examples
    --------
    >>> bar(0.75).plain, bar(-0.25).plain
    ('      │████▌ ', '    ▐█│      ')
    """
    if value is None or value != value:
        return Text(" " * (2 * HALF_BAR + 1))
    halves = min(2 * HALF_BAR, round(abs(value) * 2 * HALF_BAR))
    whole, half = divmod(halves, 2)
    if value >= 0:
        right = ("█" * whole + "▌" * half).ljust(HALF_BAR)
        return Text.assemble(" " * HALF_BAR, ("│", "dim"), (right, POSITIVE))
    left = ("▐" * half + "█" * whole).rjust(HALF_BAR)
    return Text.assemble((left, NEGATIVE), ("│", "dim"), " " * HALF_BAR)


def _print_across(console: Console, frame: pl.DataFrame, score: str, column: str) -> None:
    """Layers down, heads or distances across, in hundredths; in blocks that fit the width."""
    if frame[score].is_null().all():
        return
    labels = frame[column].unique(maintain_order=True).to_list()
    room = max(1, (console.width - 6) // 5)
    for start in range(0, len(labels), room):
        block = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
        block.add_column("layer", justify="right", style="dim")
        shown = labels[start : start + room]
        for label in shown:
            block.add_column(str(label), justify="right", min_width=3, no_wrap=True)
        for layer in frame.partition_by("layer", maintain_order=True):
            values = dict(zip(layer[column], layer[score], strict=True))
            block.add_row(str(layer["layer"][0]), *(_hundredths(values.get(x)) for x in shown))
        console.print(Text(f"{score} × 100 by {column}", style="dim"))
        console.print(block)


def _hundredths(value: float | None) -> Text:
    if value is None or value != value:
        return Text("–")
    strength = "bold " if abs(value) >= 0.5 else ""
    return Text(f"{100 * value:.0f}", style=strength + (POSITIVE if value >= 0 else NEGATIVE))


def _summary_lines(table: ScoreTable) -> Iterator[Text]:
    """Medians and quartiles over layers as the paper prints them."""
    rows = table.summary().filter(
        pl.col("over") == "layers", pl.col("distance") == table.frame["distance"][0]
    )
    for row in rows.iter_rows(named=True):
        where = f" {row['stack']} {row['kind']}" if rows.height > 1 else ""
        for score in SUMMARIZED:
            if row[f"{score}_median"] is not None:
                label = score.replace("_excess", " (excess)")
                yield Text.assemble((f"median {label}{where}: ", "dim"), median(row, score))


def median(row: Mapping[str, Any], score: str) -> str:
    """``median ± [median − q25, q75 − median]`` of a summary's row."""
    middle, low, high = (row[f"{score}_{name}"] for name in ("median", "q25", "q75"))
    return f"{middle:.2f} ± [{middle - low:.2f}, {high - middle:.2f}]"


def _footnote(table: ScoreTable) -> str:
    gamma = table.metadata.get("gamma", 2.0)
    lines = [
        "median ± [median − q25, q75 − median] over layers; null: symmetry left when the signs of "
        "rows are random.",
        f"Directionality < 0: columns dominate. It sums the norms beyond mean + {gamma:g} std "
        "(Definition 3.2); (excess) sums norm − threshold (the rule of the published tables).",
    ]
    reasons: Mapping[str, str] = table.metadata.get("partial") or {}
    lines += [f"partial ({stack}): {reason}." for stack, reason in reasons.items()]
    guesses = table.metadata.get("inferred") or []
    lines += [f"Family {guess}; check with wqk verify." for guess in guesses]
    return "\n".join(lines)


def print_overview(table: ScoreTable) -> None:
    """Medians over layers, one line for each checkpoint and kind of attention."""
    console = output()
    overview = Table(box=None, padding=(0, 1), header_style="dim")
    overview.add_column("checkpoint", overflow="fold")
    overview.add_column("attention", no_wrap=True)
    for heading in ("symmetry", "directionality", "(excess)"):
        overview.add_column(heading, justify="right", no_wrap=True)
    for row in table.summary().filter(pl.col("over") == "layers").iter_rows(named=True):
        name = row["checkpoint"] + (f" @ {row['revision']}" if row["revision"] else "")
        medians = (number(row[f"{score}_median"]) for score in SUMMARIZED)
        overview.add_row(name, f"{row['stack']} {row['kind']}", *medians)
    console.print(Text("\nmedians over layers", style="dim"))
    console.print(overview)


def print_side_by_side(table: ScoreTable, introduction: str, verdict: str) -> None:
    """Layers down, checkpoints across: symmetry, then directionality as published."""
    console = output()
    console.print(introduction)
    names = table.frame["checkpoint"].unique(maintain_order=True).to_list()
    layers = table.layers.frame
    for score, title in (
        ("symmetry", "symmetry"),
        ("directionality_excess", "directionality (excess)"),
    ):
        side = Table(box=None, padding=(0, 1), header_style="dim")
        side.add_column("layer", justify="right")
        for name in names:
            side.add_column(name, justify="right", no_wrap=True)
            side.add_column("", no_wrap=True)
        for layer in layers.partition_by("layer", maintain_order=True):
            values = dict(zip(layer["checkpoint"], layer[score], strict=True))
            cells = (cell(values.get(name)) for name in names for cell in (number, bar))
            side.add_row(str(layer["layer"][0]), *cells)
        console.print()
        console.print(Text(title, style="bold"))
        console.print(side)
    console.print()
    console.print(verdict)


def print_explanation(explanation: Explanation) -> None:
    """The tensors of a scan, and what the form does not hold."""
    console = output()
    console.print(
        Text.assemble(
            (explanation.checkpoint, "bold"),
            f"\nmodel type {explanation.model_type or 'unknown'} → family {explanation.family}\n",
        )
    )
    for (stack, kind, layers), uses in groupby(
        explanation.uses, key=lambda use: (use.stack, use.kind, use.layers)
    ):
        console.print(f"{stack} {kind}-attention, layers {layers}")
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for heading in ("role", "tensor", "layout", "heads", "stored", "bytes"):
            table.add_column(heading, overflow="fold")
        for use in uses:
            stored = f"{use.dtype} {'×'.join(map(str, use.shape))}"
            table.add_row(use.role, use.tensor, use.layout, use.heads, stored, size(use.bytes))
        console.print(table)
        console.print()
    for note in explanation.notes:
        console.print(Text(f"• {note}"))
    share = explanation.bytes_to_read / max(1, explanation.bytes_stored)
    console.print(
        f"\nA scan reads {size(explanation.bytes_to_read)} of {size(explanation.bytes_stored)} "
        f"({share:.1%})."
    )


def print_verification(result: Verification) -> None:
    """One line for each block and application, and the verdict."""
    console = output()
    console.print(Text.assemble((result.checkpoint, "bold"), f"\nfamily {result.family}\n"))
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("attention", "layer", "largest difference", ""):
        table.add_column(heading, justify="left" if heading in ("attention", "") else "right")
    for block in result.blocks:
        layer = str(block.layer) + (f", use {block.application}" if block.application else "")
        verdict = "" if block.ok else "WRONG"
        if block.difference <= block.tolerance and not block.ok:
            verdict = "too uniform to tell"
        cells = (f"{block.stack} {block.kind}", layer, f"{block.difference:.1e}")
        table.add_row(*cells, Text(verdict, style="bold red"))
    console.print(table)
    console.print(
        "\nThe forms give the model's own attention: largest difference of a probability "
        f"{result.difference:.1e}, in float64."
        if result.ok
        else "\nThe forms do NOT give the model's own attention; its scores are not to be believed."
    )


def print_difference(frame: pl.DataFrame) -> None:
    """One line for each layer, or head, that was compared."""
    console = output()
    table = Table(box=None, padding=(0, 1), header_style="dim")
    with_heads = frame["head"].is_not_null().any()
    columns = ("norm", "moved", "cosine", "symmetry", "directionality", "directionality_excess")
    for heading in (
        "attention",
        "layer",
        *(["head"] if with_heads else []),
        *columns[:5],
        "(excess)",
    ):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for row in frame.iter_rows(named=True):
        head = [] if not with_heads else ["all" if row["head"] is None else str(row["head"])]
        place = (f"{row['stack']} {row['kind']}", str(row["layer"]), *head)
        table.add_row(*place, *(number(row[column]) for column in columns))
    console.print(table)
    console.print(
        Text(
            "moved: norm of the difference over the norm before; scores are the difference's own.",
            style="dim",
        )
    )
