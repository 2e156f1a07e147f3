"""Composition of heads: every pair of a writing head and a later reading head.

A head writes with its output-value form W_v W_o. A later head of the same stream reads with its
queries (kind ``q``) or its keys (``k``) in W_q W_kᵀ, or with its values (``v``) in W_v W_o.
`wqk.forms.chaining` computes the scores, and their values by chance.

A layer writes to later layers, also in models without a causal mask, and in models whose attention
and MLP read the same input. Within a layer, cross-attention follows self-attention. A layer that is
applied several times also writes to itself. The keys and values of cross-attention read the output
of the whole encoder; other stacks do not write to each other.
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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import polars as pl
from rich.text import Text

from wqk._console import counted, number
from wqk._machine import one_blas_thread, usable_cores
from wqk._style import current
from wqk._version import __version__
from wqk.attention import Block
from wqk.attention.factors import (
    Coordinates,
    lack_of_values,
    lacks_norm,
    omissions,
    reason_without_norm,
)
from wqk.errors import CheckpointError, TableError, called_as, demo_advice, errors_about
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
from wqk.tables.schema import conditions, joined_statuses, records, types
from wqk.tables.score_table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPOSITION_KINDS = ("q", "k", "v")
# The ends of a block's circuits: the meaning of the query side and of the key side of the forms.
CIRCUIT_ENDS: dict[Literal["qk", "ov"], tuple[str, str]] = {"qk": ("q", "k"), "ov": ("v", "write")}
ENCODER = "encoder"
# The residual stream of a stack: stack and width, as the stages of a stack may differ in width.
Stream = tuple[str | None, int]

COMPOSITION_COLUMNS = (
    *(column for column in COLUMNS if column.name in ("checkpoint", "revision", "step")),
    Column("kind", str, "how the reader reads: q, k or v, with its queries, keys or values"),
    Column("writer_stack", str, "stack of the head that writes"),
    Column("writer_attention", str, "self or cross: the attention of the head that writes"),
    Column("writer_layer", int, "layer of the head that writes", "writer layer"),
    Column("writer_head", int, "number of the head that writes", "writer head"),
    Column("reader_stack", str, "stack of the head that reads"),
    Column("reader_attention", str, "self or cross: the attention of the head that reads"),
    Column("reader_layer", int, "layer of the head that reads", "reader layer"),
    Column("reader_head", int, "number of the head that reads", "reader head"),
    Column("score", float, "‖W R‖ / (‖W‖ ‖R‖)", "score"),
    Column("expected", float, "its root mean square by chance", "expected"),
    Column("excess", float, "the score less what is expected", "excess"),
    Column("z", float, "standard deviations of the squared score above its mean", "z", "$z$"),
    Column("p", float, "the probability that chance gives as much"),
    Column(
        "p_corrected", float, "the same among all pairs, by Holm's method", "p", "$p$", digits=1
    ),
    Column("status", str, "degenerate where a head is pruned", "status"),
)
COMPOSITION_SCHEMA = types(COMPOSITION_COLUMNS)

# Memory for the sides of blocks, in bytes: at least `MEMORY`, or a share of the free memory. If the
# sides of all blocks do not fit, the share `BATCH` of the memory holds writing blocks, and as much
# holds reading blocks. Larger batches save time, because each batch computes its readers anew.
MEMORY, FREE_SHARE, BATCH = 800_000_000, 0.25, 0.6

# Number of circuits in memory at the same time; weights need most of the memory.
CIRCUITS_AT_ONCE = 4

# Pairs on a terminal.
PAIRS_SHOWN = 20


HeadKey = tuple[str, int, str, int]


def _keys(frame: pl.DataFrame, end: str) -> list[HeadKey]:
    """Return the stack, layer, attention and number of the head at one end of each pair."""
    names = ("stack", "layer", "attention", "head")
    return list(frame.select(f"{end}_{name}" for name in names).iter_rows())


def _heads(frame: pl.DataFrame, end: str) -> dict[HeadKey, int]:
    """Return the place of each head in the order of the model: an encoder first, then by layer."""

    def order(key: HeadKey) -> tuple[Any, ...]:
        stack, layer, attention, head = key
        return stack != ENCODER, stack, layer, attention == "cross", head

    heads = sorted(set(_keys(frame, end)), key=order)
    return {head: place for place, head in enumerate(heads)}


def _names(heads: Mapping[HeadKey, int]) -> tuple[str, ...]:
    """Name heads by layer and number, after the stack and the attention if these are several."""
    several = len({(stack, attention) for stack, _, attention, _ in heads}) > 1
    names = []
    for stack, layer, attention, head in heads:
        prefix = f"{stack} {attention} " if several else ""
        names.append(f"{prefix}{layer}.{head}")
    return tuple(names)


@dataclass(frozen=True, eq=False)
class CompositionMatrix:
    """One number for every pair of heads, writers down and readers across.

    Attributes
    ----------
    kind, value
        Side on which readers read, and the column of the numbers.
    values
        (writers, readers); NaN if the reader comes before the writer, or if a head is pruned.
    writers, readers
        Names of the heads, LAYER.HEAD.
    """

    kind: str
    value: str
    values: np.ndarray
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype)

    @current
    def plot(self) -> Figure:
        """Draw the matrix as a map (needs matplotlib).

        Examples
        --------
        >>> import wqk
        >>> figure = wqk.compose(wqk.demo_model("induction")).matrix("k").plot()
        >>> figure.axes[0].get_xlabel()
        'head that reads'
        """
        return pictures.composition_maps([self])


@dataclass(frozen=True, eq=False, repr=False)
class CompositionTable(Table):
    """The composition of heads, one row for each pair and kind, largest excess first.

    ``score`` is ‖W R‖ / (‖W‖ ‖R‖), ``expected`` the root mean square of the score by chance, and
    ``excess`` the difference. ``z`` is the squared score minus its mean, in standard deviations;
    ``p`` is the probability of a score at least as large by chance; ``p_corrected`` is ``p``
    corrected for the number of pairs in the table by Holm's method. Pruned heads have zero forms;
    their scores are null, with the status ``degenerate``.
    """

    declared = COMPOSITION_COLUMNS
    needed = ("writer_layer", "score")
    synonyms: ClassVar[Mapping[str, str]] = dict.fromkeys(("heatmap", "map"), 'matrix("k").plot()')

    #: Number of pairs to print.
    top: int = PAIRS_SHOWN

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata and the first ``top`` pairs, as ``--json`` prints them."""
        return super().to_dict() | {"rows": records(self.frame.head(self.top))}

    def around(
        self, layer: int, head: int, stack: str | None = None, kind: str = "self"
    ) -> CompositionTable:
        """Return the pairs of one head, as a writer and as a reader.

        Parameters
        ----------
        layer, head
            Numbers from 0; negative layers count from the end.
        stack, kind
            Stack and kind of attention, as for `Model.block`.

        Raises
        ------
        TableError
            No pair contains this head.

        Examples
        --------
        >>> import wqk
        >>> table = wqk.compose(wqk.demo_model("induction")).around(1, 3)
        >>> table.frame.select("kind", "writer_layer", "writer_head").row(0)
        ('k', 0, 2)
        """
        largest: Any = self.frame.select(pl.max_horizontal("writer_layer", "reader_layer")).max()
        number = layer if layer >= 0 else largest.item() + 1 + layer

        def is_head(end: str) -> pl.Expr:
            condition = (pl.col(f"{end}_layer") == number) & (pl.col(f"{end}_head") == head)
            condition &= pl.col(f"{end}_attention") == kind
            if stack is not None:
                condition &= pl.col(f"{end}_stack") == stack
            return condition

        pairs_of_head = self.filter(is_head("writer") | is_head("reader"))
        if not len(pairs_of_head):
            last: Any = self.frame.select(pl.max_horizontal("writer_head", "reader_head").max())
            raise TableError(
                f"no pair has head {head} of layer {layer} ({kind}-attention); its last layer is "
                f"{largest.item()}, its last head {last.item()}"
            )
        return pairs_of_head

    def matrix(self, kind: str, value: str = "score") -> CompositionMatrix:
        """Return one number of every pair as a matrix, writers down and readers across.

        The entries are equal to ``all_composition_scores`` of TransformerLens, whose indices are
        the writer's layer and head and the reader's layer and head.

        Parameters
        ----------
        kind
            Side on which the reader reads: ``q``, ``k`` or ``v``, for queries, keys or values.
        value
            A column: ``score``, or ``expected``, ``excess``, ``z``, ``p``.

        Raises
        ------
        TableError
            The table has no pair of this kind, or lacks the column.

        Examples
        --------
        >>> import wqk
        >>> matrix = wqk.compose(wqk.demo_model("induction")).matrix("k")
        >>> matrix.values.shape, matrix.writers[2], matrix.readers[2]
        ((4, 4), '0.2', '1.2')
        """
        kind_in_table = str(kind).lower()
        pairs = self.filter(pl.col("kind") == kind_in_table)
        if not len(pairs):
            raise TableError(f"the table has no pair of the kind {kind!r}; expected q, k or v")
        row_of_writer = _heads(pairs.frame, "writer")
        column_of_reader = _heads(pairs.frame, "reader")
        values = np.full((len(row_of_writer), len(column_of_reader)), np.nan)
        writers = _keys(pairs.frame, "writer")
        readers = _keys(pairs.frame, "reader")
        for writer, reader, value_of_pair in zip(writers, readers, pairs[value], strict=True):
            if value_of_pair is not None:
                values[row_of_writer[writer], column_of_reader[reader]] = value_of_pair
        return CompositionMatrix(
            kind=kind_in_table,
            value=value,
            values=values,
            writers=_names(row_of_writer),
            readers=_names(column_of_reader),
        )

    @current
    def plot(self, top: int = 30, matrix: bool = False) -> Figure:
        """Draw the strongest pairs (needs matplotlib): layers across, heads upward.

        Parameters
        ----------
        top
            Number of pairs to draw.
        matrix
            Draw the scores of all pairs instead: a map for each kind, writers down and readers
            across.

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
        if matrix:
            kinds = [kind for kind in COMPOSITION_KINDS if kind in self.frame["kind"]]
            return pictures.composition_maps([self.matrix(kind) for kind in kinds])
        return pictures.composition_arcs(self.frame, top)

    _drawn = plot

    def _shown(self, width: int) -> Iterator[Any]:
        """Yield the first pairs, and the number of pairs of each kind above chance."""
        frame, top = self.frame, self.top
        if not len(self):
            yield Text("no rows")
            return
        yield Text(title(frame.row(0, named=True)), style="bold")
        outlying = (self.metadata.get("outlying") or {}).items()
        counts = ", ".join(f"{len(dimensions)} of the {stack}" for stack, dimensions in outlying)
        chance = f"random rotations of the stream that keep its outlying dimensions ({counts})"
        unusual = conditions(frame, self.metadata, every=False)
        yield Text(" · ".join(["composition", f"chance: {chance}", *unusual]))
        yield pairs_sheet(frame.head(top))
        if frame.height > top:
            yield Text(f"and {frame.height - top:,} more", style="dim")
        for kind in COMPOSITION_KINDS:
            rows = frame.filter(pl.col("kind") == kind)
            if not rows.height:
                continue
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


@called_as('wqk.compose(ref), or wqk.compose(ref, kind="k")')
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
    rotations of the stream between the two heads that keep its outlying dimensions fixed. The
    scores follow from the weights alone: a high score does not mean that the later head attends to
    the right token. Biases and norms of the written vectors are left out; rotary models are scored
    at distance 0.

    Parameters
    ----------
    ref
        A `Model`, or a reference for `wqk.open`.
    kind
        Side of the later head that reads: queries, keys or values.
    gamma
        Threshold of outlying dimensions, in standard deviations above the mean share of a dimension
        in all writing and reading.
    fold_norm
        Whether to fold in the gains and the centering of the norms before each head.
    on_progress
        Called after every block with the number of finished blocks and the number of all blocks.

    Raises
    ------
    CheckpointError
        No layer writes to a later layer; the checkpoint has no values or outputs; or an argument is
        invalid.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.compose(wqk.demo_model("induction"))
    >>> table.frame.select("kind", "writer_head", "reader_head", "status").row(0)
    ('k', 2, 2, 'ok')
    """
    kind = cast("Literal['q', 'k', 'v', 'all']", str(kind).lower())  # tables print Q, K and V
    if kind not in (*COMPOSITION_KINDS, "all"):
        expected = ", ".join(map(repr, (*COMPOSITION_KINDS, "all")))
        raise CheckpointError(f"kind must be one of {expected}, got {kind!r}")
    model = open_model(ref)
    checkpoint = model.checkpoint
    kinds = COMPOSITION_KINDS if kind == "all" else (kind,)
    with errors_about(checkpoint.name), one_blas_thread():
        source = StreamBlocks(model, fold_norm)
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
            *(f"{blocks}: neither read nor written here" for blocks in model.without_softmax),
            *checkpoint.notes,
        ],
    }
    frame = _frame(pairs)
    frame = frame.with_columns(p_corrected=holm(frame["p"].to_numpy()))
    columns = [pl.col("p_corrected").fill_nan(None)]
    for name, value in checkpoint_columns(checkpoint).items():
        if name in COMPOSITION_SCHEMA:
            columns.append(pl.lit(value, COMPOSITION_SCHEMA[name]).alias(name))
    frame = frame.with_columns(columns)
    frame = frame.sort(
        "excess", "p", descending=[True, False], nulls_last=True, maintain_order=True
    )
    return CompositionTable(frame, metadata)


