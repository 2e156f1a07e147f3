"""The model in the middle: opened once, indexed, and read once."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests import small

import wqk
from wqk.attention import Coordinates
from wqk.checkpoints import Checkpoint, Part, TensorInfo

DECODER = wqk.demo_model("decoder")


class Counting(Checkpoint):
    """A checkpoint that counts how often each part is read."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner, self.name, self.config = inner, inner.name, inner.config
        self.reads: Counter[Part] = Counter()

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.inner.tensors()

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        self.reads.update(parts)
        return self.inner.read(parts)


llama = partial(small.llama, head_width=4, width=12, sides="qkvo", norms=True, name="llama")


def test_a_scan_with_every_flag_reads_each_matrix_once() -> None:
    checkpoint = Counting(llama())
    wqk.scan(
        checkpoint,
        distances=(0, 1, 64),
        fold_norm=True,
        bias=True,
        details=True,
        measures=("spectrum", "ceiling", "bands"),
    )
    assert set(checkpoint.reads.values()) == {1}
    assert {part.name.split(".")[-2] for part in checkpoint.reads} == {
        *("q_proj", "k_proj", "input_layernorm")
    }


def test_what_a_scan_reads_is_what_explain_says() -> None:
    checkpoint = Counting(llama())
    wqk.scan(checkpoint)
    read = sum(part.nbytes(checkpoint.info(part.name)) for part in checkpoint.reads)
    assert read == wqk.explain(checkpoint).bytes_to_read


