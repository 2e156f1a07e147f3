"""Writing of a start: in place, completely or not at all, and nothing else is changed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests import small
from tests.families.architectures import NAMED
from tests.families.proving import build
from tests.lab.training.starts.untrained import build_untrained
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, FormError, UnknownFamily
from wqk_lab.training.initializations import STARTS

KEYS = ["symmetric", "negated", "indefinite", "paired", "skew"]
CONTROLS = ("independent", "negated", "indefinite", "values", "queries-keys")

bert = partial(small.bert, "BertForMaskedLM", hidden_size=64)


def attention_of(model: Any, layer: int = 0) -> Any:
    return model.bert.encoder.layer[layer].attention.self


def sides_of(model: Any) -> tuple[Any, Any]:
    return attention_of(model).query, attention_of(model).key


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_as(model: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", STARTS)
def test_parameters_stay_the_objects_that_they_are_and_generators_are_left_alone(kind):
    model = bert()
    attention_of(model).key.weight.requires_grad_(False)

    def about() -> dict[str, tuple[Any, ...]]:
        return {
            name: (id(p), p.data_ptr(), p.dtype, p.device, p.requires_grad, p.is_leaf)
            for name, p in model.named_parameters()
        }

    before, states = about(), (torch.get_rng_state(), np.random.get_state()[1].copy())
    wqk.initialize_(model, STARTS[kind], seed=5)
    assert about() == before
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_draws_are_those_of_the_seed():
    def drawn(**seed: int) -> torch.Tensor:
        model = bert()
        wqk.initialize_(model, STARTS["mimetic"], **seed)
        return attention_of(model, 1).query.weight

    assert torch.equal(drawn(seed=1), drawn(seed=1))
    assert not torch.equal(drawn(seed=1), drawn(seed=2))
    assert torch.equal(drawn(), drawn(seed=0))  # that which PyTorch was given


def test_random_measures_and_writes_nothing():
    model = bert()
    before = copied(model)
    report = wqk.initialize_(model, "random")
    assert is_as(model, before)
    assert all(layer.before == layer.after for layer in report.layers)


@pytest.mark.parametrize("kind", KEYS)
def test_with_biases_the_scores_of_pairs_are_symmetric(kind):
    model = bert()
    query, key = sides_of(model)
    with torch.no_grad():
        query.bias.normal_()
        key.bias.normal_()
    wqk.initialize_(model, STARTS[kind])
    tokens = torch.randn(9, 64)
    scores = query(tokens) @ key(tokens).T  # of all heads: they add up
    torch.testing.assert_close(scores, -scores.T if kind == "skew" else scores.T)


@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_norm_of_a_layer_and_the_mean_of_its_heads_can_be_chosen(name, kind):
    model, plans = build_untrained(NAMED[name])
    report = wqk.initialize_(model, STARTS[kind], norm_ratio=1.7)
    assert [layer.norm_ratio for layer in report.layers] == pytest.approx([1.7] * 2, rel=1e-5)
    if kind in ("symmetric", "published") and name != "llama":
        for plan in plans:  # both sides are scaled, so that they stay equal
            attention = Block(open_checkpoint(model), plan)
            assert np.array_equal(attention.query.weight, attention.key.weight)
    model, plans = build_untrained(NAMED[name])
    before = [np.mean(np.linalg.norm(heads_of(model, plan), axis=(-2, -1))) for plan in plans]
    report = wqk.initialize_(model, STARTS[kind], head_norm_ratio=1.7)
    after = [np.mean(np.linalg.norm(heads_of(model, plan), axis=(-2, -1))) for plan in plans]
    for ratios in (np.divide(after, before), [change.head_norm_ratio for change in report.layers]):
        assert ratios == pytest.approx([1.7] * len(plans), rel=1e-5)


def heads_of(model: Any, plan: Any) -> np.ndarray:
    """Every head's form, written out."""
    heads = Block(open_checkpoint(model), plan).heads
    return heads.query.astype(np.float64) @ heads.key.astype(np.float64).swapaxes(-1, -2)


def test_scores_follow_the_norm_where_there_are_biases():
    model, tokens = bert(), torch.randn(9, 64)
    query, key = sides_of(model)
    with torch.no_grad():
        query.bias.normal_()
        key.bias.normal_()
        before = query(tokens) @ key(tokens).T
        wqk.initialize_(model, "random", norm_ratio=3.0)
        torch.testing.assert_close(query(tokens) @ key(tokens).T, 3 * before)


