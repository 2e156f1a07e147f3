"""What the symmetric and the skew part of the scores do: the loss of a model without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._console import Result, number
from wqk._typing import FilePath, Float
from wqk.errors import CheckpointError, FormError, required_by
from wqk.live.held_out import HeldOut, fresh, load, open_held_out, predicted_by
from wqk.live.mixing import (
    HALF,
    NONE,
    SKEW,
    SYMMETRIC,
    WHOLE,
    Mirror,
    Mixer,
    Part,
    Place,
    mixed,
    require_one_form,
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

# The loss is differentiated by steps of this size.
STEP = 0.05

# Factors at which curves are drawn.
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True, repr=False)
class Parts(Result):
    """What parts of the scores do to a model's loss on held-out text.

    Attributes
    ----------
    checkpoint
        The model's name.
    predicts
        ``masked``, ``causal`` or ``sequence`` (the second half of a block from the first): the
        loss is in nats per predicted token. ``states``: the model has no head, or attends to the
        tokens that it predicts, and what stands for the loss is the squared distance of its last
        hidden states from those of the whole model, over their variance.
    shares
        A row for each place and part: ``stack``, ``layer``, ``head``, ``part``, ``loss``, and the
        ``share`` of the explained loss that it keeps with its 95 % interval, ``low`` and ``high``.
        The explained loss is that with scores of zero there, less that of the whole model.
        ``random`` is the mean over the halves that random orthogonal involutions select;
        ``share`` is null where scores explain nothing.
    slopes
        A row for each stack and direction: ``derivative`` and ``curvature`` of the loss at the
        whole model along a factor of a half of the scores, with intervals.
    curves
        The loss against a factor of a half, the other half kept; empty unless asked for.
    settings
        Blocks, tokens in a block, seed and the like.
    """

    checkpoint: str
    predicts: str
    shares: pl.DataFrame = field(repr=False)
    slopes: pl.DataFrame = field(repr=False)
    curves: pl.DataFrame = field(repr=False)
    settings: dict[str, Any]

    @property
    def sentence(self) -> str:
        """What parts of the scores of all layers keep, for each stack."""
        told = []
        whole = self.shares.filter(pl.all_horizontal(pl.col("layer", "head").is_null()))
        for rows in whole.partition_by("stack"):
            loss, share = (
                {row["part"]: row[of] for row in rows.to_dicts()} for of in ("loss", "share")
            )
            where = "" if self.shares["stack"].n_unique() < 2 else f" of the {rows['stack'][0]}"
            explained = loss["none"] - loss["whole"]
            if share["symmetric"] is None:
                told.append(f"The attention scores{where} explain nothing of the loss.")
                continue
            told.append(
                f"Of the {explained:.3g} by which attention scores{where} lower the loss, their "
                f"symmetric part alone keeps {share['symmetric']:.0%}, their skew part "
                f"{share['skew']:.0%}, random halves {share['random']:.0%}."
            )
        return " ".join(told)

    def _rows(self) -> Iterable[dict[str, Any]]:
        return self.shares.iter_rows(named=True)

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        about = self.settings
        text = f"{about['text']}: {about['blocks']} blocks of {about['tokens']} tokens"
        yield Text.assemble((self.checkpoint, "bold"), f"\n{text}, predicts: {self.predicts}\n")
        columns = ("stack", "layer", "head", "part", "loss", "share kept", "95 %")
        table = Sheet.of(*columns, text=("stack", "part", "95 %"))
        for row in self.shares.iter_rows(named=True):
            where = [row["stack"], *("all" if row[n] is None else row[n] for n in columns[1:3])]
            cells = [f"{row['loss']:.4f}", number(row["share"], 3), _interval(row, "")]
            table.add(*map(str, where), row["part"], *cells)
        yield table
        headings = ("stack", "along", "derivative", "95 %", "curvature", "95 % ")
        table = Sheet.of(*headings, text=("stack", "along", "95 %", "95 % "))
        for row in self.slopes.iter_rows(named=True):
            cells = [row["stack"], row["direction"]]
            for what in ("derivative", "curvature"):
                cells += [number(row[what], 4), _interval(row, f"{what}_")]
            table.add(*cells)
        yield table
        yield Text(
            "share kept: of the loss without these scores less that of the whole model; random: "
            f"the mean of the halves that {about['draws']} random involutions select.\n"
            "Masks and position terms stay whole. In an untrained model of this configuration all "
            f"scores explain {number(about['explained_untrained'], 4)}."
            + "".join(f"\n{what}: left whole" for what in about["left_whole"]),
            style="dim",
        )

    def plot(self) -> Figure:
        """Draw the loss against factors of each half, if measured, and the shares that parts keep.

        Raises
        ------
        MissingPackage
            matplotlib is not installed.
        """
        from wqk.reporting.pictures import parts_figure

        return parts_figure(self.shares, self.curves, self.predicts)

    _drawn = plot


def parts(
    ref: Any,
    *,
    text: FilePath | None = None,
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
    """Find out what the symmetric and the skew part of the scores do to the loss.

    The scores S are replaced by parts of them, such as (S + Sᵀ)/2, in all heads, a layer or a head,
    and the loss on held-out text is read. A share of the explained loss that a part keeps is to be
    read against its zero, that of random halves, not against 100 %. Needs PyTorch, transformers
    and SciPy.

    Parameters
    ----------
    ref
        A folder, the folder of a training run, a Hub id, a `transformers` model, or a `Model`
        opened from one.
    text
        Text file, for the model's own tokenizer; JSON Lines give the field ``text`` of each line,
        and .xz, .gz, .bz2 and .zst are read through. One of text, corpus and tokens is needed.
    corpus
        Folder of tokens as ``wqk lab corpus`` writes it; its held-out part is read.
    tokens
        Token ids, (B, N) or in one row.
    stack
        ``encoder`` or ``decoder``; both, one after the other, if the model has both.
    each_layer
        Whether to also change one layer at a time.
    each_head
        Whether to also change one head at a time.
    rank
        Also keep only the best rank of each head's form, for each of these ranks.
    curves
        Whether to measure the loss at several factors of each half, for the picture.
    blocks
        How many blocks of text.
    block
        Tokens in a block: by default 128, or what the model has positions for.
    mask_share
        Fraction of tokens that encoders predict.
    draws
        Number of random involutions.
    seed
        Of masks and involutions.
    on_progress
        Called with the passes over the text that are done, and their number.

    Raises
    ------
    UnknownFamily
        The model's attention does not go through transformers' attention interface, or is no
        softmax of scaled products plus a mask; or a rank was asked for where a head has no single
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
    >>> found = wqk.parts(model, tokens=torch.arange(640) % 7, block=16, blocks=8)
    >>> found.shares["part"].to_list()[:6]
    ['whole', 'none', 'half', 'symmetric', 'skew', 'random']
    """
    with required_by("running the model"):
        import scipy.special  # type: ignore[import-untyped]  # noqa: F401
        import torch
    if stack == "cross":
        raise CheckpointError(
            "parts of cross-attention are not defined: its queries and keys come from different "
            "sequences, so that no score is that of a pair read the other way"
        )
    for name, least in [("draws", draws), *(("rank", one) for one in rank or ())]:
        if least < 1:
            raise FormError(f"{name} must be 1 or more, got {least}")
    loaded, own = load(ref)
    opened = open_model(loaded, family=getattr(ref, "family_file", None))
    able = Mixer(opened, seed)
    for plan in able.modules.values() if rank else ():
        require_one_form(opened.name, plan)
    # A token that attention sees already is not predicted.
    is_next = predicted_by(type(loaded).__name__) == "causal"
    if is_next and not any(plan.causal for plan in able.modules.values()):
        loaded = loaded.base_model
    given = open_held_out(loaded, own, text, corpus, tokens, blocks, block, mask_share, seed)
    with torch.no_grad(), able.installed() as mixer:
        measured = _Measurement(mixer, given)
        stacks = dict.fromkeys(plan.stack for plan in mixer.modules.values())
        if stack is not None and stack not in stacks:
            raise CheckpointError(
                f"{opened.name}: no {stack} self-attention; it has that of: {', '.join(stacks)}"
            )
        chosen = [name for name in stacks if stack in (None, name)]
        some = {name: [p for p in mixer.modules.values() if p.stack == name] for name in chosen}
        places = [Place(name) for name in chosen]
        one_by_one = [
            Place(name, plan.layer, head)
            for name, plans in some.items()
            for plan in plans
            for head in ([None] * each_layer + [*range(plan.query.heads)] * each_head)
        ]
        base = [HALF, SYMMETRIC, SKEW, *random_halves(draws)]
        whole = [
            Part(f"random, size of {which}", 0, 0, "involution", 0, which)
            for which in ("symmetric", "skew")
        ] + [mixed("next head", 1, 0, "next head")]
        ranks = [Part(f"rank {k}", 0, 1, "rank", k) for k in sorted(set(rank or ()))]
        jobs = [(place, [*base, *whole, *ranks]) for place in places]
        jobs += [(place, [*base[:5], *ranks]) for place in one_by_one]
        slopes = _directions(draws)
        measured.total = sum(2 + len(each) for _, each in jobs) + len(places) * (
            2 * len(slopes) + curves * len(FACTORS) * 4
        )
        measured.on_progress = on_progress
        shares = [row for place, each in jobs for row in measured.shares(place, each)]
        slope_rows = [row for place in places for row in measured.slopes(place, slopes)]
        curve_rows = [row for place in places if curves for row in measured.curves(place)]
    settings = {
        "text": given.name,
        "blocks": given.count,
        "tokens": given.length,
        "mask_share": mask_share if given.predicts == "masked" else None,
        "seed": seed,
        "draws": draws,
        "left_whole": opened.without_softmax,
    }
    with torch.no_grad():
        untrained = _untrained(given, seed, opened.family_file)
    return Parts(
        str(ref) if isinstance(ref, str | Path) else getattr(ref, "name", opened.name),
        given.predicts,
        pl.DataFrame(shares, schema=SHARES),
        pl.DataFrame(slope_rows),
        pl.DataFrame(curve_rows),
        settings | {"explained_untrained": untrained},
    )


def _interval(row: dict[str, Any], prefix: str) -> str:
    low, high = row[f"{prefix}low"], row[f"{prefix}high"]
    return "–" if low is None else f"[{number(low, 3)}, {number(high, 3)}]"


def random_halves(draws: int) -> list[Part]:
    """Both halves that each random involution selects."""
    return [
        mixed("random", a, 1 - a, "involution", number) for number in range(draws) for a in (1, 0)
    ]


def _directions(draws: int) -> list[tuple[str, list[Callable[[float], Part]]]]:
    """Along what the loss is differentiated: a half of the scores that takes a factor."""

    def along(mirror: Mirror, number: int, even: bool) -> Callable[[float], Part]:
        return lambda x: mixed("", x if even else 1, 1 if even else x, mirror, number)

    halves = [
        along("involution", number, even) for number in range(draws) for even in (True, False)
    ]
    return [
        ("symmetric", [along("transpose", 0, True)]),
        ("skew", [along("transpose", 0, False)]),
        ("random", halves),
        ("all", [lambda x: Part("", x)]),
    ]


class _Measurement:
    """The losses of parts, block by block, and what follows from them."""

    def __init__(self, mixer: Mixer, given: HeldOut) -> None:
        self.mixer, self.given = mixer, given
        self.on_progress: Callable[[int, int], None] | None = None
        self.done = self.total = 0
        self.mixer.part = WHOLE
        self.given.remember_states()
        self.whole = given.losses()
        self.mixer.require_all_seen()

    def losses(self, place: Place, part: Part) -> np.ndarray:
        """The loss of each block."""
        self.mixer.place, self.mixer.part = place, part
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)
        return self.given.losses()

    def shares(self, place: Place, some: Sequence[Part]) -> list[dict[str, Any]]:
        """A row for each part, those of one name averaged."""
        none = self.losses(place, NONE)
        by_name: dict[str, list[np.ndarray]] = {"whole": [self.whole], "none": [none]}
        for part in some:
            by_name.setdefault(part.name, []).append(self.losses(place, part))
        rows = []
        for name, values in by_name.items():
            losses = np.mean(values, axis=0)
            share, low, high = share_kept(losses, none, self.whole)
            about = {**place._asdict(), "part": name, "loss": float(losses.mean())}
            rows.append(about | {"share": share, "low": low, "high": high})
        return rows

    def slopes(
        self, place: Place, directions: Sequence[tuple[str, list[Callable[[float], Part]]]]
    ) -> list[dict[str, Any]]:
        """Derivative and curvature along each direction, with intervals over blocks."""
        rows = []
        for name, alongs in directions:
            up, down = (
                np.mean([self.losses(place, along(1 + side)) for along in alongs], axis=0)
                for side in (STEP, -STEP)
            )
            about: dict[str, Any] = {"stack": place.stack, "direction": name}
            for what, values in (
                ("derivative", (up - down) / (2 * STEP)),
                ("curvature", (up - 2 * self.whole + down) / STEP**2),
            ):
                value, reach = float(values.mean()), interval(values)
                about |= {what: value, f"{what}_low": value - reach, f"{what}_high": value + reach}
            rows.append(about)
        return rows

    def curves(self, place: Place) -> list[dict[str, Any]]:
        """The loss at several factors of one half, or of all scores."""
        some = {name: alongs[0] for name, alongs in _directions(1)}
        return [
            {
                "stack": place.stack,
                "direction": name,
                "factor": factor,
                "loss": float(self.losses(place, along(factor)).mean()),
            }
            for name, along in some.items()
            for factor in FACTORS
        ]


def spread(values: Float[np.ndarray, " blocks"]) -> float:
    """The standard error of a mean over blocks."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def interval(values: Float[np.ndarray, " blocks"]) -> float:
    """How far the 95 % interval of a mean over blocks reaches, by Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * spread(values)


def share_kept(
    losses: Float[np.ndarray, " blocks"],
    none: Float[np.ndarray, " blocks"],
    whole: Float[np.ndarray, " blocks"],
) -> tuple[float | None, float | None, float | None]:
    """The share of the explained loss that a part keeps, with its 95 % interval over blocks.

    (none − losses)/(none − whole), of means; its error is that of the ratio's first order, block by
    block. None where the whole scores explain no more than chance between blocks would.

    Examples
    --------
    >>> none, whole = np.array([3.0, 3.2, 2.9]), np.array([1.0, 1.3, 1.1])
    >>> round(share_kept(np.array([2.0, 2.2, 2.0]), none, whole)[0], 4)
    0.5088
    """
    explained = none - whole
    total = float(explained.mean())
    if not total > 3 * spread(explained):
        return None, None, None
    share = float((none - losses).mean()) / total
    reach = interval((none - losses) - share * explained) / total
    return share, share - reach, share + reach


def _untrained(given: HeldOut, seed: int, family: FilePath | None) -> float | None:
    """What all scores explain in a new model of the same configuration: the zero of every share."""
    model = fresh(given.model, seed)
    if model is None:
        return None
    mine = replace(given, model=model)
    with Mixer(open_model(model, family=family), seed).installed() as mixer:
        measured = _Measurement(mixer, mine)
        stacks = dict.fromkeys(plan.stack for plan in mixer.modules.values())
        none = [measured.losses(Place(stack), NONE).mean() for stack in stacks]
        return float(max(none) - measured.whole.mean())
