"""LoRA adapters on their base model: W + s B A, computed by rows on reading, and never stored.

A maps the input to r dimensions (r: the adapter's rank), B maps them to the output, s scales them.
Queries and keys have separate factors. Therefore the form is exactly (W_q + s B_q A_q)ᵀ (W_k + s
B_k A_k): Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", equation 3.

DoRA gives each output a magnitude m: m · (W + s B A) / ‖W + s B A‖, with the norm over the inputs:
Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", equation 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._console import counted
from wqk.checkpoints.checkpoint import Checkpoint, Part, TensorInfo, as_number
from wqk.checkpoints.formats import StoredCheckpoint, weight_file
from wqk.checkpoints.modules import without_adapter
from wqk.errors import CheckpointError, errors_about, shortened, shown
from wqk.storage.references import redacted

if TYPE_CHECKING:
    from wqk.checkpoints.formats import Folder

# What PEFT puts before the names of all modules.
PREFIX = "base_model.model."
# Characters of a module's name that messages show.
SHOWN = 120
FACTOR = re.compile(r"(?P<module>.+?)\.lora_(?P<side>[AB])(?:(?:\.(?P<adapter>\w+))?\.weight)?")
MAGNITUDE = re.compile(
    r"(?P<module>.+?)\.lora_magnitude_vector(?:(?:\.(?P<adapter>\w+))?\.weight)?"
)

# What PEFT puts into the name of a tensor that is saved whole, and the start of one never used.
SAVED, UNUSED = re.compile(r"\.modules_to_save(\.\w+(?=\.\w+$))?"), ".original_module."
NUMBERED = re.compile(r"(^|\.)\d+\.")

# First words that models with a head put before the names of their base models. Base models of
# their own type (`roberta`, `gpt_neox`) are called by it.
BASE_PREFIXES = ("model", "transformer", "roberta")
# A file of a model of pictures and texts has the first order of words, the model in memory the
# second.
TOWER_ON_DISK, TOWER_IN_MEMORY = "language_model.model.", "model.language_model."


def module_of(tensor: str) -> str:
    """Return the name of a tensor's module."""
    return tensor.rpartition(".")[0]


class BaseNames:
    """The base model's tensors, by their names in PEFT.

    PEFT adapts the model in memory, and the keys of an adapter are the names of modules in memory.
    A model with a head adds one word before the names of its base model; in a file, this word may
    be missing or additional.
    """

    def __init__(self, tensors: Collection[str], model_type: object) -> None:
        self.tensors = tensors
        self._model_type = str(model_type or "").replace("-", "_")

    def own(self, name: str) -> str | None:
        """Return the base model's name for a tensor; None if the base model lacks the tensor."""
        if name in self.tensors:
            return name
        first, _, without_prefix = name.partition(".")
        if self._is_prefix(first) and without_prefix in self.tensors:
            return without_prefix
        if name.startswith(TOWER_IN_MEMORY):
            on_disk = TOWER_ON_DISK + name.removeprefix(TOWER_IN_MEMORY)
            if on_disk in self.tensors:
                return on_disk
        longer = (f"{prefix}.{name}" for prefix in self._prefixes)
        return next((tensor for tensor in longer if tensor in self.tensors), None)

    def _is_prefix(self, word: str) -> bool:
        return word in BASE_PREFIXES or (len(word) > 1 and word in self._model_type)

    @cached_property
    def _prefixes(self) -> list[str]:
        """The first words that a model with a head adds to the base model's names."""
        first_words = dict.fromkeys(name.partition(".")[0] for name in self.tensors)
        return [word for word in first_words if self._is_prefix(word)]


CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")

# Keys of adapter_config.json without an effect on W + s B A, or whose values are read here. Any
# other may set a variant, now or in a later PEFT, and must be off.
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    # Read here, or decided by the tensors.
    "alpha_pattern",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "use_rslora",
}
# Variants that are read: each output gets a magnitude.
READ_VARIANTS = {"use_dora"}
OFF: tuple[Any, ...] = (None, False, [])
# Initializations that do not change the base model.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

# Models with weights stored as (in, out).
STORED_IN_OUT = {"decision_transformer", "gpt-sw3", "gpt2", "imagegpt", "openai-gpt"}


