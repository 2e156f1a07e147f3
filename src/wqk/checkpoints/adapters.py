"""LoRA adapters on their base model: W + s B A, computed row by row on reading, never stored.

A maps the input to r dimensions (r: the adapter's rank), B maps them to the output, s scales them.
Queries and keys have factors of their own, so that the form is exactly
(W_q + s B_q A_q)ᵀ (W_k + s B_k A_k): Hu et al., "LoRA: Low-Rank Adaptation of Large Language
Models", equation 3.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._caching import cached_property
from wqk.checkpoints.checkpoint import Checkpoint, Part, TensorInfo
from wqk.checkpoints.configurations import as_number
from wqk.checkpoints.modules import without_adapter
from wqk.checkpoints.references import redacted
from wqk.checkpoints.stored import StoredCheckpoint, weight_file
from wqk.errors import CheckpointError, errors_about, shortened, shown

if TYPE_CHECKING:
    from wqk.checkpoints.formats import Folder

PREFIX, SAVED, UNUSED = "base_model.model.", ".modules_to_save.", ".original_module."
FACTOR = re.compile(
    r"(?P<module>.+?)\.lora_(?P<side>[AB])(?:\.(?!weight$)(?P<adapter>\w+))?(?:\.weight)?"
)

# Names in a configuration times modules: more are no adapter's.
MOST_COMPARED = 1_000_000

# A module inside a numbered layer.
NUMBERED = re.compile(r"(?:^|\.)\d+(?:\.|$)")
# By how many words the names of a base model and of an adapter's tensors may begin differently.
PREFIX_WORDS = 4


class Named(NamedTuple):
    """What a tensor of an adapter is."""

    side: str  # "A" or "B", a factor; "" for what replaces a tensor
    tensor: str  # the base model's, as the adapter calls it
    adapter: str = ""  # the adapter's own name, where the file has one


def adapter_name(stored: str) -> Named:
    """What a tensor is, by its name.

    Examples
    --------
    >>> adapter_name("base_model.model.layers.0.q_proj.lora_A.default.weight")
    Named(side='A', tensor='layers.0.q_proj.weight', adapter='default')
    >>> adapter_name("base_model.model.score.modules_to_save.weight")
    Named(side='', tensor='score.weight', adapter='')
    """
    name = stored.removeprefix(PREFIX)
    if match := FACTOR.fullmatch(name):
        tensor = without_adapter(f"{match['module']}.weight")
        return Named(match["side"], tensor, match["adapter"] or "")
    return Named("", without_adapter(name.replace(SAVED, ".")))


def module_of(tensor: str) -> str:
    """The name of a tensor's module."""
    return tensor.rpartition(".")[0]


class BaseNames:
    """The base model's names, found under a prefix more or fewer."""

    def __init__(self, tensors: Collection[str]) -> None:
        self.tensors = tensors

    @cached_property
    def _by_end(self) -> Mapping[str, list[str]]:
        """The names by what is left of them without their first words."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.tensors:
            for end in _ends(name):
                found[end].append(name)
        return found

    @cached_property
    def _inside(self) -> set[str]:
        """Modules with weights of their own, and all in a numbered layer."""
        inside = {name.rpartition(".")[0] for name in self.tensors}
        for module in tuple(inside):
            while (module := module.rpartition(".")[0]) and NUMBERED.search(module):
                if module in inside:
                    break
                inside.add(module)
        return {*inside, *(end for module in inside for end in _ends(module))} - {""}

    def own(self, name: str) -> str | None:
        """The base model's name for a tensor; None if there is none, or several might be meant."""
        if name in self.tensors:
            return name
        shorter = (end for end in _ends(name) if end in self.tensors)
        found = {*self._by_end.get(name, ()), *shorter}
        return found.pop() if len(found) == 1 else None

    def touches(self, name: str) -> bool:
        """Whether a tensor would lie in a module or in a layer of the base model."""
        while name := name.rpartition(".")[0]:
            if not self._inside.isdisjoint((name, *_ends(name))):
                return True
        return False


def _ends(name: str) -> Iterator[str]:
    """What is left of a name without its first words."""
    for _ in range(PREFIX_WORDS):
        _, dot, name = name.partition(".")
        if not dot:
            return
        yield name


CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")

# Keys of adapter_config.json that say nothing about W + s B A, or whose values are read here. Any
# other may stand for a variant, now or in a later PEFT, and must be off.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type",
    # Read here, or decided by the tensors.
    "alpha_pattern", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "peft_type", "use_rslora",
}  # fmt: skip
OFF: tuple[Any, ...] = (None, False, [])
# Initializations that do not change the base model.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

# Models whose modules store their weights (in, out).
STORED_IN_OUT = {"decision_transformer", "gpt-sw3", "gpt2", "imagegpt", "openai-gpt"}
# Tables that are saved whole when tokens are added to them.
RESIZED = ("embed_tokens.weight", "lm_head.weight")


