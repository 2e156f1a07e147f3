"""wqk_lab: the laboratory around `wqk`, which trains, experiments and tests the paper's statements.

The public names are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
