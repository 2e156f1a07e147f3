"""``wqk same``: whether two checkpoints attend the same way."""

from __future__ import annotations

from typing import Any

import click

from wqk.cli.options import FILE, REF, family_file, json_output, revision_of_each


@click.command()
@click.argument("ref", metavar="A", type=REF)
@click.argument("other", metavar="B", type=REF)
@revision_of_each
@family_file
@click.option("--other-family", type=FILE, metavar="FILE.toml", help="The same for B.")
@json_output
@click.pass_context
def same(context: click.Context, /, ref: str, other: str, as_json: bool, **options: Any) -> None:
    """Check whether B attends as A does, and if not, find out why.

    Compares the weights exactly, across families, layouts and number types. Changes that
    leave attention unchanged are ignored: rotations within heads, folded norms and scales. Known
    conversion errors are identified: rotary order or base, the order or the pairing of heads,
    queries and keys exchanged, a factor, biases.

    Exit status: 0 if the two are equal up to the rounding of their number types, 1 if they differ,
    2 if they cannot be compared.

    \b
    Example:
      wqk same meta-llama/Llama-3.2-1B ./my-conversion
    """
    from wqk.cli.display import print_object
    from wqk.cli.same_display import print_comparison
    from wqk.scanning.same import same as compare

    result = compare(ref, other, **options)
    if as_json:
        print_object(result.to_dict())
    else:
        print_comparison(result)
    if not result.same:
        context.exit(1)
