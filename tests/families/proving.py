"""Tiny random models, and the proof that they attend with the forms read from their files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.verification import verify

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Architecture:
    """A tiny random model of one kind.

    Attributes
    ----------
    name, model
        The test's, and the class in `transformers`.
    config
        Arguments of its configuration.
    blocks
        Number of applications of attention blocks that have to agree.
    hub
        Keys of config.json as older files on the hub have them; None takes a key out.
    """

    name: str
    model: str
    config: dict[str, Any]
    blocks: int = 2
    hub: dict[str, Any] = field(default_factory=dict)


def build(architecture: Architecture) -> Any:
    """The random model: attention far from uniform, biases and gains all different."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model_class = getattr(transformers, architecture.model)
    model = model_class(model_class.config_class(**architecture.config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(2 * noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.3 * noise)
    return model


def save(architecture: Architecture, folder: Path) -> Any:
    """Write the model as `save_pretrained` does, with the hub's older keys, and return it."""
    model = build(architecture)
    model.save_pretrained(folder)
    edit_config(folder, architecture.hub)
    return model


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({k: v for k, v in config.items() if v is not None or k not in changes})
    )


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "model.safetensors"
    safetensors.save_file(edit(safetensors.load_file(path)), path, {"format": "pt"})


def prove_attention(architecture: Architecture, folder: Path) -> None:
    """The saved model attends with the forms that are read from its files."""
    verification = verify(folder)
    assert len(verification.blocks) == architecture.blocks
    # Far from uniform in every block: other weights would be noticed.
    assert min(block.contrast for block in verification.blocks) > 0.02
    assert verification.difference < 1e-12
    assert verification.ok


def prove_live(architecture: Architecture, model: Any, folder: Path) -> None:
    """The live module holds the same blocks as the files."""
    # Loaded anew: its configuration has today's keys even where the file has older ones.
    stored, live = open_checkpoint(folder), open_checkpoint(type(model).from_pretrained(folder))
    pairs = list(zip(attention_plans(stored), attention_plans(live), strict=True))
    assert sum(a.applications for a, _ in pairs) == architecture.blocks
    for a, b in pairs:
        assert (a.rule, a.layer, a.scale, a.window) == (b.rule, b.layer, b.scale, b.window)
        assert (a.rotary is None) == (b.rotary is None)
        if a.rotary and b.rotary:
            np.testing.assert_array_equal(a.rotary.frequencies, b.rotary.frequencies)
        one, other = load_attention(stored, a), load_attention(live, b)
        for name in ("query_weight", "key_weight", "query_bias", "key_bias"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def prove_values_and_outputs(model: Any, folder: Path) -> None:
    """The value's and the output's tensors are there, one for each block."""
    for checkpoint in (open_checkpoint(folder), open_checkpoint(model)):
        rules = [plan.rule for plan in attention_plans(checkpoint)]
        for rule in rules:
            expected = [f"{name}.weight" for name in (*rule.value, *rule.output)]
            for name in [*expected, *rule.value_bias]:
                pattern = re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(name))
                found = [t for t in checkpoint.tensors() if re.fullmatch(rf"(.+\.)?{pattern}", t)]
                assert len(found) == rules.count(rule), name
