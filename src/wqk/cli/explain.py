"""``wqk explain``: how a checkpoint is interpreted, before any weight is read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from wqk.cli.options import (
    Reference,
    family_file,
    heads_per_layer,
    json_output,
    key_heads,
    revision,
)


@click.command()
@click.argument("ref", type=Reference())
@revision
@family_file
@heads_per_layer
@key_heads
@json_output
def explain(
    ref: str,
    revision: str | None,
    family: Path | None,
    heads_per_layer: int | None,
    key_heads: int | None,
    as_json: bool,
) -> None:
    """Show which tensors are queries and keys, and the bytes a scan will read.

    \b
    Example:
      wqk explain google-bert/bert-base-uncased
    """
    from wqk.attention.explanation import explain as explain_checkpoint
    from wqk.cli import display

    explanation = explain_checkpoint(
        ref,
        family=family,
        heads_per_layer=heads_per_layer,
        key_heads=key_heads,
        revision=revision,
    )
    if as_json:
        display.print_object(asdict(explanation))
    else:
        display.output().print(explanation)
