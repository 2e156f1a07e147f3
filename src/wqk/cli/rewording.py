"""Replacement of hidden synonyms on a command line by the declared words of the verb."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from wqk._synonyms import (
    ADAPTER_OPTIONS,
    ALWAYS,
    ARGUMENT_OPTIONS,
    BY_ENDING,
    BY_WORD,
    CHECKPOINT_OPTIONS,
    FORMAT_OPTIONS,
    FORMATS,
    NUMBERED,
    OPTIONS,
    PRINTED,
    REPEATED,
    TABLE_FILES,
    VerbSynonym,
)

# A layer and a head in one word: as tables name heads, 0.2, or as TransformerLens does, L0H2.
LAYER_AND_HEAD = re.compile(r"(\d+)[.,:](\d+)|[Ll](?:ayer)?(\d+)[._]?[Hh](?:ead)?(\d+)")

# The name of a figure or table of the paper.
FIGURE_NAME = re.compile(r"(?:fig|figure|table)[-_]?s?\d", re.IGNORECASE)


def layer_and_head(word: str) -> tuple[str, str] | None:
    """Return the layer and the head in a word such as 0.2; None for any other word.

    Examples
    --------
    >>> layer_and_head("0.2"), layer_and_head("L5H11"), layer_and_head("gpt2")
    (('0', '2'), ('5', '11'), None)
    """
    if not (match := LAYER_AND_HEAD.fullmatch(word)):
        return None
    layer, head = filter(None, match.groups())
    return layer, head


def with_verb(synonym: VerbSynonym, arguments: Sequence[str]) -> list[str]:
    """Replace a synonym of a verb, the first argument, by the verb and its options.

    Examples
    --------
    >>> from wqk._synonyms import VERBS
    >>> with_verb(VERBS["repair"], ["repair", "a", "b", "--output", "fixed"])
    ['same', 'a', 'b', '--repair', 'fixed']
    >>> with_verb(VERBS["plot"], ["plot", "a", "-o", "a.png"]), with_verb(VERBS["plot"], ["plot"])
    (['scan', 'a', '--picture', 'a.png'], ['plot'])
    >>> with_verb(VERBS["plot"], ["plot", "a", "0.2"])
    ['show', 'a', '0.2']
    """
    following = [*arguments[1:]]
    if synonym.at_layer and _names_layer(following):
        return [synonym.at_layer, *following]
    if synonym.out:
        names = [word.partition("=")[0] for word in following]
        places = [
            place
            for place, name in enumerate(names)
            if name in ("-o", "--out", synonym.out) or OPTIONS.get(name) == ("--out",)
        ]
        if not places:
            return [*arguments]
        for place in places:
            following[place] = synonym.out + following[place].removeprefix(names[place])
    end = following.index("--") if "--" in following else len(following)
    verb = synonym.verb
    if synonym.of_table and Path(following[0]).suffix in TABLE_FILES:
        verb = synonym.of_table
    return [verb, *following[:end], *synonym.options, *following[end:]]


def _names_layer(words: Sequence[str]) -> bool:
    """Return whether the words after a verb name a layer: by an option, or after the checkpoint."""
    options = {word.partition("=")[0] for word in words}
    return bool(options & {"--layer", "--head"}) or any(map(layer_and_head, words[1:2]))


def reworded(verb: click.Command, words: Sequence[str]) -> list[str]:
    """Replace the hidden synonyms in the words after a verb; see `wqk._synonyms`.

    Words that a verb declares are never replaced.

    Examples
    --------
    >>> from wqk.cli.main import command
    >>> reworded(command.verbs["scan"], ["bert", "--layer", "3", "--format=latex"])
    ['bert', '--layers', '3', '--out', '-.tex']
    >>> reworded(command.verbs["show"], ["bert", "0", "1", "-o", "head.png"])
    ['bert', '--layer', '0', '--head', '1', '-o', 'head.png']
    """
    options: dict[str, click.Parameter] = {}
    for option in verb.params:
        options |= dict.fromkeys(option.opts, option)
    names = {word.partition("=")[0] for word in words}
    line = _Line(options, prints_tables=_prints_tables(options) and not names & {"-o", "--out"})
    always = ALWAYS.get(verb.name or "", ())
    named = _options_of_arguments(verb)
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        if word == "--":
            return [*line.words, word, *remaining]
        if not word.startswith("-") or word == "-":
            line.add_argument(word)
            continue
        name, equals, value = word.partition("=")
        if name in always:
            continue
        if argument := named.get(name):
            line.named[argument] = value if equals else "".join(_next(remaining))
            continue
        line.add_option(name, value if equals else None, remaining)
    line.add_named(verb)
    line.add_adapter()
    return _with_options_for_arguments(verb, line.options, line.words, line.arguments)


class _Line:
    """A command line in the words of a verb, built word by word.

    Attributes
    ----------
    options
        The options of the verb, by all names.
    words
        The words of the line so far.
    arguments
        Indices, in ``words``, of the words that are neither options nor values of options.
    adapter
        Folder of an adapter, from an option.
    named
        Arguments from options, by the name of the argument.
    prints_tables
        Whether ``--out`` can be added to print a table in a format.
    """

    def __init__(self, options: Mapping[str, click.Parameter], prints_tables: bool) -> None:
        self.options = options
        self.prints_tables = prints_tables
        self.words: list[str] = []
        self.arguments: list[int] = []
        self.adapter = ""
        self.named: dict[str, str] = {}

    def add_argument(self, word: str) -> None:
        """Add a word that is not an option."""
        self.arguments.append(len(self.words))
        self.words.append(word)

    def add_option(self, name: str, value: str | None, remaining: deque[str]) -> None:
        """Add an option or its replacement; without a value, the next word may be the value."""
        if name in PRINTED and "--out" in self.options:
            self._add_printed(name, value, remaining)
        elif name in self.options:
            if value is None and _takes_value(self.options[name]):
                self._add_with_value(name, _next(remaining))
            else:
                self.words.append(name if value is None else f"{name}={value}")
        elif name in FORMAT_OPTIONS:
            self._add_format(name, "".join(_next(remaining)) if value is None else value)
        elif name in CHECKPOINT_OPTIONS:
            for word in _next(remaining) if value is None else [value]:
                self.add_argument(word)
        elif REPEATED.get(name) in self.options:
            values = "".join(_next(remaining)) if value is None else value
            for word in values.split(","):
                self.words += [REPEATED[name], word]
        elif name in ADAPTER_OPTIONS and "--base" in self.options and not self.adapter:
            self.adapter = "".join(_next(remaining)) if value is None else value
        else:
            self._add_synonym(name, value, remaining)

    def _add_with_value(self, name: str, values: Sequence[str]) -> None:
        """Add an option and its value; a head such as 0.2 also sets the layer."""
        place = layer_and_head(values[0]) if values and name == "--head" else None
        if place and "--layer" in self.options:
            self.words += ["--layer", place[0], "--head", place[1]]
        else:
            self.words += [name, *values]

    def _add_printed(self, name: str, value: str | None, remaining: deque[str]) -> None:
        """Add an option for a format; if a table's file follows, write the file instead."""
        following = value if value is not None else "".join([*remaining][:1])
        if Path(following).suffix in TABLE_FILES:
            self.words += ["--out", *(_next(remaining) if value is None else [value])]
        elif name in self.options:
            self.words.append(name if value is None else f"{name}={value}")
        else:
            self._add_synonym(name, value, remaining)

    def _add_format(self, option: str, name: str) -> None:
        """Add the options of a format, or the words unchanged if the verb lacks the options."""
        replacement = FORMATS.get(name.lower(), ())
        if replacement and self._has(replacement):
            self.words += replacement
        else:
            self.words += [option, name]

    def _has(self, replacement: Sequence[str]) -> bool:
        """Return whether the verb has the option that begins a replacement, with this effect."""
        if replacement[0] == "--out" and len(replacement) > 1:
            return self.prints_tables
        return replacement[0] in self.options

    def _add_synonym(self, name: str, value: str | None, remaining: deque[str]) -> None:
        """Add the words that replace an option; an option without a replacement stays."""
        replacement = OPTIONS.get(name, ())
        while replacement and not self._has(replacement):
            # A short name may stand for the synonym of an option.
            replacement = OPTIONS.get(replacement[0], ())
        if not replacement:
            self.words.append(name if value is None else f"{name}={value}")
            return
        self.words += replacement
        if value is not None:
            self.words.append(value)
        elif len(replacement) == 1 and _takes_value(self.options[replacement[0]]):
            self.words += _next(remaining)

    def add_named(self, verb: click.Command) -> None:
        """Put arguments from options into their places among the arguments."""
        if not self.named:
            return
        positional = deque(self.words[place] for place in self.arguments)
        placed: list[str] = []
        for parameter in verb.params:
            if isinstance(parameter, click.Argument):
                name = parameter.name or ""
                placed += [self.named[name]] if name in self.named else _next(positional)
        options = [word for place, word in enumerate(self.words) if place not in self.arguments]
        self.words = [*placed, *positional, *options]
        self.arguments = [*range(len(placed) + len(positional))]

    def add_adapter(self) -> None:
        """Put the adapter in place of the checkpoint, and pass the checkpoint as ``--base``."""
        if not self.adapter:
            return
        if len(self.arguments) == 1:
            (place,) = self.arguments
            self.words += ["--base", self.words[place]]
            self.words[place] = self.adapter
        else:
            # The verb has no such option: its error says how an adapter is given.
            self.words += ["--adapter", self.adapter]


