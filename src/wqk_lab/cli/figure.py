"""``wqk lab figure``: the paper's figures and tables, and others, from your own results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk.cli.options import FILE, SOURCE, Number
from wqk.errors import UnknownName
from wqk_lab.training.declared import documented

if TYPE_CHECKING:
    from wqk_lab.figures import Sources
    from wqk_lab.figures.catalog import FigureEntry

# Names repeated here to avoid heavy imports; a test compares both lists.
FIGURES = (
    "fig2",
    "fig3",
    "s1",
    "s2",
    "s3",
    "s4",
    "s5",
    "losses",
    "dose",
    "convert",
    "updates",
    "pairs",
    "heads",
    "coupling",
    "distances",
)
TABLES = ("table1", "tableS2", "tableS3")

# Figures and tables of models, which also take checkpoints as sources.
WITH_MODELS = ("fig2", "s1", "s2", "tableS2", "tableS3")

UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}

# A larger number of parameters is a typing error.
MOST_PARAMETERS = 1e15

# Similarity from which on a wrong name is taken for a right one; fig9 is no wrong fig2.
ALIKE = 0.8


class FigureName(click.Choice[str]):
    """The name of a figure or table; ``3``, ``figure3`` and ``fig3`` are the same figure.

    Examples
    --------
    >>> name = FigureName([*FIGURES, *TABLES])
    >>> name("3"), name("Figure 2"), name("figS3"), name("table-s2")
    ('fig3', 'fig2', 's3', 'tableS2')
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Parse a name in any spelling."""
        plain = re.sub(r"[ ._-]", "", str(value)).lower().replace("figure", "fig")
        spellings = {name.lower(): name for name in self.choices}
        for name in (plain, f"fig{plain}", plain.removeprefix("fig")):
            if name in spellings:
                return spellings[name]
        # Whole words, which a wrong letter leaves alike: figuer2, figuer S3.
        spellings |= {f"figure{name.removeprefix('fig')}": name for name in FIGURES}
        if close := get_close_matches(plain, spellings, 1, ALIKE):
            advice = f"did you mean {spellings[close[0]]!r}?"
        else:
            advice = f"figures are {', '.join(FIGURES)}; tables are {', '.join(TABLES)}"
        raise UnknownName(
            f"{value}: no such figure or table; {advice}",
            name=str(value),
            close=[spellings[name] for name in close] or self.choices,
        )


class ModelSize(click.ParamType):  # type: ignore[type-arg]
    """A name and a number of parameters, which may end in k, M, B or T.

    Examples
    --------
    >>> size = ModelSize()
    >>> size("bert-base-uncased=109482240"), size("models/a=b=1.5B")
    (('bert-base-uncased', 109482240), ('models/a=b', 1500000000))
    """

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a name and a number, as ``NAME=NUMBER``."""
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"(.+)=([\d_]*\d(?:\.\d+)?(?:e\d+)?)([kmbgt]?)", value, re.IGNORECASE)
        number = 0.0
        if match:
            number = float(match[2]) * UNITS[match[3].lower()]
        if not match or not 1 <= number < MOST_PARAMETERS:
            expected = "a checkpoint's name and a number, such as bert-base-uncased=109M"
            self.fail(f"expected {expected}, got {value!r}", param, ctx)
        return match[1], round(number)


