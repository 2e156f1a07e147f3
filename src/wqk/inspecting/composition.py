"""Which heads feed which: every pair of a head that writes and a later one that reads.

A head writes with its output-value form W_v W_o. A later head of the same stream reads with its
queries (kind ``q``) or its keys (``k``) in W_q W_kᵀ, or with its values (``v``) in W_v W_o. The
scores and what they are by chance are those of `wqk.forms.chaining`.

Layers follow one another, also where tokens see those after them, or where attention and MLP read
the same input; within a layer, cross-attention follows self-attention; a layer that is applied
several times also writes to itself. The keys and values of cross-attention read what the whole
encoder has written; other stacks do not write into one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import polars as pl
from rich.text import Text

from wqk._console import counted, number
from wqk._machine import one_blas_thread, usable_cores
from wqk._version import __version__
from wqk.attention import Block
from wqk.attention.factors import Coordinates, lacks_norm, omissions
from wqk.errors import CheckpointError, TableError, errors_about
from wqk.families import AttentionPlan, Place
from wqk.forms import chaining
from wqk.forms.chaining import End
from wqk.forms.overlaps import StackSide
from wqk.forms.scores import SIGNIFICANT, holm
from wqk.model import Model
from wqk.model import open as open_model
from wqk.reporting import pictures
from wqk.reporting.summary import pairs_sheet
from wqk.scanning.scan import checkpoint_columns, scored_parts
from wqk.tables.columns import COLUMNS, Column
from wqk.tables.rendering import title
from wqk.tables.score_table import Table, conditions, joined_statuses, records, types

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("q", "k", "v")
# Where a block's circuits meet a stream: with the query and the key side of their forms.
CIRCUITS: dict[Literal["qk", "ov"], tuple[str, str]] = {"qk": ("q", "k"), "ov": ("v", "write")}
ENCODER = "encoder"
# A stack's residual stream, by its width, as stages of one stack may have several.
Stream = tuple[str | None, int]

COMPOSITION_COLUMNS = (
    *(column for column in COLUMNS if column.name in ("checkpoint", "revision", "step")),
    Column("kind", str, "how the reader reads: q, k or v, with its queries, keys or values"),
    *(
        Column(f"{end}_{name}", kind, f"{what} of the head that {verb}", heading)
        for end, verb in (("writer", "writes"), ("reader", "reads"))
        for name, kind, what, heading in (
            ("stack", str, "stack", ""),
            ("attention", str, "self or cross: the attention", ""),
            ("layer", int, "layer", f"{end} layer"),
            ("head", int, "number", "head"),
        )
    ),
    Column("score", float, "‖W R‖ / (‖W‖ ‖R‖)", "score"),
    Column("expected", float, "its root mean square by chance", "expected"),
    Column("excess", float, "the score less what is expected", "excess"),
    Column("z", float, "standard deviations of the squared score above its mean", "z", "$z$"),
    Column("p", float, "the probability that chance gives as much"),
    Column("p_corrected", float, "the same among all pairs, by Holm's method", "p", "$p$"),
    Column("status", str, "degenerate where a head is pruned", "status"),
)
COMPOSITION_SCHEMA = types(COMPOSITION_COLUMNS)

# Bytes of a checkpoint's factors that are kept if all fit. Otherwise this share of them, or of a
# part of the free memory, is held of blocks that write, and as much of those that read: what is
# made of blocks anew for every batch takes as long as their products.
MEMORY, BATCH, PART = 800_000_000, 0.6, 0.25

# Circuits that are read at a time: their weights are what takes memory.
AT_ONCE = 4

# Pairs that a terminal shows.
SHOWN = 20


@dataclass(frozen=True, eq=False, repr=False)
class CompositionTable(Table):
    """The composition of heads, one row for each pair and kind, largest excess first.

    ``score`` is ‖W R‖ / (‖W‖ ‖R‖), ``expected`` its root mean square by chance, ``excess`` the
    difference of the two. ``z`` is how many standard deviations the squared score lies above its
    mean, ``p`` the probability that chance gives as much, and ``p_corrected`` the same among all
    pairs of the table, by Holm's method. Scores of pruned heads, whose form is zero, are null, and
    their status is ``degenerate``.
    """

    declared = COMPOSITION_COLUMNS
    needed = ("writer_layer", "score")

    #: How many pairs are printed.
    top: int = SHOWN

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata and the first ``top`` pairs, as ``--json`` prints them."""
        return super().to_dict() | {"rows": records(self.frame.head(self.top))}

    def around(
        self, layer: int, head: int, stack: str | None = None, kind: str = "self"
    ) -> CompositionTable:
        """Return the pairs that a head is part of: what it reads from, and what reads from it.

        Parameters
        ----------
        layer, head
            Numbers from 0; negative layers count from the end.
        stack, kind
            Which attention, where a model has several: as for `Model.block`.

        Raises
        ------
        TableError
            No pair has this head.

        Examples
        --------
        >>> import wqk
        >>> table = wqk.compose(wqk.demo_model("induction")).around(1, 3)
        >>> table.frame.select("kind", "writer_layer", "writer_head").row(0)
        ('k', 0, 2)
        """
        largest: Any = self.frame.select(pl.max_horizontal("writer_layer", "reader_layer")).max()
        number = layer if layer >= 0 else largest.item() + 1 + layer

        def has(end: str) -> pl.Expr:
            found = (pl.col(f"{end}_layer") == number) & (pl.col(f"{end}_head") == head)
            found &= pl.col(f"{end}_attention") == kind
            return found if stack is None else found & (pl.col(f"{end}_stack") == stack)

        around = self.filter(has("writer") | has("reader"))
        if not len(around):
            last: Any = self.frame.select(pl.max_horizontal("writer_head", "reader_head").max())
            raise TableError(
                f"no pair has head {head} of layer {layer} ({kind}-attention); its last layer is "
                f"{largest.item()}, its last head {last.item()}"
            )
        return around

    def plot(self, top: int = 30) -> Figure:
        """Draw the strongest pairs (needs matplotlib): layers across, heads upward.

        Parameters
        ----------
        top
            How many pairs to draw.

        Raises
        ------
        TableError
            No pair has a score above chance.

        Examples
        --------
        >>> import wqk
        >>> figure = wqk.compose(wqk.demo_model("induction")).plot(top=4)
        >>> figure.axes[0].get_title(loc="left")
        '4 strongest pairs of 48'
        """
        return pictures.composition_arcs(self.frame, top)

    _drawn = plot

    def _shown(self, width: int) -> Iterator[Any]:
        """Yield the first pairs, and how many of each kind exceed chance."""
        frame, top = self.frame, self.top
        if not len(self):
            yield Text("no rows")
            return
        yield Text(title(frame.row(0, named=True)), style="bold")
        outlying = (self.metadata.get("outlying") or {}).items()
        counts = ", ".join(f"{len(dimensions)} of the {stack}" for stack, dimensions in outlying)
        zero = f"random rotations of the stream that keep its outlying dimensions ({counts})"
        unusual = conditions(frame, self.metadata, every=False)
        yield Text(" · ".join(["composition", f"chance: {zero}", *unusual]))
        yield pairs_sheet(frame.head(top))
        if frame.height > top:
            yield Text(f"and {frame.height - top:,} more", style="dim")
        for kind in (one for one in KINDS if one in frame["kind"]):
            rows = frame.filter(pl.col("kind") == kind)
            beyond = rows.filter(pl.col("p_corrected") < SIGNIFICANT).height
            median: Any = rows["score"].median()
            yield Text(
                f"{kind.upper()}: {counted(rows.height, 'pair')}, {beyond:,} beyond chance "
                f"(p < {SIGNIFICANT}), median score {number(median)}"
            )
        notes = ["p: the probability of such a score by chance, corrected for the number of pairs"]
        if self.metadata.get("left_out"):
            notes.append(f"left out: {', '.join(self.metadata['left_out'])}")
        notes += self.metadata.get("notes", [])
        yield Text("\n".join(notes), style="dim")