def test_a_head_has_two_forms_and_shares_what_is_read() -> None:
    checkpoint = Counting(llama())
    model = wqk.open(checkpoint)
    for head in range(4):
        assert model[1, head].qk.shape == model[1, head].ov.shape == (12, 12)
        assert model[1, head].key_head == head // 2
    assert set(checkpoint.reads.values()) == {1}
    q, k, v, o = (llama()._arrays[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkvo")
    np.testing.assert_allclose(model[1, 3].qk.dense(), q[12:].T @ k[4:], rtol=1e-5)
    np.testing.assert_allclose(model[1, 3].ov.dense(), v[4:].T @ o[:, 12:].T, rtol=1e-5)


def test_a_head_is_its_query_key_form():
    """Whatever the groups: two heads share a key head."""
    block = wqk.open(llama())[1]
    heads, stack = block.heads, np.asarray(block.heads)
    assert (len(heads), heads.shape, stack.shape) == (4, (4, 12, 12), (4, 12, 12))
    for head, matrix in zip(block, stack, strict=True):
        assert isinstance(head.symmetry, float)
        assert head.shape == matrix.shape
        np.testing.assert_array_equal(np.asarray(head), matrix)
        np.testing.assert_array_equal(head.T, matrix.T)
        np.testing.assert_allclose((head @ head).numpy(), matrix @ matrix, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(head.svd().S, np.linalg.svd(matrix)[1][:4], rtol=1e-4)
        np.testing.assert_allclose(head.ov, heads.ov[head.index])
    for score in ("norm", "symmetry", "symmetry_null", "directionality", "directionality_excess"):
        scores_of_heads = [getattr(head, score) for head in heads]
        np.testing.assert_allclose(getattr(heads, score), scores_of_heads, rtol=1e-5)
    np.testing.assert_allclose(block.form, stack.sum(0), atol=1e-6)
    np.testing.assert_allclose(block.ov, np.asarray(heads.ov).sum(0), atol=1e-6)
    assert block.form.rank == block.ov.rank == heads.sum().rank == 8
    assert wqk.head_terms(heads) == wqk.head_terms(block.groups)
    np.testing.assert_array_equal(wqk.coupling(heads), wqk.coupling(block.groups))


def test_heads_in_other_coordinates():
    block = wqk.open(llama())[1]
    turned = block.at(distance=5)
    ((_, groups),) = block.forms(Coordinates(distances=(5,)))
    assert not np.allclose(turned, block.heads)
    np.testing.assert_array_equal(np.asarray(turned), groups.numpy().reshape(4, 12, 12))
    np.testing.assert_array_equal(turned[3], turned.numpy()[3])
    np.testing.assert_allclose(turned.sum(), turned.numpy().sum(0), atol=1e-6)


@pytest.mark.usefixtures("unchecked_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model["a"], "model[layer, head]; got 'a'"),
        (lambda model: model[0, 1, 2], "model[layer, head]; got (0, 1, 2)"),
        (lambda model: model[...], "model[layer, head]; got Ellipsis"),
        (lambda model: model[0, 1.5], "a head is a number, as in block[3], or a slice; got 1.5"),
        (lambda model: model[0, 4], "heads 0 to 3, got head 4"),
        (lambda model: model[4], "no self-attention in layer 4"),
        (lambda model: model.select(layers=[9]), "no layer 9; layers are numbered from 0 to 3"),
        (lambda model: model.select(stack="vision"), "no vision-attention; it has decoder self"),
        (lambda _: wqk.Head(np.eye(2), np.eye(2)), "of two arrays is BilinearForm(query, key)"),
        (lambda model: model.scan, "did you mean 'wqk.scan(model)'?"),
    ],
)
def test_what_a_model_does_not_have_is_told_with_what_it_has(call, message):
    expected = AttributeError if "did you mean" in message else (IndexError, wqk.WqkError)
    with pytest.raises(expected, match=re.escape(message)):
        call(wqk.open(DECODER))


def test_layers_and_heads_are_counted_from_either_end():
    model = wqk.open(DECODER)
    assert [block.layer for block in model.layers] == [0, 1, 2, 3]
    assert (len(model), len(model[0]), model[-1].layer) == (4, 4, 3)
    assert [head.index for head in model[0]] == [0, 1, 2, 3]
    assert [block.layer for block in model[1:3]] == [1, 2]
    assert [(head.layer, head.index) for head in model[:, -1]] == [(n, 3) for n in range(4)]
    np.testing.assert_array_equal(model[2, 1:], np.asarray(model[2].heads)[1:])


def test_some_of_its_layers() -> None:
    model = wqk.open(DECODER).select(layers=[2, 3])
    assert [block.layer for block in model] == [2, 3]
    assert set(wqk.scan(model, heads=False).frame["layer"]) == {2, 3}


def test_every_place_tells_the_same_omissions() -> None:
    block = wqk.open(llama())[0]
    assert isinstance(block.omissions(), tuple)
    terms = [omission.term for omission in block.omissions()]
    assert wqk.scan(llama()).metadata["left_out"]["llama"] == terms
    explained = " ".join(wqk.explain(llama()).notes)
    assert all(omission.explanation in explained for omission in block.omissions())
    assert all(term in block._repr_html_() for term in terms)
    longrope = {"type": "longrope", "short_factor": [1] * 2, "long_factor": [2] * 2}
    growing = {"type": "yarn", "factor": 4, "llama_4_scaling_beta": 0.1}  # queries, in Ministral 3
    for scaling in (longrope, growing):
        scaled = llama(rope_scaling=scaling, max_position_embeddings=32)
        assert "more than 32 tokens" in str(wqk.scan(scaled, distances=[40]).metadata["left_out"])


def test_torchs_own_encoder_knows_its_heads():
    import torch

    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    table = wqk.scan(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    assert table["heads"].unique().to_list() == [4]


def test_attentions_that_differ_in_heads_are_read_with_their_own():
    import torch

    modules = torch.nn.ModuleList(torch.nn.MultiheadAttention(16, n) for n in (2, 4))
    table = wqk.scan(modules)
    assert table.layers["heads"].to_list() == [2, 4]
    for layer, module in enumerate(modules):
        query, key, _ = module.in_proj_weight.detach().numpy().reshape(3, module.num_heads, -1, 16)
        forms = query.swapaxes(1, 2) @ key
        expected = np.einsum("hij,hji->h", forms, forms) / np.sum(forms**2, axis=(1, 2))
        assert table[layer, :]["symmetry"].to_numpy() == pytest.approx(expected, abs=1e-6)


def test_a_model_has_one_number_of_heads_where_all_blocks_have_the_same():
    import torch

    counts = (4, 2, 4)
    modules = torch.nn.ModuleList(torch.nn.MultiheadAttention(16, n) for n in counts)
    model = wqk.open(modules)
    names = {"n_heads": "heads", "n_kv_heads": "key heads", "d_head": "head dimensions"}
    for name, noun in names.items():
        expected = "[4, 8]" if name == "d_head" else "[2, 4]"
        with pytest.raises(wqk.WqkError, match=re.escape(f"numbers of {noun}, {expected}; each")):
            getattr(model, name)
    same = wqk.open(torch.nn.ModuleList([modules[0], modules[2]]))
    assert [getattr(same, name) for name in names] == [4, 4, 4]


def test_layers_that_are_stored_but_not_counted_are_said(tmp_path: Path):
    folder = shutil.copytree(DECODER, tmp_path / "few")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    expected = "layers 2-3 are stored, too, but not counted by the configuration"
    model = wqk.open(wqk.open(folder).checkpoint)
    assert len(model) == 2
    assert list(model.checkpoint.notes) == [expected]
    for shown in (wqk.scan(model), wqk.explain(folder)):
        assert expected in " ".join(repr(shown).split())
    assert not wqk.open(DECODER).checkpoint.notes
    with_lora = small.llama()._arrays | {"layers.0.q_proj.lora_A": np.eye(24)[:2]}
    (note,) = wqk.open(with_lora, heads_per_layer=4).checkpoint.notes
    assert "lora_A are stored beside weights" in note