class StreamBlocks:
    """The blocks of a checkpoint, in the order of writing to their streams."""

    def __init__(self, model: Model, fold_norm: bool = False) -> None:
        model.require_softmax()
        checkpoint, plans = model.checkpoint, model.plans
        self._checkpoint = checkpoint
        self._coordinates = {name: Coordinates(name, fold_norm) for name in CIRCUIT_ENDS}
        self.plans = sorted(
            plans, key=lambda plan: (plan.stack != ENCODER, plan.layer, plan.kind == "cross")
        )
        if not any(map(_has_values, plans)):
            raise CheckpointError(
                f"{lack_of_values(plans[0])}; without values and outputs, no head is known to "
                f"write anything{demo_advice(checkpoint.name)}"
            )
        if all(map(self._unfolded, plans)):
            raise CheckpointError(f"{reason_without_norm(plans[0])}; compose without folding norms")
        numbers = 0
        for plan in filter(_has_values, plans):
            for coordinates in self._coordinates.values():
                for part in scored_parts(plan, coordinates):
                    numbers += math.prod(part.shape(checkpoint.info(part.name).shape))
        self.room = BATCH * max(MEMORY, FREE_SHARE * _free_memory())
        self._keeps_all = 4 * numbers <= 2 * self.room  # in single precision
        self._kept: dict[tuple[Place, str], tuple[StackSide, StackSide]] = {}

    def sides(
        self, plan: AttentionPlan, circuit: Literal["qk", "ov"]
    ) -> tuple[StackSide, StackSide]:
        """Return the two sides of a circuit; cached if all sides fit in memory."""
        key = plan.place, circuit
        if key in self._kept:
            return self._kept[key]
        ((_, form),) = Block(self._checkpoint, plan).forms(self._coordinates[circuit])
        sides = chaining.sides(form)
        if self._keeps_all:
            self._kept[key] = sides
        return sides

    def stream(self, plan: AttentionPlan, end: str) -> str | None:
        """Return the stack of the stream that a block writes or reads at an end; else None."""
        if end in ("write", "v") and not _has_values(plan):
            return None
        if plan.kind == "self" or end in ("write", "q"):
            return plan.stack
        has_encoder = any(other_plan.stack == ENCODER for other_plan in self.plans)
        return ENCODER if has_encoder and plan.stack != ENCODER else None

    def feeds(self, writer: AttentionPlan, reader: AttentionPlan, kind: str) -> bool:
        """Return whether a block writes to a stream before another block reads it."""
        stream = self.stream(writer, "write")
        if stream is None or stream != self.stream(reader, kind):
            return False
        if writer.stack != reader.stack:
            return True  # the whole encoder comes before the decoder
        written_at = writer.layer, writer.kind == "cross"
        read_at = reader.layer, reader.kind == "cross"
        return written_at < read_at or (written_at == read_at and writer.applications > 1)

    def _unfolded(self, plan: AttentionPlan) -> bool:
        return any(lacks_norm(plan, coordinates) for coordinates in self._coordinates.values())

    def left_out(self, kinds: Sequence[str]) -> list[str]:
        """List the terms that the scores leave out, except the scale, which cancels."""
        circuits = [name for name in CIRCUIT_ENDS if name == "ov" or {"q", "k"} & set(kinds)]
        terms = []
        for plan in self.plans:
            for name in circuits:
                for omission in omissions(plan, self._coordinates[name]):
                    if omission.kind != "scale":
                        terms.append(omission.term)
        if any(plan.value is not None and plan.value.bias for plan in self.plans):
            terms.append("biases")
        return list(dict.fromkeys(terms))

    def notes(self, kinds: Sequence[str], pairs: Sequence[_BlockPair]) -> list[str]:
        """Yield notes on heads without pairs, with the reasons."""
        paired = {(pair.kind, pair.reader.stack, pair.reader.kind) for pair in pairs}
        notes = []
        for plan in self.plans:
            block = f"{plan.stack} {plan.what}"
            if not _has_values(plan):
                notes.append(f"{block}: values and outputs are not known; it is no writer")
            elif any(self.stream(plan, kind) is None for kind in kinds):
                notes.append(f"{block}: no known head writes what its keys and values read")
            elif any(
                (kind, plan.stack, plan.kind) not in paired and self.feeds(writer, plan, kind)
                for kind, writer in product(kinds, self.plans)
            ):
                notes.append(
                    f"{block}: what its keys and values read was written at another width; the "
                    "projection between the two is not known"
                )
            if self._unfolded(plan):
                notes.append(f"{block}: some layers have no known norm in front; none is folded in")
        return list(dict.fromkeys(notes))


