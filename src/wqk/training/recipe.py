"""Recipes: everything that determines the numbers of a training run, as data.

>>> recipe = make_recipe("fast", mode="decoder", steps=1000)
>>> recipe.objective, recipe.width, recipe.warmup
('causal', 256, 50)
>>> Recipe.from_json(recipe.to_json()) == recipe
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

from wqk.errors import RunError
from wqk.training.objectives import OBJECTIVES

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


def _option(description: str, *, default: Any = MISSING, **bounds: Any) -> Any:
    """A field with its help text, and its choices or bounds.

    Runs recorded before a field existed have its default.
    """
    return field(default=default, metadata={"help": description, **bounds})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train, on what task, and how; build one with `make_recipe`.

    The sizes, ``norm``, ``dropout`` and ``initial_std`` are None if ``config`` holds your
    own transformers configuration.

    Raises
    ------
    RunError
        A value has the wrong type or range, or two values are incompatible.
    """

    preset: str = _option("Source of all values that were not given.")
    mode: str = _option(
        "Attention to both sides, or to earlier tokens only.", choices=("encoder", "decoder")
    )
    objective: str = _option(
        "Predict masked tokens, each next token, or (as the published decoders) the next token "
        "where it is masked.",
        choices=OBJECTIVES,
    )
    config: Mapping[str, Any] | None = _option("Your own transformers configuration.")
    layers: int | None = _option("Blocks of attention and feed-forward.", least=1)
    width: int | None = _option("Width of the residual stream.", least=1)
    heads: int | None = _option("Heads in each layer.", least=1)
    intermediate: int | None = _option("Width of the feed-forward layers.", least=1)
    norm: str | None = _option(
        "Layer norm before each sublayer, or after it as in BERT.", choices=("pre", "post")
    )
    dropout: float | None = _option("Of attention and of hidden units.", least=0, below=1)
    initial_std: float | None = _option("Standard deviation of initial weights.", above=0)
    vocabulary_multiple: int | None = _option(
        "Pad the vocabulary to a multiple of this; 64 suits a GPU.", default=None, least=1
    )
    attention: str = _option("transformers' implementation.", choices=("sdpa", "eager"))
    init: str = _option("How queries, keys and values start.", choices=INITIALIZATIONS)
    init_norm: float | None = _option(
        "Norm of W_qk at the start, as a multiple of the random start's.", default=None, above=0
    )
    init_values: float | None = _option(
        "Multiply the values that init leaves by this.", default=None, above=0
    )
    penalty: str = _option(
        "What to add to the loss (S147, S148).", choices=("none", "symmetric", "skew")
    )
    penalty_weight: float = _option("Factor of the penalty.", least=0)
    rows: str = _option(
        "Rows of a batch: blocks of the stream of tokens, or single documents, cut or padded to a "
        "block as in the published runs on Jigsaw.",
        default="blocks",
        choices=("blocks", "documents"),
    )
    block: int = _option("Tokens in a block.", least=2)
    batch: int = _option("Blocks in a batch, over all processes.", least=1)
    accumulation: int = _option("Batches in a step.", least=1)
    steps: int = _option("Updates of the weights.", least=1)
    mask_share: float = _option("Fraction of tokens that are masked.", above=0, below=1)
    corruption: str = _option(
        "Corruption of masked tokens: 80:10:10 as in BERT, or the mask token for all.",
        choices=("bert", "mask"),
    )
    learning_rate: float = _option("Peak learning rate.", above=0)
    warmup: int = _option("Number of warmup steps.", least=0)
    schedule: str = _option(
        "Learning-rate schedule after the warmup.", choices=("linear", "cosine", "constant")
    )
    weight_decay: float = _option("AdamW's weight decay; not on biases and norms.", least=0)
    clip: float = _option("Maximum norm of the gradient.", above=0)
    precision: str = _option(
        "Precision on accelerators that support it; float32 elsewhere.",
        choices=("float32", "bf16", "fp16"),
    )
    seed: int = _option("Seed of weights, blocks, masks and dropout.", least=0)
    log_every: int = _option("Steps between entries of metrics.jsonl.", least=1)
    held_out_every: int = _option("Steps between held-out losses.", least=1)
    held_out_blocks: int = _option("Number of blocks for the held-out loss.", least=1)
    score_every: int = _option("Steps between scores.", least=1)
    save_every: int = _option("Steps between checkpoints to resume from.", least=1)
    keep_checkpoints: str = _option(
        "Checkpoints to keep: spaced (step 0, and 1/512 … 1/2 and all of the steps), all, "
        "last, or a list of steps such as 0,100,1000."
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, _checked(entry, getattr(self, entry.name)))
        for rule, message in _RULES:
            if not rule(self):
                raise RunError(f"recipe: {message.format(**asdict(self))}")

    def to_json(self) -> dict[str, Any]:
        """The fields, as values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe from the values of `to_json`; RunError if fields are missing or wrong."""
        if not isinstance(values, Mapping):
            raise RunError(f"recipe: expected a JSON object, got {values!r}")
        needed = {entry.name for entry in fields(cls) if entry.default is MISSING}
        known = {entry.name for entry in fields(cls)}
        if odd := sorted((needed - set(values)) | (set(values) - known)):
            raise RunError(f"recipe: fields are missing or unknown: {', '.join(odd)}")
        return cls(**values)

    @property
    def kept_steps(self) -> set[int]:
        """Steps whose checkpoints are kept."""
        if self.keep_checkpoints == "all":
            return {0, *range(0, self.steps, self.save_every), self.steps}
        if self.keep_checkpoints == "spaced":
            return {0, *(self.steps >> halvings for halvings in range(10))}
        listed = set(_step_list(self.keep_checkpoints) or ())
        return {step for step in listed if step <= self.steps} | {self.steps}

    @property
    def saved_steps(self) -> set[int]:
        """Steps after which a checkpoint is saved, to keep or only to resume from."""
        return {*range(self.save_every, self.steps, self.save_every), *self.kept_steps}


