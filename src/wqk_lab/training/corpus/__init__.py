"""Text as tokens: how a corpus is built, and the store that training reads from."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