class Adapter(NamedTuple):
    """A LoRA adapter: its configuration and its tensors."""

    config: Mapping[str, Any]
    tensors: Checkpoint
    model: Mapping[str, Any] = {}  # config.json beside it, where there is one

    @property
    def base(self) -> str:
        """The model that it was trained on, a path or a hub id."""
        base = self.config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base or "://" in base:
            raise CheckpointError(
                f"{self.tensors.name}: {CONFIG} names no base model; expected a path or a Hub id "
                f"in base_model_name_or_path, got {shown(redacted(str(base)))}"
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
    with errors_about(folder.name):
        _require_plain(config)
    tensors = StoredCheckpoint(folder.name, [weight_file(source)], {}, workers=folder.workers)
    return Adapter(config, tensors, folder.object("config.json") if "config.json" in names else {})


def _require_plain(config: Mapping[str, Any]) -> None:
    """Check that the configuration is that of W + s B A, and of nothing more."""
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    more = [
        key
        for key, value in config.items()
        if key not in WITHOUT_EFFECT and not any(value is off or value == off for off in OFF)
    ]
    what = kind if kind != "LORA" else ", ".join(more)
    if not what and not any(start is plain or start == plain for plain in PLAIN_STARTS):
        what = f"start {start}"
    if what:
        raise CheckpointError(
            f"an adapter ({shortened(str(what), 80)}) other than W + s B A; merge it into its base "
            "model first (peft: model.merge_and_unload().save_pretrained(...))"
        )


class AdaptedCheckpoint(Checkpoint):
    """A base model with an adapter, named after the adapter.

    What the adapter adds is rounded to the type that its base is read in.
    """

    _rounded = True

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        # The base model's, but the adapter says what class they are run by.
        classes = {k: v for k, v in adapter.model.items() if k in ("architectures", "auto_map")}
        self.name, self.config = adapter.tensors.name, {**base.config, **classes}
        self.adapter, self._base, self._adapter = adapter, base, adapter.tensors
        with errors_about(self.name):
            self._changes = _changes(base, adapter)
        replaced = {n: self._adapter.info(own) for n, own in self._changes.replaced.items()}
        self._tensors = {**base.tensors(), **replaced}
        count = len(self._changes.updates)
        layers = f"{count} of its tensors" if count else "none of its tensors"
        self.notes = (*base.notes, f"{base.name} with a LoRA adapter on {layers}")

    @property
    def base(self) -> Checkpoint:
        """The model without the adapter."""
        return self._base

    def scale_of(self, tensor: str) -> float | None:
        """The factor of what the adapter adds to a tensor; None if it adds nothing."""
        update = self._changes.updates.get(tensor)
        return None if update is None else update.scale

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells the base model's and the adapter's files from others."""
        return (self._base.identity, self._adapter.identity)

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes of the base model and the adapter that came over the network."""
        fetched = (self._base.bytes_fetched, self._adapter.bytes_fetched)
        return None if fetched == (None, None) else sum(filter(None, fetched))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The base model's tensors, or the adapter's own where it replaces them."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part with what the adapter adds to them."""
        replaced = self._changes.replaced
        arrays = iter(self._base.read([part for part in parts if part.name not in replaced]))
        own = [part._replace(name=replaced[part.name]) for part in parts if part.name in replaced]
        others = iter(self._adapter.read(own))
        return [
            self._adapted(part, next(others if part.name in replaced else arrays)) for part in parts
        ]

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Announce a later read."""
        changes = self._changes
        self._base.prefetch([part for part in parts if part.name not in changes.replaced])
        updates = [changes.updates[part.name] for part in parts if part.name in changes.updates]
        self._adapter.prefetch([Part(name) for one in updates for name in (one.down, one.up)])

    def abandon(self) -> None:
        """Cancel what was announced."""
        self._base.abandon()
        self._adapter.abandon()

    def _adapted(self, part: Part, array: np.ndarray) -> np.ndarray:
        update = self._changes.updates.get(part.name)
        if update is None:
            return array
        down, up = self._adapter.read([Part(update.down), Part(update.up)])
        whole = (down.T, up.T) if update.transposed else (up, down)
        ranges = part.row_ranges(self.info(part.name).shape)
        rows = np.concatenate([whole[0][start:stop] for start, stop in ranges])
        with np.errstate(over="ignore", invalid="ignore"):  # told where the weights are used
            product = rows.astype(np.float64) @ whole[1].astype(np.float64)
            adapted = array + update.scale * product
            return adapted.astype(array.dtype) if self._rounded else adapted


def unrounded(checkpoint: AdaptedCheckpoint) -> AdaptedCheckpoint:
    """The same checkpoint, its adapted weights in float64 as PEFT merges them in float64."""
    other = copy(checkpoint)
    other._rounded = False
    return other


class Changes(NamedTuple):
    """What an adapter does to its base model, by the names of the base model's tensors."""

    updates: dict[str, Update]
    replaced: dict[str, str]  # by these tensors of the adapter


def _changes(base: Checkpoint, adapter: Adapter) -> Changes:
    """What becomes of the base model's tensors.

    Raises `CheckpointError` for a tensor that is none of those that are read.
    """
    names = BaseNames(base.tensors())
    found: dict[str, dict[str, str]] = {"": {}, "A": {}, "B": {}}  # the base's name → the adapter's
    adapters: set[str] = set()
    # Tables with more tokens are saved twice, with the mark of modules_to_save and without.
    for stored in sorted(adapter.tensors.tensors(), key=lambda name: SAVED in name):
        named = adapter_name(stored)
        if UNUSED in stored:
            continue
        if named.tensor in found[named.side] and SAVED not in stored:
            raise CheckpointError(f"holds {shortened(named.tensor, 120)} of several adapters")
        found[named.side][named.tensor] = stored
        adapters |= {named.adapter} - {""}
    if len(adapters) > 1:
        several = shortened(", ".join(sorted(adapters)), 80)
        raise CheckpointError(f"holds several adapters ({several}); save one of them alone")
    replaced = {
        own: stored for name, stored in found[""].items() if (own := _replaced(names, name))
    }
    for own, stored in replaced.items():
        _require_shape(own, base.info(own).shape, adapter.tensors.info(stored).shape)
    updates = {}
    down, up = found["A"], found["B"]
    alphas = _alphas(adapter.config, {module_of(name) for name in down})
    for name in down | up:
        own = names.own(name)
        if own is None or name not in down or name not in up:
            raise CheckpointError(
                f"adapts {shortened(module_of(name), 120)}, which {base.name} does not hold, "
                "or lacks one of its two factors"
            )
        factors = (down[name], up[name])
        updates[own] = _update(base, adapter, own, factors, alphas[module_of(name)])
    return Changes(updates, replaced)


def _replaced(names: BaseNames, name: str) -> str | None:
    """The base model's tensor that one of the adapter's replaces; None for a module of its own."""
    own = names.own(name)
    if own is None and names.touches(name):
        raise CheckpointError(
            f"holds {shortened(name, 120)!r}, which is no part of the base model and none of the "
            "factors of W + s B A; merge it into its base model first"
        )
    return own


def _require_shape(name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Check that what replaces a tensor has its shape; tables of tokens may have other rows."""
    if name.endswith(RESIZED) and len(got) == len(expected) == 2 and got[1] == expected[1]:
        return
    if got != expected:
        raise CheckpointError(f"replaces {name}, of shape {expected}, with a tensor of {got}")


def _alphas(config: Mapping[str, Any], modules: Collection[str]) -> dict[str, float]:
    """Each module's alpha: the value of the first name that it has or ends with, as in PEFT."""
    default, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"alpha_pattern must be a table, got {shown(patterns)}")
    if len(patterns) * len(modules) > MOST_COMPARED:
        raise CheckpointError(
            f"{len(patterns)} names in alpha_pattern for {len(modules)} modules are too many"
        )
    alphas = dict.fromkeys(modules, default)
    for name, value in reversed(patterns.items()):
        if not re.fullmatch(r"\^?[\w.-]{1,500}", name):
            raise CheckpointError(
                f"alpha_pattern holds the expression {shortened(name, 80)!r}, where only names of "
                "modules are read; merge it into its base model first"
            )
        # To PEFT it is an expression nevertheless: its dots are any character.
        whole = re.compile(name if name[0] == "^" else rf"(?:.*\.)?{name}", re.DOTALL)
        alphas |= {module: value for module in modules if whole.fullmatch(module)}
    for alpha in alphas.values():
        if as_number(alpha) is None:
            raise CheckpointError(f"lora_alpha must be a number, got {shown(alpha)}")
    return alphas


def _update(
    base: Checkpoint, adapter: Adapter, name: str, factors: tuple[str, str], alpha: float
) -> Update:
    down, up = (adapter.tensors.info(factor).shape for factor in factors)
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise CheckpointError(f"the factors of {module_of(name)} do not fit together")
    shape, product, turned = base.info(name).shape, (up[0], down[1]), (down[1], up[0])
    # As in PEFT, the module's own storage decides, whatever fan_in_fan_out says.
    stored_in_out = base.config.get("model_type") in STORED_IN_OUT
    transposed = turned == shape and (stored_in_out or product != shape)
    if not transposed and product != shape:
        raise CheckpointError(f"adds {product} to {name}, whose shape is {shape}")
    rank, stable = down[0], adapter.config.get("use_rslora") or False
    if not isinstance(stable, bool):
        raise CheckpointError(f"use_rslora must be true or false, got {shown(stable)}")
    return Update(*factors, alpha / (math.sqrt(rank) if stable else rank), transposed)