def with_figure_name(arguments: Sequence[str]) -> list[str]:
    """Replace words for a figure or a table of the paper by its name.

    Examples
    --------
    >>> with_figure_name(["table", "1"]), with_figure_name(["figure", "fig", "3", "--json"])
    (['figure', 'table1'], ['figure', 'fig3', '--json'])
    >>> with_figure_name(["figure", "fig2"]), with_figure_name(["tableS2"])
    (['figure', 'fig2'], ['figure', 'tableS2'])
    """
    if arguments[0] == "table" and len(arguments) > 1:
        return ["figure", f"table{arguments[1].removeprefix('table')}", *arguments[2:]]
    if arguments[0] == "figure" and arguments[1:2] in (["fig"], ["figure"], ["table"]):
        return ["figure", "".join(arguments[1:3]), *arguments[3:]]
    if FIGURE_NAME.fullmatch(arguments[0]):
        return ["figure", *arguments]
    return [*arguments]


def _options_of_arguments(verb: click.Command) -> dict[str, str]:
    """Return the arguments of a verb, by options with the names of arguments."""
    arguments: dict[str, str] = {}
    for parameter in verb.params:
        if isinstance(parameter, click.Argument):
            options = ARGUMENT_OPTIONS.get(parameter.name or "", ())
            arguments |= dict.fromkeys(options, parameter.name or "")
    return arguments


