"""The loss of a model with only the symmetric, only the skew, or a random part of its scores.

The random part is the control. Random involutions that keep second moments map the inputs
(`wqk.live.reflections`). The scores of the mapped inputs are about as large as the original scores.
The size of the control is measured, and is part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from wqk._console import Result, display_name, number
from wqk._style import current
from wqk._typing import FilePath, Float
from wqk.errors import CheckpointError, FormError, called_as, required_by
from wqk.live.held_out import (
    ATTENTION_ALONE,
    HeldOut,
    TextChoice,
    fresh,
    has_attention_alone,
    load,
    open_held_out,
    predicted_by,
    require_text,
    require_tokenizer,
)
from wqk.live.mixing import (
    HALF,
    NONE,
    SKEW,
    SYMMETRIC,
    WHOLE,
    Mirror,
    Mixer,
    ScorePart,
    ScorePlace,
    mixed,
    require_one_form,
)
from wqk.live.reflections import (
    LARGEST_CONTROL,
    LEAST_MOMENTS,
    NEAR_ENOUGH,
    SMALLEST_CONTROL,
)
from wqk.model import open as open_model
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES: dict[str, Any] = {
    "stack": pl.String,
    "layer": pl.Int64,
    "head": pl.Int64,
    "part": pl.String,
    "loss": pl.Float64,
    "share": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
}

CONTROL_SIZES: dict[str, Any] = {
    "stack": pl.String,
    "layer": pl.Int64,
    "size": pl.Float64,
    "smallest": pl.Float64,
    "largest": pl.Float64,
    "least_moment": pl.Float64,
}

CONTRASTS: dict[str, Any] = {
    "stack": pl.String,
    "part": pl.String,
    "control": pl.String,
    "difference": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
}

# The reservation of all conclusions.
ONE_INVOLUTION = (
    "The random halves of these sentences come from a single random involution, whose choice the "
    "intervals do not contain: conclude from several --seed, not from this one alone."
)

# Parts of the scores with a random control of their own size.
SIZED = ("symmetric", "skew")

# A part of the scores as a function of a factor; a factor of 1 gives whole scores.
Along = Callable[[float], ScorePart]


class PartDirection(NamedTuple):
    """A direction for derivatives of the loss: the mean over parts along a factor."""

    name: str
    alongs: list[Along]


class PartJob(NamedTuple):
    """Heads with changed scores, and the list of parts that replace the scores."""

    place: ScorePlace
    replacements: list[ScorePart]


# The loss is differentiated by steps of this size.
STEP = 0.05

# Factors for points of the curves.
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True, repr=False)
class Parts(Result):
    """A model's loss on held-out text with parts of the scores.

    Attributes
    ----------
    checkpoint
        The model's name.
    predicts
        ``masked``, ``causal`` or ``sequence`` (the second half of a block from the first half): the
        loss is in nats per predicted token. ``states``: the model has no head, or attends to the
        tokens to predict. Then the loss is the squared distance of the last hidden states from the
        last hidden states of the unchanged model, divided by the variance of the unchanged states.
    shares
        A row for each place and part: ``stack``, ``layer``, ``head``, ``part``, ``loss``, and the
        ``share`` of the explained loss that the part keeps with a 95 % interval, ``low`` and
        ``high``. The explained loss is the loss with scores of zero in this place, minus the loss
        of the unchanged model. ``random`` is the mean over the halves that random involutions
        select; the involutions keep the second moments of each block's inputs. ``share`` is null if
        scores explain nothing, and for random parts if the control is rejected.
    slopes
        A row for each stack and direction: ``derivative`` and ``curvature`` of the loss at the
        whole model along a factor of a half of the scores, with intervals.
    curves
        The loss for factors of one half, with the other half unchanged; empty unless requested.
    control_size
        A row for each layer: ``stack``, ``layer``, and the size of the random involutions' scores M
        compared with the scores S, the ratio of sums of squares over all heads and pairs of tokens.
        ``size`` is the mean over involutions, ``smallest`` and ``largest`` are the ends.
        ``least_moment`` is the share of the largest second moment that smaller moments were raised
        to. A size near 1 means that the control is as large as the scores. A control with a size
        below ½ or above 2 is rejected: in this layer, loss and share of random parts are null.
    settings
        Blocks, tokens in a block, seed and the like; ``frequency_loss`` is the loss of a model that
        only knows the frequencies of the predicted tokens, None for ``states``.
    contrasts
        A row for each stack and each of symmetric and skew: the ``difference`` of the part's share
        from the share of the ``control``, a random half scaled to the size of the part, with a 95 %
        interval over blocks. The control is that of one random involution, whose choice the
        interval does not contain. Empty without shares.
    """

    checkpoint: str
    predicts: str
    shares: pl.DataFrame = field(repr=False)
    slopes: pl.DataFrame = field(repr=False)
    curves: pl.DataFrame = field(repr=False)
    control_size: pl.DataFrame = field(repr=False)
    settings: dict[str, Any]
    contrasts: pl.DataFrame = field(repr=False, default_factory=lambda: pl.DataFrame([], CONTRASTS))

    @property
    def conclusions(self) -> list[str]:
        """The comparison of each part with a random half of its own size, one sentence each."""
        several = self.contrasts["stack"].n_unique() > 1
        return [
            conclusion(row, f" of the {row['stack']}" if several else "")
            for row in self.contrasts.iter_rows(named=True)
        ]

    @property
    def sentence(self) -> str:
        """The shares of parts of the scores of all layers, for each stack."""
        sentences = []
        everywhere = self.shares.filter(pl.all_horizontal(pl.col("layer", "head").is_null()))
        for rows in everywhere.partition_by("stack"):
            loss = dict(rows.select("part", "loss").iter_rows())
            share = dict(rows.select("part", "share").iter_rows())
            where = ""
            if self.shares["stack"].n_unique() > 1:
                where = f" of the {rows['stack'][0]}"
            if share["symmetric"] is None:
                sentences.append(f"The attention scores{where} explain nothing of the loss.")
                continue
            random = "their control is refused"
            if share["random"] is not None:
                random = f"random halves {share['random']:.0%}"
            sentences.append(
                f"Of the {loss['none'] - loss['whole']:.3g} by which attention scores{where} lower "
                f"the loss, their symmetric part alone keeps {share['symmetric']:.0%}, their skew "
                f"part {share['skew']:.0%}, {random}."
            )
        return " ".join(sentences)

    def _rows(self) -> Iterable[dict[str, Any]]:
        return self.shares.iter_rows(named=True)

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        about = self.settings
        text = f"{about['text']}: {about['blocks']} blocks of {about['tokens']} tokens"
        yield Text.assemble(
            (display_name(self.checkpoint), "bold"), f"\n{text}, predicts: {self.predicts}\n"
        )
        columns = ("stack", "layer", "head", "part", "loss", "share kept", "95 %")
        table = Sheet.of(*columns, text=("stack", "part", "95 %"))
        for row in self.shares.iter_rows(named=True):
            place = [row["stack"]]
            for column in ("layer", "head"):
                place.append("all" if row[column] is None else str(row[column]))
            cells = [number(row["loss"], 4), number(row["share"], 3), _interval(row, "")]
            table.add(*place, row["part"], *cells)
        yield table
        headings = ("stack", "along", "derivative", "95 %", "curvature", "95 % ")
        table = Sheet.of(*headings, text=("stack", "along", "95 %", "95 % "))
        for row in self.slopes.iter_rows(named=True):
            cells = [row["stack"], row["direction"]]
            for slope in ("derivative", "curvature"):
                cells += [number(row[slope], 4), _interval(row, f"{slope}_")]
            table.add(*cells)
        yield table
        yield Text("\n".join(self._footnotes()), style="dim")
        if conclusions := self.conclusions:
            yield Text("\n".join([*conclusions, ONE_INVOLUTION]))

    def _footnotes(self) -> Iterator[str]:
        """Yield lines that explain the tables."""
        about = self.settings
        yield (
            "share kept: of the loss without these scores less that of the whole model; random: "
            f"the mean of the halves that {about['draws']} random involutions select, which keep "
            "the second moments of each block's inputs."
        )
        yield (
            "Compare the shares of symmetric and skew with random, not with 100 %; and, as the two "
            "parts need not be equally large, with random, size of symmetric (or skew): a random "
            "half scaled to the size of that part in each head. A share below 0: worse than no "
            "scores."
        )
        yield (
            "half: half of all scores. next head: half of the scores and half of the next head's, "
            "transposed."
        )
        frequencies = about.get("frequency_loss")
        if frequencies is not None:
            yield (
                "A model that only knew the frequencies of the predicted tokens would have a loss "
                f"of {number(frequencies, 4)}."
            )
        if self.shares.filter(part="symmetric")["share"].is_null().any():
            yield (
                "–: without these scores the loss is higher by no more than chance between blocks, "
                "so that there is no share; train longer, or give a text of the kind that the "
                "model was trained on."
            )
        for (stack,), rows in self.control_size.group_by("stack", maintain_order=True):
            sizes = ", ".join(number(size, 2) for size in rows["size"])
            yield (
                "size of the random scores next to the scores (ratio of the sums of squares; 1: "
                f"equally large), by layer ({stack}): {sizes}"
            )
            refused = rows.filter(~_sizes_allowed())["layer"].to_list()
            if refused:
                yield (
                    f"control refused in {stack} layers {', '.join(map(str, refused))}: "
                    f"its size lies outside {SMALLEST_CONTROL:g} to {LARGEST_CONTROL:g}"
                )
        yield (
            "Masks and position terms stay whole. In an untrained model of this configuration all "
            f"scores explain {number(about['explained_untrained'], 4)}."
        )
        if about.get("attention_alone"):
            yield ATTENTION_ALONE
        for layer in about["left_whole"]:
            yield f"{layer}: left whole"

    @current
    def plot(self) -> Figure:
        """Draw the loss against factors of each half, if measured, and the shares that parts keep.

        If the attention scores explain nothing of the loss, parts have no shares; then the losses
        are drawn.

        Raises
        ------
        MissingPackage
            matplotlib is not installed.
        """
        from wqk.reporting.pictures import parts_figure

        return parts_figure(self.shares, self.curves, self.predicts)

    _drawn = plot


@called_as("wqk.parts(ref, text)")
def parts(
    ref: Any,
    text: FilePath | None = None,
    *,
    corpus: str | Path | None = None,
    tokens: Any = None,
    stack: str | None = None,
    each_layer: bool = False,
    each_head: bool = False,
    rank: Collection[int] | None = None,
    curves: bool = False,
    blocks: int = 256,
    block: int | None = None,
    mask_share: float = 0.15,
    draws: int = 2,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Parts:
    """Measure the loss with only the symmetric, the skew or a random part of the scores.

    The scores S are replaced by parts of S, such as (S + Sᵀ)/2, in all heads, in a layer or in a
    head, and the loss on held-out text is measured. Compare the share of the explained loss that a
    part keeps with the share that random halves keep, not with 100 %. Random halves are about as
    large as the halves of the scores; the result contains the size. Needs PyTorch, transformers and
    SciPy.

    Parameters
    ----------
    ref
        A folder, the folder of a training run, a Hub id, a `transformers` model, or a `Model`
        opened from one.
    text
        Text file, for the model's tokenizer. From JSON Lines, the field ``text`` of each line is
        read; .xz, .gz, .bz2 and .zst are decompressed. Required, unless a corpus (or in Python,
        tokens) is given.
    corpus
        Folder of tokens as ``wqk lab corpus`` writes it, with the vocabulary that the model was
        trained with; the held-out part is read.
    tokens
        Token ids, (B, N) or in one row.
    stack
        ``encoder`` or ``decoder``; by default, all stacks of the model.
    each_layer
        Whether to also change one layer at a time.
    each_head
        Whether to also change one head at a time.
    rank
        Ranks; for each rank, every head's form is also truncated to the best approximation of this
        rank.
    curves
        Whether to measure the loss at several factors of each half, for the picture.
    blocks
        Number of blocks of text.
    block
        Tokens in a block: by default 128, or the model's number of positions if it is smaller.
    mask_share
        Fraction of tokens that encoders predict.
    draws
        Number of random involutions.
    seed
        Seed of the masks and the random involutions.
    on_progress
        Called with the number of finished passes over the text, and the number of all passes.

    Raises
    ------
    UnknownFamily
        The model's attention does not run through transformers' attention interface, or is not a
        softmax of scaled products plus a mask; or a rank is requested, and a head has no single
        form.
    CheckpointError
        The model or the text cannot be used.
    FormError
        A rank or the number of draws is below 1.
    MissingPackage
        PyTorch, transformers or SciPy is not installed.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> parts = wqk.parts(model, tokens=torch.arange(640) % 7, block=16, blocks=8)
    >>> parts.shares["part"].to_list()[:6]
    ['whole', 'none', 'half', 'symmetric', 'skew', 'random']
    """
    if text is not None and tokens is None and not isinstance(text, str | PathLike):
        text, tokens = None, text  # type: ignore[unreachable]
    if text is not None:
        require_text(Path(text))
        require_tokenizer(ref)
    with required_by("running the model"):
        import scipy.special  # type: ignore[import-untyped]  # noqa: F401
        import torch
    ranks = sorted(set(rank or ()))
    _require_defined(stack, ranks, draws)
    loaded, tokenizer_maker = load(ref)
    opened = open_model(loaded, family=getattr(ref, "family_file", None))
    mixer = Mixer(opened, seed)
    if ranks:
        for plan in mixer.modules.values():
            require_one_form(opened.name, plan)
    # If attention is not causal, the next token is visible, and is no prediction.
    is_next = predicted_by(type(loaded).__name__) == "causal"
    if is_next and not any(plan.causal for plan in mixer.modules.values()):
        loaded = loaded.base_model
    choice = TextChoice(
        text=text,
        corpus=corpus,
        tokens=tokens,
        blocks=blocks,
        block=block,
        mask_share=mask_share,
        seed=seed,
    )
    held_out = open_held_out(loaded, tokenizer_maker, choice)
    stacks = list(dict.fromkeys(plan.stack for plan in mixer.modules.values()))
    with torch.no_grad(), mixer.installed():
        measurement = _PartLosses(mixer, held_out)
        if stack is not None and stack not in stacks:
            raise CheckpointError(
                f"{opened.name}: no {stack} self-attention; it has that of: {', '.join(stacks)}"
            )
        chosen = stacks if stack is None else [stack]
        jobs = _jobs(mixer, chosen, ranks, draws, each_layer=each_layer, each_head=each_head)
        directions = _directions(draws)
        measurement.total = _passes(len(chosen), jobs, directions, draws, curves=curves)
        measurement.on_progress = on_progress
        measurement.measure_controls(chosen, draws)
        share_rows, slope_rows, curve_rows = [], [], []
        for job in jobs:
            share_rows += measurement.shares(job.place, job.replacements)
        for name in chosen:
            slope_rows += measurement.slopes(ScorePlace(name), directions)
            if curves:
                curve_rows += measurement.curves(ScorePlace(name))
    with torch.no_grad():
        untrained = _untrained(held_out, seed, opened.family_file)
    settings = {
        "text": held_out.name,
        "blocks": held_out.count,
        "tokens": held_out.length,
        "mask_share": mask_share if held_out.predicts == "masked" else None,
        "seed": seed,
        "draws": draws,
        "left_whole": opened.without_softmax,
        "explained_untrained": untrained,
        "frequency_loss": held_out.frequency_loss,
        "attention_alone": has_attention_alone(loaded),
    }
    checkpoint = getattr(ref, "name", opened.name)
    if isinstance(ref, str | Path):
        checkpoint = str(ref)
    return Parts(
        checkpoint=checkpoint,
        predicts=held_out.predicts,
        shares=pl.DataFrame(share_rows, schema=SHARES),
        slopes=pl.DataFrame(slope_rows),
        curves=pl.DataFrame(curve_rows),
        control_size=measurement.control_size,
        settings=settings,
        contrasts=pl.DataFrame(measurement.contrasts, schema=CONTRASTS),
    )


def _require_defined(stack: str | None, ranks: Sequence[int], draws: int) -> None:
    """Raise an error if parts of a stack, ranks or a number of draws are not defined."""
    if stack == "cross":
        raise CheckpointError(
            "parts of cross-attention are not defined: its queries and keys come from different "
            "sequences, so that no score is that of a pair read the other way"
        )
    if draws < 1:
        raise FormError(f"draws must be 1 or more, got {draws}")
    if ranks and ranks[0] < 1:
        raise FormError(f"rank must be 1 or more, got {ranks[0]}")


def _jobs(
    mixer: Mixer,
    stacks: Sequence[str],
    ranks: Sequence[int],
    draws: int,
    *,
    each_layer: bool,
    each_head: bool,
) -> list[PartJob]:
    """Return the places with changed scores, and the parts that replace the scores."""
    truncated = [ScorePart(f"rank {k}", 0, 1, "rank", k) for k in ranks]
    halves = [HALF, SYMMETRIC, SKEW, *random_halves(draws)]
    sized = [
        ScorePart(sized_control("symmetric"), mirror="involution", size_of="symmetric"),
        ScorePart(sized_control("skew"), mirror="involution", size_of="skew"),
    ]
    everywhere = [*halves, *sized, mixed("next head", 1, 0, "next head"), *truncated]
    # A single layer or head is measured with one involution.
    in_one_place = [HALF, SYMMETRIC, SKEW, *random_halves(1), *truncated]
    jobs = [PartJob(ScorePlace(stack), everywhere) for stack in stacks]
    for stack in stacks:
        for plan in mixer.modules.values():
            if plan.stack != stack:
                continue
            if each_layer:
                jobs.append(PartJob(ScorePlace(stack, plan.layer), in_one_place))
            if each_head:
                for head in range(plan.query.heads):
                    jobs.append(PartJob(ScorePlace(stack, plan.layer, head), in_one_place))
    return jobs


def _passes(
    stacks: int,
    jobs: Sequence[PartJob],
    directions: Sequence[PartDirection],
    draws: int,
    *,
    curves: bool,
) -> int:
    """Return the number of passes over the text, if the first control of each layer suffices."""
    of_controls = 1 + stacks * draws
    of_shares = sum(1 + len(job.replacements) for job in jobs)
    of_slopes = 2 * stacks * sum(len(direction.alongs) for direction in directions)
    of_curves = stacks * len(FACTORS) * len(directions) if curves else 0
    return of_controls + of_shares + of_slopes + of_curves


def _sizes_allowed() -> pl.Expr:
    """Return an expression that is true if the size of a layer's control is within the limits."""
    return pl.col("size").is_between(SMALLEST_CONTROL, LARGEST_CONTROL)