@documented
@click.command()
@click.argument("name", type=FigureName([*FIGURES, *TABLES]), metavar="NAME")
@click.argument("more", nargs=-1, type=SOURCE, metavar="[SOURCE]...")
@click.option("--from", "sources", type=SOURCE, multiple=True, metavar="SOURCE")
@click.option("-o", "--out", type=FILE, multiple=True)
@click.option("--parameters", type=ModelSize(), multiple=True, metavar="NAME=N")
@click.option("--published", is_flag=True)
@click.option("--only-own", is_flag=True)
@click.option("--below", "level", type=Number(min=0), metavar="NATS")
@click.option("--json", "as_json", is_flag=True)
def figure(
    name: str,
    more: tuple[Path, ...],
    sources: tuple[Path, ...],
    out: tuple[Path, ...],
    parameters: tuple[tuple[str, int], ...],
    only_own: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw a figure of the paper, or an additional one, from published results and your own.

    SOURCE is the folder of a training run, of several runs, or of a survey, a score table, or
    details of a scan (.npz). For fig2, s1, s2, tableS2 and tableS3 it may also be a checkpoint (a
    folder, a file, demo:NAME or a Hub id), whose layers are then scanned.

    \b
    From published scores, with your surveys and tables added:
      fig2       symmetry and directionality against parameters, language
      s1         the same, vision and audio
      s2         the same, models with an encoder and a decoder
      tableS2, tableS3
                 medians of symmetry; of directionality. A model of the paper's table is
                 next to its row, any other model below, under "Your models"
    From training runs:
      table1     initializations: losses and the paper's
      fig3       an encoder and a decoder during training, medians and layers
      s3, s4     the same for several corpora: medians; layers
      s5         initializations: loss, symmetry, gap between layers, layers
      losses     initializations and penalties: loss, difference from random
      dose       loss against the scale of the start
      convert    runs that continue others: scores and those of the change
      updates    symmetry and directionality of each form's change
    From a survey of pairs (wqk lab pairs):
      pairs      changes by lifting the causal mask, with tests of the predictions
    From tables and details:
      heads      symmetry within and between heads, and by chance
      coupling   how heads transpose each other (.npz)
      distances  scores over relative distance (rotary models)

    \b
    Examples:
      wqk lab figure fig2 --from survey --out fig2.pdf --out fig2.csv
      wqk lab figure fig2 --from bert.parquet --parameters bert-base-uncased=109M
      wqk lab figure fig3 runs/wikipedia-*/
      wqk lab figure tableS2 --from survey --only-own --out tableS2.tex

    Parameters
    ----------
    sources
        Same as SOURCE; repeatable.
    out
        Picture: .pdf, .svg, .png; numbers: .csv; table: .md, .tex; repeatable.
        [default: NAME.pdf]
    parameters
        Size of a model in fig2, s1 and s2, in place of its checkpoint's, by the name of the
        checkpoint or its last part, such as bert-base-uncased=109M; repeatable.
    published
        Below your runs, draw the paper's own as well (s3, s4).
    only_own
        Only the rows with your own values (tableS2, tableS3).
    level
        Training loss; dose shows when runs fall below this loss.
    as_json
        Print the numbers behind a figure as JSON.
    """
    from wqk_lab.figures import read_sources

    contents = read_sources(*sources, *more, models=name in WITH_MODELS)
    contents = replace(contents, parameters=dict(parameters), **options)
    if name in TABLES:
        if parameters:
            raise click.UsageError(f"--parameters is for fig2, s1 and s2; got {name}: leave it out")
        if as_json:
            raise click.UsageError(f"{name} is text; wqk lab atlas --json prints its rows")
        _write_table(name, contents, out, only_own)
    else:
        if only_own:
            raise click.UsageError(f"--only-own is for tableS2 and tableS3; got {name}.")
        _draw(name, contents, out or (Path(f"{name}.pdf"),), as_json)


def _draw(name: str, sources: Sources, outs: Sequence[Path], as_json: bool) -> None:
    """Save a figure to some files, or print its numbers."""
    from wqk.cli import display
    from wqk.tables.schema import records
    from wqk_lab.figures import FIGURES, numbers
    from wqk_lab.figures.catalog import check_ending, save
    from wqk_lab.figures.model_sizes import SETS, left_out
    from wqk_lab.figures.paired import sentences
    from wqk_lab.training.frequencies import plateau_note

    for out in outs:
        check_ending(out)
    sources = _with_package_models(FIGURES[name], sources)
    if as_json:
        display.print_object({"figure": name, "rows": records(numbers(name, sources))})
        return
    for out in outs:
        save(name, sources, out)
    if name == "pairs" and sources.pairs is not None:
        for line in sentences(sources.pairs, numbers(name, sources)):
            display.say(line)
    for run in sources.runs:
        if note := plateau_note(run):
            display.say(f"{run.name}: {note}")
    if name in SETS:
        for line in left_out(sources.scores, sources.parameters):
            display.say(f"not drawn, {line}")
    for out in outs:
        display.say(f"{name}: {out}")


def _with_package_models(entry: FigureEntry, sources: Sources) -> Sources:
    """Return the sources of a figure; the package's two models replace missing parts.

    Without sources, the figure draws the two models only. Next to own scores without details, the
    matrices have the names for opening these models.
    """
    from wqk.reporting.demo import demo_table
    from wqk_lab.figures import Sources

    is_empty = replace(sources, published=False, level=None) == Sources()
    if is_empty and entry.stand_in == "table":
        return Sources(table=demo_table())
    is_without_matrices = entry.with_matrices and not sources.blocks
    if not is_without_matrices and not (is_empty and entry.stand_in):
        return sources
    details = demo_table().details
    blocks = details.blocks if details else ()
    if not is_empty:
        blocks = tuple(
            replace(block, key=replace(block.key, checkpoint=f"demo:{block.key.checkpoint}"))
            for block in blocks
        )
    return replace(sources, blocks=blocks)


def _write_table(name: Any, sources: Sources, outs: Sequence[Path], only_own: bool) -> None:
    """Write a table of the paper to some files, or print the table."""
    from wqk._files import write_atomically
    from wqk.cli import display
    from wqk_lab.figures import table_text
    from wqk_lab.figures.results import not_comparable

    endings = [out.suffix for out in outs] or [".md"]
    texts = [table_text(name, sources, ending, only_own=only_own) for ending in endings]
    if names := not_comparable(sources.scores):
        display.say(f"not in the table, {', '.join(names)}: no scores of plain self-attention")
    for text, out in zip_longest(texts, outs):
        if out and not display.is_standard_output(out):
            write_atomically(out, text.encode())
            display.say(f"{name}: {out}")
        else:
            click.echo(text, nl=False)
