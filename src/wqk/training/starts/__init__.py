"""Initializations of a model's queries, keys and values before training, in place."""

from wqk.training.starts.initializing import initialize_
from wqk.training.starts.kinds import KINDS
from wqk.training.starts.report import Initialization, LayerChange, LayerScores

__all__ = ["KINDS", "Initialization", "LayerChange", "LayerScores", "initialize_"]
