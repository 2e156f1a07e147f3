"""All errors that wqk raises on purpose, and advice on misspelled names.

::

    WqkError
    ├── CheckpointError      a checkpoint that cannot be read, or cannot be trusted
    │   ├── NoCheckpoint     no such file or folder, or a folder without weights
    │   └── UnsafeCheckpoint a pickle that contains more than weights, of which nothing was run
    ├── HubError             a checkpoint that the Hub or the network does not provide
    ├── UnknownFamily        no rule finds the tensors of the queries and keys
    ├── NonFiniteWeights     NaN or infinity among the weights
    ├── MissingPackage       an optional package that this needs is not installed
    ├── FormError            factors that do not form a bilinear form
    ├── TableError           a file without a score table, or a table unfit for its use
    ├── OutputError          a file that cannot be written
    ├── UnknownName          a name that is not on its list: a row of the atlas, a figure
    ├── CorpusError          text that cannot be turned into tokens
    ├── RunError             a training run or a survey that cannot start, continue or be read
    └── TheoryError          a statement that cannot be computed on a model, text or objective

Every message is one sentence: *subject: problem; expected X, got Y; do Z.* The facts in the message
are also attributes of the error. `public` imports the public names of a package when they are first
used; for any other name, the error suggests the most similar public name.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import lazy_loader  # type: ignore[import-untyped]

from wqk._guesses import KEYWORD_ADVICE, OPENING_KEYWORDS
from wqk._synonyms import KEYWORDS, attribute, meant_attribute, meant_keywords

# Longer messages are shortened, because some quote the content of a hostile file.
LONGEST_MESSAGE = 500
# Folder of the models of `wqk.demo_model`.
DEMO_MODELS = Path(__file__).parent / "reporting" / "demo_models"

Function = TypeVar("Function", bound=Callable[..., Any])


class WqkError(Exception):
    """Base of all errors raised by wqk; the command prints it as one line and exits with 2.

    Parameters
    ----------
    message
        Message: the expected value, the value that was found, and the next step.
    **facts
        Attributes of the class, such as ``path=``.

    Examples
    --------
    >>> OutputError("out.txt: cannot be written (disk full)", reason="disk full").reason
    'disk full'
    """

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        for name, value in facts.items():
            getattr(type(self), name)  # raises if the class does not declare such an attribute
            setattr(self, name, value)


class CheckpointError(WqkError):
    """A missing, truncated, malformed, unsupported or unsafe checkpoint.

    Attributes
    ----------
    checkpoint
        Name of the checkpoint, if the message contains a name.
    """

    checkpoint: str | None = None


class NoCheckpoint(CheckpointError):
    """A path without a checkpoint: no such file or folder, or a folder without weights."""


class UnsafeCheckpoint(CheckpointError):
    """A pickle that contains more than weights; none of its operations was run."""


class HubError(WqkError):
    """A checkpoint that the Hub or the network does not provide.

    Attributes
    ----------
    checkpoint
        Name of the checkpoint.
    """

    checkpoint: str | None = None


class UnknownFamily(WqkError):
    """A model without query and key tensors that fit a rule.

    Attributes
    ----------
    checkpoint
        Name of the checkpoint.
    """

    checkpoint: str | None = None


class NonFiniteWeights(WqkError):
    """Query or key weights with NaN or infinite entries.

    Attributes
    ----------
    checkpoint
        Name of the checkpoint; None for factors of one's own.
    tensor
        Name of the tensor.
    count
        Number of entries that are not finite.
    """

    checkpoint: str | None = None
    tensor: str | None = None
    count: int | None = None


class MissingPackage(WqkError):
    """A function needs an optional package that is not installed.

    Attributes
    ----------
    package
        Name of the package.
    extra
        The extra of wqk that installs it: ``pip install 'wqk[extra]'``.
    """

    package: str | None = None
    extra: str | None = None


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra, as documented.

    Examples
    --------
    >>> install("report")
    "pip install '.[report]' in a clone of wqk"
    """
    is_clone = (Path(__file__).parents[2] / "pyproject.toml").is_file()
    if is_clone:
        return f"pip install '.[{extra}]' in a clone of wqk"
    return f"pip install 'wqk[{extra}]'"


