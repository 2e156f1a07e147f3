"""Formats of libraries other than transformers: names of weights and configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Format(NamedTuple):
    """Files of one library.

    Attributes
    ----------
    name
        Noun phrase, for messages.
    weights
        Pattern of the names of the weights, within the folder.
    config
        Names of the configuration; the first existing file is read. ``{}`` is the first group of
        the pattern, for formats with a configuration for each file of weights.
    section
        Key of the nested configuration of the model; empty if not nested.
    model_type
        Model type of the families; empty if the configuration sets the type.
    split_axis
        Function of the name and shape of a tensor, and the width of the model, that returns the
        axis of the split over tensor-parallel files; None if every file has the whole tensor.
    """

    name: str
    weights: str
    config: tuple[str, ...] = ("config.json",)
    section: str = ""
    model_type: str = ""
    split_axis: Callable[..., int | None] | None = None

    def configurations(self, weights: str) -> tuple[str, ...]:
        """Return the possible names of the configuration for weights of this name."""
        match = re.fullmatch(self.weights, weights)
        group = match[1] if match and match.re.groups else ""
        return tuple(name.format(group) for name in self.config)

    def files(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the weights of the format among these names, sorted."""
        return tuple(sorted(name for name in names if re.fullmatch(self.weights, name)))


def _llama_axis(name: str, shape: tuple[int, ...], width: object) -> int | None:
    """Return the axis along which LLaMA's tensors are split; None for vectors.

    Output projections are split by columns, other matrices by rows; embeddings by the axis that is
    not as wide as the model.
    """
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
    """Return the format of weights with this name; None for `transformers` and unknown names.

    Examples
    --------
    >>> format_of("consolidated.00.pth").name
    'the original files of LLaMA or Mistral'
    >>> format_of("model.safetensors")
    """
    return next((layout for layout in FORMATS if re.fullmatch(layout.weights, name)), None)
