"""Proofs for models of pictures and sounds, whose attention may be in windows or PyTorch's own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.families import find_family
from wqk.verification.inputs import inputs_of
from wqk.verification.recording import heads_apart, listen
from wqk.verification.running import _double_precision, _load_model

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from wqk.families import InputNorm


def prove_variety(folder: Path) -> None:
    """No two heads are alike, and biases are not zero: mistaking one for another is noticed."""
    checkpoint = open_checkpoint(folder)
    for plan in attention_plans(checkpoint):
        attention = load_attention(checkpoint, plan)
        for weight in (attention.query_weight, attention.key_weight):
            assert len({head.tobytes() for head in weight}) == len(weight)
        for bias in (attention.query_bias, attention.key_bias):
            assert bias is None or np.abs(bias).max() > 0.01
        assert plan.value is not None, plan.rule.stack
        assert plan.output is not None, plan.rule.stack


def prove_norms(folder: Path) -> int:
    """Every token that is projected comes from the named norm; how many norms were met.

    What went in is taken from the record, so that it may lie in windows.
    """
    checkpoint = open_checkpoint(folder)
    given: dict[str, list[np.ndarray]] = {}

    def keep(module: Any, args: Any, output: Any, name: str) -> None:
        given.setdefault(name, []).append(output.numpy())

    with _double_precision(), torch.no_grad(), heads_apart():
        model = _load_model(folder, checkpoint, find_family(checkpoint), {})
        plans = attention_plans(open_checkpoint(model))
        records = listen(model, plans, plans)
        for norm in {n for plan in plans for n in (plan.query_input, plan.key_input) if n}:
            module = model.get_submodule(_module_of(norm))
            assert norm.kind == ("layer" if isinstance(module, torch.nn.LayerNorm) else "rms")
            module.register_forward_hook(partial(keep, name=_module_of(norm)))
        model(**inputs_of(model, None, 24, 0), output_attentions=True)
    met = 0
    for plan, record in zip(plans, records, strict=True):
        sides = (plan.query_input, plan.key_input)
        for norm, inputs in zip(sides, zip(*(a[:2] for a in record), strict=True), strict=True):
            if norm is not None:
                met += 1
                assert _farthest(inputs, given[_module_of(norm)]) < 1e-9, norm.gain.name
    return met


def _module_of(norm: InputNorm) -> str:
    return norm.gain.name.rpartition(".")[0]


def _farthest(inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
    """Largest distance of an input token from the nearest token that the norm gave."""
    tokens, known = (
        np.concatenate([x.reshape(-1, x.shape[-1]) for x in arrays]) for arrays in (inputs, outputs)
    )
    # Windows at a picture's edge are filled up with zeros.
    tokens = tokens[np.abs(tokens).max(axis=-1) > 0]
    return float(np.abs(tokens[:, None] - known).max(axis=-1).min(axis=-1).max())