@contextmanager
def required_by(purpose: str, extra: str = "train") -> Iterator[None]:
    """Import optional packages in this context; `MissingPackage` if a package is not installed.

    Examples
    --------
    >>> with required_by("a corpus"):
    ...     import tokenizers_of_tomorrow
    Traceback (most recent call last):
        ...
    wqk.errors.MissingPackage: a corpus needs tokenizers_of_tomorrow: pip install '.[train]' ...
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        raise MissingPackage(
            f"{purpose} needs {package}: {install(extra)}", package=package, extra=extra
        ) from None


class FormError(WqkError, ValueError):
    """Factors or arguments with shapes that do not fit together."""


class TableError(WqkError):
    """A file without a score table, or a table without required data.

    Attributes
    ----------
    path
        The file, if any.
    """

    path: Path | None = None


class OutputError(WqkError):
    """A file cannot be written, or its ending belongs to no format.

    Attributes
    ----------
    path
        The file.
    reason
        The system's reason, or the supported endings.
    """

    path: Path | None = None
    reason: str | None = None


class UnknownName(WqkError, LookupError):
    """A name that is not on its list.

    Attributes
    ----------
    name
        The unknown name.
    close
        The most similar names on the list, or all names.
    """

    name: str | None = None
    close: Sequence[str] = ()


class CorpusError(WqkError):
    """Text or a token store that cannot be used."""


class RunError(WqkError):
    """A training run or a survey that cannot start, continue or be read."""


class TheoryError(WqkError):
    """A statement of the paper that cannot be computed on this model, text or objective."""


@contextmanager
def errors_about(checkpoint: str) -> Iterator[None]:
    """Add the name of a checkpoint to errors raised inside, and to their messages.

    Examples
    --------
    >>> try:
    ...     with errors_about("bert"):
    ...         raise CheckpointError("no weights here")
    ... except CheckpointError as error:
    ...     print(error, "|", error.checkpoint)
    bert: no weights here | bert
    """
    try:
        yield
    except (CheckpointError, HubError, UnknownFamily) as error:
        # The outermost context is the last to set the attribute: the checkpoint of the user.
        error.checkpoint = checkpoint
        # Messages about a file begin with its name, which begins with the folder or repository.
        if not str(error).startswith((f"{checkpoint}:", f"{checkpoint}/", f"{checkpoint} ")):
            error.args = (f"{checkpoint}: {error}",)
        raise


def did_you_mean(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return the end of a message about an unknown name: ``; did you mean ...?``, or nothing.

    Examples
    --------
    >>> did_you_mean("qeury", ["query", "key"]), did_you_mean("load", ["open"], {"load": "open"})
    ("; did you mean 'query'?", "; did you mean 'open'?")
    """
    from difflib import get_close_matches

    meanings = {word: word for word in known} | dict(synonyms or {})
    close = [name] if name in meanings else get_close_matches(name, meanings, 1)
    return f"; did you mean {meanings[close[0]]!r}?" if close else ""


def demo_advice(checkpoint: str) -> str:
    """Return the end of a message about attention weights that a demo model lacks.

    The text is empty for other checkpoints, and for the demo model with these weights.

    Examples
    --------
    >>> demo_advice(str(DEMO_MODELS / "encoder")), demo_advice("bert")
    ('; the demo model with all weights is demo:induction, wqk.demo_model("induction")', '')
    """
    path = Path(checkpoint)
    if path.parent != DEMO_MODELS or path.name == "induction":
        return ""
    return '; the demo model with all weights is demo:induction, wqk.demo_model("induction")'


def demo_folder(reference: str) -> Path | None:
    """Return the folder of the small model of the package that ``demo:NAME`` refers to.

    None for other references, and for unknown names.

    Examples
    --------
    >>> demo_folder("demo:encoder") == DEMO_MODELS / "encoder", demo_folder("bert")
    (True, None)
    """
    prefix, _, name = reference.partition(":")
    folder = DEMO_MODELS / name
    is_known = prefix == "demo" and bool(name) and (folder / "config.json").is_file()
    return folder if is_known else None