def _interval(row: dict[str, Any], prefix: str) -> str:
    """Return the interval of a row as text; a dash without an interval."""
    low, high = row[f"{prefix}low"], row[f"{prefix}high"]
    return "–" if low is None else f"[{number(low, 3)}, {number(high, 3)}]"


def sized_control(part: str) -> str:
    """Return the name of the random half that is scaled to the size of a part."""
    return f"random, size of {part}"


def conclusion(contrast: Mapping[str, Any], where: str = "") -> str:
    """Return the comparison of a part with a random half of its own size, as a sentence.

    The control of equal size decides, because a smaller part keeps less whatever it contains.

    Examples
    --------
    >>> contrast = {"part": "symmetric", "difference": -0.285, "low": -0.33, "high": -0.24}
    >>> conclusion(contrast)[:78]
    'The symmetric part keeps less than a random half of its size: by 28 % of the l'
    >>> conclusion(contrast | {"low": -0.6, "high": 0.03})[:77]
    'The symmetric part is not distinguished from a random half of its size: the d'
    """
    difference, low, high = (contrast[name] for name in ("difference", "low", "high"))
    kinds = "95 % interval over blocks of text"
    percent = f"[{100 * low:+.0f} %, {100 * high:+.0f} %]".replace("-", "−")
    if low <= 0 <= high or math.isnan(low):
        mean = f"{100 * difference:+.0f} %".replace("-", "−")
        return (
            f"The {contrast['part']} part{where} is not distinguished from a random half of its "
            f"size: the difference is {mean} of the loss that scores explain {percent} ({kinds})."
        )
    amount = "more" if difference > 0 else "less"
    return (
        f"The {contrast['part']} part{where} keeps {amount} than a random half of its size: by "
        f"{abs(100 * difference):.0f} % of the loss that scores explain {percent} ({kinds})."
    )


