"""wqk_lab: the laboratory around `wqk`, which trains, experiments and tests the paper's statements.

The public names are listed in ``__init__.pyi`` and imported when first used.
"""

from typing import Any

import lazy_loader

_public, _, _names = lazy_loader.attach_stub(__name__, __file__)

# Every command has its name here, but for `figures` and `theory`, which are modules; those of some
# functions say more.
_COMMANDS = {
    "corpus": "build_corpus",
    "experiments": "run_experiments",
    "glue": "fine_tune",
    "speedup": "speedups",
}
__all__ = sorted({*_names, *_COMMANDS})


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in __all__ or name.startswith("_"):
        return _public(_COMMANDS.get(name, name))
    from wqk.errors import did_you_mean

    raise AttributeError(f"module 'wqk_lab' has no attribute {name!r}{did_you_mean(name, __all__)}")
