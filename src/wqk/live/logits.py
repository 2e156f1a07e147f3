"""Attention logits of each head while a model runs.

A logit is the scaled product of a query and a key, with biases, norms and rotary positions, before
a soft cap, additive position terms and the mask. Only pairs that the mask allows have logits.
Entropy and the largest weight refer to the whole attention. If only the input of a softmax can be
observed, this input, the score, is used instead of the logit, and the block is listed in
`Logits.scores`.

Axes: B sequences, H query heads, I queries, J keys.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._console import Result, counted, json_value, number
from wqk._typing import FilePath
from wqk.checkpoints.modules import unwrapped
from wqk.errors import CheckpointError, UnknownFamily, called_as, first_line, required_by
from wqk.families import AttentionPlan, Place
from wqk.live.addresses import Address, BlockIndex, network_of, opened_live, title_of
from wqk.live.calls import ObservedCall
from wqk.live.observing import Observer
from wqk.live.running import run_batch
from wqk.live.statistics import BlockLogits, HeadStatistics
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    import polars as pl

# Sequences of a batch that a monitor measures, in full.
SEQUENCES = 4

#: Columns that measured logits add to a score table.
COLUMNS = BlockLogits._fields


@dataclass(frozen=True, repr=False)
class Logits(Result, synonyms={"max": "largest", "max_logit": "largest"}):
    """Logits and attention of blocks in one or several passes, and reasons for missing blocks."""

    #: By stack, kind and layer; for blocks without a family, by the path of the module.
    blocks: Mapping[Place | str, BlockLogits]
    missing: Mapping[Place | str, str] = field(default_factory=dict)
    #: Blocks with observed scores, but without logits.
    scores: Collection[Place | str] = ()
    #: Whether dropout was on, so that another pass on the same batch has other logits.
    has_dropout: bool = False

    @property
    def sentence(self) -> str:
        """The largest logit and its head; if negative, also the logit of largest magnitude."""
        if not self.blocks:
            return "no logits were measured"

        name, head = _place_of_largest({key: block.max_logit for key, block in self.blocks.items()})
        largest = self.blocks[name].max_logit[head]
        clauses = [f"largest {self._titled(largest, name, head)}"]
        sizes = {key: np.abs(block.extreme_logit) for key, block in self.blocks.items()}
        name, head = _place_of_largest(sizes)
        extreme = self.blocks[name].extreme_logit[head]
        if extreme < 0:
            clauses.append(f"of largest magnitude, the {self._titled(extreme, name, head)}")
        return "; ".join([*clauses, counted(len(self.blocks), "block")])

    def _titled(self, logit: float, name: Place | str, head: int) -> str:
        """Return a logit with the names of its block and head."""
        quantity = "score" if name in self.scores else "logit"
        return f"{quantity} {logit:.4g} ({title_of(name)}, head {head})"

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each layer, with the head None, followed by rows for its heads."""
        for name, block in self.blocks.items():
            address = _address_columns(name)
            yield {**address, "head": None, **block.of_layer()}
            for head in range(len(block.max_logit)):
                yield {**address, "head": head, **block.of_head(head)}

    @property
    def frame(self) -> pl.DataFrame:
        """One row for each head, and one row for each layer with a null head."""
        import polars as pl

        places = {"stack": pl.String, "kind": pl.String, "layer": pl.Int64, "head": pl.Int64}
        types = places | dict.fromkeys(COLUMNS, pl.Float64) | {"module": pl.String}
        rows = []
        for row in self._rows():
            rows.append({name: row[name] for name in types})
        return pl.DataFrame(rows, schema=types, orient="row")

    def to_dict(self) -> dict[str, Any]:
        """Return the rows, and the reasons for missing blocks, as plain values."""
        missing = {str(name): why for name, why in self.missing.items()}
        rows = [json_value(row) for row in self._rows()]
        scores = [str(name) for name in self.scores]
        return {
            "sentence": self.sentence,
            "rows": rows,
            "missing": missing,
            "scores": scores,
            "has_dropout": self.has_dropout,
        }

    def _shown(self, width: int) -> Iterator[Any]:
        yield self.sentence
        sheet = Sheet.of("attention", "layer", "head", *COLUMNS, text=["attention"])
        for row in self._rows():
            head = "all" if row["head"] is None else str(row["head"])
            numbers = (number(row[name], 4) for name in COLUMNS)
            attention, layer = row["module"], "–"
            if attention is None:
                attention, layer = f"{row['stack']} {row['kind']}", str(row["layer"])
            sheet.add(attention, layer, head, *numbers)
        if self.blocks:
            yield sheet
        yield from (f"{name}: scores, no logits were observed" for name in self.scores)
        yield from (f"{name}: {why}" for name, why in self.missing.items())
        if self.has_dropout:
            yield (
                "dropout was on, in training mode: another pass has other logits; model.eval() "
                "switches it off"
            )

    @property
    def largest(self) -> float:
        """The largest logit of all; NaN if any logit is NaN, or without logits."""
        if not self.blocks:
            return math.nan
        return float(np.max([np.max(block.max_logit) for block in self.blocks.values()]))


