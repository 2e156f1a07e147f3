"""The list of commands, grouped by purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click


class GroupedCommands(click.Group):
    """A group whose help lists its commands in sections, with the first sentence of each."""

    sections: Mapping[str, Sequence[click.Command]]

    def add_sections(self, sections: Mapping[str, Sequence[click.Command]]) -> None:
        """Add all commands of all sections."""
        self.sections = sections
        for commands in sections.values():
            for command in commands:
                self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, as click writes its one list."""
        widest = max(map(len, self.commands))
        for title, commands in self.sections.items():
            with formatter.section(title):
                rows = [(c.name or "", first_sentence(c.help or "")) for c in commands]
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows])


def first_sentence(text: str) -> str:
    """The first sentence of a command's help, on one line.

    Examples
    --------
    >>> first_sentence("Score the query-key form of\\nevery layer. REF is a folder.")
    'Score the query-key form of every layer.'
    """
    sentence, point, _ = " ".join(text.split()).partition(". ")
    return sentence + point.rstrip()
