"""Models as they are before training: random weights, and norms that change no scale."""

from __future__ import annotations

from typing import Any

import torch
from tests.families.architectures import Architecture
from tests.families.proving import build

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.families import AttentionPlan


def build_untrained(architecture: Architecture) -> tuple[Any, list[AttentionPlan]]:
    """A random model whose query and key norms are as before training, and its self-attention."""
    model = untrained(build(architecture))
    return model, [p for p in wqk.open(open_checkpoint(model)).plans if p.kind == "self"]


def untrained(model: Any) -> Any:
    """A random model whose query and key norms, and learned factors, are as before training."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for plan in wqk.open(open_checkpoint(model)).plans:
            for norm in filter(None, (plan.query.norm, plan.key.norm)):
                for part in norm.gain:
                    parameters[part.name].fill_(1 - norm.offset)
                for part in norm.bias:
                    parameters[part.name].zero_()
            if plan.query.temperature:
                parameters[plan.query.temperature.stored.name].fill_(2.0)
    return model