def _place_of_largest(numbers: Mapping[Place | str, np.ndarray]) -> tuple[Place | str, int]:
    """Return the block and the head of the largest number; numbers are (H,) for each block."""
    name = max(numbers, key=lambda block: float(np.max(numbers[block])))
    return name, int(np.argmax(numbers[name]))


def _address_columns(name: Place | str) -> dict[str, Any]:
    """Return the columns that identify a block: stack, kind and layer, or the module's path."""
    if isinstance(name, str):
        return {"stack": None, "kind": None, "layer": None, "module": name}
    stack, kind, layer = name
    return {"stack": stack, "kind": kind, "layer": layer, "module": None}


@called_as("wqk.logits(model, batch)")
def logits(
    model: Any,
    batch: Any = None,
    *,
    sequences: int | None = None,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
) -> Logits:
    """Measure the attention logits of one pass: largest, spread and entropy of each head.

    Parameters
    ----------
    model
        Any `nn.Module`, in its present mode (training or evaluation); or a `Model` opened from a
        module. Blocks of a known family are named by stack, kind and layer, other blocks by the
        path of their module.
    batch
        Arguments of the model: by name, in order, or a single argument.
    sequences
        Number of sequences to measure at the beginning of the batch; None for all.
    family, heads_per_layer
        Options of opening the model, as for `wqk.open`.

    Returns
    -------
    Logits
        Statistics of each block, for each head.

    Raises
    ------
    CheckpointError
        The model cannot be run on this batch, or computes no attention.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> measured = wqk.logits(transformers.GPT2Model(config), torch.arange(12)[None])
    >>> measured.blocks["decoder", "self", 1].max_logit.shape
    (4,)
    """
    require_batch(batch, "logits")
    with required_by("measuring logits"):
        import torch
    network = network_of(model, "run")
    opened = opened_or_module(model, family, heads_per_layer)
    meter = LogitMeter(opened, sequences, training=False)
    meter.start()
    try:
        with torch.no_grad():
            run_batch(network, batch)
    finally:
        meter.stop()
    measured = meter.logits
    if not measured.blocks and not measured.missing:
        raise no_attention(network)
    silent = {plan.place for plan in meter.plans} - measured.blocks.keys() - measured.missing.keys()
    missing = dict(measured.missing)
    missing.update(dict.fromkeys(sorted(silent), "it did not run"))
    return Logits(measured.blocks, missing, measured.scores, has_dropout(network))


def has_dropout(network: Any) -> bool:
    """Return whether a module has an active dropout layer.

    Dropout without a layer, directly in code, is not detected.
    """
    from torch.nn.modules.dropout import _DropoutNd

    return any(
        isinstance(module, _DropoutNd) and module.training and module.p > 0
        for module in network.modules()
    )


def require_batch(batch: Any, function: str) -> None:
    """Raise `CheckpointError` if a function of `wqk` was called without a batch."""
    if batch is None:
        raise CheckpointError(
            f"the batch is missing; expected what the model is called with: "
            f"wqk.{function}(model, batch); for any input, wqk.scan(ref, measures=['ceiling']) has "
            "the largest logits"
        )


def require_sequences(sequences: int | None) -> None:
    """Raise `CheckpointError` if less than one sequence of a batch is requested."""
    if sequences is not None and sequences < 1:
        raise CheckpointError(f"sequences must be 1 or more, got {sequences}")


def no_attention(network: Any) -> CheckpointError:
    """Return the error about a pass without observed attention."""
    return CheckpointError(
        f"{type(network).__name__}: no attention was observed; expected a softmax or a fused "
        "kernel of attention in the pass; pass a model that attends"
    )


def opened_or_module(model: Any, family: FilePath | None, heads_per_layer: int | None) -> Any:
    """Return a `Model` of a module; the module, if no family describes it."""
    try:
        return opened_live(model, family, heads_per_layer)
    except (UnknownFamily, CheckpointError):
        if family is not None or heads_per_layer is not None:
            raise
        return model


