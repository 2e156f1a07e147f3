"""The monitor as a callback of `transformers.Trainer`.

Imported only when somebody asks for `ScoreCallback`, for it needs `transformers`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wqk._typing import FilePath
from wqk.errors import MissingPackage
from wqk.monitor.monitor import Monitor
from wqk.monitor.tracking import Tracker

try:
    from transformers.trainer_callback import CallbackHandler, TrainerCallback
except ImportError:
    raise MissingPackage("ScoreCallback needs transformers: pip install 'wqk[train]'") from None

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from transformers import TrainerControl, TrainerState, TrainingArguments


class ScoreCallback(TrainerCallback):  # type: ignore[misc]
    """Score the model that a `transformers.Trainer` trains, and log the medians where it logs.

    Looks before the first step, at its cadence, and after the last step. Rows go to
    ``scores.jsonl`` and ``updates.jsonl`` in the folder, medians to the Trainer's log history and
    to everything that it reports to. A resumed run goes on in the same files.

    Parameters
    ----------
    folder
        The run's folder, such as the Trainer's ``output_dir``.
    every, steps, gamma, heads, family, heads_per_layer, name
        As for `Monitor`; steps are optimizer steps, the Trainer's ``global_step``.

    Examples
    --------
    >>> import wqk
    >>> callback = wqk.ScoreCallback("run", every=200)

    and then ``trainer.add_callback(callback)``.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        every: int | None = 1000,
        steps: Iterable[int] | Literal["log"] = (),
        gamma: float = 2.0,
        heads: bool = True,
        family: FilePath | None = None,
        heads_per_layer: int | None = None,
        name: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._settings: dict[str, Any] = {
            "every": every,
            "steps": steps,
            "gamma": gamma,
            "heads": heads,
            "family": family,
            "heads_per_layer": heads_per_layer,
            "name": name,
        }
        self.monitor: Monitor | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a model that cannot be followed as early as a callback is told of it."""
        Tracker(kwargs["model"], "", self._settings["family"], self._settings["heads_per_layer"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the queries and keys, and look at the weights that training starts from."""
        self.monitor = Monitor(kwargs["model"], self.folder / "scores.jsonl", **self._settings)
        self._log(self.monitor(state.global_step), args, state, control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look if it is time to, and after the last step."""
        assert self.monitor is not None
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        look = self.monitor.look if is_last else self.monitor
        self._log(look(state.global_step), args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look after the last step of a run that ended early; the loggers have closed by now.

        Where the Trainer has put the best model in place of the last, there is no last one to see.
        """
        assert self.monitor is not None
        if not args.load_best_model_at_end:
            self.monitor.look(state.global_step)

    def _log(
        self,
        medians: dict[str, float],
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        """Hand medians to all that the Trainer reports to, as `Trainer.log` does."""
        if not medians:
            return
        state.log_history.append({**medians, "step": state.global_step})
        handler = _calling_handler()
        if handler is not None:
            wanted = control.should_log  # which the handler takes for answered
            handler.on_log(args, state, control, medians)
            control.should_log = wanted


def _calling_handler() -> CallbackHandler | None:
    """The Trainer's handler that is calling: callbacks are given no other way to its loggers."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            return caller
        frame = frame.f_back
    return None
