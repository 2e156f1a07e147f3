"""The atlas: the paper's published scores, and where a scan stands among them."""

from wqk.atlas.comparison import Comparison, compare
from wqk.atlas.medians import summarize, survey_table
from wqk.atlas.paper_tables import TrainingResult, paper_table
from wqk.atlas.placing import Placement, place, sound_models
from wqk.atlas.published import Flag, flags, lookup, published

__all__ = [
    "Comparison",
    "Flag",
    "Placement",
    "TrainingResult",
    "compare",
    "flags",
    "lookup",
    "paper_table",
    "place",
    "published",
    "sound_models",
    "summarize",
    "survey_table",
]
