"""Queries and keys of a model before it is trained: symmetric, paired, skew, mimetic, in place."""

from wqk.training.starts.initializing import KINDS, initialize_
from wqk.training.starts.report import FormScores, Initialization, LayerChange

__all__ = ["KINDS", "FormScores", "Initialization", "LayerChange", "initialize_"]