def differences(left: Recipe, right: Recipe) -> list[str]:
    """The fields in which two recipes differ, as ``name: left → right``."""
    before, after = left.to_json(), right.to_json()
    return [f"{n}: {before[n]} → {after[n]}" for n in before if before[n] != after[n]]


SIZES: dict[str, dict[str, int]] = {
    "mini": {"layers": 4, "width": 256, "heads": 4},
    "base": {"layers": 12, "width": 768, "heads": 12},
    "large": {"layers": 24, "width": 1024, "heads": 16},
}

Chosen = Mapping[str, Any]


def _stream_width(chosen: Chosen) -> float:
    """Width of the model, from the recipe or its configuration."""
    config = chosen["config"] or {}
    named = [chosen["width"], *(config.get(name) for name in ("hidden_size", "n_embd", "d_model"))]
    known = (width for width in named if isinstance(width, int) and width > 0)
    return float(next(known, SIZES["mini"]["width"]))


# A value, or a formula of the values above it.
_COMMON: dict[str, Any | Callable[[Chosen], Any]] = {
    "mode": "encoder",
    "objective": lambda chosen: "masked" if chosen["mode"] == "encoder" else "causal",
    "config": None,
    "intermediate": lambda chosen: 4 * chosen["width"],
    "vocabulary_multiple": None,
    "attention": "sdpa",
    "init": "random",
    "init_norm": None,
    "init_values": None,
    "penalty": "none",
    "penalty_weight": 0.0,
    "rows": "blocks",
    "schedule": "linear",
    "clip": 1.0,
    "seed": 1,
    "keep_checkpoints": "spaced",
}