class LogitMeter:
    """Measures the logits of a model's training passes on request.

    `start` begins a new measurement. Failed passes, passes in evaluation mode, and passes that
    activation checkpointing repeats do not count. Code of `torch.compile` runs uncompiled during
    measured passes. Other passes have no extra cost.

    Parameters
    ----------
    model
        The `nn.Module`, plain or wrapped, or a `Model` opened from one.
    sequences
        Number of sequences to measure completely at the beginning of a batch; None for all.
    training
        Whether only passes in training mode count.
    passes
        Number of passes to measure; None to continue until `stop`.

    Examples
    --------
    >>> import torch, transformers
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2Model(config).train()
    >>> meter = LogitMeter(model)
    >>> meter.start()
    >>> _ = model(torch.arange(12)[None])
    >>> meter.logits.blocks["decoder", "self", 1].max_logit.shape
    (4,)
    """

    def __init__(
        self,
        model: Any,
        sequences: int | None = SEQUENCES,
        training: bool = True,
        passes: int | None = 1,
    ) -> None:
        require_sequences(sequences)
        network = network_of(model, "run")
        opened = opened_or_module(model, None, None)
        self.plans: tuple[AttentionPlan, ...] = ()
        if opened is not network:
            self.plans = tuple(plan for plan in opened.plans if plan.has_softmax)
        self._sequences, self._training = sequences, training
        self._most_passes = passes
        self._model = weakref.ref(unwrapped(network))  # a meter keeps no model alive
        self._index = BlockIndex(network, self.plans)
        self._observer: Observer | None = None
        self._measured = Measurement()  # of finished passes
        self._current = Measurement()  # of the current pass
        self._passes = 0

    @property
    def is_measuring(self) -> bool:
        """Return whether passes are being measured."""
        return self._observer is not None and self._observer.is_observing

    @property
    def has_measured(self) -> bool:
        """Return whether a pass has been measured since the last `start`."""
        return self._passes > 0

    @property
    def logits(self) -> Logits:
        """Logits that were measured since the last `start`."""
        return self._measured.result()

    @property
    def measured(self) -> Measurement:
        """The statistics on the model's device."""
        return self._measured

    def start(self) -> None:
        """Measure the following passes, and discard earlier measurements."""
        self.reset()
        model = self._model()
        if self.is_measuring or model is None:
            return
        meter = weakref.ref(self)  # an observer does not keep its meter alive

        def observed(call: ObservedCall) -> None:
            live_meter = meter()
            if live_meter is not None:
                live_meter._observed(call)

        def ended(path: str, complete: bool) -> None:
            live_meter = meter()
            if live_meter is not None:
                live_meter._ended(path, complete)

        self._observer = Observer(model, observed, ended)
        self._observer.start()

    def reset(self) -> None:
        """Discard all measurements."""
        self._measured, self._current = Measurement(), Measurement()
        self._passes = 0

    def stop(self) -> None:
        """Stop measuring."""
        if self._observer is not None:
            self._observer.stop()
        self._observer = None

    def __del__(self) -> None:
        try:
            self.stop()
        # At the end of the process modules are gone; a meter that was never made has no observer.
        except (AttributeError, ImportError, TypeError):
            return

    def _observed(self, call: ObservedCall) -> None:
        """Record a call, under each name of the block."""
        if self._training and not call.modules[0].module.training:
            return
        for address in self._index.addresses(call):
            if address.name in self._current.missing:
                continue
            try:
                self._current.add(address, call, self._sequences)
            except Exception as error:  # a measurement must not stop a run of weeks
                self._current.missing[address.name] = f"{type(error).__name__}: {first_line(error)}"

    def _ended(self, path: str, complete: bool) -> None:
        """Keep the statistics of a pass of a module, unless the pass has failed.

        The meter stops after the requested number of passes, but only if each block has run.
        """
        current, self._current = self._current, Measurement()
        if not complete or not current:
            return
        self._measured.merge(current)
        self._passes += 1
        is_whole = path == "" or {plan.place for plan in self.plans} <= self._measured.names
        if self._most_passes is not None and self._passes >= self._most_passes and is_whole:
            self.stop()


class Measurement:
    """Statistics of blocks by name, and reasons for missing blocks.

    Attributes
    ----------
    statistics
        Statistics of each measured block.
    missing
        Reasons why blocks could not be measured.
    scores
        Blocks whose scores were observed, but not their logits.
    """

    def __init__(self) -> None:
        self.statistics: dict[Place | str, HeadStatistics] = {}
        self.missing: dict[Place | str, str] = {}
        self.scores: set[Place | str] = set()

    def __bool__(self) -> bool:
        return bool(self.statistics or self.missing)

    @property
    def names(self) -> set[Place | str]:
        """All blocks, measured or missing."""
        return {*self.statistics, *self.missing}

    def add(self, address: Address, call: ObservedCall, sequences: int | None = None) -> None:
        """Add a call under the name of its block: the first ``sequences``, or all sequences.

        Raises
        ------
        CheckpointError
            Earlier calls of the block had another number of heads.
        """
        arranged = call.by_head(address.heads)
        if arranged is None:
            # Scores of other heads, such as the heads that choose keys in sparse attention.
            return
        if sequences is not None:
            arranged = arranged.first(sequences)
        statistics = self.statistics.get(address.name)
        if statistics is None:
            statistics = HeadStatistics(arranged.shape[1], arranged.device)
            self.statistics[address.name] = statistics
        if statistics.heads != arranged.shape[1]:
            raise CheckpointError(
                f"its calls have {statistics.heads} heads and {arranged.shape[1]} heads"
            )
        if not arranged.has_logits:
            self.scores.add(address.name)
        statistics.add(arranged, address.is_self)

    def merge(self, other: Measurement) -> None:
        """Add the measurement of another pass."""
        for name, statistics in other.statistics.items():
            if name in self.statistics:
                self.statistics[name].merge(statistics)
            else:
                self.statistics[name] = statistics
        self.missing |= other.missing
        self.scores |= other.scores

    def result(self) -> Logits:
        """Return the statistics on the host."""
        blocks = {name: statistics.result() for name, statistics in self.statistics.items()}
        missing = {name: why for name, why in self.missing.items() if name not in blocks}
        return Logits(blocks, missing, frozenset(self.scores))
