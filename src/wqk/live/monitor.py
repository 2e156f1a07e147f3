"""Scores of a model during training, written to a file: for custom training loops."""

from __future__ import annotations

import logging
import math
import operator
import shutil
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, NamedTuple

import polars as pl

from wqk._console import counted
from wqk._files import (
    append_lines,
    json_line,
    read_lines,
    replace_last_lines,
    unwritable,
    write_atomically,
)
from wqk._typing import FilePath
from wqk.errors import Advising, OutputError, RunError, called_as
from wqk.live.addresses import opened_live
from wqk.live.logits import SEQUENCES, LogitMeter, Logits
from wqk.live.scoring import (
    Snapshot,
    Tracker,
    is_first_process,
    logit_summary,
    medians,
    score_look,
    score_update,
    with_logits,
)
from wqk.model import Model
from wqk.scanning.scan import mover
from wqk.tables.columns import select_measures
from wqk.tables.growing import NotebookDisplay, RecentMedians, is_notebook, last_steps
from wqk.tables.run import drop_after, read_table
from wqk.tables.schema import records
from wqk.tables.score_table import ScoreTable

LOG = logging.getLogger("wqk.live")


def journals(path: Path) -> tuple[Path, Path]:
    """Return the files for scores, ``path``, and for the scores of updates, next to ``path``."""
    if path.suffix != ".jsonl":
        raise OutputError(
            f"{path}: a monitor appends to .jsonl; got the ending {path.suffix!r}", path=path
        )
    updates = f"{path.stem}-updates.jsonl"
    if path.name == "scores.jsonl":
        updates = "updates.jsonl"
    return path, path.with_name(updates)


