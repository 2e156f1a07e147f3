"""Models that report no attention of all queries and keys: what `wqk verify` says of them.

What is read of them is proven by `test_every_family.py`, which follows their operations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.families.architectures import Architecture
from tests.families.architectures.architecture import BERT, T5, TOKENS
from tests.families.proving import prove_live, prove_variety, save

import wqk
from wqk.live.verification import verify

torch = pytest.importorskip("torch")

XLNET = Architecture(
    "xlnet",
    "XLNetLMHeadModel",
    TOKENS | {"d_model": 32, "n_layer": 2, "n_head": 4, "d_head": 8, "d_inner": 24},
)
# Queries see half of what is projected, keys and values a quarter.
SQUEEZEBERT = Architecture(
    "squeezebert",
    "SqueezeBertForMaskedLM",
    BERT | {"embedding_size": 32, "q_groups": 2, "k_groups": 4, "v_groups": 4},
)
LONGT5 = Architecture("longt5", "LongT5Model", T5 | {"local_radius": 3}, 8)
LONGT5_GLOBAL = Architecture(
    "longt5-global",
    "LongT5Model",
    LONGT5.config | {"encoder_attention_type": "transient-global", "global_block_size": 4},
    8,
)
# Units of a picture see each other from the third stage on.
HIERA = Architecture(
    "hiera",
    "HieraModel",
    {
        "image_size": [64, 64],
        "embed_dim": 16,
        "depths": [1, 2, 2],
        "num_heads": [1, 2, 4],
        "num_query_pool": 2,
        "masked_unit_attention": [True, True, False],
        "masked_unit_size": [4, 4],
    },
    5,
)
SAM2 = Architecture(
    "sam2-hiera",
    "Sam2HieraDetModel",
    {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 3, 2],
        "embed_dim_per_stage": [16, 32, 64],
        "num_attention_heads_per_stage": [1, 2, 4],
        "window_size_per_stage": [8, 4, 2],
        "global_attention_blocks": [2],
        "num_query_pool_stages": 2,
    },
    6,
)
TOLD = [
    (XLNET, ["form right"] * 2),
    (SQUEEZEBERT, ["form right"] * 2),
    (LONGT5, ["not compared"] * 2 + ["right"] * 6),
    (LONGT5_GLOBAL, ["not compared"] * 2 + ["right"] * 6),
    # Units are interleaved in memory, and where a stage begins queries are pooled.
    (HIERA, ["not compared"] * 4 + ["form right"]),
    (SAM2, ["form right", "not compared", *["form right"] * 2, "not compared", "form right"]),
]


@pytest.mark.parametrize(("architecture", "told"), TOLD, ids=[one.name for one, _ in TOLD])
def test_nothing_right_is_called_wrong(
    architecture: Architecture, told: list[str], tmp_path: Path
) -> None:
    model = save(architecture, tmp_path)
    assert [block.verdict for block in verify(tmp_path).blocks] == told
    prove_live(architecture, model, tmp_path)
    prove_variety(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        (XLNET, 'key = "layer.{layer}.rel_attn.v"'),
        (
            SQUEEZEBERT,
            'key = "encoder.layers.{layer}.attention.value"\nvalue = []\noutput = []',
        ),
    ],
    ids=["xlnet", "squeezebert"],
)
def test_other_keys_are_noticed(architecture: Architecture, change: str, tmp_path: Path) -> None:
    save(architecture, tmp_path / "model")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(
        f'name = "wrong"\nlike = "{architecture.name}"\nmodel_types = []\n[change]\n{change}\n'
    )
    verified = verify(wqk.open(tmp_path / "model", family=wrong))
    assert [block.verdict for block in verified.blocks] == ["wrong", "wrong"]


# Its eager attention is NaN, since it takes the mask's zeros for hidden tokens.
NEMOTRON = Architecture(
    "nemotron-asr",
    "NemotronAsrStreamingEncoder",
    {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_mel_bins": 16,
        "subsampling_conv_channels": 8,
        "layerdrop": 0.0,
    },
)


def test_what_pytorch_attends_with_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(NEMOTRON, tmp_path).eval()
    given: list[Any] = []
    heard: list[Any] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: Any, key: Any, *args: Any, **settings: Any) -> Any:
        heard.append((query, key, settings["scale"]))
        return attend(query, key, *args, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    for layer in model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with torch.no_grad():
        model(input_features=torch.randn(2, 96, 16))
    blocks = wqk.open(tmp_path)
    assert len(blocks) == len(heard) == len(given) == 2
    for layer, block, x, (query, key, scale) in zip(
        model.layers, blocks, given, heard, strict=True
    ):
        queries = query - layer.self_attn.bias_u[None, :, None].detach()
        keys = key.repeat_interleave(block.head_count // key.shape[1], 1)
        np.testing.assert_allclose(block.queries(x.numpy()), queries, atol=1e-5)
        np.testing.assert_allclose(block.keys(x.numpy()), keys, atol=1e-5)
        assert block.plan.scale == pytest.approx(scale)
        assert (block.plan.window, block.plan.causal) == ("local", False)


GEMMA4_AUDIO = Architecture(
    "gemma4-audio",
    "Gemma4AudioModel",
    {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "subsampling_conv_channels": [8, 4],
        "attention_context_left": 5,
    },
)


def test_what_chunks_attend_with_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without distances, whose vectors are projected to nothing."""
    model = save(GEMMA4_AUDIO, tmp_path).eval()
    capped: list[Any] = []
    tanh = torch.tanh
    monkeypatch.setattr(torch, "tanh", lambda given: capped.append(given) or tanh(given))
    x, past = torch.randn(1, 6, 32), 4
    for layer, block in zip(model.layers, wqk.open(tmp_path), strict=True):
        with torch.no_grad():
            layer.self_attn(x, torch.zeros(1, 7, 32))
        assert layer.self_attn.per_dim_scale.std() > 0
        logits = tanh(capped.pop()[0, :, 0, :6, past : past + 6]) * block.plan.softcap
        np.testing.assert_allclose(block.logits(x[0].numpy(), x[0].numpy()), logits, rtol=1e-4)
        plan, module = block.plan, f"layers.{block.plan.layer}.self_attn"
        assert (plan.stack, plan.causal, plan.window, plan.position) == (
            "audio",
            True,
            "5",
            "relative",
        )
        assert plan.value.tensor == f"{module}.v_proj.linear.weight"
        assert plan.output.tensor == f"{module}.post.linear.weight"
        norm = plan.query.input_norm
        assert norm.gain[0].name == f"layers.{plan.layer}.norm_pre_attn.weight"
        assert norm.epsilon == layer.norm_pre_attn.eps
