"""Public names of a package, imported when first used; and what one may try in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import lazy_loader  # type: ignore[import-untyped]

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
        from wqk.errors import did_you_mean

        advice = did_you_mean(name, listed, synonyms)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")

    return get, lambda: listed, listed


def require_list(name: str, value: Any, like: Sequence[str] | Sequence[int]) -> None:
    """Raise `CheckpointError` if an argument is no list of names, or of numbers, as ``like`` is.

    Examples
    --------
    >>> require_list("layers", (0, -1), [0, -1])
    """
    from wqk.errors import CheckpointError

    kind, kinds = (str, "names") if isinstance(like[0], str) else (Integral, "whole numbers")
    if isinstance(value, str | bytes) or not (
        isinstance(value, Iterable) and all(isinstance(one, kind) for one in value)
    ):
        raise CheckpointError(
            f"{name}: expected a list of {kinds}, such as {name}={like}; got {value!r}"
        )


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
            from wqk.errors import did_you_mean

            advice = "" if name.startswith("_") else did_you_mean(name, dir(self), self._synonyms)
            kind = type(self).__name__
            article = "an" if kind[0] in "AEIO" else "a"
            raise AttributeError(f"{article} {kind} has no attribute {name!r}{advice}")
