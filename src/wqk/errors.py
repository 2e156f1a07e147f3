"""Every error that wqk raises on purpose; and on an unknown name, the one that was meant.

::

    WqkError
    ├── CheckpointError      a checkpoint that cannot be read, or cannot be trusted
    ├── HubError             a checkpoint that the Hub or the network does not provide
    ├── UnknownFamily        no rule says which tensors are the queries and keys
    ├── NonFiniteWeights     NaN or infinity among the weights
    ├── MissingPackage       an optional package that this needs is not installed
    ├── FormError            factors that do not form a bilinear form
    ├── TableError           a file without a score table, or a table unfit for its use
    ├── OutputError          a file that cannot be written
    ├── UnknownName          a name that is not on its list: a row of the atlas, a figure
    ├── CorpusError          text that cannot be turned into tokens
    ├── RunError             a training run or a survey that cannot start, continue or be read
    └── TheoryError          a statement that cannot be computed on a model, text or objective

The message says it all in one sentence; the facts in it are attributes, too. Public names of a
package are imported when first used; a name that is not public is told the one that is.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import lazy_loader  # type: ignore[import-untyped]

# Longer messages are cut: some quote what a hostile file holds.
LONGEST = 500


class WqkError(Exception):
    """Base of all errors raised by wqk; the command prints it as one line and exits with 2.

    Parameters
    ----------
    message
        What was expected, what was found, and what to do next.
    **facts
        Attributes of the class, such as ``path=``.

    Examples
    --------
    >>> OutputError("out.txt: cannot be written (disk full)", reason="disk full").reason
    'disk full'
    """

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        for name, fact in facts.items():
            getattr(type(self), name)  # a fact that the class does not declare is a mistake here
            setattr(self, name, fact)


class CheckpointError(WqkError):
    """A missing, truncated, malformed, unsupported or unsafe checkpoint.

    Attributes
    ----------
    checkpoint
        Its name, if the message has one.
    """

    checkpoint: str | None = None


class HubError(WqkError):
    """A checkpoint that the Hub or the network does not provide.

    Attributes
    ----------
    checkpoint
        Its name.
    """

    checkpoint: str | None = None


class UnknownFamily(WqkError):
    """A model whose query and key tensors wqk does not know how to find.

    Attributes
    ----------
    checkpoint
        Its name.
    """

    checkpoint: str | None = None


class NonFiniteWeights(WqkError):
    """Query or key weights with NaN or infinite entries.

    Attributes
    ----------
    tensor
        Checkpoint and name of the tensor.
    count
        How many of its entries are not finite.
    """

    tensor: str | None = None
    count: int | None = None


class MissingPackage(WqkError):
    """Something that needs an optional package, which is not installed.

    Attributes
    ----------
    package
        Its name.
    extra
        The extra of wqk that installs it: ``pip install '.[extra]'`` in a clone.
    """

    package: str | None = None
    extra: str | None = None


def install(extra: str) -> str:
    """The command that installs an extra's packages, as the documentation has it.

    Examples
    --------
    >>> install("report")
    "pip install '.[report]' in a clone of wqk"
    """
    return f"pip install '.[{extra}]' in a clone of wqk"


@contextmanager
def required_by(purpose: str, extra: str = "train") -> Iterator[None]:
    """Import optional packages in this context; `MissingPackage` if one is not installed.

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
    """Factors or arguments whose shapes do not fit together."""


class TableError(WqkError):
    """A file without a score table, or a table that lacks what is needed.

    Attributes
    ----------
    path
        The file, if any.
    """

    path: Path | None = None


class OutputError(WqkError):
    """A file that cannot be written, or whose ending names no format.

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
        Names on the list: the most similar ones, or all.
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
    """Tell errors raised inside which checkpoint, or file of it, they are about; messages, too.

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
        error.checkpoint = checkpoint  # outside of its files is the checkpoint that was asked for
        # A file's own name begins with that of the folder or repository.
        if not str(error).startswith((f"{checkpoint}:", f"{checkpoint}/", f"{checkpoint} ")):
            error.args = (f"{checkpoint}: {error}",)
        raise