def check_journal(path: Path, gamma: float) -> None:
    """Create a file if absent, and check that rows with this gamma can be appended."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise unwritable(path, error) from None
    lines = read_lines(path)
    if not lines:
        return
    written_gamma = lines[0].get("metadata", {}).get("gamma")
    if written_gamma != gamma:
        raise RunError(
            f"{path}: holds scores with gamma {written_gamma}, but these have gamma {gamma}; "
            "use the same gamma, or choose another file"
        )


def check_model(path: Path, model: Model) -> None:
    """Raise `RunError` if a file contains scores of a model with other blocks or sizes."""
    columns = ("stack", "kind", "layer", "heads", "key_heads", "rank")
    written = set()
    for row in read_lines(path)[1:]:
        if row.get("head") is None:
            written.add(tuple(row.get(name) for name in columns))
    of_model = {
        (*plan.place, plan.query.heads, plan.key.heads, plan.key.heads * plan.key.head_width)
        for plan in model.plans
    }
    foreign = written - of_model
    if foreign:
        *place, heads, key_heads, rank = next(iter(foreign))
        raise RunError(
            f"{path}: holds scores of another model, with {heads} heads over {key_heads} key heads "
            f"and forms of rank {rank} in {' '.join(map(str, place))}; choose another file"
        )


def begin_journal(path: Path, keep: int, metadata: Mapping[str, Any]) -> int:
    """Remove the rows of steps after ``keep``, and an incomplete last line.

    Returns
    -------
    int
        Number of removed rows of an earlier run, if no row remains and the file begins again; else
        0.
    """
    old_rows = max(0, len(read_lines(path)) - 1)  # the first line is the metadata
    drop_after(path, keep)
    if read_lines(path)[1:]:
        return 0
    write_atomically(path, json_line({"metadata": dict(metadata)}))
    return old_rows


class LookCost(NamedTuple):
    """Cost of computing the scores of one step."""

    step: int  # optimizer steps done
    seconds: float  # waiting time of training
    share: float  # share of the time since the previous scores; NaN for the first


class WaitingLook(NamedTuple):
    """Scores of a look, waiting for logits."""

    table: ScoreTable
    begin: int  # position in the file of scores at which the look's rows begin


def step_of(value: Any) -> int:
    """Return a number of optimizer steps; `RunError` for other values."""
    try:
        step = operator.index(value)
    except TypeError:
        step = -1
    if step < 0:
        raise RunError(f"step: expected the number of optimizer steps done so far, got {value!r}")
    return step


class Cadence:
    """Multiples of ``every`` and single ``steps``, or 1, 2, 4, 8, ... if these are ``"log"``."""

    def __init__(self, every: int | None = None, steps: Iterable[int] | str = ()) -> None:
        if every is not None and not (isinstance(every, int) and every >= 1):
            raise RunError(f"a monitor scores every N steps with N at least 1, got every={every}")
        is_text = isinstance(steps, str)
        if steps != "log" and (is_text or not isinstance(steps, Iterable)):
            raise RunError(f"steps must be numbers, or 'log' for 1, 2, 4, 8, ...; got {steps!r}")
        self._every = every
        self._has_powers = is_text  # the only text is "log"
        self._steps = frozenset(() if is_text else map(step_of, steps))

    def is_due(self, step: int) -> bool:
        """Return whether scores are due after this many optimizer steps.

        Examples
        --------
        >>> cadence = Cadence(every=10, steps="log")
        >>> [step for step in range(24) if cadence.is_due(step)]
        [0, 1, 2, 4, 8, 10, 16, 20]
        """
        is_multiple = self._every is not None and step % self._every == 0
        is_power = self._has_powers and step > 0 and step & (step - 1) == 0
        return is_multiple or is_power or step in self._steps


def _live_display() -> Callable[[ScoreTable], None]:
    """Return a function that displays a growing table."""

    def show(table: ScoreTable) -> None:
        print(RecentMedians(table), flush=True)

    return NotebookDisplay() if is_notebook() else show


# Names that are tried on a monitor, with the names to use instead.
SYNONYMS = dict.fromkeys(("rows", "to_frame"), "table.frame") | {
    "plot": "table.plot()",
    "report": "wqk.report(monitor.table, path)",
    "summary": "latest",
    **dict.fromkeys(("save", "write"), "table.write(path)"),
    "score": "monitor(step)",
}


class LoudHead(NamedTuple):
    """A head whose largest logit exceeds the limit of an alarm; ``head`` is None for a layer."""

    stack: str
    kind: str
    layer: int
    head: int | None
    logit: float


class LogitAlarm(NamedTuple):
    """An alarm of a monitor about large logits.

    Attributes
    ----------
    step, limit
        Number of finished optimizer steps, and the limit.
    heads
        Heads with larger logits, the largest logit first.
    """

    step: int
    limit: float
    heads: tuple[LoudHead, ...]

    def __str__(self) -> str:
        loudest = self.heads[0]
        place = f"layer {loudest.layer} of the {loudest.stack}"
        if loudest.head is not None:
            place = f"head {loudest.head} of {place}"
        return (
            f"at step {self.step}, {counted(len(self.heads), 'head')} had logits beyond "
            f"{self.limit:g}; the largest is {loudest.logit:.1f}, in {place}"
        )


class Monitor(Advising, synonyms=SYNONYMS):
    """Score a model's query-key forms during training, and append the scores to a file.

    Call the monitor with the number of finished optimizer steps. At the first call and at the
    chosen steps, the monitor scores every layer and head as `wqk.scan` does, and the change of each
    form since the previous scores. A monitor never stops a training run: after construction, errors
    are logged as warnings.

    Parameters
    ----------
    model
        The trained `nn.Module`, plain or wrapped by `torch.compile`, `DistributedDataParallel` or
        `fully_shard`; or a `Model` opened from the module, to choose its family:
        ``wqk.Monitor(wqk.open(model, family=...), ...)``. In a distributed run every process makes
        a monitor and calls it at the same steps; the first process writes.
    path
        A ``.jsonl`` file, such as ``run/scores.jsonl``; the changes go to ``updates.jsonl`` next to
        it (``NAME-updates.jsonl`` for any other ``NAME.jsonl``). None for no file, if numbers are
        logged elsewhere: the tables are then deleted with the monitor.
    every
        Scores are computed at multiples of this number of steps; None for no multiples.
    steps
        Further steps with scores; ``"log"`` for 1, 2, 4, 8, ...
    gamma, heads
        As for `wqk.scan`.
    name
        The run's name in the column ``checkpoint``; the folder's name by default.
    device
        Device that computes the scores, such as ``"cuda"``. On the CPU, the default, the scores are
        equal to `wqk.scan` to the last digit.
    measures
        Further measures: ``"spectral_norm"``, ``"spectrum"``, ``"ceiling"``, ``"bands"``; see
        `wqk.tables.columns`. The first two are also computed for the changes.
    per_layer
        Whether to return the numbers of every layer for logging, besides the medians.
    logits
        Whether to also measure attention logits, in the training pass after each look, which uses
        the weights of the look. Measured are, for every head, the largest logit, the logits'
        standard deviation, the mean entropy of the attention, and the mean of each token's largest
        weight (`wqk.live.logits`). The rows are completed at the next call of the monitor after
        this pass; the call returns the new numbers to log.
    sequences
        Number of sequences of the pass's batch to measure completely.
    alarm
        Limit of the largest attention logit. If a head exceeds this limit, ``on_alarm`` is called.
        Implies ``logits=True``.
    on_alarm
        Function of a `LogitAlarm`; by default the alarm is logged as a warning. An error that the
        function raises ends the run.
    live
        Whether to print the medians over layers after each look, as a growing table.
    family, heads_per_layer
        Options of opening the model, as for `wqk.open`.

    Attributes
    ----------
    latest
        The latest scores.
    costs
        Cost of each look.

    Raises
    ------
    UnknownFamily
        The model's family is unknown, and cannot be guessed.
    CheckpointError
        Queries and keys of the model cannot be read.
    RunError
        Queries and keys are sharded in an unsupported way, or the file contains scores of another
        kind.
    OutputError
        The file cannot be written.
    MissingPackage
        PyTorch cannot use the device.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> from transformers import BertConfig, BertModel
    >>> import wqk
    >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
    >>> monitor = wqk.Monitor(model, mkdtemp() + "/scores.jsonl", every=2)
    >>> for step in range(5):
    ...     looked = monitor(step)
    ...     _ = model.encoder.layer[0].attention.self.query.weight.data.mul_(1.5)
    >>> monitor.table.layers.frame.select("step", "layer").rows()
    [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]
    >>> monitor.updates.layers.frame.select("step", "layer", "status").rows()[:2]
    [(2, 0, 'ok'), (2, 1, 'degenerate')]
    """

    @called_as("wqk.Monitor(model, path)")
    def __init__(
        self,
        model: Any,
        path: str | PathLike[str] | None = None,
        *,
        every: int | None = 1000,
        steps: Iterable[int] | Literal["log"] = (),
        gamma: float = 2.0,
        heads: bool = True,
        name: str | None = None,
        device: str | None = None,
        measures: Collection[str] = (),
        per_layer: bool = False,
        logits: bool = False,
        sequences: int = SEQUENCES,
        alarm: float | None = None,
        on_alarm: Callable[[LogitAlarm], None] | None = None,
        live: bool = False,
        family: FilePath | None = None,
        heads_per_layer: int | None = None,
    ) -> None:
        if alarm is not None and not (isinstance(alarm, int | float) and alarm > 0):
            raise RunError(f"alarm: expected a limit of logits, more than 0; got {alarm!r}")
        if on_alarm is not None and alarm is None:
            raise RunError("on_alarm: expected a limit; give alarm=100, for example")
        self._alarm, self._on_alarm = alarm, on_alarm
        logits = logits or alarm is not None
        if family is not None or heads_per_layer is not None:
            model = opened_live(model, family, heads_per_layer)
        if path is None:
            name = name or type(getattr(model, "ref", model)).__name__
            path = Path(mkdtemp(prefix="wqk-")) / "scores.jsonl"
            weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)
        path = Path(path)
        select_measures(measures)
        self._cadence = Cadence(every, steps)
        self._options: dict[str, Any] = {  # of `score_look` and `score_update`
            "gamma": gamma,
            "heads": heads,
            "measures": measures,
            "move": mover(device) if device else None,
        }
        self._per_layer = per_layer
        self._tracker = Tracker(
            model, name or path.resolve().parent.name, with_norms="ceiling" in measures
        )
        self._scores, self._updates = journals(path)
        if is_first_process():
            check_journal(self._scores, gamma)
            check_journal(self._updates, gamma)
            check_model(self._scores, self._tracker.model)
        self._meter = LogitMeter(model, sequences) if logits else None
        self._waiting: WaitingLook | None = None
        self._awaits_pass = False
        self._logits: Logits | None = None
        self._unlogged: dict[str, float] = {}  # numbers for the next call
        self._step: int | None = None  # of the latest look
        self._has_begun = False  # whether the files were cut to the first step of this run
        self._previous: Snapshot | None = None
        self._warned: set[str] = set()  # kinds of logged warnings
        self._end_of_look = float("nan")  # time of the end of the latest look
        self._show = _live_display() if live else None
        self._recent: ScoreTable | None = None  # layers of the last steps, for the live table
        self.latest: ScoreTable | None = None
        self.costs: list[LookCost] = []

    @called_as("monitor(step), with the number of optimizer steps done so far")
    def __call__(self, step: int) -> dict[str, float]:
        """Compute scores if they are due after ``step`` optimizer steps.

        Returns
        -------
        dict
            As returned by `look`; empty if no scores were due.
        """
        step = step_of(step)
        is_first = self._step is None or step < self._step
        if is_first or self._cadence.is_due(step):
            return self.look(step)
        return {} if step == self._step else self._take_unlogged()

    def look(self, step: int) -> dict[str, float]:
        """Compute scores now, for example after the last step, unless this step was already scored.

        In a resumed run, the first call removes the rows of later steps.

        Returns
        -------
        dict
            Medians over layers, for logging: ``wqk/symmetry_median`` and so on, and
            ``wqk/update_symmetry_median`` and so on for the change. In a distributed run, empty in
            all processes except the first.
        """
        step = step_of(step)
        if step == self._step:
            return {}
        start = time.perf_counter()
        if self._step is not None and step < self._step:
            self._has_begun, self._previous = False, None
        logged = self._take_unlogged()
        self._step = step
        try:
            snapshot = self._tracker.snapshot(step)
            if snapshot is not None:
                logged |= self._score(snapshot, step)
                self._show_latest()
            if self._meter is not None:
                self._meter.start()
                self._awaits_pass = True
        except Exception as error:  # scores must not stop a run of weeks
            self._warn(type(error).__name__, f"step {step} has no scores: {error}")
        now = time.perf_counter()
        seconds = now - start
        self.costs.append(LookCost(step, seconds, share=seconds / (now - self._end_of_look)))
        self._end_of_look = now
        return logged

    @property
    def logits(self) -> Logits | None:
        """The latest measured logits of all blocks; None before the first measurement."""
        self._complete()
        return self._logits

    def take_logits(self) -> Logits | None:
        """Return `logits` once, and None until the next measurement, for `wqk.clip_`."""
        taken = self.logits
        self._logits = None
        return taken

    def __repr__(self) -> str:
        """Return the latest scores, printed like a scan, and their cost."""
        heading = f"wqk.Monitor({str(self._scores)!r}), step {self._step}"
        if self.costs:
            cost = self.costs[-1]
            heading += f"; training waited {cost.seconds:.3f} s"
            if not math.isnan(cost.share):
                heading += f", {cost.share:.2%} of the time since the previous scores"
        return heading if self.latest is None else f"{heading}\n{self.latest}"

    @property
    def table(self) -> ScoreTable:
        """All scores so far, including scores of earlier sessions of the run."""
        return read_table(self._scores)

    @property
    def updates(self) -> ScoreTable:
        """Scores of all changes between consecutive scored steps; ``step`` is the later step."""
        return read_table(self._updates)

    def _show_latest(self) -> None:
        """Add the latest scores to the live table, if requested."""
        if self._show is None or self.latest is None:
            return
        try:
            if self._recent is None:
                self._recent = last_steps(self.table.layers)
            else:
                self._recent = last_steps(self._recent.join(self.latest.layers))
            self._show(self._recent)
        except Exception as error:  # as in `look`
            self._warn("live", f"the live table cannot be shown: {error}")

    def close(self) -> None:
        """Stop measuring, after a run."""
        if self._meter is not None:
            self._meter.stop()

    def _score(self, snapshot: Snapshot, step: int) -> dict[str, float]:
        """Score a snapshot and its change, write both, and return the medians to log."""
        model, previous = self._tracker.model, self._previous
        table = score_look(model, snapshot, **self._options)
        logged = medians(table, layers=self._per_layer)
        if not self._has_begun:
            self._begin(step, table.metadata)
        if previous is not None:
            update = score_update(model, previous, snapshot, **self._options)
            append_lines(self._updates, *records(update.frame))
            logged |= medians(update, prefix="update_", layers=self._per_layer)
        if self._meter is not None:
            table = with_logits(table, Logits({}))  # empty columns, until a pass was measured
        begin = append_lines(self._scores, *records(table.frame))
        self._previous, self.latest = snapshot, table
        self._waiting = None if self._meter is None else WaitingLook(table, begin)
        if snapshot.non_finite:
            self._warn_of_non_finite(snapshot, step)
        return {f"wqk/{name}": value for name, value in logged.items()}

    def _warn_of_non_finite(self, snapshot: Snapshot, step: int) -> None:
        """Warn about tensors of a snapshot with entries that are not finite."""
        names = sorted(part.name for part in snapshot.non_finite)
        self._warn(
            "non-finite",
            f"at step {step}, {len(names)} query and key tensors have NaN or infinite entries, "
            f"{names[0]} for one: the loss has probably diverged; their rows have the status "
            "'non-finite'",
        )

    def _take_unlogged(self) -> dict[str, float]:
        """Return the numbers to log from the logits measured since the last call."""
        self._complete()
        numbers, self._unlogged = self._unlogged, {}
        return numbers

    def _complete(self) -> None:
        """Write the logits of the latest look after a measured pass, and raise the alarm."""
        meter = self._meter
        if meter is None or not self._awaits_pass or not meter.has_measured:
            return
        self._awaits_pass = False
        meter.stop()
        try:
            self._logits = meter.logits
            for place, reason in self._logits.missing.items():
                self._warn(f"logits {place}", f"no logits of {place}: {reason}")
            waiting, self._waiting = self._waiting, None
            if waiting is None:
                return
            table = with_logits(waiting.table, self._logits)
            replace_last_lines(self._scores, waiting.begin, *records(table.frame))
            self.latest = table
            logged = logit_summary(table, self._per_layer)
            self._unlogged = {f"wqk/{name}": value for name, value in logged.items()}
        except Exception as error:  # as in `look`
            self._warn(type(error).__name__, f"step {self._step} has no logits: {error}")
            return
        if self._alarm is not None:
            self._raise_alarm(table, self._alarm)

    def _raise_alarm(self, table: ScoreTable, limit: float) -> None:
        """Call the function of the alarm if the logits of a look exceed the limit."""
        rows = table.heads if len(table.heads) else table.layers
        beyond = rows.frame.filter(pl.col("max_logit") > limit).sort("max_logit", descending=True)
        if beyond.is_empty():
            return
        columns = ("stack", "kind", "layer", "head", "max_logit")
        heads = tuple(LoudHead(*row) for row in beyond.select(columns).iter_rows())
        alarm = LogitAlarm(int(beyond["step"][0]), limit, heads)
        if self._on_alarm is None:
            LOG.warning("wqk.Monitor: %s", alarm)
        else:
            self._on_alarm(alarm)

    def _begin(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Remove rows of later steps from the files, and scores of this step, which come next."""
        self._recent = None
        lost_rows = begin_journal(self._scores, step - 1, metadata)
        begin_journal(self._updates, step, {**metadata, "form": "update"})
        self._has_begun = True
        if lost_rows:
            LOG.warning(
                "wqk.Monitor: %s: %d rows of an earlier run are gone; this one begins at step %d",
                self._scores,
                lost_rows,
                step,
            )

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning, once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            LOG.warning("wqk.Monitor: %s", message)
