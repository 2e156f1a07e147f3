"""Negative controls: a family with a mistake in it is refused, or does not agree with the model."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tests.families.architectures import NAMED
from tests.families.proving import edit_tensors, save

import wqk
from wqk.attention.block import Block
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError
from wqk.families import find_family
from wqk.forms import BilinearForm
from wqk.live.verification import verify

ROWS = tomllib.loads(Path(__file__).with_name("wrong.toml").read_text(encoding="utf-8"))


def wrong_family(name: str, changes: dict[str, str], folder: Path) -> Path:
    """Save a model, and its family with a mistake."""
    save(NAMED[name], folder)
    family = find_family(open_checkpoint(folder))
    shipped = resources.files("wqk.families") / "data" / f"{family.name}.toml"
    text = shipped.read_text(encoding="utf-8")
    if "added" in changes:
        changes = {"[[attention]]": f"[[attention]]\n{changes['added']}"}
    assert all(right in text for right in changes)
    # All at once, so that two names may be swapped.
    rights = re.compile("|".join(map(re.escape, changes)))
    path = folder / "wrong.toml"
    path.write_text(rights.sub(lambda right: changes[right[0]], text), encoding="utf-8")
    return path


@pytest.mark.parametrize(("row", "changes"), ROWS["wrong"].items(), ids=ROWS["wrong"])
def test_a_wrong_family_fails(row: str, changes: dict[str, str], tmp_path: Path) -> None:
    verification = verify(
        wqk.open(tmp_path, family=wrong_family(row.partition(": ")[0], changes, tmp_path))
    )
    assert not verification.ok
    assert verification.difference > 1e-3


@pytest.mark.parametrize("row", ROWS["unfit"], ids=lambda row: f"{row['model']}: {row['what']}")
def test_a_family_that_does_not_fit_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    family = wrong_family(row["model"], row["changes"], tmp_path)
    with pytest.raises(CheckpointError, match=row["said"]):
        verify(wqk.open(tmp_path, family=family))


def test_pairing_heads_with_the_wrong_key_heads_fails(tmp_path, monkeypatch):
    save(NAMED["llama"], tmp_path)
    assert verify(tmp_path).ok

    def paired_modulo(attention: Block) -> BilinearForm:
        query_side, key_side = attention.query_key
        heads, width, d_query = query_side.weight.shape
        groups = attention.key_head_count
        query = query_side.weight.reshape(heads // groups, groups, width, d_query)
        key = key_side.weight[:, None].swapaxes(-1, -2)
        return BilinearForm(query.swapaxes(0, 1).swapaxes(-1, -2), key)

    monkeypatch.setattr(Block, "groups", property(paired_modulo))
    verification = verify(tmp_path)
    assert not verification.ok
    assert verification.difference > 1e-3


def test_uniform_attention_proves_nothing(tmp_path: Path) -> None:
    save(NAMED["bert"], tmp_path)
    edit_tensors(tmp_path, lambda t: {n: v * (".self.query." not in n) for n, v in t.items()})
    verification = verify(tmp_path)
    assert verification.difference < 1e-12
    assert not verification.ok
