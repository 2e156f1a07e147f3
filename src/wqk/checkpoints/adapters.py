"""LoRA adapters on their base model: W + s B A, computed row by row on reading, never stored.

A maps the input to r dimensions (r: the adapter's rank), B maps them to the output, s scales them.
Queries and keys have factors of their own, so that the form is exactly
(W_q + s B_q A_q)ᵀ (W_k + s B_k A_k): Hu et al., "LoRA: Low-Rank Adaptation of Large Language
Models", equation 3.
"""

from __future__ import annotations

import math
import re
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Checkpoint, Part, TensorInfo
from wqk.checkpoints.stored import StoredCheckpoint, weight_file
from wqk.checkpoints.wrapping import without_adapter
from wqk.errors import CheckpointError, concerning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wqk.checkpoints.folders import Folder

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")

TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?P<side>[AB])(\.\w+)?\.weight")
WHOLE = re.compile(
    r"(?:base_model\.model\.)?(?P<name>.+?)(\.modules_to_save(\.\w+)?)?(?P<end>\.\w+)"
)

# Variants whose forward pass is not W + s B A; initializations that do not change the base model.
UNSUPPORTED = ("use_dora", "use_qalora", "lora_bias", "layer_replication", "target_parameters")
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


class Adapter(NamedTuple):
    """A LoRA adapter: its configuration and its tensors."""

    config: Mapping[str, Any]
    tensors: Checkpoint

    @property
    def base(self) -> str:
        """The model that it was trained on, a path or a hub id."""
        base = self.config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base or "://" in base:
            raise CheckpointError(
                f"{self.tensors.name}: {CONFIG} names no base model; expected a path or a Hub id "
                f"in base_model_name_or_path, got {base!r}"
            )
        return base

    @property
    def revision(self) -> str | None:
        """The base model's revision."""
        revision = self.config.get("revision")
        return revision if isinstance(revision, str) else None


class Update(NamedTuple):
    """What an adapter adds to one tensor: scale · B A, transposed where the tensor is."""

    down: str
    up: str
    scale: float
    transposed: bool


def read_adapter(folder: Folder) -> Adapter | None:
    """The adapter in a folder, here or remote; None if there is none.

    Raises `CheckpointError` for an adapter that is not LoRA, or does more than add a product.
    """
    names = folder.names or ()
    file = next((name for name in FILES if name in names and CONFIG in names), None)
    source = folder.source(file) if file else None
    if source is None:
        return None
    config = folder.object(CONFIG)
    kind = config.get("peft_type")
    used = [name for name in UNSUPPORTED if config.get(name)]
    if kind != "LORA" or used or config.get("init_lora_weights") not in PLAIN_STARTS:
        what = kind if kind != "LORA" else ", ".join(used) or f"start {config['init_lora_weights']}"
        raise CheckpointError(
            f"{folder.name}: an adapter ({what}) other than W + s B A; merge it into its base "
            "model first (peft: model.merge_and_unload().save_pretrained(...))"
        )
    tensors = StoredCheckpoint(folder.name, [weight_file(source)], {}, workers=folder.workers)
    return Adapter(config, tensors)


class AdaptedCheckpoint(Checkpoint):
    """A base model with an adapter, named after the adapter.

    What the adapter adds is rounded to the type that its base is read in.
    """

    _rounded = True

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self.name, self.config = adapter.tensors.name, base.config
        self.adapter, self._base, self._adapter = adapter, base, adapter.tensors
        with concerning(self.name):
            self._updates, self._replaced = _updates(base, adapter)
        layers = f"{len(self._updates)} of its tensors" if self._updates else "none of its tensors"
        self.notes = (*base.notes, f"{base.name} with a LoRA adapter on {layers}")

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes of the base model and the adapter that came over the network."""
        fetched = (self._base.bytes_fetched, self._adapter.bytes_fetched)
        return None if fetched == (None, None) else sum(filter(None, fetched))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The base model's tensors."""
        return self._base.tensors()

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part with what the adapter adds to them."""
        plain = [part for part in parts if part.name not in self._replaced]
        arrays = iter(self._base.read(plain))
        return [
            self._adapted(
                part,
                next(arrays)
                if part.name not in self._replaced
                else self._adapter.read([part._replace(name=self._replaced[part.name])])[0],
            )
            for part in parts
        ]

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Announce a later read."""
        self._base.prefetch([part for part in parts if part.name not in self._replaced])
        updates = [self._updates[part.name] for part in parts if part.name in self._updates]
        self._adapter.prefetch([Part(name) for one in updates for name in (one.down, one.up)])

    def abandon(self) -> None:
        """Cancel what was announced."""
        self._base.abandon()
        self._adapter.abandon()

    def _adapted(self, part: Part, array: np.ndarray) -> np.ndarray:
        update = self._updates.get(part.name)
        if update is None:
            return array
        down, up = self._adapter.read([Part(update.down), Part(update.up)])
        whole = (down.T, up.T) if update.transposed else (up, down)
        ranges = part.row_ranges(self.info(part.name).shape)
        rows = np.concatenate([whole[0][start:stop] for start, stop in ranges])
        product = rows.astype(np.float64) @ whole[1].astype(np.float64)
        adapted = array + update.scale * product
        return adapted.astype(array.dtype) if self._rounded else adapted


def unrounded(checkpoint: AdaptedCheckpoint) -> AdaptedCheckpoint:
    """The same checkpoint, its adapted weights in float64 as PEFT merges them in float64."""
    other = copy(checkpoint)
    other._rounded = False
    return other


def _updates(base: Checkpoint, adapter: Adapter) -> tuple[dict[str, Update], dict[str, str]]:
    """What is added to the base model's tensors, and which of them the adapter replaces."""
    sides: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for name in adapter.tensors.tensors():
        if match := TENSOR.fullmatch(name):
            sides.setdefault(match["module"], {})[match["side"]] = name
        elif ".lora_" in name:
            continue  # of embeddings and convolutions, which no query or key is
        elif match := WHOLE.fullmatch(name):
            own = _base_name(base, without_adapter(match["name"] + match["end"]))
            if own:
                replaced[own] = name
    updates = {}
    for module, names in sides.items():
        own = _base_name(base, f"{module}.weight")
        if own is None or names.keys() != {"A", "B"}:
            raise CheckpointError(
                f"adapts {module}, which {base.name} does not hold, or lacks one of its two factors"
            )
        updates[own] = _update(adapter, module, names, base.info(own).shape)
    return updates, replaced


def _update(
    adapter: Adapter, module: str, names: Mapping[str, str], shape: tuple[int, ...]
) -> Update:
    down, up = (adapter.tensors.info(names[side]).shape for side in "AB")
    transposed = bool(adapter.config.get("fan_in_fan_out"))
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise CheckpointError(f"the factors of {module} do not fit together")
    product = (down[1], up[0]) if transposed else (up[0], down[1])
    if product != shape:
        raise CheckpointError(f"adds {product} to {module}, whose weight is {shape}")
    config, rank = adapter.config, down[0]
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"lora_alpha must be a number, got {alpha!r}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Update(names["A"], names["B"], scale, transposed)


def _pattern(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in PEFT."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        except re.error:
            raise CheckpointError(
                f"alpha_pattern: {pattern!r} is not a regular expression"
            ) from None
    return default


def _base_name(base: Checkpoint, name: str) -> str | None:
    """The base model's tensor of this name, under one prefix more or fewer."""
    tensors = base.tensors()
    if name in tensors:
        return name
    found = [n for n in tensors if n.endswith(f".{name}") or name.endswith(f".{n}")]
    return found[0] if len(found) == 1 else None
