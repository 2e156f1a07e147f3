"""How far a training run is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingProgress:
    """Steps, and the latest losses (in nats per token) and speed, as far as known."""

    steps_done: int
    steps: int
    loss: float | None
    held_out_loss: float | None
    tokens_per_second: float | None
    held_out_is_new: bool