def _has_values(plan: AttentionPlan) -> bool:
    return plan.value is not None and plan.output is not None


def outlying_dimensions(source: StreamBlocks, gamma: float) -> dict[Stream, np.ndarray]:
    """Return the outlying dimensions of every stream with writing heads, as masks (D,).

    The form of each head that writes to or reads from a stream has a share of its squared norm in
    each dimension of the stream. A dimension is outlying if the root of its mean share exceeds the
    mean over dimensions by more than ``gamma`` standard deviations.
    """
    circuits: list[tuple[AttentionPlan, Literal["qk", "ov"]]] = []
    for plan in source.plans:
        circuits.append((plan, "qk"))
        if _has_values(plan):
            circuits.append((plan, "ov"))

    def shares_of(plan_and_circuit: tuple[AttentionPlan, Literal["qk", "ov"]]) -> list[np.ndarray]:
        return [side.shares for side in source.sides(*plan_and_circuit)]

    shares: dict[Stream, list[np.ndarray]] = {}
    written: set[Stream] = set()
    with ThreadPoolExecutor(min(usable_cores(), CIRCUITS_AT_ONCE)) as pool:
        results = pool.map(shares_of, circuits)
        for (plan, circuit), side_shares in zip(circuits, results, strict=True):
            for end, share in zip(CIRCUIT_ENDS[circuit], side_shares, strict=True):
                stack = source.stream(plan, end)
                if stack is None:
                    continue
                shares.setdefault((stack, len(share)), []).append(share)
                if end == "write":
                    written.add((stack, len(share)))
    masks = {}
    for stream in shares:
        if stream not in written:
            continue
        norms = np.sqrt(np.mean(shares[stream], axis=0))
        # A spread that is only rounding makes no dimension outlying.
        threshold = norms.mean() + max(gamma * norms.std(ddof=1), 1e-6 * norms.mean())
        masks[stream] = norms > threshold
    return masks


