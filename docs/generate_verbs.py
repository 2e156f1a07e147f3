"""Write the table of verbs of the page of commands: `python docs/generate_verbs.py`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from wqk.cli.main import LABORATORY, SECTIONS, command

PAGE = Path(__file__).parent / "commands.md"
TABLE = re.compile(r"(?<=:::{container} stacked\n\n).*?\n\n", re.S)


def table() -> str:
    """A line for each verb, with its arguments and the first sentence of its help."""
    lines = ["| | |", "|:--|:--|"]
    context = click.Context(command, info_name="wqk")
    for name in (name for names in SECTIONS.values() for name in names if name != "lab"):
        verb = command.verbs[name]
        arguments = [w for w in verb.collect_usage_pieces(context) if w != "[OPTIONS]"]
        arguments += [
            f"{option.opts[-1]} {option.make_metavar(context)}"
            for option in verb.params
            if isinstance(option, click.Option) and option.required
        ]
        usage = " ".join(["wqk", name, *arguments]).replace("|", r"\|")
        lines.append(f"| `{usage}` | {command.verbs.summary(name).removesuffix('.')} |")
    laboratory = ", ".join(f"`{name}`" for name in LABORATORY)
    summary = command.verbs.summary("lab").removesuffix(".")
    lines.append(f"| `wqk lab VERB` | {summary}: {laboratory} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text("utf-8")), encoding="utf-8")
