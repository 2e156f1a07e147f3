"""What no shipped family may need, in a family of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.command import run
from tests.families.architectures import GROUPED, TOKENS, Architecture
from tests.families.proving import save

import wqk
from wqk.live.verification import verify

if TYPE_CHECKING:
    from pathlib import Path

DECODER = """
name = "own"
[[attention]]
stack = "decoder"
causal = true
"""
SEPARATE = (
    DECODER
    + """
query = "layers.{layer}.self_attn.q_proj"
key = "layers.{layer}.self_attn.k_proj"
query_norm = "layers.{layer}.self_attn.q_norm"
key_norm = "layers.{layer}.self_attn.k_norm"
[attention.rotary]
order = "half"
local_base = ["rope_theta", "rope_local_base_freq"]
"""
)
OWN = {
    # 6 heads: slopes of a number of heads that is no power of two.
    "linear biases": (
        Architecture("bloom", "BloomModel", TOKENS | {"hidden_size": 48, "n_head": 6}),
        DECODER
        + """
layout = "grouped"
fused = "h.{layer}.self_attention.query_key_value"
heads = "n_head"
layers = "n_layer"
position = "alibi"
""",
    ),
    "softcap": (
        Architecture("gemma2", "Gemma2Model", GROUPED | {"attn_logit_softcapping": 3.0}),
        SEPARATE.replace(
            "[attention.rotary]",
            """
softcap = "attn_logit_softcapping"
scale = "query_pre_attn_scalar ** -0.5"
[attention.rotary]
""",
        ),
    ),
    "gain stored from 1": (
        Architecture("gemma3", "Gemma3TextModel", GROUPED | {"sliding_window": 5}),
        SEPARATE.replace(
            "[attention.rotary]",
            """
norm_offset = 1.0
window = "sliding_window"
scale = "query_pre_attn_scalar ** -0.5"
[attention.rotary]
""",
        ),
    ),
    "norm over all heads": (
        Architecture("olmo2", "Olmo2Model", GROUPED | {"head_dim": 8}),
        SEPARATE,
    ),
}


@pytest.mark.parametrize(("architecture", "family"), OWN.values(), ids=OWN.keys())
def test_a_users_own_family(architecture: Architecture, family: str, tmp_path: Path) -> None:
    save(architecture, tmp_path)
    path = tmp_path / "own.toml"
    path.write_text(family, encoding="utf-8")
    verification = verify(wqk.open(tmp_path, family=path))
    assert len(verification.blocks) == architecture.blocks
    assert min(block.contrast for block in verification.blocks) > 0.02
    assert verification.difference < 1e-12


def test_a_family_is_named_on_the_command_line() -> None:
    demo = str(wqk.demo_model("encoder"))
    assert "family bert" in run("explain", demo, "--family", "bert").output
    assert "did you mean 'nanogpt'" in run("scan", demo, "--family", "nanogtp").output
