"""Options that several verbs take."""

from __future__ import annotations

from pathlib import Path

import click

json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

family_file = click.option(
    "--family",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.toml",
    help="Say which tensors are queries and keys.",
)

revision = click.option("--revision", metavar="R", help="Revision of a hub repository.")

gamma = click.option(
    "--gamma",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Outliers lie this many standard deviations above the mean norm.",
)
