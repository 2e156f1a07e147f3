"""Progress of a training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingProgress:
    """Steps done, and the latest losses, speed and score, each None until it is known.

    Attributes
    ----------
    steps_done, steps
        Updates so far, and of the whole run.
    loss, held_out_loss
        In nats per predicted token: of training since the previous entry, and of held-out blocks.
    tokens_per_second
        Between the latest two entries.
    held_out_is_new
        Whether the held-out loss was computed at this step.
    symmetry
        Median over layers of the symmetry of W_qk.
    """

    steps_done: int
    steps: int
    loss: float | None
    held_out_loss: float | None
    tokens_per_second: float | None
    held_out_is_new: bool
    symmetry: float | None = None
