"""Words of a command line with hidden synonyms, in the words that a verb declares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import click

from wqk._synonyms import (
    ADAPTER_OPTIONS,
    BY_ENDING,
    BY_WORD,
    CHECKPOINT_OPTIONS,
    FORMAT_OPTIONS,
    FORMATS,
    NUMBERED,
    OPTIONS,
)

# A layer and a head in one word, as tables name heads: 0.2.
LAYER_AND_HEAD = re.compile(r"(\d+)\.(\d+)")


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
    options = {name: option for option in verb.params for name in option.opts}
    result: list[str] = []
    arguments: list[int] = []  # places of the words that are no options and no values
    adapter = ""
    remaining = iter(words)
    for word in remaining:
        if word == "--":
            return [*result, word, *remaining]
        if not word.startswith("-") or word == "-":
            arguments.append(len(result))
            result.append(word)
            continue
        name, equals, value = word.partition("=")
        if name in options:
            result.append(word)
            if _takes_value(options[name]) and not equals:
                result += islice(remaining, 1)
            continue
        if name in FORMAT_OPTIONS:
            value = value if equals else next(remaining, "")
            replacement = FORMATS.get(value.lower(), ())
            if replacement and replacement[0] in options:
                result += replacement
            else:
                result += [name, value]
            continue
        if name in CHECKPOINT_OPTIONS:
            arguments.append(len(result))
            result.append(value) if equals else result.extend(islice(remaining, 1))
            continue
        if name in ADAPTER_OPTIONS and "--base" in options and not adapter:
            adapter = value if equals else next(remaining, "")
            continue
        replacement = OPTIONS.get(name, ())
        if not replacement or replacement[0] not in options:
            result.append(word)
            continue
        result += replacement
        if equals:
            result.append(value)
        elif len(replacement) == 1 and _takes_value(options[replacement[0]]):
            result += islice(remaining, 1)
    if adapter and len(arguments) == 1:
        base = result[arguments[0]]
        result[arguments[0]] = adapter
        result += ["--base", base]
    elif adapter:
        result += ["--adapter", adapter]  # an error, with advice
    return _with_options_for_arguments(verb, options, result, arguments)


def _takes_value(option: click.Parameter) -> bool:
    """Return whether the next word is the value of an option."""
    return isinstance(option, click.Option) and not option.is_flag and not option.count


def _with_options_for_arguments(
    verb: click.Command,
    options: Mapping[str, click.Parameter],
    words: Sequence[str],
    places: Sequence[int],
) -> list[str]:
    """Put the option before each word that follows the verb's own arguments."""
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
    if numbered and len(further) == 1 and (match := LAYER_AND_HEAD.fullmatch(words[further[0]])):
        layer_option, head_option = numbered
        before, after = words[: further[0]], words[further[0] + 1 :]
        return [*before, layer_option, match[1], head_option, match[2], *after]
    if len(further) <= len(numbered) and all(words[place].isdecimal() for place in further):
        option_before |= zip(further, numbered, strict=False)
    result: list[str] = []
    for place, word in enumerate(words):
        if place in option_before:
            result.append(option_before[place])
        result.append(word)
    return result
