"""One changed entry is no scaled row: a cause with a repair reproduces the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.sameness.mending import mend
from tests.sameness.plants import right

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.sameness.mismatches import Kind

DOWN = "model.layers.1.mlp.down_proj.weight"
TENSORS = (
    DOWN,
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
)
# Shares of the norm of the entry's column.
SIZES = np.geomspace(1e-3, 1, 10)


def models(name: str, changed: np.ndarray) -> tuple[StateDict, StateDict]:
    tensors, config, _ = right("LLaMA")
    return StateDict(tensors, config, "reference"), StateDict(
        {**tensors, name: changed}, config, "candidate"
    )


def with_one_entry(weight: np.ndarray, size: float, dice: np.random.Generator) -> np.ndarray:
    """A copy with one entry changed by a share of the norm of its column."""
    changed = weight.copy()
    index = tuple(int(dice.integers(length)) for length in weight.shape)
    column = weight[..., index[-1]] if weight.ndim > 1 else weight
    changed[index] += size * np.linalg.norm(column)
    return changed


@pytest.mark.parametrize("up_to", [[], ["neurons"]], ids=["strict", "neurons"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_repair_of_one_changed_entry_reproduces_the_reference(
    name: str, up_to: list[str]
) -> None:
    tensors, config, _ = right("LLaMA")
    dice = np.random.default_rng(len(name))
    for size in SIZES:
        changed = with_one_entry(tensors[name], float(size), dice)
        reference, candidate = models(name, changed)
        comparison = wqk.same(reference, candidate, everything=True, up_to=up_to)
        assert not comparison.same
        if comparison.repair:
            mended = {**tensors, name: changed}
            mend(comparison.repair, mended, tensors, dict(config))
            repaired = StateDict(mended, config, "repaired")
            assert wqk.same(reference, repaired, everything=True, up_to=up_to).same, size


def test_a_changed_entry_is_named_by_its_place() -> None:
    tensors, _, _ = right("LLaMA")
    changed = tensors[DOWN].copy()
    # As much of its column as the factor of a column needs to be fitted above the rounding.
    changed[5, 3] += 0.01 * np.linalg.norm(changed[:, 3])
    comparison = wqk.same(*models(DOWN, changed), everything=True)
    assert comparison.causes == ()
    size = f"{changed.size:,}"
    assert f"1 of {size} entries differs, at row 5, column 3" in comparison.sentence
    changed[0, 0] += 1
    text = wqk.same(*models(DOWN, changed), everything=True).sentence
    assert f"2 of {size} entries differ, at row 0, column 0 and at row 5, column 3" in text


def test_a_changed_entry_of_a_vector_does_not_scale_the_vector() -> None:
    """One large entry has nearly the norm of its vector."""
    name = "model.norm.weight"
    tensors, config, _ = right("LLaMA")
    gains = np.full_like(tensors[name], 0.01)
    gains[::2] = 0.02
    gains[1] = 100
    changed = gains.copy()
    changed[1] *= 1.1
    pair = [StateDict({**tensors, name: value}, config, "m") for value in (gains, changed)]
    comparison = wqk.same(*pair, everything=True)
    assert comparison.causes == ()
    assert "entries differs, at index 1, by 10 %" in comparison.sentence


def test_a_difference_besides_a_cause_is_named_and_not_repaired() -> None:
    tensors, _, _ = right("LLaMA")
    changed = 2 * tensors[DOWN]
    changed[5, 3] += 0.01 * np.abs(changed).max()
    (cause,) = wqk.same(*models(DOWN, changed), everything=True).causes
    assert cause.mismatch.verdict is Kind.SCALED
    expected = f"scaled by 2; besides, 1 of {changed.size:,} entries differs, at row 5, column 3"
    assert expected in cause.reason
    assert not cause.repair


def save(folder: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    import json

    folder.mkdir()
    save_file(
        {name: torch.tensor(value) for name, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_nothing_is_written_for_a_changed_entry(tmp_path: Path) -> None:
    tensors, config, _ = right("LLaMA")
    original = save(tmp_path / "original", tensors, config)
    changed = tensors[DOWN].copy()
    changed[5, 3] += 0.01 * np.linalg.norm(changed[:, 3])
    copy = save(tmp_path / "copy", {**tensors, DOWN: changed}, config)
    command = [sys.executable, "-m", "wqk", "same", original, copy, "--all", "--repair"]
    done = subprocess.run(
        [*command, tmp_path / "mended"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no repair is known" in " ".join(done.stderr.split())
    assert not (tmp_path / "mended").exists()


def test_a_copy_farther_from_the_reference_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a printed repair were wrong, no folder would remain."""
    from wqk.sameness import repaired_files

    tensors, config, _ = right("LLaMA")
    original = save(tmp_path / "original", tensors, config)
    copy = save(tmp_path / "copy", {**tensors, DOWN: 1.5 * tensors[DOWN]}, config)
    run = repaired_files.run

    def run_wrongly(code: str, *arguments: object) -> None:
        run(code.replace("w / 1.5", "w * 1.5"), *arguments)

    monkeypatch.setattr(repaired_files, "run", run_wrongly)
    with pytest.raises(CheckpointError, match="farther from the reference"):
        wqk.same(original, copy, everything=True, repair=tmp_path / "mended")
    assert not (tmp_path / "mended").exists()