def compose(
    ref: Any,
    *,
    kind: Literal["q", "k", "v", "all"] = "all",
    gamma: float = 2.0,
    fold_norm: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> CompositionTable:
    """Find the heads that read what earlier heads write.

    Scores every pair of heads of two layers by their composition, ‖W_out W_in‖ / (‖W_out‖ ‖W_in‖),
    for the later head's queries (Q), keys (K) and values (V), and compares it with chance: random
    rotations of the stream between the two that leave its outlying dimensions where they are.
    Weights only: whether a head attends to the token in question is another matter. Without biases,
    at distance 0 in rotary models, and without norms of what a head writes.

    Parameters
    ----------
    ref
        A `Model`, or what `wqk.open` takes.
    kind
        How the later head reads: with its queries, keys or values.
    gamma
        Dimensions are outlying if more is written to and read from them than the mean plus this
        many standard deviations.
    fold_norm
        Whether to fold in the gains and the centering of the norms that feed each head.
    on_progress
        Called after every block with the number done and the number of all.

    Raises
    ------
    CheckpointError
        No layer writes to a later one; the checkpoint has no values or outputs; or an argument is
        none of those above.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.compose(wqk.demo_model("induction"))
    >>> table.frame.select("kind", "writer_head", "reader_head", "status").row(0)
    ('k', 2, 2, 'ok')
    """
    kind = cast("Literal['q', 'k', 'v', 'all']", str(kind).lower())  # tables print Q, K and V
    if kind not in (*KINDS, "all"):
        expected = ", ".join(map(repr, (*KINDS, "all")))
        raise CheckpointError(f"kind must be one of {expected}, got {kind!r}")
    model = open_model(ref)
    checkpoint = model.checkpoint
    kinds = KINDS if kind == "all" else (kind,)
    with errors_about(checkpoint.name), one_blas_thread():
        source = Source(model, fold_norm)
        fixed = outlying_dimensions(source, gamma)
        pairs = list(_pairs(source, kinds, fixed, on_progress))
        if not pairs:
            raise CheckpointError("no layer writes to a later one: there is nothing to compose")
    metadata = {
        "wqk": __version__,
        "zero": "outliers",
        "gamma": gamma,
        "outlying": _named(fixed),
        "folded_norms": fold_norm,
        "biases": False,
        "left_out": source.left_out(kinds),
        "notes": [
            *source.notes(kinds, pairs),
            *(f"{what}: neither read nor written here" for what in model.without_softmax),
            *checkpoint.notes,
        ],
    }
    columns = {n: v for n, v in checkpoint_columns(checkpoint).items() if n in COMPOSITION_SCHEMA}
    frame = _frame(pairs)
    frame = frame.with_columns(
        pl.Series("p_corrected", holm(frame["p"].to_numpy())).fill_nan(None),
        *(pl.lit(value, COMPOSITION_SCHEMA[name]).alias(name) for name, value in columns.items()),
    )
    frame = frame.sort(
        "excess", "p", descending=[True, False], nulls_last=True, maintain_order=True
    )
    return CompositionTable(frame, metadata)


class Source:
    """The blocks of a checkpoint, in the order in which they write to their streams."""

    def __init__(self, model: Model, fold_norm: bool = False) -> None:
        model.require_softmax()
        checkpoint, plans = model.checkpoint, model.plans
        self._checkpoint = checkpoint
        self._coordinates = {name: Coordinates(name, fold_norm) for name in CIRCUITS}
        self.plans = sorted(
            plans, key=lambda plan: (plan.stack != ENCODER, plan.layer, plan.kind == "cross")
        )
        if not any(map(_has_values, plans)):
            raise CheckpointError(
                f"family {plans[0].family} describes no values and outputs, or the checkpoint "
                "lacks them; without them, no head is known to write anything"
            )
        if all(map(self._unfolded, plans)):
            raise CheckpointError(
                f"family {plans[0].family} describes no norm in front of its attention, or the "
                "checkpoint lacks it; compose without folding norms"
            )
        numbers = sum(
            math.prod(part.shape(checkpoint.info(part.name).shape))
            for coordinates in self._coordinates.values()
            for plan in filter(_has_values, plans)
            for part in scored_parts(plan, coordinates)
        )
        self.room = BATCH * max(MEMORY, PART * _free_memory())
        self._keeps_all = 4 * numbers <= 2 * self.room  # in single precision
        self._kept: dict[tuple[Place, str], tuple[StackSide, StackSide]] = {}

    def sides(
        self, plan: AttentionPlan, circuit: Literal["qk", "ov"]
    ) -> tuple[StackSide, StackSide]:
        """How a circuit of a block meets its streams; kept if those of all blocks fit in memory."""
        key = plan.place, circuit
        if key in self._kept:
            return self._kept[key]
        ((_, form),) = Block(self._checkpoint, plan).forms(self._coordinates[circuit])
        found = chaining.sides(form)
        if self._keeps_all:
            self._kept[key] = found
        return found

    def stream(self, plan: AttentionPlan, end: str) -> str | None:
        """The stack whose stream a block writes to or reads; None if it does, or has, no such."""
        if end in ("write", "v") and not _has_values(plan):
            return None
        if plan.kind == "self" or end in ("write", "q"):
            return plan.stack
        has_encoder = any(one.stack == ENCODER for one in self.plans)
        return ENCODER if has_encoder and plan.stack != ENCODER else None

    def feeds(self, writer: AttentionPlan, reader: AttentionPlan, kind: str) -> bool:
        """Whether a block writes to a stream before another reads it."""
        stream = self.stream(writer, "write")
        if stream is None or stream != self.stream(reader, kind):
            return False
        if writer.stack != reader.stack:
            return True  # the whole encoder comes before the decoder
        places = [(plan.layer, plan.kind == "cross") for plan in (writer, reader)]
        return places[0] < places[1] or (places[0] == places[1] and writer.applications > 1)

    def _unfolded(self, plan: AttentionPlan) -> bool:
        return any(lacks_norm(plan, coordinates) for coordinates in self._coordinates.values())

    def left_out(self, kinds: Sequence[str]) -> list[str]:
        """The terms of the model that the scores do not have; a scale would not change them."""
        circuits = [name for name in CIRCUITS if name == "ov" or {"q", "k"} & set(kinds)]
        terms = [
            omission.term
            for plan in self.plans
            for name in circuits
            for omission in omissions(plan, self._coordinates[name])
            if omission.kind != "scale"
        ]
        if any(plan.value is not None and plan.value.bias for plan in self.plans):
            terms.append("biases")
        return list(dict.fromkeys(terms))

    def notes(self, kinds: Sequence[str], pairs: Sequence[_Pair]) -> list[str]:
        """Which heads are not among the pairs, and why."""
        paired = {(pair.kind, pair.reader.stack, pair.reader.kind) for pair in pairs}
        found = []
        for plan in self.plans:
            where = f"{plan.stack} {plan.what}"
            if not _has_values(plan):
                found.append(f"{where}: values and outputs are not known; it is no writer")
            elif any(self.stream(plan, kind) is None for kind in kinds):
                found.append(f"{where}: no known head writes what its keys and values read")
            elif any(
                (kind, plan.stack, plan.kind) not in paired and self.feeds(writer, plan, kind)
                for kind, writer in product(kinds, self.plans)
            ):
                found.append(
                    f"{where}: what its keys and values read was written at another width; the "
                    "projection between the two is not known"
                )
            if self._unfolded(plan):
                found.append(f"{where}: some layers have no known norm in front; none is folded in")
        return list(dict.fromkeys(found))


def _has_values(plan: AttentionPlan) -> bool:
    return plan.value is not None and plan.output is not None


def outlying_dimensions(source: Source, gamma: float = 2.0) -> dict[Stream, np.ndarray]:
    """Return the outlying dimensions of every stream that is written to, as masks (D,).

    Every head that writes to the stream or reads from it has its share of its form's squared norm
    in each dimension. Outlying is a dimension whose root mean share exceeds the mean over
    dimensions by more than ``gamma`` standard deviations.
    """
    shares: dict[Stream, list[np.ndarray]] = {}
    written: set[Stream] = set()
    read = [
        (plan, one) for plan in source.plans for one in CIRCUITS if one == "qk" or _has_values(plan)
    ]
    with ThreadPoolExecutor(min(usable_cores(), AT_ONCE)) as pool:
        found = pool.map(lambda one: [side.shares for side in source.sides(*one)], read)
        for (plan, circuit), both in zip(read, found, strict=True):
            for end, share in zip(CIRCUITS[circuit], both, strict=True):
                stack = source.stream(plan, end)
                if stack is not None:
                    shares.setdefault((stack, len(share)), []).append(share)
                    written |= {(stack, len(share))} if end == "write" else set()
    masks = {}
    for stream in filter(written.__contains__, shares):
        norms = np.sqrt(np.mean(shares[stream], axis=0))
        # Rounding alone makes no dimension an outlying one.
        threshold = norms.mean() + max(gamma * norms.std(ddof=1), 1e-6 * norms.mean())
        masks[stream] = norms > threshold
    return masks


def _named(fixed: Mapping[Stream, np.ndarray]) -> dict[str, list[int]]:
    """The numbers of outlying dimensions by stack, and by width where a stack has several."""
    stacks = [stack for stack, _ in fixed]
    return {
        f"{stack}, width {width}" if stacks.count(stack) > 1 else str(stack): np.flatnonzero(
            mask
        ).tolist()
        for (stack, width), mask in fixed.items()
    }


def _pairs(
    source: Source,
    kinds: Sequence[str],
    fixed: Mapping[Stream, np.ndarray],
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[_Pair]:
    """Every kind of every pair of blocks.

    As many writing blocks are held as memory has room for; for each such batch, the blocks after
    it are read once, again as many at a time.
    """
    plans, begin, room = source.plans, 0, source.room
    while begin < len(plans):
        writers: list[tuple[AttentionPlan, End]] = []
        readers: list[_Reader] = []
        held, waiting, last = 0, 0, len(plans)
        for place, plan in enumerate(plans[begin:], start=begin):
            writes = place < last and source.stream(plan, "write") is not None
            feeding = {
                kind: [n for n, (one, _) in enumerate(writers) if source.feeds(one, plan, kind)]
                # A layer that is applied several times also reads itself.
                + [len(writers)] * (writes and source.feeds(plan, plan, kind))
                for kind in kinds
            }
            met = ["write"] * writes + [kind for kind, fed in feeding.items() if fed]
            ends = _ends(source, plan, met, fixed)
            if writes:
                writers.append((plan, ends.pop("write")))
                held += writers[-1][1].columns.nbytes
                last = place + 1 if held > room else last
            for kind, end in ends.items():
                # Between streams of two widths lies a projection that is not known here.
                fed = [n for n in feeding[kind] if writers[n][1].width == end.width]
                if fed:
                    readers.append(_Reader(kind, plan, end, fed))
                    waiting += end.columns.nbytes
            if waiting > room or place + 1 == len(plans):
                yield from _chained(writers, readers)
                readers, waiting = [], 0
            if on_progress and place < last:
                on_progress(place + 1, len(plans))
        begin = last


def _free_memory() -> int:
    """Bytes that this process may still take, in a container of its own; 0 where unknown."""
    with suppress(OSError, ValueError, IndexError):
        system = Path("/proc/meminfo").read_text("ascii").partition("MemAvailable:")[2]
        free = 1024 * int(system.split()[0])
        with suppress(OSError, ValueError):  # "max" without a limit
            group = [Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")]
            limit, used = (int(one.read_text("ascii")) for one in group)
            free = min(free, limit - used)
        return free
    return 0


def _ends(
    source: Source, plan: AttentionPlan, met: Sequence[str], fixed: Mapping[Stream, np.ndarray]
) -> dict[str, End]:
    """How a block meets its streams, of which those dimensions keep their places."""
    circuits = [one for one, both in CIRCUITS.items() if set(both) & set(met)]
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = zip(circuits, pool.map(partial(source.sides, plan), circuits), strict=True)
        sides = {
            end: side for one, both in found for end, side in zip(CIRCUITS[one], both, strict=True)
        }
        streams = [(source.stream(plan, end), sides[end].width) for end in met]
        kept = pool.map(chaining.with_chance, (sides[end] for end in met), map(fixed.get, streams))
        return dict(zip(met, kept, strict=True))


class _Reader(NamedTuple):
    """How a block reads: its kind, its heads, and the numbers of the writing blocks before it."""

    kind: str
    plan: AttentionPlan
    end: End
    fed: list[int]


def _chained(
    writers: Sequence[tuple[AttentionPlan, End]], readers: Sequence[_Reader]
) -> Iterator[_Pair]:
    """Yield the pairs of some writing blocks with some reading ones."""
    wanted = [(n, m) for m, reader in enumerate(readers) for n in reader.fed]
    scored = chaining.chain_all(
        [end for _, end in writers], [reader.end for reader in readers], wanted, usable_cores()
    )
    for (n, m), scores in zip(wanted, scored, strict=True):
        yield _Pair(readers[m].kind, writers[n][0], readers[m].plan, scores)


class _Pair(NamedTuple):
    """Two blocks, and how the heads of the second read what those of the first write."""

    kind: str
    writer: AttentionPlan
    reader: AttentionPlan
    scores: chaining.Chained

    @property
    def places(self) -> dict[str, Any]:
        """What all rows of the pair share."""
        # Only a form of queries and keys can be a part of what the model computes.
        counting = set(self.reader.statuses) - ({"partial"} if self.kind == "v" else set())
        return {
            "kind": self.kind,
            "writer_stack": self.writer.stack,
            "writer_attention": self.writer.kind,
            "writer_layer": self.writer.layer,
            "reader_stack": self.reader.stack,
            "reader_attention": self.reader.kind,
            "reader_layer": self.reader.layer,
            "status": joined_statuses(counting | (set(self.writer.statuses) - {"partial"})),
            "status_if_zero": joined_statuses(counting | {"degenerate"}),
        }

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """The columns of single rows: every writing head with every reading head."""
        scores = self.scores
        writers, readers = scores.score.shape
        return {
            "writer_head": np.repeat(np.arange(writers), readers),
            "reader_head": np.tile(np.arange(readers), writers),
            "score": scores.score.ravel(),
            "expected": scores.expected.ravel(),
            "excess": (scores.score - scores.expected).ravel(),
            "z": scores.z.ravel(),
            "p": scores.p.ravel(),
        }


def _frame(pairs: Sequence[_Pair]) -> pl.DataFrame:
    """All rows, with the columns of the schema that follow from the pairs."""
    parts = [pair.numbers for pair in pairs]
    numbers = pl.DataFrame(
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    )
    each = np.repeat(np.arange(len(pairs)), [pair.scores.score.size for pair in pairs])
    frame = pl.concat(
        [pl.DataFrame([pair.places for pair in pairs])[each], numbers], how="horizontal"
    )
    zero = pl.col("score").is_null()
    return frame.with_columns(pl.col(pl.Float64).fill_nan(None)).with_columns(
        pl.when(zero).then("status_if_zero").otherwise("status").alias("status")
    )