def _prints_tables(options: Mapping[str, click.Parameter]) -> bool:
    """Return whether ``--out`` of a verb is the file of a table or a picture, not a folder."""
    out = options.get("--out")
    if out is None or not isinstance(out.type, click.Path) or out.type.dir_okay:
        return False
    return "html" not in (out.metavar or "")


def _next(remaining: deque[str]) -> list[str]:
    """Take the next word; return an empty list if no word remains."""
    return [remaining.popleft()] if remaining else []


def _takes_value(option: click.Parameter) -> bool:
    """Return whether the next word is the value of an option."""
    return isinstance(option, click.Option) and not option.is_flag and not option.count


def _with_options_for_arguments(
    verb: click.Command,
    options: Mapping[str, click.Parameter],
    words: Sequence[str],
    places: Sequence[int],
) -> list[str]:
    """Put the option before each word after the verb's own arguments."""
    arguments = [parameter for parameter in verb.params if isinstance(parameter, click.Argument)]
    first = sum(argument.nargs for argument in arguments if argument.nargs > 0)
    if any(argument.nargs < 0 for argument in arguments):
        first = 1
    name = verb.name or ""
    option_before: dict[int, str] = {}
    further = [*places[first:]]
    numbered = NUMBERED.get(name, ())
    ending_option, endings = BY_ENDING.get(name, ("", ()))
    if further and Path(words[further[-1]]).suffix in endings and ending_option in options:
        option_before[further.pop()] = ending_option
    word_option, known_words = BY_WORD.get(name, ("", ()))
    if len(further) == 1 and words[further[0]] in known_words and word_option in options:
        option_before[further.pop()] = word_option
    if any(Path(words[place]).exists() for place in further):
        numbered = ()
    if numbered and len(further) == 1 and (layer_head := layer_and_head(words[further[0]])):
        layer_option, head_option = numbered
        before, after = words[: further[0]], words[further[0] + 1 :]
        return [*before, layer_option, layer_head[0], head_option, layer_head[1], *after]
    if len(further) <= len(numbered) and all(words[place].isdecimal() for place in further):
        option_before |= zip(further, numbered, strict=False)
    result: list[str] = []
    for place, word in enumerate(words):
        if place in option_before:
            result.append(option_before[place])
        result.append(word)
    return result
