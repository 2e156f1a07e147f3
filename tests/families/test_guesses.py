"""A guess never passes for knowledge: what it looks at, what it says, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.stand_in import Module

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, UnknownFamily
from wqk.inspecting.explanation import explain
from wqk_lab.atlas.ranks import place

D = 24
CONFIG = {"model_type": "nobody-knows", "num_attention_heads": 4, "hidden_size": D}
ATTENTION = "model.layers.{}.attn."


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def model(beside: dict[str, tuple[int, ...]], config: dict[str, Any] = CONFIG, **roles: Any) -> Any:
    shapes = {"q_proj.weight": (D, D), "k_proj.weight": (D, D), "v_proj.weight": (D, D)}
    shapes |= {"o_proj.weight": (D, D)} | roles | beside
    return Module(
        {
            ATTENTION.format(layer) + name: draw(*s)
            for layer in range(2)
            for name, s in shapes.items()
        },
        config,
    )


def statuses(ref: Any, **options: Any) -> set[str]:
    return set(wqk.scan(ref, **options).frame["status"]) - {"random-looking"}


@pytest.fixture(autouse=True)
def _trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights stand for trained ones."""
    monkeypatch.setattr("wqk.scanning.scan.looks_random", lambda *_: False)


def test_a_guess_is_never_ok_and_never_placed() -> None:
    table = wqk.scan(model({"rotary_emb.inv_freq": (3,)}))
    assert set(table.frame["status"]) == {"guessed"}
    assert place(table) == []
    assert place(wqk.scan(wqk.demo_model("encoder"))) != []


def test_a_guess_that_looks_random_is_told_as_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wqk.scanning.scan.looks_random", lambda *_: True)
    table = wqk.scan(model({"rotary_emb.inv_freq": (3,)}))
    assert set(table.frame["status"]) == {"guessed, random-looking"}
    legend = str(table)
    assert "guessed: the family" in legend
    assert "random-looking: as if" in legend
    assert place(table) == []


def test_scale_and_positions_that_nobody_knows_are_not_spoken_of() -> None:
    guess = model({"q_proj.bias": (D,), "k_proj.bias": (D,)})
    told = " ".join(explain(guess).notes)
    assert "unknown" in told
    assert "multiplies scores" not in told
    attention = wqk.open(guess)[0]
    assert "none in the score" not in attention._repr_html_()
    with pytest.raises(UnknownFamily, match="scale and positions"):
        attention.logits(draw(3, D), draw(3, D))


@pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("norm_q", "norm_k"), ("q_ln", "k_ln")])
def test_norms_of_queries_and_keys_are_folded(names: tuple[str, str]) -> None:
    width = D // 4
    guess = model({f"{name}.weight": (width,) for name in names})
    assert statuses(guess) == {"partial, guessed"}
    attention = wqk.open(guess)[1]
    weights = guess.state_dict()
    gain = weights[ATTENTION.format(1) + f"{names[0]}.weight"]
    stored = weights[ATTENTION.format(1) + "q_proj.weight"].reshape(4, width, D)
    np.testing.assert_array_equal(attention.query.weight, stored * gain[:, None])


@pytest.mark.parametrize(
    "name",
    ["q_norm.scale_table", "gate", "q_proj.lora_A.weight", "short_filter.weight", "rel_bias"],
)
def test_what_is_not_explained_is_named(name: str) -> None:
    table = wqk.scan(model({name: (D, 3)}))
    assert set(table.frame["status"]) == {"partial, guessed"}
    assert name in table.metadata["partial"]["unknown"]


def test_norms_without_gains_are_seen_in_the_configuration() -> None:
    table = wqk.scan(model({}, {**CONFIG, "use_qk_norm": True}))
    assert set(table.frame["status"]) == {"partial, guessed"}
    assert "use_qk_norm" in table.metadata["partial"]["unknown"]