def test_values_alone_are_multiplied():
    model = bert()
    before = copied(model)
    report = wqk.initialize_(model, "random", value_ratio=2.6)
    assert [layer.value_ratio for layer in report.layers] == pytest.approx([2.6] * 2)
    for name, tensor in model.state_dict().items():
        scaled = before[name] * (2.6 if "value.weight" in name else 1)
        torch.testing.assert_close(tensor, scaled)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_ratios_are_positive_numbers(ratio):
    for name in ("head_norm_ratio", "norm_ratio", "value_ratio"):
        with pytest.raises(FormError, match=f"{name} must be a positive number"):
            wqk.initialize_(bert(), "random", **{name: ratio})
    with pytest.raises(FormError, match=r"head_norm_ratio and norm_ratio .* only one"):
        wqk.initialize_(bert(), "symmetric", norm_ratio=1.0, head_norm_ratio=1.0)


def test_the_published_start_is_what_the_papers_code_did():
    model = bert(hidden_size=256, num_hidden_layers=1)
    before = copied(model)
    layer = wqk.initialize_(model, STARTS["published"], seed=1).layers[0]
    attention = attention_of(model)
    assert torch.equal(attention.key.weight, attention.query.weight)
    for side in (attention.query, attention.value):
        assert side.weight.abs().max() <= 1 / 16
        assert side.weight.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.02)
    redrawn = {"query.weight", "key.weight", "value.weight"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != any(name.endswith(end) for end in redrawn)
    assert layer.after.symmetry == pytest.approx(1)
    assert layer.norm_ratio == pytest.approx(4.6, rel=0.03)
    # Σ_r ‖q_r‖² / √R = √R / 3: every token looks at itself.
    assert layer.after.own_score == pytest.approx(8 / 3, rel=0.02)


def test_controls_of_one_seed_share_what_they_draw():
    def weights(kind: str) -> list[Any]:
        model = bert()
        wqk.initialize_(model, STARTS[kind], seed=3)
        attention = attention_of(model, 1)
        return [side.weight.detach() for side in (attention.query, attention.key, attention.value)]

    drawn, published, independent, negated, indefinite, values, sides = map(
        weights, ["random", "published", *(f"published-{control}" for control in CONTROLS)]
    )
    query, key, value = published
    for kind, actual, expected in (
        ("published", key, query),
        ("independent", (independent[0], independent[2]), (query, value)),
        ("negated", negated[1:], (-query, value)),
        ("indefinite", indefinite[1].abs(), query.abs()),
        ("values", values, (*drawn[:2], value)),
        ("queries-keys", sides, (query, independent[1], drawn[2])),
    ):
        assert all(map(torch.equal, actual, expected)), kind
    assert not torch.equal(query, drawn[0])
    assert not torch.equal(indefinite[1], query)
    assert abs(torch.corrcoef(torch.stack([independent[1].ravel(), query.ravel()]))[0, 1]) < 0.05


def test_what_is_drawn_does_not_repeat_the_models_own_draws():
    """A generator with the model's seed would give the embedding's numbers again."""
    model = bert(vocab_size=400)
    wqk.initialize_(model, STARTS["published"], seed=0)  # the seed that the model was built with
    queries = attention_of(model).query.weight.detach().ravel()
    for weight in model.parameters():
        if weight.numel() >= queries.numel():
            pair = torch.stack([weight.detach().ravel()[: queries.numel()], queries])
            same_side = weight.shape == (64, 64) and torch.equal(pair[0].abs(), pair[1].abs())
            assert same_side or abs(torch.corrcoef(pair)[0, 1]) < 0.08


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_of_numbers(dtype):
    model = build_untrained(NAMED["llama"])[0].to(dtype)
    report = wqk.initialize_(model, "symmetric")
    rounding = 1e-4 if torch.finfo(dtype).bits == 16 else 1e-12
    assert all(abs(layer.after.symmetry - 1) < rounding for layer in report.layers)
    assert {p.dtype for p in model.parameters()} == {dtype}
    small_model = bert().to(dtype)
    wqk.initialize_(small_model, "skew")
    query, key = (side.weight.abs().flatten().sort()[0] for side in sides_of(small_model))
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


def untied(model: Any) -> None:
    attention_of(model, 1).key.weight.data = attention_of(model, 0).key.weight.data


def as_values(model: Any) -> None:
    attention_of(model, 1).value.weight = attention_of(model, 1).key.weight


def expanded(model: Any) -> None:
    key = attention_of(model, 1).key
    key.weight.data = key.weight.data[:1].expand_as(key.weight)


def inferred(model: Any) -> None:
    with torch.inference_mode():
        attention_of(model, 1).key.weight.data = torch.randn(64, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (untied, r"layer\.0.*key\.weight and .*layer\.1.*key\.weight are one weight"),
        (as_values, r"key\.weight and .*value\.weight are one weight"),
        (expanded, "is expanded"),
        (inferred, "was made in inference mode"),
    ],
)
def test_weights_that_cannot_be_set_by_themselves_are_refused(change, message):
    model = bert()
    change(model)
    before = copied(model)
    with pytest.raises(CheckpointError, match=message):
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
    wqk.initialize_(model, STARTS["mimetic"], norm_ratio=1.0)
    assert not attention_of(model).key.weight.any()


