"""wqk: read, measure and follow the query-key form of self-attention, W_qk = W_q W_kᵀ.

The public names are listed in ``__init__.pyi`` and imported when first used, so that the command
starts at once and nothing heavy is loaded for a small task.
"""

from wqk import errors

# Every command has its name here; those of some functions say more.
__getattr__, __dir__, __all__ = errors.public(
    __name__, __file__, {"report": "write_report", "tokens": "match_tokens"}, errors.SYNONYMS
)
