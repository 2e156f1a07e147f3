"""The files of the page on families describe the modules that the page is about."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import small

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.families.layouts import sized

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "family.md"
FILES = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
FUSED, SECTIONS, FEWER_KEY_HEADS = (
    next(file for file in FILES if name in file)
    for name in ("layout", '"sections"', '"fewer-key-heads"')
)
HEADS, GROUPS, WIDTH = 6, 3, 24


class Attention(torch.nn.Module):
    """Causal attention whose queries, keys and values are rows of one tensor, in some order."""

    def __init__(self, roles: str, key_heads: int) -> None:
        super().__init__()
        self.roles = roles
        key_width = WIDTH * key_heads // HEADS
        self.widths = [key_width if role in "kv" else WIDTH for role in roles]
        self.heads = {"q": HEADS, "k": key_heads, "v": key_heads}
        self.qkv = torch.nn.Linear(WIDTH, sum(self.widths))

    def forward(self, x: Any) -> Any:
        by_role = dict(zip(self.roles, self.qkv(x).split(self.widths, dim=-1), strict=True))
        q, k, v = (
            by_role[role]
            .unflatten(-1, (self.heads[role], -1))
            .repeat_interleave(HEADS // self.heads[role], dim=-2)
            .transpose(1, 2)
            for role in "qkv"
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Net(torch.nn.Module):
    """Two such layers, with a configuration."""

    def __init__(self, roles: str, key_heads: int = HEADS) -> None:
        super().__init__()
        settings = {"model_type": "net", "n_layers": 2, "n_heads": HEADS, "n_others": 4}
        settings |= {"n_groups": key_heads, "width": WIDTH}
        self.config = SimpleNamespace(to_dict=lambda: settings)
        self.layers = torch.nn.ModuleList(Attention(roles, key_heads) for _ in range(2))
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x


def verified(roles: str, file: str, folder: Path, key_heads: int = HEADS) -> wqk.Verification:
    """The verification of a module with a file of the page."""
    path = folder / "family.toml"
    path.write_text(file)
    batch = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    return wqk.verify(wqk.open(Net(roles, key_heads), family=path), batch)


@pytest.mark.parametrize(
    ("roles", "file", "verdict"),
    [
        ("qkv", FUSED, "right"),
        ("kqvg", SECTIONS, "right"),
        ("kqv", FUSED, "WRONG"),
        ("qkvg", SECTIONS, "WRONG"),
    ],
)
def test_the_files_are_right_for_their_order_alone(
    roles: str, file: str, verdict: str, tmp_path: Path
) -> None:
    verification = verified(roles, file, tmp_path)
    assert verification.verdict.lower() == verdict.lower()
    assert "query heads" not in verification.result


@pytest.mark.parametrize(("roles", "verdict"), [("kvq", "right"), ("qkv", "WRONG")])
def test_the_file_for_fewer_key_heads_is_right_for_its_order_alone(
    roles: str, verdict: str, tmp_path: Path
) -> None:
    verification = verified(roles, FEWER_KEY_HEADS, tmp_path, GROUPS)
    assert verification.verdict.lower() == verdict.lower()


@pytest.mark.parametrize(
    ("key_heads", "reason"),
    [
        # A share of 16 outputs is no 6 heads.
        (3, r"'\*'\) of 48 outputs for k \(3 heads\), v \(3 heads\), q \(6 heads\)"),
        # 40 outputs are no three shares.
        (2, r"in place of each '\*', write the head width as a factor: 4, if all"),
    ],
)
def test_equal_shares_do_not_serve_fewer_key_heads(
    key_heads: int, reason: str, tmp_path: Path
) -> None:
    file = FEWER_KEY_HEADS.replace("width // n_heads", "*")
    with pytest.raises(CheckpointError, match=reason):
        verified("kvq", file, tmp_path, key_heads)


def test_equal_shares_for_queries_and_keys_of_different_widths_are_refused() -> None:
    """A share of 6 outputs divides into 3 heads and into 6 heads, of different widths."""
    with pytest.raises(CheckpointError, match="do not give heads of one width; in place of"):
        sized("qkv", 12, [("k", 3, 0), ("q", 6, 0)], 1)
    assert sized("qkv", 12, [("v", 3, 0), ("q", 6, 0)], 1)["v"].head_width == 2


def test_a_given_number_of_heads_counts_in_all_parts_of_a_fused_tensor(tmp_path: Path) -> None:
    """A module without a configuration lacked the number that parts of a fused tensor name."""
    path = tmp_path / "family.toml"
    path.write_text(SECTIONS)
    net = Net("kqvg")
    net.config = SimpleNamespace(to_dict=lambda: {"n_layers": 2})
    batch = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    opened = wqk.open(net, family=path, heads_per_layer=HEADS)
    assert wqk.verify(opened, batch).verdict == "right"
    with pytest.raises(CheckpointError, match="lacks n_heads"):
        wqk.open(net, family=path)


def test_the_file_of_rotary_positions_is_that_of_a_renamed_llama(tmp_path: Path) -> None:
    """Scores are equal at every distance; in the other order they are not."""
    (file,) = (file for file in FILES if "rotary" in file)
    path = tmp_path / "family.toml"
    path.write_text(file)
    llama = small.llama(rope_theta=500.0)
    renamed = {
        name.replace("model.", "").replace("self_attn.", "").replace("_proj", ""): value
        for name, value in llama._arrays.items()
    }
    config = {"n_layers": 2, "n_heads": 4, "n_groups": 2, "rope_base": 500.0}
    mine = StateDict(renamed, config, "mine")
    assert wqk.same(llama, mine, other_family=path).same
    for changed in (file.replace("half", "interleaved"), file.replace("rope_base", "n_heads")):
        path.write_text(changed)
        assert not wqk.same(llama, mine, other_family=path).same


def test_another_number_of_heads_is_named(tmp_path: Path) -> None:
    verification = verified("qkv", FUSED.replace("n_heads", "n_others"), tmp_path)
    block, _ = verification.blocks
    assert (block.verdict, block.heads, block.observed_heads) == ("wrong", 4, 6)
    printed = " ".join(str(verification).split())
    assert "WRONG: 6 heads, not 4" in printed
    assert "In decoder self 0, the model attends with 6 query heads, the family has 4;" in printed
    assert "inf" not in re.findall(r"\S+", printed)
