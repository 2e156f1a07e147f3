"""``wqk explain``: how a checkpoint is interpreted, before any weight is read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from wqk.cli.options import (
    REF,
    json_output,
    opened,
    reading,
    revision,
)


@click.command()
@click.argument("ref", type=REF)
@revision
@reading
@json_output
def explain(ref: str, as_json: bool, **options: Any) -> None:
    """Show which tensors are queries and keys, and the bytes a scan will read.

    \b
    Example:
      wqk explain google-bert/bert-base-uncased
    """
    from wqk.cli import display
    from wqk.inspecting.explanation import explain as explain_checkpoint

    explanation = explain_checkpoint(opened(ref, options))
    display.show(asdict(explanation), explanation, as_json=as_json)