@pytest.mark.parametrize(
    "tensors",
    [
        {"mixer.in_proj": (3 * D, D), "mixer.A_log": (4,), "mixer.conv1d": (D, 1, 4)},
        {"conv.in_proj": (3 * D, D), "conv.conv": (D, 1, 3), "conv.out_proj": (D, D)},
        {"attn.q_proj": (D, D), "attn.k_proj": (D, D), "attn.q_conv1d": (D, 1, 4)},
    ],
    ids=["mamba", "short convolution", "linear attention"],
)
def test_recurrences_and_convolutions_are_no_attention(tensors: dict[str, tuple[int, ...]]) -> None:
    named = {
        f"layers.0.{name}" + ("" if name.endswith("A_log") else ".weight"): draw(*shape)
        for name, shape in tensors.items()
    }
    with pytest.raises(UnknownFamily, match="recurrence or a convolution"):
        wqk.scan(Module(named, CONFIG))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_key_heads_follow_from_the_shapes(key_heads: int) -> None:
    guess = model({}, **{"k_proj.weight": (key_heads * D // 4, D)})
    assert set(wqk.scan(guess).frame["key_heads"]) == {key_heads}
    fused = {"layers.0.attn.qkv.weight": draw(D + 2 * key_heads * D // 4, D)}
    assert set(wqk.scan(Module(fused, CONFIG)).frame["key_heads"]) == {key_heads}


def test_queries_that_hold_a_gate_are_refused() -> None:
    guess = model({}, {**CONFIG, "head_dim": D // 4}, **{"q_proj.weight": (2 * D, D)})
    with pytest.raises(UnknownFamily, match="more than queries"):
        wqk.scan(guess)


def heads_of(tensors: dict[str, tuple[int, ...]], config: dict[str, Any]) -> dict[str, int]:
    named = {
        f"{path}.{side}_proj.weight": draw(*shape)
        for path, shape in tensors.items()
        for side in "qk"
    }
    plans = wqk.open(open_checkpoint(Module(named, config))).plans
    return {plan.stack: plan.query.heads for plan in plans}


def test_numbers_come_from_the_parts_own_configuration() -> None:
    both = {"encoder.layers.0.attn": (D, D), "decoder.layers.0.attn": (D, D)}
    config = {"encoder_attention_heads": 2, "decoder_attention_heads": 4}
    assert heads_of(both, config) == {"encoder": 2, "decoder": 4}
    config = {"num_attention_heads": 2, "decoder_num_attention_heads": 4}
    assert heads_of(both, config) == {"encoder": 2, "decoder": 4}
    # A decoder's heads are never the encoder's, a vision tower's never the text's.
    with pytest.raises(UnknownFamily, match="decoder"):
        heads_of(both, {"encoder_attention_heads": 2})
    towers = {"vision_model.layers.0.attn": (D, D), "language_model.layers.0.attn": (D, D)}
    nested = {"vision_config": {"num_heads": 2}, "text_config": {"num_attention_heads": 4}}
    assert heads_of(towers, nested) == {"vision": 2, "text": 4}
    with pytest.raises(UnknownFamily, match="vision_model"):
        heads_of(towers, {"num_attention_heads": 4})
    with pytest.raises(UnknownFamily, match="give the number of heads"):
        heads_of({"layers.0.attn": (D, D)}, {"num_attention_heads": 4, "hidden_size": 2 * D})


def test_names_that_meet_are_told_apart() -> None:
    sides = ("query", "key", "value", "query_global", "key_global", "value_global")
    tensors = {f"encoder.layer.0.attention.self.{side}.weight": draw(D, D) for side in sides}
    meeting = Module(tensors, CONFIG)
    frame = wqk.scan(meeting).layers.frame
    assert frame["stack"].to_list() == ["encoder-query", "encoder-query_global"]
    with pytest.raises(CheckpointError, match="has several stacks"):
        wqk.open(meeting)[0]
    chosen = wqk.open(meeting).block(0, stack="encoder-query_global")
    np.testing.assert_array_equal(
        chosen.query.weight.reshape(D, D),
        tensors[f"{'encoder.layer.0.attention.self'}.query_global.weight"],
    )


def test_heads_and_key_heads_can_be_given() -> None:
    tensors = {"layers.0.attn.qkv.weight": draw(D + 2 * 6, D)}
    attention = wqk.open(tensors, heads_per_layer=4, key_heads=1)[0]
    assert (attention.head_count, attention.key_head_count) == (4, 1)


def test_diffusers_second_attention_is_cross_attention() -> None:
    block = "down_blocks.0.attentions.1.transformer_blocks.0"
    tensors = {
        f"{block}.attn{n}.to_{side}.weight": draw(D, D if (n, side) != (2, "k") else 40)
        for n in (1, 2)
        for side in "qk"
    }
    plans = wqk.open(open_checkpoint(Module(tensors, CONFIG))).plans
    assert [(plan.stack, plan.kind) for plan in plans] == [
        ("unknown", "self"),
        ("unknown", "cross"),
    ]


def _crossing(model_type: str) -> Module:
    """A model with BERT's names for its attention and its cross-attention."""
    tensors = {
        f"encoder.layer.0.{block}.self.{side}.weight": draw(D, D)
        for block in ("attention", "crossattention")
        for side in ("query", "key")
    }
    numbers = {"num_attention_heads": 4, "num_hidden_layers": 1}
    return Module(tensors, {"model_type": model_type, **numbers})


def test_attention_that_no_family_describes_is_said_to_be_left_out() -> None:
    lilt = _crossing("lilt")
    (name,) = wqk.scan(lilt).metadata["unread"]
    assert "crossattention" in name
    assert any("crossattention" in note for note in explain(lilt).notes)


def test_modules_that_are_no_transformers_models_are_read() -> None:
    torch = pytest.importorskip("torch")
    single = torch.nn.MultiheadAttention(D, 4)
    attention = wqk.open(single)[0]
    weight = single.in_proj_weight.detach().numpy()[:D].reshape(4, D // 4, D)
    np.testing.assert_array_equal(attention.query.weight, weight)

    class Settings:
        def __init__(self) -> None:
            self.n_head, self.n_embd = 4, D

    class NanoGPT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Settings()
            block = torch.nn.ModuleDict({"c_attn": torch.nn.Linear(D, 3 * D)})
            self.h = torch.nn.ModuleList([torch.nn.ModuleDict({"attn": block})])

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = NanoGPT()

    for module in (NanoGPT(), Holder()):
        assert wqk.open(module)[0].head_count == 4


def test_a_tensor_of_exactly_the_name_is_the_one_that_is_meant(tmp_path: Any) -> None:
    tensors = {
        f"{tower}layers.0.{side}.weight": draw(D, D)
        for tower in ("", "vision.")
        for side in ("q", "k")
    }
    both = Module(tensors, CONFIG)
    for tower in ("", "vision."):
        family = tmp_path / "own.toml"
        family.write_text(
            'name = "own"\nmodel_types = ["own"]\n[[attention]]\nstack = "own"\n'
            f'query = "{tower}layers.{{layer}}.q"\nkey = "{tower}layers.{{layer}}.k"\n'
        )
        attention = wqk.open(both, family=str(family))[0]
        expected = tensors[f"{tower}layers.0.q.weight"].reshape(4, D // 4, D)
        np.testing.assert_array_equal(attention.query.weight, expected)


def test_a_family_file_names_a_tower_wholly_where_there_are_two(tmp_path: Any) -> None:
    family = tmp_path / "own.toml"
    family.write_text(
        'name = "own"\nmodel_types = ["own"]\n[[attention]]\nstack = "own"\n'
        'query = "layers.{layer}.q_proj"\nkey = "layers.{layer}.k_proj"\n'
    )

    def tower(prefix: str) -> dict[str, np.ndarray]:
        return {f"{prefix}layers.0.{side}_proj.weight": draw(D, D) for side in "qk"}

    # What stands before everything may be left out; what tells two towers apart may not.
    alone = Module(tower("model."), CONFIG)
    assert wqk.open(alone, family=str(family))[0].head_count == 4
    both = Module(tower("model.text.") | {
        f"model.vision.blocks.0.{side}_proj.weight": draw(D, D) for side in "qk"
    }, CONFIG)  # fmt: skip
    with pytest.raises(CheckpointError, match=r"write the whole name, 'model\.text\.layers"):
        wqk.open(both, family=str(family))[0]
    family.write_text(family.read_text().replace('"layers', '"model.text.layers'))
    assert wqk.open(both, family=str(family))[0].head_count == 4


def test_a_family_can_be_like_another(tmp_path: Any) -> None:
    family = tmp_path / "own.toml"
    own = 'name = "own"\nmodel_types = ["own"]\nlike = "llama"\n'
    config = {"num_attention_heads": 4, "num_hidden_layers": 1, "model_type": "own"}
    model = Module({f"layers.0.self_attn.{s}_proj.weight": draw(D, D) for s in "qk"}, config)
    family.write_text(own + '[change]\nscale = []\n[change.rotary]\norder = "interleaved"\n')
    (changed,) = wqk.open(open_checkpoint(model), family=family).plans
    assert (changed.family, changed.scale, changed.causal) == ("own", 1.0, True)
    assert changed.rotary is not None
    assert changed.rotary.order == "interleaved"
    for wrong, said in (
        (own.replace("llama", "nobody"), "'like' must name a shipped family"),
        (own.replace("llama", "../llama"), "'like' must name a shipped family"),
        (own + "change = 1\n", "'change' must be a table"),
        (own + "[change]\nqeury = 'q'\n", "did you mean 'query'"),
    ):
        family.write_text(wrong)
        with pytest.raises(UnknownFamily, match=said):
            wqk.open(open_checkpoint(model), family=family)


GROUPS, R = 2, D // 4


def taken(weight: np.ndarray, rows: list[int]) -> np.ndarray:
    """Heads (heads, R, D) that begin at these rows."""
    return np.stack([weight[row : row + R] for row in rows])


@pytest.mark.parametrize(
    ("model_type", "name", "queries", "keys"),
    [
        # ChatGLM2/3, GLM-4 and Bailing: all queries, then the keys, then the values.
        ("chatglm", "transformer.encoder.layers.{}.self_attention.query_key_value",
         [0, R, 2 * R, 3 * R], [D, D + R]),
        ("bailing_moe", "model.layers.{}.attention.query_key_value",
         [0, R, 2 * R, 3 * R], [D, D + R]),
        # InternLM2: for each key head its queries, its key and its value.
        ("internlm2", "model.layers.{}.attention.wqkv",
         [0, R, 4 * R, 5 * R], [2 * R, 6 * R]),
    ],
)  # fmt: skip
def test_fused_weights_of_grouped_heads_by_hand(
    model_type: str, name: str, queries: list[int], keys: list[int]
) -> None:
    fused = draw(D + 2 * GROUPS * R, D)
    config = {"model_type": model_type, "num_attention_heads": 4, "hidden_size": D,
              "num_layers": 1}  # fmt: skip
    counted = "multi_query_group_num" if model_type == "chatglm" else "num_key_value_heads"
    attention = wqk.open(Module({f"{name.format(0)}.weight": fused}, config | {counted: GROUPS}))[0]
    x = draw(5, D)
    query, key = (x @ taken(fused, rows).swapaxes(-1, -2) for rows in (queries, keys))
    expected = np.stack([query[h] @ key[h // 2].T for h in range(4)])
    np.testing.assert_allclose(attention.products(x, x), expected, rtol=1e-5, atol=1e-5)
    forms = np.stack([x @ attention[h].dense() @ x.T for h in range(4)])
    np.testing.assert_allclose(forms, expected, rtol=1e-4, atol=1e-4)
