"""Two small models that ship with the package, scanned side by side."""

from wqk.demo.demo import demo_model

__all__ = ["demo_model"]