class Adapter(NamedTuple):
    """Configuration and tensors of a LoRA adapter."""

    config: Mapping[str, Any]
    tensors: Checkpoint
    model: Mapping[str, Any] = {}  # config.json next to the adapter

    @property
    def base(self) -> str:
        """The model that the adapter was trained on, a path or a Hub id."""
        base = self.config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base or "://" in base:
            raise CheckpointError(
                f"{self.tensors.name}: {CONFIG} names no base model; expected a path or a Hub id "
                f"in base_model_name_or_path, got {shown(redacted(str(base)))}; give it with "
                "base=PATH"
            )
        return base

    @property
    def revision(self) -> str | None:
        """The base model's revision."""
        revision = self.config.get("revision")
        return revision if isinstance(revision, str) else None

    def on_base(self, base: str | None) -> Adapter:
        """Return the adapter with another base model, a path or a Hub id; unchanged for None."""
        if base is None:
            return self
        place = {"base_model_name_or_path": base, "revision": None}
        return self._replace(config={**self.config, **place})


class Update(NamedTuple):
    """The update of one tensor: scale · B A, transposed if the tensor is transposed."""

    down: str
    up: str
    scale: float
    transposed: bool
    magnitude: str = ""  # of DoRA: the norm of each output's weights; empty for LoRA


class DoraUpdate(NamedTuple):
    """An update of DoRA: the product to add to a weight, and the new norm of each output."""

    product: np.ndarray  # scale · B A, (out, in)
    magnitudes: np.ndarray  # (out,)
    transposed: bool  # whether the weight is stored (in, out)


class LoraFactors(NamedTuple):
    """The factors of a LoRA update, s B A.

    Attributes
    ----------
    down, up
        A, (r, in), and B, (out, r).
    scale
        The factor s.
    transposed
        Whether the weight is stored (in, out), and the update is (B A)ᵀ.
    """

    down: np.ndarray
    up: np.ndarray
    scale: float
    transposed: bool


def read_adapter(folder: Folder) -> Adapter | None:
    """Read the adapter in a local or remote folder; None without an adapter.

    Raises
    ------
    CheckpointError
        The adapter is not LoRA, or does more than add a product.
    """
    names = folder.names or ()
    file = next((name for name in FILES if name in names and CONFIG in names), None)
    source = folder.source(file) if file else None
    if source is None:
        return None
    config = folder.object(CONFIG)
    with errors_about(folder.name):
        _require_plain(config)
    tensors = StoredCheckpoint(folder.name, [weight_file(source)], {}, transfers=folder.transfers)
    return Adapter(config, tensors, folder.object("config.json") if "config.json" in names else {})


def _require_plain(config: Mapping[str, Any]) -> None:
    """Check that the configuration describes W + s B A without further changes."""
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    further_keys = []
    for key, value in config.items():
        is_off = any(value is off or value == off for off in OFF)
        if key not in WITHOUT_EFFECT | READ_VARIANTS and not is_off:
            further_keys.append(key)
    if config.get("alpha_pattern"):
        further_keys.append("alpha_pattern")
    variant = ", ".join(further_keys)
    if kind != "LORA":
        variant = str(kind)
    elif not variant and not any(start is plain or start == plain for plain in PLAIN_STARTS):
        variant = f"start {start}"
    if variant:
        raise CheckpointError(
            f"an adapter ({shortened(variant, 80)}) other than W + s B A; expected LoRA or DoRA; "
            f"{MERGE}"
        )


class NotAnAdapter(CheckpointError):
    """A base model was passed for a checkpoint that is not an adapter."""


