"""The models that prove the families: each a name, a class and a tiny configuration."""

from __future__ import annotations

from tests.families.architectures.architecture import Architecture
from tests.families.architectures.audio import AUDIO
from tests.families.architectures.language import LANGUAGE
from tests.families.architectures.paper import PAPER
from tests.families.architectures.vision import VISION
from tests.families.inputs import MODEL_INPUTS as MODEL_INPUTS  # with those of rare models

ALL: tuple[Architecture, ...] = (*PAPER, *LANGUAGE, *VISION, *AUDIO)
NAMED: dict[str, Architecture] = {architecture.name: architecture for architecture in ALL}
