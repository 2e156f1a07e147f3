"""Initializations of a model's queries, keys and values before training, in place."""

from wqk.live.starts.initializing import (
    Initialization,
    LayerChange,
    LayerScores,
    initialize_,
)
from wqk.live.starts.kinds import KINDS

__all__ = ["KINDS", "Initialization", "LayerChange", "LayerScores", "initialize_"]
