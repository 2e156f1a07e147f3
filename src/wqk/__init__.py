"""wqk: read, measure and follow the query-key form of self-attention, W_qk = W_q W_kᵀ.

The public names are listed in ``__init__.pyi`` and imported when first used, so that the command
starts at once and nothing heavy is loaded for a small task.
"""

from typing import Any

import lazy_loader

_public, _, _names = lazy_loader.attach_stub(__name__, __file__)

# Every command has its name here; those of some functions say more.
_COMMANDS = {"report": "write_report", "tokens": "match_tokens"}
__all__ = sorted({*_names, *_COMMANDS})


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in __all__ or name.startswith("_"):
        return _public(_COMMANDS.get(name, name))
    from wqk._synonyms import SYNONYMS
    from wqk.errors import did_you_mean

    advice = did_you_mean(name, __all__, SYNONYMS)
    raise AttributeError(f"module 'wqk' has no attribute {name!r}{advice}")