def random_halves(draws: int) -> list[ScorePart]:
    """Return the two halves of scores for each random involution."""
    halves = []
    for draw in range(draws):
        halves.append(mixed("random", 1, 0, "involution", draw))
        halves.append(mixed("random", 0, 1, "involution", draw))
    return halves


def _directions(draws: int) -> list[PartDirection]:
    """Return the directions of derivatives of the loss: factors of a half of the scores."""

    def even_half(mirror: Mirror, draw: int) -> Along:
        return lambda factor: mixed("", factor, 1, mirror, draw)

    def odd_half(mirror: Mirror, draw: int) -> Along:
        return lambda factor: mixed("", 1, factor, mirror, draw)

    random = []
    for draw in range(draws):
        random += [even_half("involution", draw), odd_half("involution", draw)]
    return [
        PartDirection("symmetric", [even_half("transpose", 0)]),
        PartDirection("skew", [odd_half("transpose", 0)]),
        PartDirection("random", random),
        PartDirection("all", [lambda factor: ScorePart("", factor)]),
    ]


@dataclass(frozen=True)
class ControlSize:
    """Sizes ‖M‖² / ‖S‖² of a layer's controls, one size for each involution."""

    draws: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean size."""
        return sum(self.draws) / len(self.draws)

    @property
    def distance(self) -> float:
        """The absolute logarithm of the mean; 0 if the control is as large as the scores."""
        return abs(math.log(self.mean)) if self.mean else math.inf

    @property
    def is_near_enough(self) -> bool:
        """True if the mean is within a factor of `NEAR_ENOUGH` of 1."""
        return self.distance <= math.log(NEAR_ENOUGH)


class _PartLosses:
    """Losses of parts by block, and the shares, slopes and curves from these losses.

    Construction runs the model on its text once, with unchanged scores: ``whole`` is the loss of
    each block. The progress does not count this pass.

    Raises
    ------
    UnknownFamily
        A self-attention has not run through the attention interface.
    """

    def __init__(self, mixer: Mixer, held_out: HeldOut) -> None:
        self.mixer, self.held_out = mixer, held_out
        self.on_progress: Callable[[int, int], None] | None = None
        self.done = self.total = 0  # passes over the text
        self.control_size = pl.DataFrame(schema=CONTROL_SIZES)
        self.contrasts: list[dict[str, Any]] = []
        self.mixer.part = WHOLE
        self.held_out.remember_states()
        self.whole = held_out.losses()
        self.mixer.require_all_seen()

    def measure_controls(self, stacks: Sequence[str], draws: int) -> None:
        """Measure the inputs of all blocks, and make controls about as large as the scores.

        In each layer, small second moments of the inputs are raised to one of the shares
        `LEAST_MOMENTS`, chosen such that the size of the control is nearest to 1.
        """
        self.mixer.measure_inputs(self._run)
        rows = []
        for stack in stacks:
            sizes = self._control_sizes(stack, draws)
            least_moments = dict.fromkeys(sizes, LEAST_MOMENTS[0])
            for least_moment in LEAST_MOMENTS[1:]:
                far_layers = [layer for layer, size in sizes.items() if not size.is_near_enough]
                if not far_layers:
                    break
                self.mixer.raise_moments(stack, dict.fromkeys(far_layers, least_moment))
                self.total += draws
                new_sizes = self._control_sizes(stack, draws)
                for layer in far_layers:
                    if new_sizes[layer].distance < sizes[layer].distance:
                        sizes[layer], least_moments[layer] = new_sizes[layer], least_moment
            self.mixer.raise_moments(stack, least_moments)
            rows += [
                (stack, layer, size.mean, min(size.draws), max(size.draws), least_moments[layer])
                for layer, size in sorted(sizes.items())
            ]
        self.control_size = pl.DataFrame(rows, schema=CONTROL_SIZES, orient="row")

    def _control_sizes(self, stack: str, draws: int) -> dict[int, ControlSize]:
        """Measure the sizes ‖M‖² / ‖S‖² of all involutions by layer."""
        by_layer: dict[int, list[float]] = {}
        for draw in range(draws):
            sizes = self.mixer.control_sizes(self._run, stack, draw)
            for layer, size in sizes.items():
                by_layer.setdefault(layer, []).append(size)
        return {layer: ControlSize(tuple(sizes)) for layer, sizes in by_layer.items()}

    def is_refused(self, place: ScorePlace, part: ScorePart) -> bool:
        """Return whether a part needs a control that is too small or too large."""
        if part.mirror != "involution":
            return False
        sizes = self.control_size.filter(stack=place.stack)
        if place.layer is not None:
            sizes = sizes.filter(layer=place.layer)
        return not sizes.select(_sizes_allowed().all()).item()

    def losses(self, place: ScorePlace, part: ScorePart) -> np.ndarray:
        """Return the loss of each block, with a part in a place."""
        self.mixer.place, self.mixer.part = place, part
        return self._run()

    def _run(self) -> np.ndarray:
        """Return the loss of each block with the current part, and report progress."""
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)
        return self.held_out.losses()

    def shares(self, place: ScorePlace, parts: Sequence[ScorePart]) -> list[dict[str, Any]]:
        """Return a row for each part; losses of parts with one name are averaged."""
        none = self.losses(place, NONE)
        draws_by_name: dict[str, list[np.ndarray]] = {"whole": [self.whole], "none": [none]}
        for part in parts:
            losses = self.losses(place, part)
            if self.is_refused(place, part):
                losses = np.full_like(losses, np.nan)
            draws_by_name.setdefault(part.name, []).append(losses)
        self._contrast(place, none, draws_by_name)
        rows = []
        for name, draws in draws_by_name.items():
            losses = np.mean(draws, axis=0)
            row: dict[str, Any] = {**place._asdict(), "part": name}
            if np.isnan(losses).any():
                rows.append(row)
                continue
            share, low, high = share_kept(losses, none, self.whole)
            rows.append(
                row | {"loss": float(losses.mean()), "share": share, "low": low, "high": high}
            )
        return rows

    def _contrast(
        self, place: ScorePlace, none: np.ndarray, draws_by_name: dict[str, list[np.ndarray]]
    ) -> None:
        """Compare the parts in a place with random halves of their size, where both are measured.

        The difference of two shares is the share of a loss that is lower than ``none`` by the
        difference of the two losses.
        """
        for part in SIZED:
            control = sized_control(part)
            if control not in draws_by_name:
                continue
            lead = np.mean(draws_by_name[control], axis=0) - np.mean(draws_by_name[part], axis=0)
            if np.isnan(lead).any():
                continue
            difference, low, high = share_kept(none - lead, none, self.whole)
            if difference is None:
                continue
            row = {"stack": place.stack, "part": part, "control": control}
            self.contrasts.append(row | {"difference": difference, "low": low, "high": high})

    def slopes(
        self, place: ScorePlace, directions: Sequence[PartDirection]
    ) -> list[dict[str, Any]]:
        """Return derivative and curvature in each direction, with intervals over blocks."""
        rows = []
        for direction in directions:
            up = self._mean_losses(place, direction, 1 + STEP)
            down = self._mean_losses(place, direction, 1 - STEP)
            row: dict[str, Any] = {"stack": place.stack, "direction": direction.name}
            if not self.is_refused(place, direction.alongs[0](0)):
                curvature = (up - 2 * self.whole + down) / STEP**2
                row |= _with_interval("derivative", (up - down) / (2 * STEP))
                row |= _with_interval("curvature", curvature)
            rows.append(row)
        return rows

    def _mean_losses(
        self, place: ScorePlace, direction: PartDirection, factor: float
    ) -> Float[np.ndarray, " blocks"]:
        """Return the loss of each block, averaged over the parts of a direction at a factor."""
        losses = [self.losses(place, along(factor)) for along in direction.alongs]
        return np.asarray(np.mean(losses, axis=0))

    def curves(self, place: ScorePlace) -> list[dict[str, Any]]:
        """Return the loss at several factors of one half, or of all scores."""
        rows = []
        for direction in _directions(1):
            along = direction.alongs[0]
            if self.is_refused(place, along(0)):
                continue
            for factor in FACTORS:
                rows.append(
                    {
                        "stack": place.stack,
                        "direction": direction.name,
                        "factor": factor,
                        "loss": float(self.losses(place, along(factor)).mean()),
                    }
                )
        return rows


def _with_interval(name: str, values: Float[np.ndarray, " blocks"]) -> dict[str, float]:
    """Return the mean of values over blocks, and the ends of its interval, as columns."""
    mean, reach = float(values.mean()), interval(values)
    return {name: mean, f"{name}_low": mean - reach, f"{name}_high": mean + reach}


def spread(values: Float[np.ndarray, " blocks"]) -> float:
    """Return the standard error of a mean over blocks; NaN for a single block."""
    if len(values) < 2:
        return math.nan
    return float(values.std(ddof=1) / len(values) ** 0.5)


def interval(values: Float[np.ndarray, " blocks"]) -> float:
    """Return half the length of the 95 % interval of a mean over blocks, by Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * spread(values)


