"""How the queries, keys and values of a model start before it is trained, set in place."""

from wqk.training.starts.initializing import initialize_
from wqk.training.starts.kinds import KINDS
from wqk.training.starts.report import Initialization, LayerChange, LayerScores

__all__ = ["KINDS", "Initialization", "LayerChange", "LayerScores", "initialize_"]
