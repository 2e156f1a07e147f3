"""The model in the middle: opened once, indexed, and read once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from tests import small

import wqk
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.errors import CheckpointError

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
    tensors = checkpoint.inner.read(
        [
            Part(f"model.layers.1.self_attn.{n}.weight")
            for n in ("q_proj", "k_proj", "v_proj", "o_proj")
        ]
    )
    q, k, v, o = tensors
    np.testing.assert_allclose(model[1, 3].qk.dense(), q[12:].T @ k[4:], rtol=1e-5)
    np.testing.assert_allclose(model[1, 3].ov.dense(), v[4:].T @ o[:, 12:].T, rtol=1e-5)


def test_layers_are_counted_from_either_end() -> None:
    model = wqk.open(DECODER)
    assert [block.layer for block in model.layers] == [0, 1, 2, 3]
    assert model[-1].layer == 3
    assert len(model) == 4
    assert len(model[0]) == 4
    assert [head.index for head in model[0]] == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="no self-attention in layer 4"):
        model[4]
    with pytest.raises(IndexError, match="heads 0 to 3, got head 4"):
        model[0, 4]


def test_some_of_its_layers() -> None:
    model = wqk.open(DECODER).select(layers=[2, 3])
    assert [block.layer for block in model] == [2, 3]
    assert set(wqk.scan(model, heads=False).frame["layer"]) == {2, 3}
    with pytest.raises(CheckpointError, match="no layer 9; layers are numbered from 0 to 3"):
        wqk.open(DECODER).select(layers=[9])
    with pytest.raises(CheckpointError, match="no vision-attention; it has decoder self"):
        wqk.open(DECODER).select(stack="vision")


def test_every_place_tells_the_same_omissions() -> None:
    block = wqk.open(llama())[0]
    terms = [omission.term for omission in block.omissions()]
    table = wqk.scan(llama())
    assert table.metadata["left_out"]["llama"] == terms
    explained = " ".join(wqk.explain(llama()).notes)
    assert all(omission.explanation in explained for omission in block.omissions())
    assert all(term in block._repr_html_() for term in terms)


@pytest.mark.parametrize(
    ("name", "meant"), [("config", "checkpoint.config"), ("scan", "wqk.scan(model)")]
)
def test_an_attribute_that_a_model_lacks_is_told_the_one_that_does_it(name, meant):
    model = wqk.open(wqk.demo_model("encoder"))
    with pytest.raises(AttributeError, match=re.escape(f"did you mean '{meant}'?")):
        getattr(model, name)


def test_every_command_has_its_name_in_python():
    import wqk_lab
    from wqk.cli.main import command

    modules = {"figure": "figures", "demo": "demo_model"}
    for name in command.commands:
        assert any(hasattr(home, modules.get(name, name)) for home in (wqk, wqk_lab)), name
    assert wqk.tokens is wqk.match_tokens
    assert wqk_lab.speedup is wqk_lab.speedups


def test_torchs_own_encoder_knows_its_heads():
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    table = wqk.scan(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    assert table["heads"].unique().to_list() == [4]


def test_models_whose_attentions_differ_in_heads_are_asked_for_them():
    torch = pytest.importorskip("torch")
    with pytest.raises(wqk.WqkError, match="heads_per_layer=N"):
        wqk.scan(torch.nn.ModuleList(torch.nn.MultiheadAttention(16, n) for n in (2, 4)))


def test_a_view_is_saved_under_a_name(tmp_path):
    wqk.show(wqk.demo_model("encoder"), layer=1).save(str(tmp_path / "form.png"))
    assert (tmp_path / "form.png").stat().st_size > 1000