def share_kept(
    losses: Float[np.ndarray, " blocks"],
    none: Float[np.ndarray, " blocks"],
    whole: Float[np.ndarray, " blocks"],
) -> tuple[float | None, float | None, float | None]:
    """Return the share of the explained loss that a part keeps, with a 95 % interval over blocks.

    The share is (none − losses)/(none − whole), with means over blocks. The error is the error of
    this ratio to first order, from the single blocks. None if the unchanged scores explain no more
    than chance between blocks.

    Examples
    --------
    >>> none, whole = np.array([3.0, 3.2, 2.9]), np.array([1.0, 1.3, 1.1])
    >>> round(share_kept(np.array([2.0, 2.2, 2.0]), none, whole)[0], 4)
    0.5088
    """
    explained = none - whole
    kept = none - losses
    total = float(explained.mean())
    if not total > 3 * spread(explained):
        return None, None, None
    share = float(kept.mean()) / total
    reach = interval(kept - share * explained) / total
    return share, share - reach, share + reach


def _untrained(held_out: HeldOut, seed: int, family: FilePath | None) -> float | None:
    """Return the loss that all scores explain in a new model, the zero point of every share."""
    model = fresh(held_out.model, seed)
    if model is None:
        return None
    with Mixer(open_model(model, family=family), seed).installed() as mixer:
        measurement = _PartLosses(mixer, replace(held_out, model=model))
        stacks = dict.fromkeys(plan.stack for plan in mixer.modules.values())
        losses_without_scores = [
            measurement.losses(ScorePlace(stack), NONE).mean() for stack in stacks
        ]
        return float(max(losses_without_scores) - measurement.whole.mean())
