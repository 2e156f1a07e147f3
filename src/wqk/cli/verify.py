"""``wqk verify``: the forms as read against the attention of the running model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from wqk.cli.options import (
    REF,
    family_file,
    json_output,
    opened,
    revision,
)


@click.command()
@click.argument("ref", type=REF)
@click.option("--text", help="Text to run the model on.  [default: random tokens]")
@click.option("--seed", default=0, help="Seed of the random tokens.")
@revision
@family_file
@json_output
@click.pass_context
def verify(context: click.Context, /, ref: str, as_json: bool, **options: Any) -> None:
    """Run the model and compare its attention with the forms'.

    Where the family is guessed, positions, mask and scale are not known, and only the products of
    queries and keys are compared. Exit status 1 means that some forms are wrong or could not be
    compared. Needs PyTorch and transformers (pip install torch transformers).

    \b
    Example:
      wqk verify google-bert/bert-base-uncased
    """
    from wqk.cli import display
    from wqk.inspecting.verification import verify as verify_checkpoint

    result = verify_checkpoint(opened(ref, options), **options)
    value = asdict(result) | {"ok": result.ok, "verdict": result.verdict, "result": result.result}
    for block, said in zip(result.blocks, value["blocks"], strict=True):
        said["verdict"] = block.verdict
    display.show(value | {"difference": result.difference}, result, as_json=as_json)
    if not result.ok:
        context.exit(1)