PRESETS: dict[str, dict[str, Any | Callable[[Chosen], Any]]] = {
    # Appendix S2.3 and Table S1; for the rest, transformers' defaults.
    "paper": {
        **_COMMON,
        "size": "base",
        "norm": "post",
        "dropout": 0.1,
        "initial_std": 0.02,
        "block": 512,
        "batch": 32,
        "accumulation": 8,
        "steps": 200_000,
        "mask_share": 0.15,
        "corruption": "bert",
        "learning_rate": 5e-5,
        "warmup": 200,
        "weight_decay": 0.01,
        "precision": "bf16",
        "log_every": 100,
        "held_out_every": 1000,
        "held_out_blocks": 256,
        "score_every": 1000,
        "save_every": 10_000,
    },
    # Leaves the plateau of token frequencies early, and wastes neither tokens nor computation.
    "fast": {
        **_COMMON,
        "size": "mini",
        "norm": "pre",
        "dropout": 0.0,
        "initial_std": lambda chosen: round(0.68 / math.sqrt(_stream_width(chosen)), 4),
        "block": 128,
        "batch": 64,
        "accumulation": 1,
        "steps": 20_000,
        "mask_share": 0.3,
        "corruption": "mask",
        "learning_rate": lambda chosen: float(
            f"{2e-3 * math.sqrt(128 / _stream_width(chosen)):.2g}"
        ),
        "warmup": lambda chosen: chosen["steps"] // 20,
        "weight_decay": 0.1,
        "precision": "bf16",
        "log_every": lambda chosen: max(1, chosen["steps"] // 200),
        "held_out_every": lambda chosen: max(1, chosen["steps"] // 20),
        "held_out_blocks": lambda chosen: max(1, 32_768 // chosen["block"]),
        "score_every": lambda chosen: max(1, chosen["steps"] // 50),
        "save_every": lambda chosen: max(1, chosen["steps"] // 10),
    },
}

# Fields that the user's configuration determines instead of the recipe.
MODEL_FIELDS = ("layers", "width", "heads", "intermediate", "norm", "dropout", "initial_std")


def make_recipe(preset: str = "fast", *, size: str | None = None, **overrides: Any) -> Recipe:
    """A preset's recipe with your own values, from which its formulas compute the others.

    Parameters
    ----------
    preset
        ``paper`` (Appendix S2.3 and Table S1) or ``fast``.
    size
        ``mini``, ``base`` or ``large``; the preset's own (``base``, ``mini``) if not given.
    overrides
        Any fields of `Recipe`.

    Raises
    ------
    RunError
        There is no such preset, size or field, or a value is wrong.

    Examples
    --------
    >>> make_recipe("paper", size="mini").learning_rate
    5e-05
    >>> make_recipe("fast", width=128).learning_rate
    0.002
    """
    explicit = {name: value for name, value in overrides.items() if value is not None}
    _known("preset", preset, PRESETS)
    names = {entry.name: entry for entry in fields(Recipe)}
    if odd := [name for name in explicit if name not in names]:
        raise RunError(f"recipe: no field named {', '.join(odd)}; fields are {', '.join(names)}")
    own = explicit.get("config") is not None
    if own and (twice := [name for name in MODEL_FIELDS if name in explicit or size]):
        raise RunError(
            f"recipe: the configuration determines {', '.join(twice)}; give only one of the two"
        )
    defaults = {**PRESETS[preset], "preset": preset}
    size = size or str(defaults.pop("size"))
    _known("size", size, SIZES)
    defaults |= dict.fromkeys(MODEL_FIELDS) if own else SIZES[size]
    chosen: dict[str, Any] = {}
    for name, entry in names.items():
        value = explicit.get(name, defaults[name])
        chosen[name] = _checked(entry, value(chosen) if callable(value) else value)
    return Recipe(**chosen)


def _known(what: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise RunError(f"recipe: {what} must be one of {', '.join(known)}; got {name!r}")


def _step_list(text: str) -> list[int] | None:
    """``0,100`` as numbers; None for any other text."""
    pieces = [piece.strip() for piece in text.split(",")]
    return [int(piece) for piece in pieces] if all(p.isdecimal() for p in pieces) else None


_RULES: list[tuple[Callable[[Recipe], bool], str]] = [
    (
        lambda r: (r.objective == "masked") == (r.mode == "encoder"),
        "an encoder's objective must be masked, a decoder's causal or "
        "masked-next; got {objective} for mode {mode}",
    ),
    (
        lambda r: r.width is None or r.heads is None or r.width % r.heads == 0,
        "the width must be divisible by the number of heads; got width {width} and {heads} heads",
    ),
    (
        lambda r: r.config is not None or None not in (getattr(r, name) for name in MODEL_FIELDS),
        "without a configuration, all of " + ", ".join(MODEL_FIELDS) + " are needed",
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


# Types of fields by their names.
TYPES = {"str": str, "int": int, "float": float}

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "choices": ("one of", lambda value, choices: value in choices),
    "least": ("at least", lambda value, least: bool(value >= least)),
    "above": ("greater than", lambda value, above: bool(value > above)),
    "below": ("less than", lambda value, below: bool(value < below)),
}


def _checked(entry: Field[Any], value: Any) -> Any:
    """A field's checked value, converted to float if the field is one."""
    name, bounds = entry.name, entry.metadata
    wanted = str(entry.type).removesuffix(" | None")
    if value is None and wanted != entry.type:
        return None
    if wanted == "float" and type(value) is int:
        value = float(value)
    if type(value) is not TYPES.get(wanted, type(value)) or (
        wanted.startswith("Mapping") and not isinstance(value, Mapping)
    ):
        raise RunError(f"recipe: {name} must be of type {wanted}, got {value!r}")
    for bound, (phrase, holds) in _BOUNDS.items():
        if bound in bounds and not holds(value, bounds[bound]):
            shown = bounds[bound]
            listed = ", ".join(shown) if isinstance(shown, tuple) else shown
            raise RunError(f"recipe: {name} must be {phrase} {listed}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RunError(f"recipe: {name} must be a finite number, got {value!r}")
    return value