def did_you_mean(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The end of a message on an unknown name: ``; did you mean ...?``, or nothing.

    Examples
    --------
    >>> did_you_mean("qeury", ["query", "key"]), did_you_mean("load", ["open"], {"load": "open"})
    ("; did you mean 'query'?", "; did you mean 'open'?")
    """
    from difflib import get_close_matches

    meanings = {word: word for word in known} | dict(synonyms or {})
    close = [name] if name in meanings else get_close_matches(name, meanings, 1)
    return f"; did you mean {meanings[close[0]]!r}?" if close else ""


_TRIED = {
    "BilinearForm": "FactoredMatrix Form LowRank QKForm form",
    "Monitor": "attach monitor",
    "ScoreCallback": "Callback TrainerCallback callback",
    "ScoreTable": "DataFrame Table table",
    "demo_model": "demo example",
    "diff": "compare difference distance",
    "explain": "describe info summary",
    "initialize_": "init_ initialize",
    "join": "concat merge",
    "tokens": "top_tokens token_pairs",
    "open": "attention from_pretrained head layer load load_checkpoint load_model read "
    "read_attention",
    "Block": "Attention block heads",
    "read_table": "load_table read_csv read_parquet",
    "same": "allclose equal is_same similarity",
    "scan": "analyze compute measure score scores",
    "show": "display draw heatmap plot view visualize",
    "verify": "check test validate",
    "report": "html to_html",
    "wqk_lab.atlas": "atlas published",
    "wqk_lab.figures": "figure figures",
    "wqk_lab.corpus": "build_corpus corpus",
    "wqk_lab.experiments": "experiments run_experiments",
    "wqk_lab.glue": "fine_tune glue",
    "wqk_lab.speedup": "speedup speedups",
    "wqk_lab.study": "study theory",
    "wqk_lab.train": "fit train",
}

SYNONYMS = {name: meant for meant, names in _TRIED.items() for name in names.split()}


def public(
    package: str, file: str, commands: Mapping[str, str], synonyms: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose stub lies beside ``file``.

    ``commands`` are the names of commands whose functions have others. An AttributeError on an
    unknown name says which one was probably meant, by its spelling or as one of the ``synonyms``.
    """
    found, _, names = lazy_loader.attach_stub(package, file)
    listed = sorted({*names, *commands})

    def get(name: str) -> Any:
        if name in listed or name.startswith("_"):
            return found(commands.get(name, name))
        advice = did_you_mean(name, listed, synonyms)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")

    return get, lambda: listed, listed


class Advising:
    """An object whose AttributeError names the attribute that was meant.

    Type checkers do not see this, so that they report the mistake themselves.
    """

    _synonyms: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, synonyms: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._synonyms = {**cls._synonyms, **(synonyms or {})}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            advice = "" if name.startswith("_") else did_you_mean(name, dir(self), self._synonyms)
            kind = type(self).__name__
            article = "an" if kind[0] in "AEIO" else "a"
            raise AttributeError(f"{article} {kind} has no attribute {name!r}{advice}")


def require_list(name: str, value: Any, like: Sequence[str] | Sequence[int]) -> None:
    """Raise `CheckpointError` if an argument is no list of names, or of numbers, as ``like`` is.

    Examples
    --------
    >>> require_list("layers", (0, -1), [0, -1])
    """
    kind, kinds = (str, "names") if isinstance(like[0], str) else (Integral, "whole numbers")
    if isinstance(value, str | bytes) or not (
        isinstance(value, Iterable) and all(isinstance(one, kind) for one in value)
    ):
        raise CheckpointError(
            f"{name}: expected a list of {kinds}, such as {name}={like}; got {value!r}"
        )


def first_line(error: BaseException) -> str:
    r"""The first line of an error's message, truncated; its class if the message is empty.

    Examples
    --------
    >>> first_line(ValueError("one\ntwo")), first_line(MemoryError())
    ('one', 'MemoryError')
    """
    text = str(getattr(error, "strerror", None) or error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return shortened(line) or type(error).__name__


def all_lines(error: BaseException, longest: int = LONGEST) -> str:
    r"""An error's message as one line, truncated; its class if the message is empty.

    Examples
    --------
    >>> all_lines(ValueError("one\n  two")), all_lines(MemoryError())
    ('one two', 'MemoryError')
    """
    return shortened(" ".join(str(error).split()), longest) or type(error).__name__


def shortened(text: str, longest: int = LONGEST) -> str:
    """Text of at most ``longest`` characters; the middle of longer text is left out.

    Examples
    --------
    >>> shortened("a" * 20, 9), shortened("a" * 9, 9)
    ('aaaa…aaaa', 'aaaaaaaaa')
    """
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


# Nested values are quoted in part: lists whose entries name each other would be written for years.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 100, 100, 100


def shown(value: Any) -> str:
    """A value as an error quotes it: short, whatever it is.

    Examples
    --------
    >>> shown("64"), shown(10**5000), shown([10**5000])
    ("'64'", 'a number of 16610 bits', 'a list that cannot be printed')
    >>> shown([[[[1]]]]) == "[[[[...]]]]"
    True
    """
    try:
        return shortened(_SHORT.repr(value), 40)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        if isinstance(value, int):
            return f"a number of {value.bit_length()} bits"
        return f"a {type(value).__name__} that cannot be printed"
