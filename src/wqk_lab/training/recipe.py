"""Recipes: all settings that determine the numbers of a training run, as data.

>>> recipe = make_recipe("fast", mode="decoder", steps=1000)
>>> recipe.objective, recipe.width, recipe.warmup
('causal', 256, 50)
>>> Recipe.from_json(recipe.to_json()) == recipe
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from wqk.errors import RunError
from wqk_lab.training.declared import checked, option

OBJECTIVES = ("masked", "causal", "masked-next")

INITIALIZATIONS = (
    "random",
    "symmetric",
    "negated",
    "indefinite",
    "paired",
    "skew",
    "mimetic",
    "published",
    "published-independent",
    "published-indefinite",
    "published-negated",
    "published-values",
    "published-queries-keys",
)

SIZES: dict[str, dict[str, int]] = {
    "mini": {"layers": 4, "width": 256, "heads": 4},
    "base": {"layers": 12, "width": 768, "heads": 12},
    "large": {"layers": 24, "width": 1024, "heads": 16},
}

# The size of each preset. ``paper`` is Appendix S2.3 and Table S1, and for the rest transformers'
# defaults; ``fast`` leaves the plateau of token frequencies early, and wastes neither tokens nor
# computation.
PRESETS = {"paper": "base", "fast": "mini"}

# Fields that the user's configuration determines instead of the recipe.
MODEL_FIELDS = ("layers", "width", "heads", "intermediate", "norm", "dropout", "initial_std")


# Widths up to this one train fastest on one CPU thread. On two busy cores, width 64 took 18 s with
# one thread, and 220 s with two, which wait for each other in every operation.
NARROW = 64

# The fields of a start, for a run that continues another run and has no start of its own.
NO_START = {"init": "random", "init_head_norm": None, "init_norm": None, "init_values": None}


def _stream_width(chosen: Mapping[str, Any]) -> float:
    """Return the width of the model, from the recipe or its configuration."""
    config = chosen["config"] or {}
    named = [chosen["width"], *(config.get(name) for name in ("hidden_size", "n_embd", "d_model"))]
    widths = (width for width in named if isinstance(width, int) and width > 0)
    return float(next(widths, SIZES["mini"]["width"]))


def _times(number: int) -> Callable[[Mapping[str, Any]], int]:
    """Return a formula for the interval in steps of ``number`` events in a run."""
    return lambda chosen: max(1, chosen["steps"] // number)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of a training run: model, task, optimizer; build one with `make_recipe`.

    The sizes, ``norm``, ``dropout`` and ``initial_std`` are None if ``config`` holds your
    own transformers configuration. Runs recorded before a field existed have its default. Each
    preset's value is one, or a formula of the fields before.

    Attributes
    ----------
    preset
        Source of all values that were not given.
    mode
        Attention to both sides, or to earlier tokens only.
    objective
        Predict masked tokens (an encoder's default), each next token (a decoder's default), or (as
        the published decoders) the next token where it is masked.
    config
        Your own transformers configuration.
    layers
        Blocks of attention and feed-forward.
    width
        Width of the residual stream.
    heads
        Heads in each layer.
    intermediate
        Width of the feed-forward layers: four times the width, unless given.
    norm
        Layer norm before each sublayer, or after it as in BERT.
    dropout
        Dropout of attention and of hidden units.
    initial_std
        Standard deviation of initial weights.
    vocabulary_multiple
        Pad the vocabulary to a multiple of this; 64 suits a GPU.
    attention
        transformers' implementation.
    init
        Initialization of queries, keys and values.
    init_head_norm
        Mean norm of the heads' W_qk at the start, as a multiple of the random start's; 1 keeps the
        spread of the logits.
    init_norm
        The same for the norm of the heads' sum, which no model computes.
    init_values
        Multiply the values that init leaves by this.
    penalty
        Penalty that is added to the loss (S147, S148).
    penalty_weight
        Factor of the penalty.
    rows
        Rows of a batch: blocks of the stream of tokens, or single documents, cut or padded to a
        block as in the published runs on Jigsaw.
    block
        Tokens in a block.
    batch
        Blocks in a batch, over all processes.
    accumulation
        Batches in a step.
    steps
        Updates of the weights.
    mask_share
        Fraction of tokens that are masked.
    corruption
        Corruption of masked tokens: 80:10:10 as in BERT, or the mask token for all.
    learning_rate
        Peak learning rate.
    warmup
        Number of warmup steps.
    schedule
        Learning-rate schedule after the warmup.
    weight_decay
        AdamW's weight decay; not on biases and norms.
    clip
        Maximum norm of the gradient.
    qk_clip
        After each step, rescale the queries and keys of heads whose largest attention logit exceeds
        this (QK-clip; 100 in MuonClip).
    logits
        Measure attention logits with the scores.
    precision
        Precision on accelerators that support it; float32 elsewhere.
    seed
        Seed of weights, blocks, masks and dropout.
    log_every
        Steps between entries of metrics.jsonl.
    held_out_every
        Steps between held-out losses; in fast, a twentieth of all steps.
    held_out_blocks
        Number of blocks for the held-out loss.
    score_every
        Steps between scores.
    save_every
        Steps between checkpoints to resume from.
    keep_checkpoints
        Checkpoints to keep: spaced (step 0, and 1/512 … 1/2 and all of the steps), all, last, or a
        list of steps such as 0,100,1000.
    parent
        The run that this one continues: its name (run), step and recipe.

    Raises
    ------
    RunError
        A value has the wrong type or range, or two values are incompatible.
    """

    preset: str = option()
    mode: str = option(default="encoder", choices=("encoder", "decoder"))
    objective: str = option(
        formula=lambda chosen: "masked" if chosen["mode"] == "encoder" else "causal",
        choices=OBJECTIVES,
    )
    config: Mapping[str, Any] | None = option(default=None)
    layers: int | None = option(least=1)
    width: int | None = option(least=1)
    heads: int | None = option(least=1)
    intermediate: int | None = option(formula=lambda chosen: 4 * chosen["width"], least=1)
    norm: str | None = option(paper="post", fast="pre", choices=("pre", "post"))
    dropout: float | None = option(paper=0.1, fast=0.0, least=0, below=1)
    initial_std: float | None = option(
        paper=0.02, fast=lambda chosen: round(0.68 / math.sqrt(_stream_width(chosen)), 4), above=0
    )
    vocabulary_multiple: int | None = option(default=None, least=1)
    attention: str = option(default="sdpa", choices=("sdpa", "eager"))
    init: str = option(default="random", choices=INITIALIZATIONS)
    init_head_norm: float | None = option(default=None, above=0)
    init_norm: float | None = option(default=None, above=0)
    init_values: float | None = option(default=None, above=0)
    penalty: str = option(default="none", choices=("none", "symmetric", "skew"))
    penalty_weight: float = option(default=0.0, least=0)
    rows: str = option(default="blocks", choices=("blocks", "documents"))
    block: int = option(paper=512, fast=128, least=2)
    batch: int = option(paper=32, fast=64, least=1)
    accumulation: int = option(paper=8, fast=1, least=1)
    steps: int = option(paper=200_000, fast=20_000, least=1)
    mask_share: float = option(paper=0.15, fast=0.3, above=0, below=1)
    corruption: str = option(paper="bert", fast="mask", choices=("bert", "mask"))
    learning_rate: float = option(
        paper=5e-5,
        fast=lambda chosen: float(f"{2e-3 * math.sqrt(128 / _stream_width(chosen)):.2g}"),
        above=0,
    )
    warmup: int = option(paper=200, fast=lambda chosen: chosen["steps"] // 20, least=0)
    schedule: str = option(default="linear", choices=("linear", "cosine", "constant"))
    weight_decay: float = option(paper=0.01, fast=0.1, least=0)
    clip: float = option(default=1.0, above=0)
    qk_clip: float | None = option(default=None, above=0)
    logits: str = option(default="no", choices=("no", "yes"))
    precision: str = option(default="bf16", choices=("float32", "bf16", "fp16"))
    seed: int = option(default=1, least=0)
    log_every: int = option(paper=100, fast=_times(200), least=1)
    held_out_every: int = option(paper=1000, fast=_times(20), least=1)
    held_out_blocks: int = option(
        paper=256, fast=lambda chosen: max(1, 32_768 // chosen["block"]), least=1
    )
    score_every: int = option(paper=1000, fast=_times(50), least=1)
    save_every: int = option(paper=10_000, fast=_times(10), least=1)
    keep_checkpoints: str = option(default="spaced")
    parent: Mapping[str, Any] | None = option(default=None)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = checked(entry, getattr(self, entry.name), _wrong)
            object.__setattr__(self, entry.name, value)
        for rule, message in _RULES:
            if not rule(self):
                raise _wrong(message.format(**asdict(self)))

    def to_json(self) -> dict[str, Any]:
        """Return the fields, as values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with the values of `to_json`; RunError if fields are wrong."""
        if not isinstance(values, Mapping):
            raise _wrong(f"expected a JSON object, got {values!r}")
        needed = {entry.name for entry in fields(cls) if entry.default is MISSING}
        field_names = {entry.name for entry in fields(cls)}
        if odd := sorted((needed - set(values)) | (set(values) - field_names)):
            raise _wrong(f"fields are missing or unknown: {', '.join(odd)}")
        return cls(**values)

    @property
    def fits_one_thread(self) -> bool:
        """True if the model is so narrow that more CPU threads mostly wait for each other."""
        return _stream_width(self.to_json()) <= NARROW

    @property
    def batches_before(self) -> int:
        """Number of batches drawn by the parent runs; this run draws the following batches."""
        if self.parent is None:
            return 0
        before = Recipe.from_json(self.parent["recipe"])
        return int(self.parent["step"]) * before.accumulation + before.batches_before

    @property
    def kept_steps(self) -> set[int]:
        """Steps with checkpoints to keep."""
        if self.keep_checkpoints == "all":
            return {0, *range(0, self.steps, self.save_every), self.steps}
        if self.keep_checkpoints == "spaced":
            return {0, *(self.steps >> halvings for halvings in range(10))}
        listed = set(_step_list(self.keep_checkpoints) or ())
        return {step for step in listed if step <= self.steps} | {self.steps}

    @property
    def saved_steps(self) -> set[int]:
        """Steps with checkpoints, to keep or only to resume from."""
        return {*range(self.save_every, self.steps, self.save_every), *self.kept_steps}


def differences(before: Recipe, after: Recipe) -> list[str]:
    """Name the fields in which two recipes differ, as ``name: before → after``."""
    return [f"{name}: {old} → {new}" for name, old, new in changes(before, after)]


def changes(before: Recipe, after: Recipe) -> list[tuple[str, Any, Any]]:
    """Return the fields in which two recipes differ: name, value before and value after."""
    old, new = before.to_json(), after.to_json()
    return [(name, old[name], new[name]) for name in old if old[name] != new[name]]


def make_recipe(preset: str = "fast", *, size: str | None = None, **overrides: Any) -> Recipe:
    """Return a preset's recipe with overrides; formulas of the preset compute all other values.

    Parameters
    ----------
    preset
        ``paper`` (Appendix S2.3 and Table S1) or ``fast``.
    size
        ``mini``, ``base`` or ``large``; by default, the size of the preset (``base``, ``mini``).
    overrides
        Any fields of `Recipe`.

    Raises
    ------
    RunError
        The preset, the size or a field is unknown, or a value is wrong.

    Examples
    --------
    >>> make_recipe("paper", size="mini").learning_rate
    5e-05
    >>> make_recipe("fast", width=128).learning_rate
    0.002
    """
    explicit = given_fields(overrides)
    _require_known("preset", preset, PRESETS)
    has_config = explicit.get("config") is not None
    if has_config and (twice := [name for name in MODEL_FIELDS if name in explicit or size]):
        raise _wrong(f"the configuration determines {', '.join(twice)}; give only one of the two")
    size = size or PRESETS[preset]
    _require_known("size", size, SIZES)
    settings = (
        (dict.fromkeys(MODEL_FIELDS) if has_config else SIZES[size]) | explicit | {"preset": preset}
    )
    chosen: dict[str, Any] = {}
    for entry in fields(Recipe):
        otherwise = entry.metadata.get(preset, entry.metadata.get("formula", entry.default))
        value = settings.get(entry.name, otherwise)
        chosen[entry.name] = checked(entry, value(chosen) if callable(value) else value, _wrong)
    return Recipe(**chosen)


def given_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None; `RunError` for a field that recipes lack."""
    names = [entry.name for entry in fields(Recipe)]
    fields_given = {name: value for name, value in values.items() if value is not None}
    if odd := [name for name in fields_given if name not in names]:
        raise _wrong(f"no field named {', '.join(odd)}; fields are {', '.join(names)}")
    return fields_given


def _require_known(kind: str, name: str, choices: Mapping[str, Any]) -> None:
    if name not in choices:
        raise _wrong(f"{kind} must be one of {', '.join(choices)}; got {name!r}")


def _wrong(message: str) -> RunError:
    return RunError(f"recipe: {message}")


def _step_list(text: str) -> list[int] | None:
    """Return the numbers in a text such as ``0,100``; None for any other text."""
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() for piece in pieces):
        return None
    return [int(piece) for piece in pieces]


_RULES: list[tuple[Callable[[Recipe], bool], str]] = [
    (
        lambda r: r.parent is not None or (r.objective == "masked") == (r.mode == "encoder"),
        "an encoder's objective must be masked, a decoder's causal or "
        "masked-next; got {objective} for mode {mode}",
    ),
    (
        lambda r: r.parent is None or {"run", "step", "recipe"} == set(r.parent),
        "a parent must have a run, a step and a recipe; got {parent!r}",
    ),
    (
        lambda r: r.parent is None or all(getattr(r, n) == v for n, v in NO_START.items()),
        "a run that continues another has its weights; leave out " + ", ".join(NO_START),
    ),
    (
        lambda r: r.width is None or r.heads is None or r.width % r.heads == 0,
        "the width must be divisible by the number of heads; got width {width} and {heads} heads",
    ),
    (
        lambda r: r.config is not None or None not in (getattr(r, name) for name in MODEL_FIELDS),
        "without a configuration, all of " + ", ".join(MODEL_FIELDS) + " are needed",
    ),
    (
        lambda r: r.init_head_norm is None or r.init_norm is None,
        "init_head_norm and init_norm scale the same weights; give only one",
    ),
    (lambda r: r.warmup <= r.steps, "warmup must not exceed the steps; got {warmup} of {steps}"),
    (
        lambda r: r.objective == "causal" or round(r.mask_share * r.block) >= 1,
        "mask_share must mask at least one token per block; got {mask_share} of {block}",
    ),
    (
        lambda r: (
            r.keep_checkpoints in ("spaced", "all", "last")
            or _step_list(r.keep_checkpoints) is not None
        ),
        "keep_checkpoints must be spaced, all, last or a list of steps; got {keep_checkpoints!r}",
    ),
]