def test_a_guess_is_not_written_to():
    class Unknown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"model_type": "unheard-of", "num_attention_heads": 2}
            self.layers = torch.nn.ModuleList([torch.nn.Module()])
            self.layers[0].q_proj = torch.nn.Linear(8, 8)
            self.layers[0].k_proj = torch.nn.Linear(8, 8)

    model = Unknown()
    before = copied(model)
    with pytest.raises(UnknownFamily, match="no weights are written based on a guess"):
        wqk.initialize_(model, "symmetric")
    assert is_as(model, before)
    assert len(wqk.initialize_(model, "random").layers) == 1


def test_a_family_of_ones_own():
    model = bert()
    model.config.model_type = "unheard-of"
    report = wqk.initialize_(wqk.open(model, family=Path(__file__).with_name("own.toml")), "skew")
    assert [layer.after.symmetry for layer in report.layers] == pytest.approx([-1, -1])


def test_what_cannot_be_set_is_refused():
    with pytest.raises(FormError, match=r"one of random, symmetric, .*, got 'orthogonal'"):
        wqk.initialize_(bert(), "orthogonal")
    with pytest.raises(CheckpointError, match=r"expected an nn\.Module, .*got dict"):
        wqk.initialize_({}, "symmetric")
    with torch.device("meta"), pytest.raises(CheckpointError, match="on the meta device"):
        wqk.initialize_(bert(), "symmetric")
    with pytest.raises(CheckpointError, match="heads no wider than the model, got 256 of 48"):
        wqk.initialize_(build(NAMED["gemma3-hub"]), STARTS["mimetic"])
    model = bert()
    attention_of(model).key.weight.full_tensor = None  # as a DTensor has
    with pytest.raises(CheckpointError, match=r"key\.weight: is sharded over processes"):
        wqk.initialize_(model, "symmetric")


@pytest.mark.parametrize(("kind", "sign"), [("symmetric", 1), ("indefinite", 1), ("skew", -1)])
def test_rotary_scores_of_a_sequence_are_symmetric_and_forms_at_a_distance_are_not(
    kind: str, sign: int
) -> None:
    """M(n)ᵀ = ± M(−n), as the page on initializations states."""
    model = transformers.LlamaModel(
        transformers.LlamaConfig(
            **small.sizes(64, 1, 4, num_key_value_heads=4, intermediate_size=16, vocab_size=9)
        )
    )
    wqk.initialize_(model, kind)
    x = torch.randn(12, 64)
    attention = model.layers[0].self_attn
    cosine, sine = model.rotary_emb(x, torch.arange(12)[None])
    query, key = (
        projection(x).view(1, 12, 4, 16).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, cosine, sine)
    scores = (query @ key.mT)[0].detach()
    torch.testing.assert_close(scores, sign * scores.mT)
    table = wqk.scan(model, distances=(0, 8), heads=False).frame
    at_zero, at_eight = table.sort("distance")["symmetry"]
    assert at_zero == pytest.approx(sign)
    assert 0.2 < sign * at_eight < 0.9
