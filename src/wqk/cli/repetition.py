"""Options with one value that are given several times: an error instead of a silent choice."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import click

TIMES = {2: "twice", 3: "three times"}


def require_single_values(verb: click.Command, words: Sequence[str], parent: click.Context) -> None:
    """Require that no option of one value has several values in the words after a verb.

    click itself would use the last value, and say nothing of the others. Equal values are no error,
    and all further errors of the words are left to the parser of the verb.

    Raises
    ------
    UsageError
        An option has several different values.

    Examples
    --------
    >>> from wqk.cli.main import command
    >>> context = click.Context(command)
    >>> scan = command.verbs["scan"]
    >>> require_single_values(scan, ["bert", "--gamma", "1", "--gamma=1", "--heads"], context)
    >>> require_single_values(scan, ["bert", "--layers", "0", "--layers=1"], context)
    Traceback (most recent call last):
    click.exceptions.UsageError: --layers is given twice, 0 and 1; give it once: --layers 0,1
    """
    context = click.Context(verb, info_name=verb.name, parent=parent)
    options = [
        parameter
        for parameter in verb.params
        if isinstance(parameter, click.Option)
        and not (parameter.is_flag or parameter.count or parameter.multiple)
    ]
    try:
        # With repeatable options, the parser keeps all values.
        values, _, _ = _with_repeatable(verb, options).make_parser(context).parse_args([*words])
    except click.UsageError:
        return
    help_option = verb.get_help_option(context)
    if help_option and values.get(help_option.name or ""):
        return
    for option in options:
        texts = [*dict.fromkeys(map(_text, values.get(option.name or "") or ()))]
        if len(texts) > 1:
            raise click.UsageError(_message(option, texts, context), ctx=context)


def _with_repeatable(verb: click.Command, options: Sequence[click.Option]) -> click.Command:
    """Return a copy of a verb whose options can be repeated."""
    repeatable = copy(verb)
    repeatable.params = []
    for parameter in verb.params:
        if parameter in options:
            parameter = copy(parameter)
            parameter.multiple = True
        repeatable.params.append(parameter)
    return repeatable


def _text(value: object) -> str:
    """Return the value of an option as on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "no value"  # of an option whose value may be left out


def _message(option: click.Option, texts: Sequence[str], context: click.Context) -> str:
    """Return the message on an option with several values."""
    name = max(option.opts, key=len)
    times = TIMES.get(len(texts), f"{len(texts)} times")
    listed = f"{', '.join(texts[:-1])} and {texts[-1]}"
    advice = "give it once"
    takes_list = "," in option.make_metavar(context) and not any(" " in text for text in texts)
    if takes_list:
        advice += f": {name} {','.join(texts)}"
    return f"{name} is given {times}, {listed}; {advice}"
