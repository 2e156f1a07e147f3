"""The atlas: the paper's published scores, and how a scan ranks among them."""

from wqk.scanning.surveys.surveying import survey_table
from wqk_lab.atlas.paper_tables import TrainingResult, paper_table
from wqk_lab.atlas.ranks import (
    Flag,
    Placement,
    flags,
    place,
    published,
    sound_models,
    summarize,
)
from wqk_lab.atlas.reference import (
    drawn_models,
    published_layers,
    published_losses,
    published_training,
)
from wqk_lab.atlas.search import all_published, lookup

__all__ = [
    "Flag",
    "Placement",
    "TrainingResult",
    "all_published",
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
