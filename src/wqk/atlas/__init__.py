"""The atlas: the paper's published scores, and how a scan ranks among them."""

from wqk.atlas.comparison import Comparison, compare
from wqk.atlas.lookup import all_published, lookup
from wqk.atlas.medians import summarize, survey_table
from wqk.atlas.paper_tables import TrainingResult, paper_table
from wqk.atlas.placing import Placement, place, sound_models
from wqk.atlas.published import Flag, flags, published
from wqk.atlas.reference import (
    drawn_models,
    published_layers,
    published_losses,
    published_training,
)

__all__ = [
    "Comparison",
    "Flag",
    "Placement",
    "TrainingResult",
    "all_published",
    "compare",
    "drawn_models",
    "flags",
    "lookup",
    "paper_table",
    "place",
    "published",
    "published_layers",
    "published_losses",
    "published_training",
    "sound_models",
    "summarize",
    "survey_table",
]