def demo_reference_advice(reference: str) -> str:
    """Return the end of a message about ``demo:`` with an unknown name; else empty.

    Examples
    --------
    >>> demo_reference_advice("demo:bert"), demo_reference_advice("bert")
    ('; the models of the package are demo:decoder, demo:encoder, demo:induction', '')
    """
    prefix, separator, _ = reference.partition(":")
    if not separator or prefix.lower() != "demo":
        return ""
    names = [f"demo:{path.parent.name}" for path in DEMO_MODELS.glob("*/config.json")]
    return f"; the models of the package are {', '.join(sorted(names))}"


def public(
    package: str,
    file: str,
    commands: Mapping[str, str],
    calls: Mapping[str, str] | None = None,
    synonyms: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package with lazy imports.

    An AttributeError on an unknown name suggests the public name that was probably meant.

    Parameters
    ----------
    package, file
        ``__name__`` and ``__file__`` of the package. Its stub, ``__init__.pyi``, lists the public
        names and lies next to the file.
    commands
        By command, the name of its function, if the two differ.
    calls
        By the name of a similar function in another library, the equivalent call.
    synonyms
        Hidden names that work, with their public names.
    """
    load, _, names = lazy_loader.attach_stub(package, file)
    public_names = sorted({*names, *commands})

    def get(name: str) -> Any:
        if name in public_names or name.startswith("_"):
            return load(commands.get(name, name))  # lazy_loader imports the object now
        if name in (synonyms or {}):
            return get((synonyms or {})[name])
        if find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        advice = did_you_mean(name, public_names)
        if known_call := (calls or {}).get(name):
            advice = f"; did you mean {known_call}?"
        message = f"module {package!r} has no attribute {name!r}{advice}"
        raise unknown_attribute(message, name)

    return get, lambda: public_names, public_names


def called_as(call: str) -> Callable[[Function], Function]:
    """Return a decorator that adds a working call to the errors about wrong arguments.

    Synonyms of keywords work: see `wqk._synonyms`.

    Parameters
    ----------
    call
        A call of the function with the arguments that it needs.

    Examples
    --------
    >>> @called_as("wqk.show(ref, layer)")
    ... def show(ref, layer, *, top=5): ...
    >>> show("bert")
    Traceback (most recent call last):
        ...
    TypeError: show(): missing a required argument: 'layer'; expected wqk.show(ref, layer)
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def decorated(*arguments: Any, **options: Any) -> Any:
            if options.keys() & KEYWORDS:
                options = meant_keywords(_keywords(function), options)
            try:
                return function(*arguments, **options)
            except TypeError:
                if problem := _misfit(function, arguments, options):
                    name = call.partition("(")[0].rpartition(".")[2]
                    if function.__name__ == "__init__":
                        name = function.__qualname__.partition(".")[0]
                    raise TypeError(f"{name}(): {problem}; expected {call}") from None
                raise

        return decorated  # type: ignore[return-value]

    return decorate


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Return the keywords of a function, including the keywords of a typed ``**options``."""
    names = [*signature(function).parameters]
    for hint in function.__annotations__.values():
        if isinstance(hint, str) and (match := re.fullmatch(r"Unpack\[(\w+)\]", hint)):
            names += getattr(import_module(function.__module__), match[1]).__annotations__
    return names


def _misfit(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> str:
    """Describe the arguments that a function's signature does not accept; empty if all fit."""
    called = signature(function)
    try:
        called.bind(*arguments, **options)
    except TypeError as error:
        unknown = [name for name in options if name not in called.parameters]
        return f"{error}{keyword_advice(unknown[0], called.parameters) if unknown else ''}"
    return ""


def keyword_advice(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown keyword: the keyword that was probably meant.

    Examples
    --------
    >>> keyword_advice("top_k", ["ref", "top"]), keyword_advice("top_k", ["ref"])
    ("; did you mean 'top'?", '')
    """
    known = [*known]
    meaning = KEYWORDS.get(name, name)
    if meaning in OPENING_KEYWORDS and meaning not in known and "form" not in known:
        return f"; pass wqk.open(ref, {meaning}=...) in place of the ref"
    if name in KEYWORD_ADVICE:
        return f"; {KEYWORD_ADVICE[name]}"
    synonyms = {word: meaning for word, meaning in KEYWORDS.items() if meaning in known}
    return did_you_mean(name, known, synonyms)


class _WithoutAttributes:
    """The object of an error with advice in its message, so that Python adds no second advice."""

    def __dir__(self) -> list[str]:
        return []


def unknown_attribute(message: str, name: str) -> AttributeError:
    """Return an AttributeError without Python's suggestion after an uncaught error."""
    return AttributeError(message, name=name, obj=_WithoutAttributes())


def public_attributes(owner: object) -> list[str]:
    """Return the attributes of an object that are not private."""
    return [name for name in dir(owner) if not name.startswith("_")]


class Advising:
    """Base of objects whose AttributeError suggests a similar attribute.

    ``__getattr__`` is hidden from type checkers, so that they also report unknown attributes.
    """

    _synonyms: ClassVar[Mapping[str, str]] = {}
    # Calls of functions that people look for among the attributes, by name.
    _known_calls: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(
        cls,
        synonyms: Mapping[str, str] | None = None,
        calls: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init_subclass__(**options)
        cls._synonyms = {**cls._synonyms, **(synonyms or {})}
        cls._known_calls = {**cls._known_calls, **(calls or {})}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if meaning := meant_attribute(self, name):
                return attribute(self, meaning)
            advice = ""
            if not name.startswith("_"):
                call = {name: self._known_calls[name]} if name in self._known_calls else {}
                advice = did_you_mean(name, public_attributes(self), {**call, **self._synonyms})
            kind = type(self).__name__
            article = "an" if kind[0] in "AEIO" else "a"
            message = f"{article} {kind} has no attribute {name!r}{advice}"
            raise unknown_attribute(message, name)


def require_list(name: str, value: Any, example: Sequence[str] | Sequence[int]) -> None:
    """Raise `CheckpointError` if an argument is not a list of names or numbers like the example.

    Examples
    --------
    >>> require_list("layers", (0, -1), [0, -1])
    """
    item_type: type = Integral
    item_names = "whole numbers"
    if isinstance(example[0], str):
        item_type, item_names = str, "names"
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if not is_list or not all(isinstance(item, item_type) for item in value):
        raise CheckpointError(
            f"{name}: expected a list of {item_names}, such as {name}={example}; got {value!r}"
        )


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, shortened; without one, its class.

    Examples
    --------
    >>> first_line(ValueError("one\ntwo")), first_line(MemoryError())
    ('one', 'MemoryError')
    """
    text = str(getattr(error, "strerror", None) or error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return shortened(line) or type(error).__name__


def all_lines(error: BaseException, longest: int = LONGEST_MESSAGE) -> str:
    r"""Return an error's message as one line, shortened; without one, its class.

    Examples
    --------
    >>> all_lines(ValueError("one\n  two")), all_lines(MemoryError())
    ('one two', 'MemoryError')
    """
    return shortened(" ".join(str(error).split()), longest) or type(error).__name__


def shortened(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Shorten a text to at most ``longest`` characters by leaving out its middle.

    Examples
    --------
    >>> shortened("a" * 20, 9), shortened("a" * 9, 9)
    ('aaaa…aaaa', 'aaaaaaaaa')
    """
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


# Nested values are quoted in part, because lists that contain each other have no end.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 100, 100, 100


def shown(value: Any) -> str:
    """Quote a value for an error message, as a short text.

    Examples
    --------
    >>> shown("64"), shown(10**5000), shown([10**5000])
    ("'64'", 'a number of 16610 bits', 'a list that cannot be printed')
    >>> shown([[[[1]]]]) == "[[[[...]]]]", len(shown("a" * 99))
    (True, 39)
    """
    try:
        return shortened(_SHORT.repr(value), 40)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        if isinstance(value, int):
            return f"a number of {value.bit_length()} bits"
        return f"a {type(value).__name__} that cannot be printed"
