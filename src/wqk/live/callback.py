"""The monitor as a callback of `transformers.Trainer`.

Imported only when `ScoreCallback` is used, since it needs `transformers`.
"""

from __future__ import annotations

import inspect
import logging
import math
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._synonyms import meant_keywords
from wqk._typing import FilePath
from wqk.errors import Advising, MissingPackage, called_as, install, keyword_advice
from wqk.live.clipping import Clipper
from wqk.live.monitor import Monitor
from wqk.live.scoring import Tracker
from wqk.model import open as open_model
from wqk.tables.run import CLIPS

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError:
    raise MissingPackage(
        f"ScoreCallback needs transformers: {install('train')}", extra="train"
    ) from None

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

LOG = logging.getLogger("wqk.live")
# The monitor, which has the scores, exists once training has begun.
CALLBACK_SYNONYMS = {
    **dict.fromkeys(("frame", "history", "scores", "table"), "monitor.table"),
    "logits": "monitor.logits",
    "updates": "monitor.updates",
}


class ScoreCallback(TrainerCallback, Advising, synonyms=CALLBACK_SYNONYMS):  # type: ignore[misc]
    """Score the model that a `transformers.Trainer` trains, and log the medians to its loggers.

    Scores are computed before the first step, at the chosen steps, and after the last step. Rows go
    to ``scores.jsonl`` and ``updates.jsonl`` in the folder. A resumed run appends to the same
    files. With `attach`, medians also go to the Trainer's log history and loggers; a callback that
    is only added has no access to them.

    Parameters
    ----------
    folder
        The run's folder, such as the Trainer's ``output_dir``.
    clip
        Limit of the largest attention logit: `wqk.clip_` rescales the heads that exceed the limit.
        Steps and heads are written to ``clips.jsonl``. None for no clipping.
    clip_every
        Number of steps from one clipping to the next; the logits of the last step are used. With
        `torch.compile`, steps with measured logits run uncompiled: choose 10 or more.
    family, heads_per_layer
        Options of opening the Trainer's model, as for `wqk.open`.
    every, steps, per_layer, alarm, ...
        Further parameters of `Monitor`: ``per_layer=True`` also logs the values of every layer, as
        ``wqk/layer_03/symmetry``. Steps are optimizer steps, the Trainer's ``global_step``.

    Examples
    --------
    >>> import wqk
    >>> callback = wqk.ScoreCallback("run", every=200)

    and then ``callback.attach(trainer)``.
    """

    @called_as("wqk.ScoreCallback(folder, every=200)")
    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        clip: float | None = None,
        clip_every: int = 1,
        family: FilePath | None = None,
        heads_per_layer: int | None = None,
        **options: Any,
    ) -> None:
        parameters = inspect.signature(Monitor).parameters
        options = meant_keywords(parameters, options)
        for name in options:
            if name not in parameters:
                raise TypeError(
                    f"ScoreCallback(): got an unexpected keyword argument {name!r}"
                    f"{keyword_advice(name, parameters)}; its options are those of wqk.Monitor"
                )
        inspect.signature(Monitor).bind(None, **options)  # a TypeError for an option given twice
        self.folder = Path(folder)
        self._clip, self._clip_every = clip, clip_every
        self._clipper: Clipper | None = None
        self._clipped = 0  # heads, since the last entry of the log
        self._family, self._heads_per_layer = family, heads_per_layer
        self._options = options
        self.monitor: Monitor | None = None
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> ScoreCallback:
        """Add the callback to a Trainer, and log through the Trainer.

        Raises
        ------
        UnknownFamily, CheckpointError, RunError
            The Trainer's model cannot be monitored.
        """
        self._require_model(trainer.model)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise an error early for a model that cannot be monitored."""
        self._require_model(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the queries and keys, and score the initial weights."""
        self.monitor = Monitor(
            self._opened(kwargs["model"]), self.folder / "scores.jsonl", **self._options
        )
        if self._trainer is None:
            LOG.warning(
                "wqk.ScoreCallback: neither the Trainer's log nor a logger gets the medians: call "
                "attach(trainer)"
            )
        if self._clip is not None:
            self._clipper = self._clipper_of(kwargs["model"])
            self._clipper.begin(state.global_step)
        self._log(self.monitor(state.global_step), control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Clip, and compute scores if they are due or after the last step."""
        assert self.monitor is not None
        if self._clipper is not None:
            self._clipped += len(self._clipper(state.global_step))
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        look = self.monitor.look if is_last else self.monitor
        self._log(look(state.global_step), control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compute scores after the last step of a run that ended early, without logging.

        If the Trainer has replaced the last model by the best model, no scores are computed.
        """
        assert self.monitor is not None
        if not args.load_best_model_at_end:
            self.monitor.look(state.global_step)
        self.monitor.close()
        if self._clipper is not None:
            self._clipper.close()

    def _log(self, medians: dict[str, float], control: TrainerControl) -> None:
        """Send medians, and the cost of the latest scores, to all loggers of the Trainer."""
        if medians and self._trainer is not None:
            assert self.monitor is not None
            share = self.monitor.costs[-1].share
            if not math.isnan(share):
                medians["wqk/look_share"] = share
            if self._clip is not None:
                medians["wqk/clipped_heads"] = float(self._clipped)
            self._clipped = 0
            should_log = control.should_log  # the Trainer resets this after logging
            self._trainer.log(medians)
            control.should_log = should_log

    def _require_model(self, model: Any) -> None:
        """Raise the errors of `Monitor` and `Clipper` for a model that they cannot use."""
        Tracker(self._opened(model), "")
        if self._clip is not None:
            self._clipper_of(model)

    def _clipper_of(self, model: Any) -> Clipper:
        """Return the clipper of a model, which writes to ``clips.jsonl``."""
        assert self._clip is not None
        return Clipper(self._opened(model), self._clip, self.folder / CLIPS, self._clip_every)

    def _opened(self, model: Any) -> Any:
        """Return the model, or a `Model` with the chosen family and number of heads."""
        if self._family is None and self._heads_per_layer is None:
            return model
        return open_model(model, family=self._family, heads_per_layer=self._heads_per_layer)