def _named(fixed: Mapping[Stream, np.ndarray]) -> dict[str, list[int]]:
    """Return the numbers of outlying dimensions by stack, with the width if a stack has several."""
    stacks = [stack for stack, _ in fixed]
    numbers = {}
    for (stack, width), mask in fixed.items():
        name = f"{stack}, width {width}" if stacks.count(stack) > 1 else str(stack)
        numbers[name] = np.flatnonzero(mask).tolist()
    return numbers


def _pairs(
    source: StreamBlocks,
    kinds: Sequence[str],
    fixed: Mapping[Stream, np.ndarray],
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[_BlockPair]:
    """Yield all pairs of blocks, of all kinds.

    The blocks are divided into batches of writers that fit into memory. For each batch, its blocks
    and all later blocks are read once; as many readers as fit are in memory at a time.
    """
    plans, begin, room = source.plans, 0, source.room
    while begin < len(plans):
        writers: list[tuple[AttentionPlan, End]] = []
        readers: list[_Reader] = []
        writer_bytes, reader_bytes = 0, 0
        stop = len(plans)  # the first block after the batch of writers, once it is known
        for place, plan in enumerate(plans[begin:], start=begin):
            writes = place < stop and source.stream(plan, "write") is not None
            feeding = {kind: _feeding(source, writers, plan, kind, writes) for kind in kinds}
            ends_met = [kind for kind, numbers in feeding.items() if numbers]
            if writes:
                ends_met.append("write")
            ends = _ends(source, plan, ends_met, fixed)
            if writes:
                writers.append((plan, ends.pop("write")))
                writer_bytes += writers[-1][1].columns.nbytes
                if writer_bytes > room:
                    stop = place + 1
            for kind, end in ends.items():
                # Streams of two widths are connected by a projection that is not known here.
                numbers = [n for n in feeding[kind] if writers[n][1].width == end.width]
                if numbers:
                    readers.append(_Reader(kind, plan, end, numbers))
                    reader_bytes += end.columns.nbytes
            if reader_bytes > room or place + 1 == len(plans):
                yield from _chained(writers, readers)
                readers, reader_bytes = [], 0
            if on_progress and place < stop:
                on_progress(place + 1, len(plans))
        begin = stop


def _feeding(
    source: StreamBlocks,
    writers: Sequence[tuple[AttentionPlan, End]],
    reader: AttentionPlan,
    kind: str,
    writes: bool,
) -> list[int]:
    """Return the numbers of the writers that feed a reader; a reader may be a writer, too."""
    numbers = [n for n, (writer, _) in enumerate(writers) if source.feeds(writer, reader, kind)]
    if writes and source.feeds(reader, reader, kind):  # a layer that is applied several times
        numbers.append(len(writers))
    return numbers


def _free_memory() -> int:
    """Return the free memory of the system or of this container, in bytes; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        system = Path("/proc/meminfo").read_text("ascii").partition("MemAvailable:")[2]
        free = 1024 * int(system.split()[0])
        with suppress(OSError, ValueError):  # "max" without a limit
            group = [Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")]
            limit, used = (int(file.read_text("ascii")) for file in group)
            free = min(free, limit - used)
        return free
    return 0


def _ends(
    source: StreamBlocks,
    plan: AttentionPlan,
    ends_met: Sequence[str],
    fixed: Mapping[Stream, np.ndarray],
) -> dict[str, End]:
    """Return the ends of a block by name; chance keeps the ``fixed`` dimensions."""
    circuits = [circuit for circuit, names in CIRCUIT_ENDS.items() if set(names) & set(ends_met)]
    with ThreadPoolExecutor(usable_cores()) as pool:
        sides: dict[str, StackSide] = {}
        sides_of_circuits = pool.map(partial(source.sides, plan), circuits)
        for circuit, sides_of_circuit in zip(circuits, sides_of_circuits, strict=True):
            sides |= zip(CIRCUIT_ENDS[circuit], sides_of_circuit, strict=True)
        sides_met = [sides[end] for end in ends_met]
        streams = [(source.stream(plan, end), sides[end].width) for end in ends_met]
        ends = pool.map(chaining.with_chance, sides_met, map(fixed.get, streams))
        return dict(zip(ends_met, ends, strict=True))


class _Reader(NamedTuple):
    """A reading block: kind, plan, end, and the numbers of the writing blocks that feed it."""

    kind: str
    plan: AttentionPlan
    end: End
    writers: list[int]


def _chained(
    writers: Sequence[tuple[AttentionPlan, End]], readers: Sequence[_Reader]
) -> Iterator[_BlockPair]:
    """Yield the reading blocks with the writing blocks that feed them."""
    pairs: list[tuple[int, int]] = []
    for m, reader in enumerate(readers):
        pairs += [(n, m) for n in reader.writers]
    scored = chaining.chain_all(
        [end for _, end in writers], [reader.end for reader in readers], pairs, usable_cores()
    )
    for (n, m), scores in zip(pairs, scored, strict=True):
        yield _BlockPair(readers[m].kind, writers[n][0], readers[m].plan, scores)


class _BlockPair(NamedTuple):
    """Two blocks, and the compositions of their heads."""

    kind: str
    writer: AttentionPlan
    reader: AttentionPlan
    scores: chaining.Chained

    @property
    def places(self) -> dict[str, Any]:
        """Columns with one value for all rows of the pair."""
        reader_statuses = set(self.reader.statuses)
        writer_statuses = set(self.writer.statuses) - {"partial"}
        if self.kind == "v":
            reader_statuses -= {"partial"}  # only forms of queries and keys can be partial
        return {
            "kind": self.kind,
            "writer_stack": self.writer.stack,
            "writer_attention": self.writer.kind,
            "writer_layer": self.writer.layer,
            "reader_stack": self.reader.stack,
            "reader_attention": self.reader.kind,
            "reader_layer": self.reader.layer,
            "status": joined_statuses(reader_statuses | writer_statuses),
            "status_if_zero": joined_statuses(reader_statuses | {"degenerate"}),
        }

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """Columns of the single rows: every writing head with every reading head."""
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


def _frame(pairs: Sequence[_BlockPair]) -> pl.DataFrame:
    """Return all rows, with all columns of the schema."""
    columns_of_pairs = [pair.numbers for pair in pairs]
    columns = {}
    for name in columns_of_pairs[0]:
        columns[name] = np.concatenate([numbers[name] for numbers in columns_of_pairs])
    rows_of_pairs = [pair.scores.score.size for pair in pairs]
    pair_of_row = np.repeat(np.arange(len(pairs)), rows_of_pairs)
    places_of_pairs = pl.DataFrame([pair.places for pair in pairs])
    places = places_of_pairs[pair_of_row]
    frame = pl.concat([places, pl.DataFrame(columns)], how="horizontal")
    frame = frame.with_columns(pl.col(pl.Float64).fill_nan(None))
    is_zero = pl.col("score").is_null()
    status = pl.when(is_zero).then("status_if_zero").otherwise("status")
    return frame.with_columns(status.alias("status"))
