"""How a start is written: in place, whole or not at all, and nothing beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tests.families.architectures import NAMED
from tests.families.proving import build
from tests.training.starts.untrained import build_untrained

import wqk
from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, FormError, UnknownFamily

if TYPE_CHECKING:
    from pathlib import Path

KEYS = ["symmetric", "indefinite", "paired", "skew"]


def bert(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tiny = {"intermediate_size": 16, "vocab_size": 50}
    return transformers.BertForMaskedLM(transformers.BertConfig(**(sizes | tiny | changes)))


def attention_of(model: Any, layer: int = 0) -> Any:
    return model.bert.encoder.layer[layer].attention.self


def sides_of(model: Any) -> tuple[Any, Any]:
    return attention_of(model).query, attention_of(model).key


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_as(model: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [*KEYS, "mimetic"])
def test_parameters_stay_the_objects_that_they_are(kind):
    model = bert()
    attention_of(model).key.weight.requires_grad_(False)
    before = {
        name: (id(p), p.data_ptr(), p.dtype, p.device, p.requires_grad, p.is_leaf)
        for name, p in model.named_parameters()
    }
    wqk.initialize_(model, kind)
    assert before == {
        name: (id(p), p.data_ptr(), p.dtype, p.device, p.requires_grad, p.is_leaf)
        for name, p in model.named_parameters()
    }
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("kind", [*KEYS, "mimetic", "random"])
def test_the_generators_of_others_are_left_alone(kind):
    model = bert()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    wqk.initialize_(model, kind, seed=5)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])


def test_draws_are_those_of_the_seed():
    def drawn(**seed: int) -> torch.Tensor:
        model = bert()
        wqk.initialize_(model, "mimetic", **seed)
        return attention_of(model, 1).query.weight

    assert torch.equal(drawn(seed=1), drawn(seed=1))
    assert not torch.equal(drawn(seed=1), drawn(seed=2))
    assert torch.equal(drawn(), drawn(seed=0))  # that which PyTorch was given


def test_random_measures_and_writes_nothing():
    model = bert()
    before = copied(model)
    report = wqk.initialize_(model, "random", keep_norm=True)
    assert is_as(model, before)
    assert all(layer.before == layer.after for layer in report.layers)


def test_symmetric_keys_are_the_queries_to_the_bit():
    model = bert()
    attention = attention_of(model, 1)
    with torch.no_grad():
        attention.query.bias.normal_()
        attention.key.bias.normal_()
    wqk.initialize_(model, "symmetric")
    assert torch.equal(attention.key.weight, attention.query.weight)
    assert torch.equal(attention.key.bias, attention.query.bias)


@pytest.mark.parametrize("kind", KEYS)
def test_with_biases_the_scores_of_pairs_are_symmetric(kind):
    model = bert()
    query, key = sides_of(model)
    with torch.no_grad():
        query.bias.normal_()
        key.bias.normal_()
    wqk.initialize_(model, kind)
    tokens = torch.randn(9, 64)
    scores = query(tokens) @ key(tokens).T  # of all heads: they add up
    torch.testing.assert_close(scores, -scores.T if kind == "skew" else scores.T)


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt-neox", "codegen", "glm", "phi3"])
@pytest.mark.parametrize("kind", KEYS)
def test_with_rotary_positions_the_scores_of_every_pair_are_symmetric(name, kind):
    model, plans = build_untrained(NAMED[name])
    wqk.initialize_(model, kind)
    attention = load_attention(open_checkpoint(model), plans[1])
    rng, positions = np.random.default_rng(0), np.arange(9)
    tokens = rng.standard_normal((9, attention.form.shape[0]))

    def turned(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        vectors = tokens @ weight.astype(np.float64).swapaxes(-1, -2)
        return plans[1].rotary.rotate(
            vectors if bias is None else vectors + bias[:, None], positions
        )

    queries = turned(attention.query_weight, attention.query_bias)
    keys = turned(attention.key_weight, attention.key_bias)
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)
    scores = (queries @ keys.swapaxes(-1, -2)).sum(0)
    expected = -scores.T if kind == "skew" else scores.T
    np.testing.assert_allclose(scores, expected, atol=1e-5 * np.abs(scores).max())


@pytest.mark.parametrize("kind", [*KEYS, "mimetic"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_norm_can_be_kept(name, kind):
    model, _ = build_untrained(NAMED[name])
    queries = load_attention(open_checkpoint(model), attention_plans(open_checkpoint(model))[0])
    report = wqk.initialize_(model, kind, keep_norm=True)
    assert [layer.norm_ratio for layer in report.layers] == pytest.approx([1] * 2, rel=1e-5)
    again = load_attention(open_checkpoint(model), attention_plans(open_checkpoint(model))[0])
    assert np.array_equal(queries.query_weight, again.query_weight) == (kind != "mimetic")


def test_the_norm_grows_as_it_is_told_to():
    model = bert(hidden_size=128, num_hidden_layers=4)
    ratios = {
        kind: np.mean([layer.norm_ratio for layer in wqk.initialize_(model, kind).layers])
        for kind in ("random", "symmetric")
    }
    assert ratios["random"] == 1
    assert ratios["symmetric"] == pytest.approx(math.sqrt(2 + 1 / 128), rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_of_numbers(dtype):
    model = build_untrained(NAMED["llama"])[0].to(dtype)
    report = wqk.initialize_(model, "symmetric")
    rounding = 1e-4 if torch.finfo(dtype).bits == 16 else 1e-12
    assert all(abs(layer.after.symmetry - 1) < rounding for layer in report.layers)
    assert {p.dtype for p in model.parameters()} == {dtype}
    own = bert().to(dtype)
    wqk.initialize_(own, "skew")
    query, key = (side.weight.abs().flatten().sort()[0] for side in sides_of(own))
    assert torch.equal(query, key)  # turned, never rounded


def test_gains_that_differ_are_refused_before_anything_is_written():
    model = build(NAMED["qwen3"])
    before = copied(model)
    with pytest.raises(CheckpointError, match="gains of its query and key norms differ"):
        wqk.initialize_(model, "skew")
    assert is_as(model, before)
    # They multiply both sides of a form that is symmetric dimension by dimension.
    report = wqk.initialize_(model, "indefinite")
    assert all(layer.after.symmetry > 1 - 1e-6 for layer in report.layers)


def test_a_model_is_set_as_a_whole_or_not_at_all():
    model = bert()
    with torch.no_grad():
        attention_of(model, 1).query.weight.zero_()
    before = copied(model)
    with pytest.raises(CheckpointError, match=r"layer 1 .* its queries are zero"):
        wqk.initialize_(model, "symmetric")
    assert is_as(model, before)


def test_cross_attention_is_left_alone():
    model = build(NAMED["bart"])
    before = copied(model)
    report = wqk.initialize_(model, "symmetric")
    assert [(layer.stack, layer.layer) for layer in report.layers] == [
        *(("encoder", layer) for layer in range(2)),
        *(("decoder", layer) for layer in range(3)),
    ]
    changed = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert all(".self_attn.k_proj." in name for name in changed)
    assert len(changed) == 2 * 5


def test_zero_forms_are_measured_all_the_same():
    model = bert()
    with torch.no_grad():
        attention_of(model).query.weight.zero_()
    report = wqk.initialize_(model, "random")
    assert math.isnan(report.layers[0].norm_ratio)
    assert "nan" in repr(report)
    wqk.initialize_(model, "mimetic", keep_norm=True)
    assert not attention_of(model).key.weight.any()


def test_a_guess_is_not_written_to():
    class Unknown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.BertConfig(num_attention_heads=2, num_hidden_layers=1)
            self.config.model_type = "unheard-of"
            self.layers = torch.nn.ModuleList([torch.nn.Module()])
            self.layers[0].q_proj = torch.nn.Linear(8, 8)
            self.layers[0].k_proj = torch.nn.Linear(8, 8)

    model = Unknown()
    before = copied(model)
    with pytest.raises(UnknownFamily, match="nothing is written on a guess"):
        wqk.initialize_(model, "symmetric")
    assert is_as(model, before)
    assert len(wqk.initialize_(model, "random").layers) == 1


def test_a_family_of_ones_own(tmp_path: Path):
    family = tmp_path / "own.toml"
    family.write_text(
        'name = "own"\nmodel_types = ["own"]\n[[attention]]\nstack = "encoder"\n'
        'query = "encoder.layer.{layer}.attention.self.query"\n'
        'key = "encoder.layer.{layer}.attention.self.key"\n'
    )
    model = bert()
    model.config.model_type = "unheard-of"
    report = wqk.initialize_(model, "skew", family=family)
    assert [layer.after.symmetry for layer in report.layers] == pytest.approx([-1, -1])


def test_what_cannot_be_set_is_refused():
    with pytest.raises(FormError, match=r"one of random, symmetric, .*, got 'orthogonal'"):
        wqk.initialize_(bert(), "orthogonal")
    with pytest.raises(CheckpointError, match=r"expected an nn\.Module, got dict"):
        wqk.initialize_({}, "symmetric")
    with torch.device("meta"), pytest.raises(CheckpointError, match="on the meta device"):
        wqk.initialize_(bert(), "symmetric")
    with pytest.raises(CheckpointError, match="heads no wider than the model, got 256 of 48"):
        wqk.initialize_(build(NAMED["gemma3-hub"]), "mimetic")


def test_sharded_parameters_are_refused():
    model = bert()
    attention_of(model).key.weight.full_tensor = None  # as a DTensor has
    with pytest.raises(CheckpointError, match=r"key\.weight is sharded over processes"):
        wqk.initialize_(model, "symmetric")


def test_the_report_is_readable():
    report = wqk.initialize_(bert(), "symmetric")
    lines = repr(report).splitlines()
    assert lines[0] == "symmetric initialization of 2 layers"
    assert lines[2].split()[:2] == ["encoder", "0"]
    assert "→   1.000" in lines[2]
    assert len(lines) == 4
