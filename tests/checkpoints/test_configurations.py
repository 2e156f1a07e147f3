"""Other libraries' configurations with any value replaced by nonsense: read, or refused in a line.

What honest ones say is proven in `test_formats` and `tests/families`.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.checkpoints.attacking import NONSENSE
from tests.limits import refused

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, WqkError

# Of more digits than Python prints; archives can hold it, JSON cannot.
UNPRINTABLE = 10**5000


class Example(NamedTuple):
    """A model of one format."""

    weights: str
    config: dict[str, Any]
    shapes: Mapping[str, Sequence[int]]
    file: str = ""
    key: str = ""

    def write(self, folder: Path, config: Any) -> None:
        path = folder / self.weights
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.ones(shape) for name, shape in self.shapes.items()}
        if self.file:
            (folder / self.file).write_text(json.dumps(config))
            if not path.exists():
                torch.save(tensors, path)
        else:
            held = argparse.Namespace(**config) if self.key == "args" else config
            torch.save({"model": tensors, self.key: held}, path)

    def plans(self, folder: Path, config: Any) -> None:
        """Everything that is read from the configuration is read."""
        self.write(folder, config)
        wqk.open(open_checkpoint(folder))


ROWS = Path(__file__).with_name("examples.toml").read_text(encoding="utf-8")
EXAMPLES = {name: Example(**row) for name, row in tomllib.loads(ROWS).items()}


def changed(config: dict[str, Any], values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The configuration with each of its entries, also nested ones, left out or replaced."""
    for key, old in config.items():
        remaining = {name: value for name, value in config.items() if name != key}
        yield remaining
        yield from (remaining | {key: value} for value in values)
        if isinstance(old, dict):
            yield from (remaining | {key: new} for new in changed(old, values))


@pytest.mark.parametrize("name", EXAMPLES)
def test_nonsense_is_read_or_refused(tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    example.plans(tmp_path, example.config)
    values = NONSENSE if example.file else (*NONSENSE, UNPRINTABLE, [UNPRINTABLE])
    nonsense = changed(example.config, values)
    assert {refused(example.plans, tmp_path, config) for config in nonsense} == {True, False}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"dim": -16}, "dim must be a positive whole number, got -16"),
        ("llama", {"dim": 10**400, "head_dim": None}, "dim must be a positive whole number"),
        ("llama", {"n_heads": "2"}, "n_heads must be a positive whole number, got '2'"),
        ("litgpt", {"rope_adjustments": [8]}, r"rope_adjustments must be .*, got \[8\]"),
        (
            "litgpt",
            {"sliding_window_indices": [1, 0], "rope_indices": [0, 1]},
            "LitGPT's rope_indices of this model is not read",
        ),
        ("litgpt condensed", {"rope_condense_ratio": "two"}, "rotary scaling 'linear' .* 'two'"),
        ("timm", {"architecture": None}, "lacks num_heads"),
        ("open_clip", {"model_cfg": {"vision_cfg": []}}, "lacks heads"),
        (
            "open_clip",
            {"model_cfg": {"vision_cfg": {"width": 16, "head_width": "8"}}},
            "head_width must be a positive whole number, got '8'",
        ),
    ],
)
def test_errors_name_the_key_and_its_value(tmp_path, name, changes, message):
    example = EXAMPLES[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        example.plans(tmp_path, example.config | changes)
    assert str(tmp_path) in str(caught.value)


def test_a_projection_without_rows_is_refused(tmp_path: Path) -> None:
    example = EXAMPLES["llama"]
    scalar = example._replace(shapes=dict.fromkeys(example.shapes, ()))
    with pytest.raises(CheckpointError, match="have 0 rows"):
        scalar.plans(tmp_path, example.config)


@pytest.mark.parametrize("file", ["{}", '{"model_type": "modded-nanogpt"}'])
def test_a_training_script_that_is_missing_is_not_needed(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(file)
    weights = {f"h.0.attn.c_{side}.weight": torch.ones(16, 16) for side in "qk"}
    torch.save({"code": 7, "model": weights}, tmp_path / "state.pt")
    with pytest.raises(WqkError):
        wqk.open(open_checkpoint(tmp_path))