class AdaptedCheckpoint(Checkpoint):
    """A base model with an adapter, named after the adapter.

    The adapted weights are rounded to the type of the base model's weights on reading.

    Attributes
    ----------
    base
        The base model.
    adapter
        The adapter.
    """

    _rounded = True

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        # The configuration of the base model, with the class that the adapter's sets.
        classes = {k: v for k, v in adapter.model.items() if k in ("architectures", "auto_map")}
        self.name, self.config = adapter.tensors.name, {**base.config, **classes}
        self.adapter, self.base, self._adapter = adapter, base, adapter.tensors
        with errors_about(self.name):
            changes = _changes(base, adapter)
        self._updates, self._whole = changes.updates, changes.whole
        count = len(self._updates)
        layers = f"{count} of its tensors" if count else "none of its tensors"
        self.notes = (*base.notes, f"{base.name} with a LoRA adapter on {layers}")
        if changes.unmatched:
            self.notes += (_unmatched(changes.unmatched, base.name),)

    def scale_of(self, tensor: str) -> float | None:
        """Return the factor of the adapter's update of a tensor; None without an update."""
        update = self._updates.get(tensor)
        return None if update is None else update.scale

    def rank_of(self, tensor: str) -> int:
        """Return the rank of the adapter's update of a tensor; 0 without an update."""
        update = self._updates.get(tensor)
        return 0 if update is None else self._adapter.info(update.down).shape[0]

    def factors(self, tensor: str) -> LoraFactors | None:
        """Return the LoRA factors of a tensor's update; None without an update, and for DoRA."""
        update = self._updates.get(tensor)
        if update is None or update.magnitude:
            return None
        down, up = self._adapter.read([Part(update.down), Part(update.up)])
        return LoraFactors(down, up, update.scale, update.transposed)

    @property
    def stabilized(self) -> bool:
        """True if updates are scaled by alpha / √rank (rsLoRA) instead of alpha / rank."""
        return bool(self.adapter.config.get("use_rslora"))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Identity of the present content of the files of base model and adapter."""
        return (self.base.identity, self._adapter.identity)

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes of the base model and the adapter that came over the network."""
        fetched = (self.base.bytes_fetched, self._adapter.bytes_fetched)
        return None if fetched == (None, None) else sum(filter(None, fetched))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the tensors of the base model; the adapter may replace whole tensors."""
        replaced = {name: self._adapter.info(stored) for name, stored in self._whole.items()}
        return {**self.base.tensors(), **replaced}

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Read the rows of each part with the adapter's updates."""
        base_arrays = iter(self.base.read([p for p in parts if p.name not in self._whole]))
        arrays = []
        for part in parts:
            if part.name in self._whole:
                stored_part = part._replace(name=self._whole[part.name])
                arrays += self._adapter.read([stored_part])
            else:
                arrays.append(self._adapted(part, next(base_arrays)))
        return arrays

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Announce a later read."""
        self.base.prefetch([part for part in parts if part.name not in self._whole])
        names: list[str] = []
        for part in parts:
            update = self._updates.get(part.name)
            if update is not None:
                names += filter(None, (update.down, update.up, update.magnitude))
        self._adapter.prefetch([Part(name) for name in names])

    def abandon(self) -> None:
        """Cancel announced reads."""
        self.base.abandon()
        self._adapter.abandon()

    def decomposed(self, tensor: str) -> DoraUpdate | None:
        """Return the DoRA update of a tensor; None if the tensor has none."""
        update = self._updates.get(tensor)
        if update is None or not update.magnitude:
            return None
        parts = [Part(update.down), Part(update.up), Part(update.magnitude)]
        down, up, magnitudes = (array.astype(np.float64) for array in self._adapter.read(parts))
        change = update.scale * (up @ down)
        return DoraUpdate(change, magnitudes.reshape(-1), update.transposed)

    def _adapted(self, part: Part, array: np.ndarray) -> np.ndarray:
        """Return rows of the base model with the update of their tensor."""
        update = self._updates.get(part.name)
        if update is None:
            return array
        if update.magnitude:
            return self._with_magnitudes(part, array)
        down, up = self._adapter.read([Part(update.down), Part(update.up)])
        # The update is left @ right: B A, (out, r) and (r, in); or (B A)ᵀ = Aᵀ Bᵀ.
        left, right = (down.T, up.T) if update.transposed else (up, down)
        ranges = part.row_ranges(self.info(part.name).shape)
        left_rows = np.concatenate([left[start:stop] for start, stop in ranges])
        with np.errstate(over="ignore", invalid="ignore"):  # reported where the weights are used
            product = left_rows.astype(np.float64) @ right.astype(np.float64)
            adapted = array + update.scale * product
            return adapted.astype(array.dtype) if self._rounded else adapted

    def _with_magnitudes(self, part: Part, array: np.ndarray) -> np.ndarray:
        """Return rows of a tensor with DoRA, with magnitudes.

        ``array`` contains the rows of the base model. If a weight is stored (in, out), the norm of
        an output needs all rows, and the whole tensor is read.
        """
        update = self.decomposed(part.name)
        assert update is not None
        shape = self.info(part.name).shape
        rows = np.concatenate([np.arange(*ends) for ends in part.row_ranges(shape)])
        if update.transposed:
            (weight,) = self.base.read([Part(part.name)])
            adapted = decomposed(weight.T, update.product, update.magnitudes).T[rows]
        else:
            adapted = decomposed(array, update.product[rows], update.magnitudes[rows])
        return np.asarray(adapted, array.dtype) if self._rounded else adapted


def decomposed(weight: np.ndarray, product: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Return the weight of DoRA, m · (W + s B A) / ‖W + s B A‖, with the norm over the inputs.

    Parameters
    ----------
    weight, product
        W and s B A, both (out, in).
    magnitudes
        The norm m of each output, (out,).

    Examples
    --------
    >>> decomposed(np.array([[3.0, 0.0]]), np.array([[0.0, 4.0]]), np.array([10.0]))
    array([[6., 8.]])
    """
    adapted = weight.astype(np.float64) + product
    norms = np.linalg.norm(adapted, axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # reported where the weights are used
        return np.asarray(magnitudes[:, None] * adapted / norms)


def unrounded(checkpoint: AdaptedCheckpoint) -> AdaptedCheckpoint:
    """Return a copy of the checkpoint that returns adapted weights in float64, as PEFT merges."""
    other = copy(checkpoint)
    other._rounded = False
    return other


MERGE = "merge it into its base model first (peft: model.merge_and_unload().save_pretrained(...))"


class Changes(NamedTuple):
    """Changes of an adapter that apply to its base model.

    Attributes
    ----------
    updates
        Updates, by the names of tensors in the base model.
    whole
        Tensors of the adapter that replace tensors of the base model, by the names in the base
        model.
    unmatched
        Modules of the adapter that the base model lacks.
    """

    updates: dict[str, Update]
    whole: dict[str, str]
    unmatched: list[str]


class _AdapterNames(NamedTuple):
    """Names of an adapter's tensors, by PEFT's names of the weights.

    Attributes
    ----------
    down, up, magnitudes
        The factors A and B, and the magnitudes of DoRA.
    further
        All other tensors; they were saved completely.
    """

    down: dict[str, str]
    up: dict[str, str]
    magnitudes: dict[str, str]
    further: list[str]


def _adapter_names(adapter: Adapter) -> _AdapterNames:
    """Return the names of an adapter's tensors; `CheckpointError` for factors of two adapters."""
    names = _AdapterNames({}, {}, {}, [])
    for stored in adapter.tensors.tensors():
        name = stored.removeprefix(PREFIX)
        magnitude = MAGNITUDE.fullmatch(name) if adapter.config.get("use_dora") else None
        if magnitude is not None:
            names.magnitudes[without_adapter(f"{magnitude['module']}.weight")] = stored
            continue
        factor = FACTOR.fullmatch(name)
        if factor is None:
            names.further.append(stored)
            continue
        weight = without_adapter(f"{factor['module']}.weight")
        factors = names.down if factor["side"] == "A" else names.up
        if weight in factors:
            raise CheckpointError(
                f"holds {shortened(weight, SHOWN)} of several adapters; expected one adapter; save "
                "one of them alone"
            )
        factors[weight] = stored
    return names


def _changes(base: Checkpoint, adapter: Adapter) -> Changes:
    """Return the changes of an adapter that apply to its base model, by PEFT's rules for names.

    Raises
    ------
    CheckpointError
        A tensor is neither a factor nor a completely saved head or table of tokens; or the base
        model has none of the adapter's modules.
    """
    adapter_names = _adapter_names(adapter)
    base_names = BaseNames(base.tensors(), base.config.get("model_type"))
    whole: dict[str, str] = {}
    # Tables with more tokens are saved twice: with the mark of modules_to_save, which counts, and
    # without.
    for stored in sorted(adapter_names.further, key=lambda name: bool(SAVED.search(name))):
        base_name = _saved_whole(base, adapter, base_names, stored)
        if base_name is not None:
            whole[base_name] = stored
    alpha = adapter.config.get("lora_alpha", 8)
    if as_number(alpha) is None:
        raise _wrong_key("lora_alpha", "a number", alpha)
    updates: dict[str, Update] = {}
    unmatched: list[str] = []
    for name in adapter_names.down | adapter_names.up:
        module = module_of(name)
        _require_targeted(adapter.config, module)
        if name not in adapter_names.down or name not in adapter_names.up:
            raise CheckpointError(
                f"adapts {shortened(module, SHOWN)}, but lacks one of its two factors; expected "
                "lora_A and lora_B; save the adapter again"
            )
        base_name = base_names.own(name)
        if base_name is None:
            unmatched.append(module)
            continue
        factors = (adapter_names.down[name], adapter_names.up[name])
        update = _update(base, adapter, base_name, factors, alpha)
        magnitude = adapter_names.magnitudes.get(name)
        updates[base_name] = _decomposing(adapter, base_name, update, magnitude)
    if unmatched and not updates:
        raise CheckpointError(
            f"its keys match no module of {base.name}: adapts {shortened(unmatched[0], SHOWN)}, "
            f"which {base.name} does not hold, so PEFT applies nothing; rename the keys, or use "
            "the base model"
        )
    return Changes(updates, whole, unmatched)


def _wrong_key(key: str, expected: str, value: Any) -> CheckpointError:
    """Return the error for a value of an adapter's configuration that PEFT does not write."""
    return CheckpointError(
        f"{key} must be {expected}, got {shown(value)}; correct {CONFIG} next to the adapter"
    )


def _require_targeted(config: Mapping[str, Any], module: str) -> None:
    """Raise `CheckpointError` if the configuration excludes a module that has factors."""
    if not _is_targeted(config, module):
        raise CheckpointError(
            f"holds factors of {shortened(module, SHOWN)}, which target_modules, exclude_modules "
            f"and layers_to_transform of {CONFIG} leave out, so PEFT would not add them; correct "
            "the configuration, or remove the factors"
        )


def _decomposing(adapter: Adapter, name: str, update: Update, magnitude: str | None) -> Update:
    """Return an update with its magnitudes, if the adapter is a DoRA adapter."""
    is_dora = adapter.config.get("use_dora") or False
    if not isinstance(is_dora, bool):
        raise _wrong_key("use_dora", "true or false", is_dora)
    if not is_dora:
        return update
    if magnitude is None:
        raise CheckpointError(
            f"adapts {shortened(module_of(name), SHOWN)} with use_dora, but lacks its magnitudes; "
            "expected lora_magnitude_vector; save the adapter again"
        )
    outputs = adapter.tensors.info(update.up).shape[0]
    magnitudes_shape = adapter.tensors.info(magnitude).shape
    if math.prod(magnitudes_shape) != outputs:
        raise CheckpointError(
            f"the magnitudes of {shortened(module_of(name), SHOWN)} do not fit its {outputs} "
            f"outputs; expected {outputs} numbers, got the shape {magnitudes_shape}; save the "
            "adapter again"
        )
    return update._replace(magnitude=magnitude)


def _is_targeted(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the configuration of an adapter includes a module.

    Raises
    ------
    CheckpointError
        A key has a type that PEFT does not write.
    """
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _is_named(module, "exclude_modules", excluded):
        return False
    if targets != "all-linear" and not _is_named(module, "target_modules", targets):
        return False
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if layers is None or layers == []:
        return True
    listed = layers if isinstance(layers, list) else [layers]
    layer_words = patterns if isinstance(patterns, list) else [patterns or r"[^.]*"]
    if not all(type(layer) is int for layer in listed) or not all(map(_is_pattern, layer_words)):
        raise CheckpointError(
            "layers_to_transform must be layers, and layers_pattern names, got "
            f"{shown(layers)} and {shown(patterns)}; correct {CONFIG} next to the adapter"
        )
    for word in layer_words:
        if number := re.match(rf".*\.{word}\.(\d+)\.", module):
            return int(number[1]) in listed
    return False


def _is_named(module: str, key: str, names: Any) -> bool:
    """Return whether a pattern matches the name of a module, or a list contains the name's end."""
    if _is_pattern(names):
        return re.fullmatch(names, module) is not None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong_key(key, "a pattern or a list of modules", names)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_pattern(value: Any) -> bool:
    """Return whether a value is a regular expression."""
    try:
        re.compile(value)
    except (re.error, TypeError, RecursionError):
        return False
    return isinstance(value, str)


def _unmatched(modules: Sequence[str], base: str) -> str:
    """Return the note on modules that PEFT leaves out because the base model lacks them."""
    return (
        f"{counted(len(modules), 'adapted module')} that {base} does not hold, not applied, as in "
        f"PEFT: {shortened(modules[0], SHOWN)}{', …' if len(modules) > 1 else ''}"
    )


def _saved_whole(base: Checkpoint, adapter: Adapter, names: BaseNames, stored: str) -> str | None:
    """Return the base model's tensor that a saved tensor replaces; None for a new head.

    Raises
    ------
    CheckpointError
        The tensor is in a layer or in a module with a weight, or its shape differs from the
        replaced tensor in more than the first axis, the number of tokens.
    """
    name = SAVED.sub("", stored.removeprefix(PREFIX))
    if UNUSED in name:
        return None
    base_name = names.own(name)
    if base_name is None:
        module_words = module_of(name).split(".")
        modules = [".".join(module_words[:count]) for count in range(1, len(module_words) + 1)]
        fits = not any(names.own(f"{module}.weight") for module in modules)
    else:
        fits = adapter.tensors.info(stored).shape[1:] == base.info(base_name).shape[1:]
    if NUMBERED.search(name) or not fits:
        raise CheckpointError(
            f"holds {shortened(stored, SHOWN)!r}, none of the factors of W + s B A, and no head or "
            f"table of tokens that was saved whole; {MERGE}"
        )
    return base_name


def _update(
    base: Checkpoint, adapter: Adapter, name: str, factors: tuple[str, str], alpha: float
) -> Update:
    """Return the update of one tensor of the base model.

    Parameters
    ----------
    base, adapter
        The base model and the adapter.
    name
        The base model's name of the tensor.
    factors
        The adapter's names of A and B.
    alpha
        Numerator of the factor s.

    Raises
    ------
    CheckpointError
        The factors do not fit each other, the tensor, or the configuration.
    """
    down_shape, up_shape = (adapter.tensors.info(factor).shape for factor in factors)
    if len(down_shape) != 2 or len(up_shape) != 2 or down_shape[0] != up_shape[1]:
        raise _unfitting_factors(name, down_shape, up_shape)
    (rank, inputs), outputs = down_shape, up_shape[0]
    if rank == 0:
        raise _unfitting_factors(name, down_shape, up_shape)
    shape = base.info(name).shape
    fits, fits_transposed = shape == (outputs, inputs), shape == (inputs, outputs)
    # As in PEFT, the module's own storage decides, whatever fan_in_fan_out is.
    is_stored_in_out = base.config.get("model_type") in STORED_IN_OUT
    is_transposed = fits_transposed and (is_stored_in_out or not fits)
    if not is_transposed and not fits:
        raise CheckpointError(
            f"adds {(outputs, inputs)} to {name}, whose shape is {shape}; expected factors of this "
            "shape; use the adapter's own base model"
        )
    _require_rank(adapter.config, module_of(name), rank)
    is_stabilized = adapter.config.get("use_rslora") or False
    if not isinstance(is_stabilized, bool):
        raise _wrong_key("use_rslora", "true or false", is_stabilized)
    divisor = math.sqrt(rank) if is_stabilized else rank
    return Update(*factors, scale=alpha / divisor, transposed=is_transposed)


def _unfitting_factors(
    name: str, down_shape: tuple[int, ...], up_shape: tuple[int, ...]
) -> CheckpointError:
    """Return the error for factors that cannot be multiplied."""
    return CheckpointError(
        f"the factors of {module_of(name)} do not fit together; expected A (rank, inputs) and B "
        f"(outputs, rank), got {down_shape} and {up_shape}; save the adapter again"
    )


def _require_rank(config: Mapping[str, Any], module: str, rank: int) -> None:
    """Check that the configuration sets the rank of a module's factors.

    PEFT creates factors of the configured rank, and cannot load factors of another rank.
    """
    patterns = config.get("rank_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_is_pattern, patterns)):
        raise _wrong_key("rank_pattern", "ranks by pattern", patterns)
    ranks = (
        value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)
    )
    configured = next(ranks, config.get("r", rank))
    if type(configured) is not int or configured != rank:
        raise CheckpointError(
            f"the factors of {shortened(module, SHOWN)} have rank {rank}, but {CONFIG} sets "
            f"{shown(configured)} (r, rank_pattern), so PEFT would not load them; correct the "
            "configuration"
        )
