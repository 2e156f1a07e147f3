"""wqk: read, measure and follow the query-key form of self-attention, W_qk = W_q W_kᵀ.

The public names are listed in ``__init__.pyi`` and imported when first used, so that the command
starts at once and nothing heavy is loaded for a small task.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
