"""Progress of a training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingProgress:
    """Finished steps, and the latest losses, speed and score; unknown values are None."""

    steps_done: int  #: Updates so far.
    steps: int  #: Updates of the whole run.
    loss: float | None  #: Of training since the previous entry, in nats per predicted token.
    held_out_loss: float | None  #: In nats per predicted token.
    tokens_per_second: float | None  #: Between the latest two entries.
    held_out_is_new: bool  #: Whether the held-out loss was computed at this step.
    symmetry: float | None = None  #: Median over layers of the symmetry of W_qk.
