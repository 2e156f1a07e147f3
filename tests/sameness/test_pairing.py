"""Blocks of two checkpoints are paired by name; what a guess does not contain is left out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests import small
from tests.cases import cases
from tests.sameness.test_same import CONFIG, R, edited, llama, opened

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError, UnknownFamily
from wqk.sameness.same import same

# Names of the tensors of Whisper in OpenAI's own files.
OPENAI = cases(__file__, "openai")


def random_whisper(heads: int, decoder_heads: int, dims: bool) -> tuple[StateDict, StateDict]:
    """A Whisper for `transformers`, and the same as OpenAI writes it: cross-attention last."""
    random, tensors = np.random.default_rng(0), {}
    blocks = [
        ("encoder", "self_attn", 3),
        ("decoder", "self_attn", 2),
        ("decoder", "encoder_attn", 2),
    ]
    for stack, attention, depth in blocks:
        for layer in range(depth):
            at = f"{stack}.layers.{layer}.{attention}"
            for side in "qkv":
                tensors[f"{at}.{side}_proj.weight"] = random.standard_normal((24, 24))
                if side != "k":
                    tensors[f"{at}.{side}_proj.bias"] = random.standard_normal(24)
            for name in ("weight", "bias"):
                tensors[f"{at}_layer_norm.{name}"] = 1 + random.standard_normal(24)
    openai_tensors = {}
    for name in sorted(tensors):
        openai_name = name
        for pattern, replacement in OPENAI.items():
            openai_name = re.sub(pattern, replacement, openai_name)
        openai_tensors[openai_name] = tensors[name]
    config = {
        "model_type": "whisper",
        "d_model": 24,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": decoder_heads,
    }
    counts = {"n_audio_head": heads, "n_text_head": decoder_heads} if dims else {}
    return StateDict(tensors, config, "hf"), StateDict(openai_tensors, counts, "openai")


def test_blocks_are_paired_by_name_not_by_order() -> None:
    ours, theirs = random_whisper(6, 4, dims=True)
    for pair in ((ours, theirs), (theirs, ours)):
        comparison = same(*pair)
        assert comparison.same, comparison.sentence
        assert len(comparison.blocks) == 7
        assert len(wqk.scan(pair[0], layers=[-1], heads=False)) == 3  # the last of each stack
        assert max(max(block.distance.values()) for block in comparison.blocks) == 0


def test_numbers_of_heads_are_taken_from_the_other_side() -> None:
    ours, theirs = random_whisper(6, 6, dims=False)
    for pair in ((ours, theirs), (theirs, ours)):
        comparison = same(*pair)
        assert comparison.same
        assert comparison.notes[0] == ("openai lacks its number of heads: 6 query heads, as in hf")
    with pytest.raises(UnknownFamily, match="heads_per_layer=N"):
        same(theirs, theirs)
    assert same(theirs, theirs, heads_per_layer=6).same
    assert same(ours, theirs, heads_per_layer=6).same
    with pytest.raises(CheckpointError, match="knows the number of heads"):
        same(ours, ours, heads_per_layer=6)


def test_a_supplied_number_of_key_heads_must_fit_a_model_that_lacks_the_number() -> None:
    reference, candidate = small.llama(key_heads=2), small.llama(key_heads=2, name="candidate")
    del candidate.config["num_key_value_heads"]
    same(reference, candidate, key_heads=2)
    with pytest.raises(CheckpointError, match="give key_heads=2"):
        same(reference, candidate, key_heads=4)


def test_what_a_guess_does_not_know_is_left_out_and_said() -> None:
    recognized, guess = opened(llama()), opened(llama(), model_type="something-new")
    for pair in ((recognized, guess), (guess, recognized), (guess, guess)):
        comparison = same(*pair)
        assert comparison.same
        assert any("not compared" in note and "mask" in note for note in comparison.notes)
    noisy = opened(edited(lambda q: 2 * q[::-1], "q"), model_type="something-new")
    assert not same(recognized, noisy).same


def test_blocks_that_one_side_lacks_are_listed() -> None:
    ours, theirs = random_whisper(6, 6, dims=True)
    half = {n: a for n, a in theirs._arrays.items() if ".cross_attn" not in n}
    comparison = same(ours, StateDict(half, theirs.config, "half"))
    assert not comparison.same
    assert comparison.missing == (("decoder", "cross", 0), ("decoder", "cross", 1))
    assert comparison.sentence.startswith("Not the same: 2 blocks only in hf. Equal: attention 5/5")
    assert "not compared: values, " in comparison.sentence
    assert same(StateDict(half, theirs.config, "half"), ours).added == comparison.missing


def test_a_number_of_heads_that_is_filled_in_wrongly_is_an_error() -> None:
    config = {name: value for name, value in CONFIG.items() if name != "num_attention_heads"}
    with pytest.raises(CheckpointError, match="do not divide into 32 heads"):
        same(opened(llama()), StateDict(llama(), config, "shortened"))


def test_a_number_missing_from_a_configuration_is_a_difference() -> None:
    key = "num_key_value_heads"
    config = {name: value for name, value in CONFIG.items() if name != key}
    comparison = same(opened(llama()), StateDict(llama(), config, "shortened"))
    assert not comparison.same
    (mismatch,) = comparison.blocks[0].mismatches
    assert mismatch.facts["name"] == key
    assert mismatch.repair == f'config["{key}"] = {CONFIG[key]}'


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_values_rounded_and_stored_wider_are_known_by_their_grid(kind: str) -> None:
    def rounded(value: np.ndarray) -> np.ndarray:
        if kind == "F16":
            return value.astype(np.float16).astype(np.float32)
        bits = (value.view(np.uint32).astype(np.uint64) + 0x8000) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32)

    wide = opened({name: rounded(value) for name, value in llama().items()})
    comparison = same(opened(llama()), wide)
    assert comparison.same
    assert comparison.blocks[0].distance[0] > 1e-5
    name = {"BF16": "bfloat16", "F16": "float16"}[kind]
    assert comparison.notes == (f"tiny: values are rounded to {name}, though stored as F32",)


def test_a_tolerance_is_accepted() -> None:
    near = opened(
        edited(lambda q: q * (1 + 1e-3 * np.arange(R)).reshape(-1, *[1] * (q.ndim - 2)), "q")
    )
    assert not same(opened(llama()), near).same
    assert same(opened(llama()), near, tolerance=0.02).same


def test_some_layers() -> None:
    faulty = opened(edited(lambda q: q * 2, "q", layer=0))
    assert same(opened(llama()), faulty, layers=[-1]).same
    assert not same(opened(llama()), faulty, layers=[0]).same


def test_models_without_a_block_in_common_are_refused_in_words(tmp_path: Path) -> None:
    """Blocks are named by their kinds and layers; a model may have no attention."""
    encoder = wqk.demo_model("encoder")
    with pytest.raises(CheckpointError, match=r"encoder self, layers 0-3; the other has decoder"):
        wqk.same(encoder, wqk.demo_model("induction"))
    random = np.random.default_rng(0)
    mamba = {"mixer.in_proj": (64, 16), "mixer.x_proj": (33, 32), "mixer.out_proj": (16, 32)}
    tensors = {
        f"backbone.layers.0.{name}.weight": random.standard_normal(shape)
        for name, shape in mamba.items()
    }
    config = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}
    folder = small.save(tmp_path / "mamba", tensors, config)
    with pytest.raises(CheckpointError, match="the other has no attention"):
        wqk.same(encoder, folder)
    for pair in ((tmp_path / "missing", folder), (folder, tmp_path / "missing")):
        with pytest.raises(CheckpointError, match="no such file or folder"):
            wqk.same(*pair)
