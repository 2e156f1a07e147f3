"""Formats of libraries other than transformers: names of their weights and configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Format(NamedTuple):
    """Files of one library.

    ``split_axis`` gives the axis along which a tensor of some name and shape, in a model of some
    width, is split over tensor-parallel files; None if every file has all of it.
    """

    name: str  # for messages
    weights: str  # pattern of the names of its weights, within the folder
    # The first that exists is its configuration; ``{}`` is the first group of the pattern.
    config: tuple[str, ...] = ("config.json",)
    section: str = ""  # key of the configuration that holds the model's own, where it is nested
    model_type: str = ""  # what families call its models; empty where the configuration says it
    split_axis: Callable[..., int | None] | None = None

    def configurations(self, weights: str) -> tuple[str, ...]:
        """Return the names that the configuration of weights of this name may have."""
        match = re.fullmatch(self.weights, weights)
        group = match[1] if match and match.re.groups else ""
        return tuple(name.format(group) for name in self.config)

    def files(self, names: Iterable[str]) -> tuple[str, ...]:
        """Its weights among these names, sorted."""
        return tuple(sorted(name for name in names if re.fullmatch(self.weights, name)))


def _llama_axis(name: str, shape: tuple[int, ...], width: object) -> int | None:
    """Output projections by columns, all others by rows; embeddings either way."""
    if len(shape) != 2:
        return None
    if name.startswith("tok_embeddings."):
        return 0 if shape[1] == width else 1
    return 1 if re.search(r"\b(wo|w2)\.weight$", name) else 0


DISTRIBUTED = Format(
    "a distributed checkpoint of PyTorch",
    r"(?:[^/]+/)?\.metadata",
    ("config.json", "../config.json", "../../config.json"),
)
FORMATS = (
    Format(
        "the original files of LLaMA or Mistral",
        r"consolidated(\.\d+)?\.(pth|pt|safetensors)",
        ("params.json",),
        model_type="llama-original",
        split_axis=_llama_axis,
    ),
    Format("LitGPT", r"lit_model\.pth", ("model_config.yaml",), model_type="litgpt"),
    Format(
        "nanochat",
        r"model_([0-9]{6})\.pt",
        ("meta_{}.json",),
        section="model_config",
        model_type="nanochat",
    ),
    Format(
        "OpenCLIP",
        r"open_clip_(pytorch_)?model\.(safetensors|bin)",
        ("open_clip_config.json",),
        section="model_cfg",
        model_type="open_clip",
    ),
    Format("GGUF", r"[^/]*\.gguf", ()),
    DISTRIBUTED,
)


def format_of(name: str) -> Format | None:
    """Return the format whose weights have this name; None for `transformers` and unknown names.

    Examples
    --------
    >>> format_of("consolidated.00.pth").name
    'the original files of LLaMA or Mistral'
    >>> format_of("model.safetensors")
    """
    return next((layout for layout in FORMATS if re.fullmatch(layout.weights, name)), None)
