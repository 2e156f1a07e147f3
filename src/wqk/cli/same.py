"""``wqk same``: whether two checkpoints attend the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wqk.cli.options import (
    FILE,
    OPTIONS,
    REF,
    Number,
    json_output,
    layers,
    reading,
    revision_of_each,
)


@click.command()
@click.argument("ref", metavar="A", type=REF)
@click.argument("other", metavar="B", type=REF)
@revision_of_each
@reading
@click.option("--other-family", **OPTIONS["family"] | {"help": "The family of B, likewise."})
@layers
@click.option(
    "--tolerance", type=Number(min=0), default=0.0, metavar="X",
    help="Accept heads that lie this far apart, relative to their norm.",
)  # fmt: skip
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Compare every other tensor too, by name or by what it holds.",
)  # fmt: skip
@click.option(
    "--up-to", type=click.Choice(["heads"]), multiple=True,
    help="Ignore this freedom: the order of heads, where values and outputs have the same.",
)  # fmt: skip
@click.option("--junit", type=FILE, metavar="FILE.xml", help="Write a report as JUnit's XML.")
@click.option("--picture", type=FILE, help="Draw where they differ: .png, .pdf or .svg.")
@json_output
@click.pass_context
def same(
    context: click.Context, /, ref: str, other: str, picture: Path | None,
    junit: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Check whether B is A, converted or rewritten, and if not, find out why.

    Compares what attends: scores, values and outputs, learned positions, sinks, and other mixers;
    with --all every other tensor too. Exact, across families, layouts and number types. Changes
    that leave attention unchanged are ignored: rotations within heads, folded norms and scales. If
    the two differ, each row of B's queries and keys is searched for among A's, and the mistake is
    named with the code that undoes it: rotary order not converted, converted twice or with the
    wrong number of heads, heads regrouped, copied or left as initialized, queries and keys
    exchanged or transposed, another layer's weights, another layout of a fused weight, biases,
    gains of norms, a factor, rotary base, scaling or width, an adapter that was not merged.

    Exit status: 0 if the two are equal up to the rounding of their number types, 1 if they differ,
    2 if they cannot be compared.

    \b
    Examples:
      wqk same meta-llama/Llama-3.2-1B ./my-conversion
      wqk same meta-llama/Llama-3.2-1B model-Q8_0.gguf --layers 0,-1
    """
    from wqk._style import check_picture, save_figure
    from wqk.cli import display
    from wqk.comparing.sameness import same as compare

    if picture:
        check_picture(picture)

    def changes(done: int, count: int) -> dict[str, Any]:
        return {"completed": done, "total": count, "text": f"{done}/{count} blocks"}

    with display.bar("comparing", changes) as report:
        result = compare(ref, other, on_progress=report, **options)
    display.show(result.to_dict(), result, as_json=as_json)
    if junit:
        from wqk._files import write_atomically
        from wqk.comparing.gate import junit as report_of

        write_atomically(junit, report_of(result))
    if picture:
        save_figure(result.plot(), picture)
        display.say(f"picture: {picture}")
    if not result.same:
        context.exit(1)
