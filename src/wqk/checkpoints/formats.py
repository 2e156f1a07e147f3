"""Which files of a folder hold a model, by the library that wrote them.

A format is a row of data: the names of its weights, of its configuration, and along which axis it
splits tensors over files. The names of its tensors are a family's, under the format's model type;
what has to be computed from its configuration is in `wqk.checkpoints.configurations`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Format(NamedTuple):
    """What one library writes.

    Attributes
    ----------
    name
        For messages.
    weights
        Pattern of the names of its weights, within the folder.
    config
        Names under which its configuration may lie in the folder; the first that is there counts.
    section
        Key of the configuration that holds the model's own, where it is nested.
    model_type
        What families call its models; empty where the configuration says it.
    split_axis
        Along which axis a tensor, of this name and shape in a model of this width, is split over
        tensor-parallel files; None where every file has all of it.
    """

    name: str
    weights: str
    config: tuple[str, ...] = ("config.json",)
    section: str = ""
    model_type: str = ""
    split_axis: Callable[..., int | None] | None = None

    def files(self, names: Iterable[str]) -> tuple[str, ...]:
        """Its weights among these names, in the order of their numbers."""
        return tuple(sorted(name for name in names if re.fullmatch(self.weights, name)))


def _llama_axis(name: str, shape: tuple[int, ...], width: object) -> int | None:
    """Rows of what is projected to, columns of what is projected from; embeddings either way."""
    if len(shape) != 2:
        return None
    if name.startswith("tok_embeddings."):
        return 0 if shape[1] == width else 1
    return 1 if re.search(r"\b(wo|w2)\.weight$", name) else 0


def _megatron_axis(name: str, shape: tuple[int, ...], width: object) -> int | None:
    """As Megatron's column-parallel and row-parallel layers; biases go with their rows."""
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
    """The format whose weights have this name; None for those of `transformers` and any other.

    Examples
    --------
    >>> format_of("consolidated.00.pth").name
    'the original files of LLaMA or Mistral'
    >>> format_of("model.safetensors")
    """
    return next((one for one in FORMATS if re.fullmatch(one.weights, name)), None)
