"""State dicts of TransformerLens, written as its own modules define and compute them.

The library is not needed: its attention is a few lines, `attention` below, in its own notation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests import small
from tests.stand_in import Module

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.sameness.same import same

LAYERS, D, H, G, R = 2, 24, 4, 2, 6
ABOUT = {"rope_theta": 5e5, "attention_bias": True, "rms_norm_eps": 1e-5}
LLAMA = small.llama(sides="qkvo", biases="qkv", norms=True, **ABOUT)
LENS = {
    "n_layers": LAYERS,
    "d_model": D,
    "n_heads": H,
    "n_key_value_heads": G,
    "d_head": R,
    "positional_embedding_type": "rotary",
    "rotary_dim": R,
    "rotary_base": 5e5,
    "rotary_adjacent_pairs": False,
    "attention_dir": "causal",
    "use_attn_scale": True,
    "attn_scale": R**0.5,
    "scale_attn_by_inverse_layer_idx": False,
    "normalization_type": "RMS",
    "eps": 1e-5,
    "attn_scores_soft_cap": -1.0,
    "use_local_attn": False,
    "window_size": None,
}
SIDES = {"q": H, "k": G, "v": G}
Arrays = dict[str, np.ndarray]


def lensed(folded: bool = False) -> Arrays:
    """The same as TransformerLens stores it, its norms' gains folded into the weights if wanted."""
    theirs, tensors = LLAMA._arrays, {}
    for layer in range(LAYERS):
        at, block = f"model.layers.{layer}", f"blocks.{layer}"
        gain = theirs[f"{at}.input_layernorm.weight"]
        for side, heads in SIDES.items():
            mark = "" if side == "q" else "_"  # fewer keys and values are stored once
            weight = theirs[f"{at}.self_attn.{side}_proj.weight"].reshape(heads, R, D)
            weight = weight * gain if folded else weight
            tensors[f"{block}.attn.{mark}W_{side.upper()}"] = weight.transpose(0, 2, 1)
            bias = theirs[f"{at}.self_attn.{side}_proj.bias"].reshape(heads, R)
            tensors[f"{block}.attn.{mark}b_{side.upper()}"] = bias
        output = theirs[f"{at}.self_attn.o_proj.weight"]
        tensors[f"{block}.attn.W_O"] = output.reshape(D, H, R).transpose(1, 2, 0)
        tensors[f"{block}.attn.b_O"] = np.zeros(D, np.float32)
        tensors[f"{block}.attn.mask"] = np.tril(np.ones((8, 8), bool))
        if not folded:
            tensors[f"{block}.ln1.w"] = gain
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("is_configured", [False, True])
def test_it_is_the_same_as_its_original(folded: bool, is_configured: bool) -> None:
    kind = "RMSPre" if folded else "RMS"
    lens = StateDict(
        lensed(folded), LENS | {"normalization_type": kind} if is_configured else {}, "lens"
    )
    for pair in ((LLAMA, lens), (lens, LLAMA)):
        comparison = same(*pair)
        assert comparison.same, (comparison.sentence, comparison.causes)
        assert len(comparison.blocks) == LAYERS
        assert bool(comparison.notes) == (not is_configured)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_saved_state_dicts_are_read(tmp_path: Any, ending: str) -> None:
    state = {name: torch.tensor(value) for name, value in lensed().items()}
    path = tmp_path / f"lens.{ending}"
    write = torch.save if ending == "pt" else pytest.importorskip("safetensors.torch").save_file
    write(state, path)
    # The original's configuration next to the file is not that of these tensors.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    model = wqk.open(open_checkpoint(path))
    assert [(plan.query.heads, plan.key.heads) for plan in model.plans] == [(H, G)] * LAYERS
    assert same(model, LLAMA).same
    scores, expected = (wqk.scan(ref).frame["symmetry"] for ref in (path, LLAMA))
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_a_module_tells_its_configuration() -> None:
    class HookedTransformer(Module):
        config, cfg = None, Module.config

    comparison = same(HookedTransformer(lensed(), LENS), LLAMA)
    assert comparison.same, comparison.sentence
    assert comparison.notes == ()


def test_a_matrix_in_its_place_is_refused() -> None:
    flat = {n: v.reshape(-1, v.shape[-1]) if v.ndim == 3 else v for n, v in lensed().items()}
    with pytest.raises(CheckpointError, match=r"must be \(heads, D, R\), got shape"):
        wqk.open(StateDict(flat, LENS, "lens"))
