"""Which files of a folder hold a model, by the library that wrote them.

A format is a row of data: the names of its weights and its configuration, and the axis along which
it splits tensors over files. The names of its tensors belong to a family, under the format's model
type; what has to be computed from its configuration is in `wqk.checkpoints.configurations`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Format(NamedTuple):
    """What one library writes.

    ``split_axis`` gives the axis along which a tensor of some name and shape, in a model of some
    width, is split over tensor-parallel files; None if every file has all of it.
    """

    name: str  # for messages
    weights: str  # pattern of the names of its weights, within the folder
    config: tuple[str, ...] = ("config.json",)  # the first that exists is its configuration
    section: str = ""  # key of the configuration that holds the model's own, where it is nested
    model_type: str = ""  # what families call its models; empty where the configuration says it
    split_axis: Callable[..., int | None] | None = None

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


def _megatron_axis(name: str, shape: tuple[int, ...], width: object) -> int | None:
    """As in Megatron's column-parallel and row-parallel layers; biases go with their rows."""
    if re.search(r"(linear_proj|linear_fc2|attention\.dense|dense_4h_to_h)\.", name):
        return 1 if len(shape) == 2 else None
    if re.search(r"norm|router|position_embeddings", name):
        return None
    return 0


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
        "OpenCLIP",
        r"open_clip_(pytorch_)?model\.(safetensors|bin)",
        ("open_clip_config.json",),
        section="model_cfg",
        model_type="open_clip",
    ),
    Format(
        "a distributed checkpoint of PyTorch",
        r"(pytorch_model_fsdp_\d+/|model/)?\.metadata",
        ("config.json", "../config.json", "params.json", "../params.json"),
    ),
    Format(
        "Megatron-LM",
        r"mp_rank_\d+/(model_optim_rng|model_rng)\.pt",
        model_type="megatron",
        split_axis=_megatron_axis,
    ),
)


def format_of(name: str) -> Format | None:
    """The format whose weights have this name; None for `transformers` and unknown ones.

    Examples
    --------
    >>> format_of("consolidated.00.pth").name
    'the original files of LLaMA or Mistral'
    >>> format_of("model.safetensors")
    """
    return next((one for one in FORMATS if re.fullmatch(one.weights, name)), None)
