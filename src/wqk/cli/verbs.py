"""Verbs that are functions, as declarations; small verbs of their own; the group ``wqk lab``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from wqk.cli.main import LABORATORY, Boundary
from wqk.cli.options import (
    FILE,
    OPTIONS,
    PATH,
    POSITIVE,
    REF,
    SOURCE,
    Number,
    Several,
    csv_output,
    every_head,
    gamma,
    json_output,
    junit_file,
    layers,
    opened,
    option,
    picture_file,
    reading,
    result_file,
    revision,
    revision_of_each,
    stack,
)
from wqk.cli.verb import Verb

if TYPE_CHECKING:
    from wqk.kinship.kin import Kinship
    from wqk.tables.score_table import ScoreTable

explain = Verb(
    "wqk.inspecting.explanation:explain", examples=("wqk explain google-bert/bert-base-uncased",)
)

verify = Verb(
    "wqk.live.verification:verify",
    fails="some forms are wrong, or could not be compared",
    omit=("batch", "tokens", "length", "tolerance"),
    examples=(
        "wqk verify google-bert/bert-base-uncased",
        "wqk verify ./my-model --junit verify.xml",
    ),
    junit=True,
)

tokens = Verb(
    "wqk.inspecting.tokens:match_tokens",
    examples=(
        "wqk tokens meta-llama/Llama-3.2-1B --layer 0 --head 3 --fold-norm",
        "wqk tokens meta-llama/Llama-3.2-1B --layer 0 --head 3 --query Paris",
        "wqk tokens openai-community/gpt2 --layer 5 --head 1 --through 4.11",
        "wqk tokens openai-community/gpt2 --layer 5 --head 1 --directions --circuit ov",
    ),
)

compose = Verb(
    "wqk.inspecting.composition:compose",
    examples=(
        "wqk compose openai-community/gpt2 --kind k",
        "wqk compose openai-community/gpt2 --kind k --matrix --picture map.pdf",
        "wqk compose meta-llama/Llama-3.2-1B --fold-norm --out pairs.parquet",
    ),
    extra={
        "top": {
            "default": 20,
            "help": "Number of pairs to print, and to draw; if given, also of --csv and --out.",
        },
        "matrix": {
            "is_flag": True,
            "help": "Draw the scores of all pairs: a map for each kind, writers down, readers "
            "across.",
        },
    },
    show=lambda result, top, matrix: [replace(result, top=top)],
    table=True,
    picture=True,
    plotted=("top", "matrix"),
)

parts = Verb(
    "wqk.live.parts:parts",
    examples=(
        "wqk parts google-bert/bert-base-uncased --text wikitext.txt --each-layer",
        "wqk parts out/pair/encoder-1 --corpus out/pair/corpus --picture parts.png",
    ),
    picture=True,
    progress="passes_progress",
    omit=("tokens",),
)

diff = Verb(
    "wqk.differences:diff",
    examples=(
        "wqk diff EleutherAI/pythia-160m ./my-finetuned-pythia",
        "wqk diff ./run/checkpoint-1000 ./run/checkpoint-2000 --terms",
        "wqk diff ./run/checkpoint-1000 ./run/checkpoint-2000 --heads --top 10",
        "wqk diff ./model ./model-int4 --beside ./model-nf4 --picture heads.png",
    ),
    extra={
        "top": {
            "help": "Print this many rows, also of --csv, --json and --out: those that moved most, "
            "of heads with --heads.",
        },
    },
    show=lambda result, top: [replace(result, rows_shown=top)],
    table=True,
    picture=True,
    drawn=("heads",),
)


def _with_matches(result: Kinship, matches: bool) -> list[Any]:
    """Return the result, and on request the layers and heads that match."""
    from rich.text import Text

    from wqk._console import display_name
    from wqk.kinship.kin import layer_table

    if not (matches and result.related):
        return [result]
    reference, candidate = display_name(result.reference), display_name(result.candidate)
    title = f"{candidate}, and its matches in {reference}"
    order = Text(
        "Heads: for each head of the candidate, in order, the number of the closest head of the "
        "reference.",
        style="dim",
    )
    return [result, title, layer_table(result), order]


kin = Verb(
    "wqk.kinship.kin:kin",
    extra={"matches": {"is_flag": True, "help": "Also print which layers and heads match."}},
    show=_with_matches,
    examples=(
        "wqk kin Qwen/Qwen2.5-7B ./a-model-that-hides-its-parent",
        "wqk kin ./merged ./parent --matches",
    ),
)


@click.command()
@click.argument("ref", type=REF)
@option("layer", required=True)
@option("head", help="Show one head instead of the whole layer.")
@click.option(
    "--coupling",
    is_flag=True,
    help="Show how the layer's heads transpose each other, with the strongest pairs, and the "
    "symmetry within heads and between heads.",
)
@stack
@click.option(
    "--cross",
    "kind",
    flag_value="cross",
    default="self",
    show_default=False,
    help="Cross-attention instead of self-attention.",
)
@click.option("--linear", "kind", flag_value="linear", help="Linear attention instead.")
@click.option("--state-space", "kind", flag_value="state-space", help="State spaces instead.")
@click.option(
    "-o",
    "--out",
    "--picture",
    "out",
    type=FILE,
    help="Figure to write: .png, .pdf or .svg.  [default: named after the model and layer]",
)
@gamma
@revision
@option("base")
@reading
@json_output
@csv_output
def show(
    ref: str, layer: int, out: Path | None, as_json: bool, as_csv: bool, **options: Any
) -> None:
    """Draw a form with its norms, or the coupling of heads.

    \b
    Examples:
      wqk show google-bert/bert-base-uncased --layer 3
      wqk show google-bert/bert-base-uncased --layer 3 --coupling --out coupling.pdf
    """
    from wqk._style import check_picture
    from wqk.cli import display
    from wqk.inspecting.showing import show as show_checkpoint

    ending = display.require_one_output(as_csv, out, as_json)
    if out and not (as_json or ending):
        check_picture(out)
    view = show_checkpoint(opened(ref, options), layer, **options)
    if as_json or ending:
        display.show(view.values, as_json=as_json, ending=ending, rows=view)
        return
    path = out or Path(f"{view.title.replace(', ', '-').replace(' ', '')}.png")
    view.save(path)
    display.output().print(view)
    display.say(f"picture: {path}")


@click.command()
@click.argument("reference", type=REF)
@click.argument("candidate", type=REF)
@revision_of_each
@option("base")
@reading
@click.option("--other-family", **OPTIONS["family"] | {"help": "The candidate's family, likewise."})
@layers
@click.option(
    "--tolerance",
    type=Number(min=0),
    default=0.0,
    metavar="X",
    help="Accept heads that lie this far apart, relative to their norm.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Compare every other tensor too, by name or by what it holds.",
)
@click.option(
    "--up-to",
    type=Several("stream", "heads", "neurons"),
    multiple=True,
    callback=lambda context, option, given: [*chain(*given)],
    help="Ignore a freedom: the coordinates of the residual stream, if one rotation turns "
    "everything (QuaRot, SpinQuant); the order of neurons (both imply --all); or that of heads.",
)
@click.option(
    "--repair",
    type=PATH,
    metavar="FOLDER",
    help="Write a repaired copy of the candidate, with its files, names and types, and compare it. "
    "The outcome is printed instead of the code.",
)
@click.option(
    "--merged-with",
    type=REF,
    multiple=True,
    metavar="REF",
    help="A further parent of the candidate: fit the weights of the reference and of all these, "
    "and compare the candidate with their weighted sum.",
)
@junit_file
@picture_file("Draw where they differ")
@result_file
@json_output
@csv_output
@click.pass_context
def same(
    context: click.Context,
    /,
    reference: str,
    candidate: str,
    picture: Path | None,
    out: Path | None,
    junit: Path | None,
    as_json: bool,
    as_csv: bool,
    **options: Any,
) -> None:
    """Check whether the candidate is the reference, converted or rewritten; if not, find out why.

    Compares scores, values and outputs, learned positions, sinks, and other mixers; with --all
    every other tensor too. The comparison is exact, across families, layouts and number types.
    Changes that leave attention unchanged are ignored: rotations within heads, folded norms and
    scales. If the models differ, the rows of the candidate's queries and keys are searched in the
    reference. The output names the mistake, with code for the repair: rotary order not converted,
    converted twice or with the wrong number of heads; heads regrouped, copied or still as
    initialized; queries and keys exchanged or transposed; weights of another layer; another layout
    of a fused weight; biases, gains of norms, a factor; rotary base, scaling or width; an adapter
    without a merge.

    Exit status: 0 if the models are equal up to the rounding of the number types, 1 if they differ,
    3 if the comparison is undecided, for example if a family only names its rotary positions, and 2
    if an error prevents the comparison. With --repair, the status is about the repaired copy: 0 if
    the copy is equal to the reference, 1 if it still differs (it is never farther from the
    reference than the candidate), and 2 if no repair is known and nothing was written.

    \b
    Examples:
      wqk same meta-llama/Llama-3.2-1B ./my-conversion
      wqk same meta-llama/Llama-3.2-1B model-Q8_0.gguf --layers 0,-1
      wqk same parent ./merged --merged-with other-parent --all
    """
    from wqk._files import check_writable, write_atomically
    from wqk._style import check_picture, save_figure
    from wqk.cli import display
    from wqk.errors import OutputError
    from wqk.sameness import reports
    from wqk.sameness.same import same as compare

    if out and not (out.suffix or display.is_standard_output(out)):
        raise OutputError(
            f"{out}: is no file of a result; expected FILE.csv or FILE.json, or - for CSV; "
            "--repair FOLDER writes a repaired copy"
        )
    ending, out = display.result_output(as_csv, out, as_json)
    if picture:
        check_picture(picture)
    if junit:
        check_writable(junit)

    try:
        with display.bar("comparing", display.blocks_progress) as show_progress:
            result = compare(reference, candidate, on_progress=show_progress, **options)
    except Exception as error:
        # A build server shows the report of every outcome, of unexpected errors too.
        if junit:
            reason = str(error) or type(error).__name__
            write_atomically(junit, reports.junit_error(reference, candidate, reason))
        raise
    display.show(result.to_dict(), result, as_json=as_json, ending=ending, rows=result)
    if junit:
        write_atomically(junit, reports.junit(result))
        display.say(f"report: {junit}")
    if out:
        display.write_result(result, out)
    if picture:
        save_figure(result.plot(), picture)
        display.say(f"picture: {picture}")
    verdict = result.verdict if result.repaired is None else result.repaired.verdict
    context.exit(verdict.exit_status)


@click.command()
@click.argument("run", metavar="DIR", type=REF)
@click.option(
    "-o",
    "--out",
    type=PATH,
    metavar="DIR",
    help="Folder of the scores; with FILE.csv or another table's ending, the folder FILE "
    "(FILE.csv.survey if FILE is something else), and the table as this file.  [default: "
    "DIR/wqk-scores; of an address, NAME-scores]",
)
@click.option("--once", is_flag=True, help="Score the steps that are complete, and end.")
@click.option("--until", type=click.IntRange(min=0), metavar="STEP", help="Stop after this step.")
@click.option(
    "--every",
    type=POSITIVE,
    default=10.0,
    metavar="SECONDS",
    help="Seconds between looks at the folder.",
)
@click.option("--live", is_flag=True, help="Show all steps as one table that grows in place.")
@every_head
@gamma
def watch(run: str, out: Path | None, live: bool, **options: Any) -> None:
    """Score each checkpoint of a training run as soon as it is complete.

    Works with any trainer that names folders after steps (checkpoint-100, step-100): it only
    looks at files, and reads only queries and keys. Ctrl-C ends the watch; the same command
    resumes. With --once, it scores the steps that exist now.

    \b
    Example:
      wqk watch ./run --until 100000
      wqk watch ./run --live
      wqk watch ./run --once --out scores.csv
      wqk watch s3://bucket/run --out scores
    """
    from wqk._console import counted
    from wqk.cli import display
    from wqk.scanning.surveys.watch import WATCHED
    from wqk.scanning.surveys.watch import watch as watch_run
    from wqk.storage.references import is_url, redacted, step_in
    from wqk.tables.rendering import HEADLINE, STATUS_MEANINGS, label
    from wqk.tables.schema import status_counts, summarized_status

    name = redacted(run).rstrip("/").rpartition("/")[2]
    folder = out or (Path(f"{name}-scores") if is_url(run) else Path(run) / WATCHED)
    folder, table_file = display.folder_and_file(folder)

    def written(tables: Iterable[ScoreTable]) -> Iterator[ScoreTable]:
        for table in tables:
            if table_file:
                table.write(table_file)
                display.say(f"{table_file}: {counted(len(table), 'row')}")
            if options["once"] and not (len(table) or table.metadata.get("failed")):
                display.say(
                    f"{run}: no complete checkpoint; expected folders in it that are named after "
                    "steps, such as checkpoint-100 or step-100"
                )
            yield table

    def tell(rows: ScoreTable) -> None:
        summary = rows.layers.summary().row(0, named=True)
        medians = {name: summary[f"{name}_median"] for name in HEADLINE}
        step = rows.frame["step"][0]
        texts = (f"{label(n)} {value:.3f}" for n, value in medians.items() if value is not None)
        line = f"step {step}: {', '.join(texts)}"
        status = summarized_status(rows.layers["status"].to_list())
        if status != "ok":
            line += f"; {status}"
        click.echo(line)
        for name in status_counts(rows.layers["status"]):
            if name in STATUS_MEANINGS and name not in explained:
                explained.add(name)
                display.say(f"{name}: {STATUS_MEANINGS[name]}")

    explained: set[str] = set()
    next_look = "the next look" if not options["once"] else "the next wqk watch"

    def wait(folder: str, reason: str) -> None:
        line = f"{folder} is not complete yet: {reason}"
        if step_in(PurePath(folder).name) is not None:
            line += f"; it may still be being written, and {next_look} tries it again"
        display.say(line)

    every = f"{options['every']:g} seconds"

    def fail(place: str, reason: str) -> None:
        if place == str(folder):
            display.say(f"no scores were written: {reason}; the watch tries again every {every}")
        else:
            display.say(f"{place} cannot be scored, and is tried again once it changes: {reason}")

    if not options["once"]:
        display.say(f"{run}: waiting for folders named after steps, with a look every {every}")
    try:
        if live:
            tables = watch_run(run, out=folder, on_wait=wait, on_failure=fail, **options)
            display.live_tables(written(tables))
        else:
            tables = watch_run(
                run, out=folder, on_scores=tell, on_wait=wait, on_failure=fail, **options
            )
            for _ in written(tables):
                pass
    except KeyboardInterrupt:
        scores = folder / "scores.parquet"
        raise KeyboardInterrupt(
            f"the scores are in {scores}" if scores.exists() else "no checkpoint was scored"
        ) from None


@click.command()
@click.argument("sources", nargs=-1, required=True, type=SOURCE, metavar="TABLE|REF...")
@click.option(
    "--details",
    "details_files",
    type=FILE,
    multiple=True,
    metavar="FILE.npz",
    help="Details from wqk scan --details (matrices, norms, head coupling); repeatable.",
)
@click.option(
    "-o",
    "--out",
    type=FILE,
    metavar="FILE.html",
    help="Report to write (.html).  [default: report.html, if there is none]",
)
@picture_file("Draw the scores as wqk scan does, instead of a report without --out")
@click.option("--title", metavar="TEXT", help="Heading.  [default: the models' names]")
def report(
    sources: tuple[Path, ...],
    details_files: tuple[Path, ...],
    out: Path | None,
    picture: Path | None,
    title: str | None,
) -> None:
    """Write score tables as one HTML file that opens offline.

    TABLE is a .parquet, .jsonl or .csv file with scores, the folder of a training run, of several
    runs, of a callback (scores.jsonl), of a run that wqk watch has scored, or of a survey. Several
    are shown side by side. A checkpoint, REF, is scanned first, with its details, and so are the
    steps of a run that has no scores yet, without details. In addition, a table of wqk compose
    (.parquet) adds a section with the heads that feed heads.

    \b
    Examples:
      wqk report scores.parquet -o report.html
      wqk report bert.parquet gpt2.parquet --details forms.npz -o report.html
      wqk report scores.parquet pairs.parquet -o report.html
      wqk report ./run -o run.html
      wqk report google-bert/bert-base-uncased -o report.html
      wqk report scores.parquet --picture scores.pdf
    """
    from wqk._style import check_picture, save_figure
    from wqk.checkpoints import is_checkpoint, step_folders
    from wqk.cli import display
    from wqk.errors import OutputError, TableError
    from wqk.inspecting.composition import CompositionTable
    from wqk.reporting import check_report, write_report
    from wqk.reporting.report import has_scores
    from wqk.scanning.scan import scan as scan_checkpoint
    from wqk.tables.details import read_details
    from wqk.tables.score_table import ScoreTable, Table, join, read_one_of

    if picture:
        check_picture(picture)
    if out is None and picture is None:
        out = Path("report.html")
        if out.exists():
            raise OutputError(
                f"{out}: already exists; -o {out} replaces it, -o FILE.html writes another file"
            )
    if out:
        check_report(out)
    pairs: list[Table] = []
    tables: list[ScoreTable | Path] = []
    for source in sources:
        if is_checkpoint(source):
            with display.bar(str(source), display.scan_progress) as on_progress:
                tables.append(scan_checkpoint(str(source), details=True, on_progress=on_progress))
            continue
        if not source.is_file():  # the folder of a run, a callback or a survey
            steps = [] if has_scores(source) else step_folders(str(source))
            for step in steps:
                with display.bar(step, display.scan_progress) as on_progress:
                    tables.append(scan_checkpoint(step, on_progress=on_progress))
            if not steps:
                tables.append(source)
            continue
        table = read_one_of(source, ScoreTable, CompositionTable)
        if isinstance(table, ScoreTable):
            tables.append(table)
        else:
            pairs.append(table)
    if not tables:
        raise TableError(
            "a report shows scores, and these are pairs of heads only; expected a score table "
            "beside them: wqk scan REF --out scores.parquet"
        )
    details = [read_details(file) for file in details_files]
    if picture:
        folders = [str(source) for source in tables if isinstance(source, Path)]
        if folders:
            raise TableError(
                f"{folders[0]}: a picture is drawn of score tables; expected the file of a table, "
                "such as scores.parquet in the folder"
            )
        table = join([table for table in tables if isinstance(table, ScoreTable)])
        save_figure(table.plot(), picture)
        display.say_picture(picture, table, [source for source in sources if source.is_file()])
    if out:
        write_report(tables, out, details=details, compositions=pairs, title=title)
        display.say(f"report: {out}")


@click.command()
@click.argument("word", required=False, default="")
@result_file
@json_output
@csv_output
def models(word: str, out: Path | None, as_json: bool, as_csv: bool) -> None:
    """List the model types that are read.

    With WORD, only the types with the word in their name, or in the name of their family. A type is
    the model_type of config.json; for a GGUF file, gguf- and its architecture. Composite models are
    listed with the families of their parts.

    \b
    Examples:
      wqk models
      wqk models qwen
      wqk models --csv
    """
    from wqk._files import exists
    from wqk.cli import display
    from wqk.inspecting.model_list import models as list_types

    ending, out = display.result_output(as_csv, out, as_json)
    if "/" in word or (word and exists(Path(word))):
        raise click.UsageError(f"{word}: names a checkpoint; wqk explain {word} shows its type")
    result = list_types(word)
    display.show(result.to_dict(), result, as_json=as_json, ending=ending, rows=result)
    if out:
        display.write_result(result, out)


@click.command()
@click.option(
    "-o",
    "--picture",
    "--out",
    "out",
    type=FILE,
    default=Path("wqk-demo.png"),
    help="Figure to write (.png, .pdf, .svg); needs matplotlib.",
)
@click.option(
    "--report",
    type=FILE,
    metavar="FILE.html",
    default=Path("wqk-demo.html"),
    help="Report to write (.html); needs plotly.",
)
@json_output
@csv_output
def demo(out: Path, report: Path, as_json: bool, as_csv: bool) -> None:
    """Scan an encoder and a decoder trained with the same recipe, side by side.

    Needs no network and no PyTorch. Every command that reads a checkpoint takes demo:encoder,
    demo:decoder and demo:induction, the small models of the package; only demo:induction has all
    weights, the pair has queries and keys only.
    """
    from wqk._style import save_figure
    from wqk.cli import display
    from wqk.errors import MissingPackage
    from wqk.reporting import write_report
    from wqk.reporting.demo import demo_figure, demo_introduction, demo_table, demo_verdict
    from wqk.tables.rendering import side_by_side

    table = demo_table()
    if ending := display.require_one_output(as_csv, out, as_json):
        display.print_table(table, ending)
        return
    if as_json:
        display.print_json(table)
        return
    lines = (demo_introduction(), *side_by_side(table), "", demo_verdict(table))
    display.output().print(*lines, sep="\n")
    files: dict[str, tuple[Path, Callable[[], object]]] = {
        "picture": (out, lambda: save_figure(demo_figure(table), out)),
        "report": (report, lambda: write_report(table, report)),
    }
    for kind, (path, write) in files.items():
        try:
            write()
            display.say(f"{kind}: {path}")
        except MissingPackage as error:
            display.say(f"no {kind}: {error}")


@click.group(cls=Boundary, verbs=LABORATORY)
def lab() -> None:
    """Train small models, and test the paper on them.

    These verbs come from packages. The laboratory, wqk_lab, is installed with wqk; other packages
    add verbs with an entry point of the group wqk.commands.
    """
