"""Scores of a model during training, written to a file: for custom training loops."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wqk._typing import FilePath
from wqk.monitor.cadence import cadence
from wqk.monitor.journal import Journal
from wqk.monitor.scoring import medians, score_look, score_update
from wqk.monitor.tracking import Tracker, is_first_process

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from os import PathLike

    from wqk.monitor.tracking import Snapshot
    from wqk.scanning.tables import ScoreTable

LOG = logging.getLogger("wqk.monitor")


class Monitor:
    """Score a model's query-key forms while it trains, and append them to a file.

    Call it with the number of optimizer steps done so far. At the first call and at the given
    steps it scores every layer and head as `wqk.scan` does, and the change of each form since the
    previous scores. It never stops a training run: after construction, errors are logged as
    warnings.

    Parameters
    ----------
    model
        The `nn.Module` that is trained, plain or wrapped by `torch.compile`,
        `DistributedDataParallel` or `fully_shard`. In a distributed run every process makes a
        monitor and calls it at the same steps; the first one writes.
    path
        A ``.jsonl`` file, such as ``run/scores.jsonl``; the changes go to ``updates.jsonl`` next
        to it (``NAME-updates.jsonl`` for any other ``NAME.jsonl``).
    every, steps
        When to look: at multiples of ``every`` (None for no multiples), and at these steps, or at
        1, 2, 4, 8, ... with ``"log"``.
    gamma, heads, family, heads_per_layer
        As for `wqk.scan`.
    name
        What the rows call the run, in the column ``checkpoint``; the folder's name by default.

    Raises
    ------
    UnknownFamily
        The model belongs to no known family, and none can be guessed.
    CheckpointError
        Its queries and keys cannot be read.
    RunError
        They are sharded in a way that hides them, or the file holds scores of another kind.
    OutputError
        The file cannot be written.

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

    def __init__(
        self,
        model: Any,
        path: str | PathLike[str],
        *,
        every: int | None = 1000,
        steps: Iterable[int] | Literal["log"] = (),
        gamma: float = 2.0,
        heads: bool = True,
        family: FilePath | None = None,
        heads_per_layer: int | None = None,
        name: str | None = None,
    ) -> None:
        path = Path(path)
        self._cadence = cadence(every, steps)
        self._gamma, self._heads = gamma, heads
        self._tracker = Tracker(model, name or path.resolve().parent.name, family, heads_per_layer)
        self._scores, self._updates = Journal(path, gamma), Journal(_beside(path), gamma)
        if is_first_process():
            self._scores.check()
            self._updates.check()
        self._step: int | None = None
        self._has_begun = False
        self._before: Snapshot | None = None
        self._warned: set[str] = set()
        self.latest: ScoreTable | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """Compute scores if they are due after ``step`` optimizer steps.

        Returns
        -------
        dict
            As returned by `look`; empty if no scores were due.
        """
        is_first = self._step is None or step < self._step
        return self.look(step) if is_first or self._cadence.is_due(step) else {}

    def look(self, step: int) -> dict[str, float]:
        """Compute scores now, for instance after the last step, unless this step has been scored.

        In a resumed run, the first call removes the rows of later steps.

        Returns
        -------
        dict
            Medians over layers, to be logged: ``wqk/symmetry_median`` and so on, and
            ``wqk/update_symmetry_median`` and so on for the change. Empty in all processes of a
            distributed run but the first.
        """
        if step == self._step:
            return {}
        if self._step is not None and step < self._step:
            self._has_begun, self._before = False, None
        self._step = step
        try:
            snapshot = self._tracker.snapshot(step)
            return {} if snapshot is None else self._score(snapshot, step)
        except Exception as error:  # a run of weeks is worth more than its gauge
            self._warn(type(error).__name__, f"step {step} has no scores: {error}")
            return {}

    def __repr__(self) -> str:
        """The latest scores, as the command shows a scan."""
        steps = f"wqk.Monitor({str(self._scores.path)!r}), step {self._step}"
        return steps if self.latest is None else f"{steps}\n{self.latest}"

    @property
    def table(self) -> ScoreTable:
        """All scores so far, including those of earlier sessions of the run."""
        return self._scores.read()

    @property
    def updates(self) -> ScoreTable:
        """The scores of all changes between consecutive scored steps; ``step`` is the later one."""
        return self._updates.read()

    def _score(self, snapshot: Snapshot, step: int) -> dict[str, float]:
        """Score a snapshot and its change, and write both."""
        plans, before = self._tracker.plans, self._before
        table = score_look(snapshot, plans, self._gamma, self._heads)
        found = medians(table)
        if not self._has_begun:
            self._begin(step, table.metadata)
        if before is not None:
            update = score_update(before, snapshot, plans, self._gamma, self._heads)
            self._updates.append(update)
            found |= medians(update, "update_")
        self._scores.append(table)
        self._before, self.latest = snapshot, table
        if snapshot.non_finite:
            names = sorted(part.name for part in snapshot.non_finite)
            self._warn(
                "non-finite",
                f"at step {step}, {len(names)} query and key tensors have NaN or infinite entries, "
                f"{names[0]} for one: the loss has probably diverged; their rows have the status "
                "'non-finite'",
            )
        return {f"wqk/{name}": value for name, value in found.items()}

    def _begin(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Truncate the files to this step, whose scores are appended next."""
        lost = self._scores.begin(step - 1, metadata)
        self._updates.begin(step, {**metadata, "form": "update"})
        self._has_begun = True
        if lost:
            LOG.warning(
                "wqk.Monitor: %s: %d rows of an earlier run are gone; this one begins at step %d",
                self._scores.path,
                lost,
                step,
            )

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            LOG.warning("wqk.Monitor: %s", message)


def _beside(path: Path) -> Path:
    """The file for the scores of updates."""
    name = "updates.jsonl" if path.name == "scores.jsonl" else f"{path.stem}-updates.jsonl"
    return path.with_name(name)
