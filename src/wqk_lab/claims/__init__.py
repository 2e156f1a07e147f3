"""The paper's empirical claims, each with the records that decide the claim."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
