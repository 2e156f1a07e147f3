"""``wqk same``: whether two checkpoints attend the same way."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import family_file, json_output


@click.command()
@click.argument("ref", metavar="A")
@click.argument("other", metavar="B")
@family_file
@click.option(
    "--other-family",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.toml",
    help="The same for B.",
)
@json_output
@click.pass_context
def same(
    context: click.Context,
    ref: str,
    other: str,
    family: Path | None,
    other_family: Path | None,
    as_json: bool,
) -> None:
    """Tell whether B attends as A does, and if not, what is wrong with it.

    Exact, from the weights, whatever the families, layouts and number types. What leaves the
    attention alone is not seen: rotations within heads, folded norms and scales. Known mistakes of
    conversions are named: rotary order or base, the order or the pairing of heads, queries and keys
    exchanged, a factor, biases.

    Exits with 0 if the two are the same to the rounding of their number types, 1 if they differ, 2
    if they cannot be compared.

    \b
    Example:
      wqk same meta-llama/Llama-3.2-1B ./my-conversion
    """
    from wqk.cli.display import print_object
    from wqk.cli.same_display import print_comparison
    from wqk.scanning.same import same as compare

    result = compare(ref, other, family=family, other_family=other_family)
    if as_json:
        print_object(result.to_dict())
    else:
        print_comparison(result)
    if not result.same:
        context.exit(1)
