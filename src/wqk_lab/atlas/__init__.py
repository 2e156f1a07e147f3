"""The atlas: the paper's published scores, and how a scan ranks among them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
