"""A guess of a family is right where names tell, and never passes for knowledge."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.stand_in import Module

import wqk
from wqk.errors import CheckpointError, UnknownFamily
from wqk.inspecting.explanation import explain
from wqk_lab.atlas.ranks import place

D, GROUPS, R = 24, 2, 6
CONFIG = {"model_type": "nobody-knows", "num_attention_heads": 4, "hidden_size": D}
ATTENTION = "model.layers.{}.attn."


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def pair(path: str, sides: str = "qk") -> dict[str, np.ndarray]:
    return {f"{path}.{side}_proj.weight": draw(D, D) for side in sides}


def model(
    further: dict[str, tuple[int, ...]], config: dict[str, Any] = CONFIG, **roles: Any
) -> Any:
    shapes = {"q_proj.weight": (D, D), "k_proj.weight": (D, D), "v_proj.weight": (D, D)}
    shapes |= {"o_proj.weight": (D, D)} | roles | further
    return Module(
        {
            ATTENTION.format(layer) + name: draw(*s)
            for layer in range(2)
            for name, s in shapes.items()
        },
        config,
    )


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
    notes = " ".join(explain(guess).notes)
    assert "unknown" in notes
    assert "multiplies scores" not in notes
    attention = wqk.open(guess)[0]
    assert "none in the score" not in attention._repr_html_()
    with pytest.raises(UnknownFamily, match="scale and positions"):
        attention.logits(draw(3, D), draw(3, D))


@pytest.mark.parametrize("names", [("q_norm", "k_norm"), ("norm_q", "norm_k"), ("q_ln", "k_ln")])
def test_norms_of_queries_and_keys_are_folded(names: tuple[str, str]) -> None:
    width = D // 4
    guess = model({f"{name}.weight": (width,) for name in names})
    assert set(wqk.scan(guess).frame["status"]) == {"partial, guessed"}
    attention = wqk.open(guess)[1]
    weights = guess.state_dict()
    gain = weights[ATTENTION.format(1) + f"{names[0]}.weight"]
    stored = weights[ATTENTION.format(1) + "q_proj.weight"].reshape(4, width, D)
    np.testing.assert_array_equal(attention.query.weight, stored * gain[:, None])


@pytest.mark.parametrize(
    "name",
    [
        "q_norm.scale_table",
        "gate",
        "q_proj.lora_A.weight",
        "short_filter.weight",
        "rel_bias",
        "scaling",
        "use_qk_norm",
    ],
)
def test_what_is_not_explained_is_named(name: str) -> None:
    """Tensors next to the queries, and norms without gains, which the configuration switches on."""
    is_setting = name == "use_qk_norm"
    table = wqk.scan(
        model({} if is_setting else {name: (D, 3)}, CONFIG | ({name: True} if is_setting else {}))
    )
    assert set(table.frame["status"]) == {"partial, guessed"}
    assert name in table.metadata["partial"]["unknown"]


# What else mixes tokens in a layer, and its tensors.
MIXERS: dict[str, dict[str, tuple[int, ...]]] = {
    "state-space": {
        "mixer.A_log": (4,),
        "mixer.in_proj.weight": (3 * D, D),
        "mixer.conv1d.weight": (D, 1, 4),
    },
    "lightning": {"self_attn.slope_rate": (4,), "self_attn.qkv_proj.weight": (3 * D, D)},
    "gated linear": {
        "temporal_block.rg_lru.recurrent_param": (D,),
        "temporal_block.conv_1d.weight": (D, 1, 4),
    },
    "short convolution": {
        "conv.in_proj.weight": (3 * D, D),
        "conv.conv.weight": (D, 1, 3),
        "conv.out_proj.weight": (D, D),
    },
    "no attention there": {
        "attn.q_proj.weight": (D, D),
        "attn.k_proj.weight": (D, D),
        "attn.q_conv1d.weight": (D, 1, 4),
    },
}


@pytest.mark.parametrize(("kind", "shapes"), MIXERS.items(), ids=MIXERS)
def test_recurrences_and_convolutions_are_no_attention(kind, shapes):
    """Alone they are refused; next to a layer with attention they are named."""
    tensors = {f"layers.0.{name}": draw(*shape) for name, shape in shapes.items()}
    alone = "no family knows" if kind == "gated linear" else "recurrence or a convolution"
    with pytest.raises(UnknownFamily, match=alone):
        wqk.scan(Module(tensors, CONFIG))
    explanation = explain(Module(tensors | pair("layers.1.mixer", "qkv"), CONFIG))
    assert {(use.layers, use.heads) for use in explanation.uses} == {("1", "4×6")}
    (note,) = [note for note in explanation.notes if kind in note]
    assert note.startswith("layers 0:")


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
    plans = wqk.open(Module(named, config)).plans
    return {plan.stack: plan.query.heads for plan in plans}


def test_numbers_come_from_the_parts_own_configuration() -> None:
    shapes = {"encoder.layers.0.attn": (D, D), "decoder.layers.0.attn": (D, D)}
    config = {"encoder_attention_heads": 2, "decoder_attention_heads": 4}
    assert heads_of(shapes, config) == {"encoder": 2, "decoder": 4}
    config = {"num_attention_heads": 2, "decoder_num_attention_heads": 4}
    assert heads_of(shapes, config) == {"encoder": 2, "decoder": 4}
    # A decoder's heads are never the encoder's, a vision tower's never the text's.
    with pytest.raises(UnknownFamily, match="decoder"):
        heads_of(shapes, {"encoder_attention_heads": 2})
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
    fused, config = {"layers.0.attn.qkv.weight": draw(D + 2 * 6, D)}, {"num_attention_heads": 4}
    for opened, counts in (
        (wqk.open(fused, heads_per_layer=4, key_heads=1), (4, 1, 6)),
        (wqk.open(Module(fused, config), key_heads=4), (4, 4, 3)),
    ):
        (plan,) = opened.plans
        assert (plan.query.heads, plan.key.heads, plan.query.head_width) == counts
    with pytest.raises(UnknownFamily, match="heads_per_layer=N"):
        wqk.scan(fused)


def test_diffusers_second_attention_is_cross_attention() -> None:
    block = "down_blocks.0.attentions.1.transformer_blocks.0"
    tensors = {
        f"{block}.attn{n}.to_{side}.weight": draw(D, D if (n, side) != (2, "k") else 40)
        for n in (1, 2)
        for side in "qk"
    }
    plans = wqk.open(Module(tensors, CONFIG)).plans
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
    import torch

    single = torch.nn.MultiheadAttention(D, 4)
    attention = wqk.open(single)[0]
    weight = single.in_proj_weight.detach().numpy()[:D].reshape(4, D // 4, D)
    np.testing.assert_array_equal(attention.query.weight, weight)

    class NanoGPT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(n_head=4, n_embd=D)
            block = torch.nn.ModuleDict({"c_attn": torch.nn.Linear(D, 3 * D)})
            self.h = torch.nn.ModuleList([torch.nn.ModuleDict({"attn": block})])

    for module in (NanoGPT(), torch.nn.ModuleDict({"model": NanoGPT()})):
        assert wqk.open(module)[0].head_count == 4


def own(folder: Path, query: str, key: str) -> Path:
    """The file of a family with these names."""
    text = 'name = "own"\nmodel_types = ["own"]\n[[attention]]\nstack = "own"\n'
    (folder / "own.toml").write_text(f'{text}query = "{query}"\nkey = "{key}"\n')
    return folder / "own.toml"


def test_a_tensor_of_exactly_the_name_is_the_one_that_is_meant(tmp_path: Path) -> None:
    names = [f"{tower}layers.0.{side}.weight" for tower in ("", "vision.") for side in "qk"]
    tensors = {name: draw(D, D, seed=seed) for seed, name in enumerate(names)}
    module = Module(tensors, CONFIG)
    for tower in ("", "vision."):
        family = own(tmp_path, *(f"{tower}layers.{{layer}}.{side}" for side in "qk"))
        attention = wqk.open(module, family=str(family))[0]
        expected = tensors[f"{tower}layers.0.q.weight"].reshape(4, D // 4, D)
        np.testing.assert_array_equal(attention.query.weight, expected)


def test_a_family_file_names_a_tower_wholly_where_there_are_two(tmp_path: Path) -> None:
    family = own(tmp_path, "layers.{layer}.q_proj", "layers.{layer}.k_proj")
    # A prefix of all names may be left out; a prefix that distinguishes two towers may not.
    alone = Module(pair("model.layers.0"), CONFIG)
    assert wqk.open(alone, family=str(family))[0].head_count == 4
    module = Module(pair("model.text.layers.0") | pair("model.vision.blocks.0"), CONFIG)
    with pytest.raises(CheckpointError, match=r"the whole name; write 'model\.text\.layers"):
        wqk.open(module, family=str(family))[0]
    family.write_text(family.read_text().replace('"layers', '"model.text.layers'))
    assert wqk.open(module, family=str(family))[0].head_count == 4


def test_a_family_file_that_misspells_a_key_is_named(tmp_path: Path) -> None:
    names = [f"net.{layer}.to_{side}.weight" for layer in (0, 1) for side in "qk"]
    tensors = {name: draw(D, D, seed=seed) for seed, name in enumerate(names)}
    for spelling, message in (
        (
            "net.{layer}.to_key",
            r"family file names the key 'net\.0\.to_key', .*mean 'net\.0\.to_k'",
        ),
        ("somewhere.{layer}.else", "which the checkpoint lacks; correct the name in the file"),
    ):
        family = own(tmp_path, "net.{layer}.to_q", spelling)
        with pytest.raises(CheckpointError, match=message):
            wqk.open(Module(tensors, CONFIG), family=str(family))
    bare = {name.removesuffix(".weight"): array for name, array in tensors.items()}
    family = own(tmp_path, "net.{layer}.to_query", "net.{layer}.to_k")
    with pytest.raises(CheckpointError, match=r"mean 'net\.0\.to_q'\?; or choose .* family=NAME"):
        wqk.open(Module(bare, CONFIG), family=str(family))
    # A file that lacks the key of a single layer is incomplete.
    family = own(tmp_path, "net.{layer}.to_q", "net.{layer}.to_k")
    del tensors["net.1.to_k.weight"]
    with pytest.raises(CheckpointError, match=r"incomplete, tensor 'net\.1\.to_k\.weight'"):
        wqk.open(Module(tensors, CONFIG), family=str(family))


def test_a_family_can_be_like_another(tmp_path: Path) -> None:
    family = tmp_path / "own.toml"
    like = 'name = "own"\nmodel_types = ["own"]\nlike = "llama"\n'
    config = {"num_attention_heads": 4, "num_hidden_layers": 1, "model_type": "own"}
    model = Module(pair("layers.0.self_attn"), config)
    family.write_text(like + '[change]\nscale = []\n[change.rotary]\norder = "interleaved"\n')
    (changed,) = wqk.open(model, family=family).plans
    assert (changed.family, changed.scale, changed.causal) == ("own", 1.0, True)
    assert changed.rotary.order == "interleaved"
    for wrong, message in (
        (like.replace("llama", "nobody"), "'like' must name a shipped family"),
        (like.replace("llama", "../llama"), "'like' must name a shipped family"),
        (like + "change = 1\n", "'change' must be a table"),
        (like + "[change]\nqeury = 'q'\n", "did you mean 'query'"),
    ):
        family.write_text(wrong)
        with pytest.raises(UnknownFamily, match=message):
            wqk.open(model, family=family)


def taken(weight: np.ndarray, rows: list[int]) -> np.ndarray:
    """Heads (heads, R, D) that begin at these rows."""
    return np.stack([weight[row : row + R] for row in rows])


@pytest.mark.parametrize(
    ("model_type", "name", "queries", "keys"),
    [
        # ChatGLM2/3, GLM-4 and Bailing: all queries, then the keys, then the values.
        (
            "chatglm",
            "transformer.encoder.layers.{}.self_attention.query_key_value",
            [0, R, 2 * R, 3 * R],
            [D, D + R],
        ),
        (
            "bailing_moe",
            "model.layers.{}.attention.query_key_value",
            [0, R, 2 * R, 3 * R],
            [D, D + R],
        ),
        # InternLM2: for each key head its queries, its key and its value.
        ("internlm2", "model.layers.{}.attention.wqkv", [0, R, 4 * R, 5 * R], [2 * R, 6 * R]),
    ],
)
def test_fused_weights_of_grouped_heads_by_hand(model_type, name, queries, keys):
    fused = draw(D + 2 * GROUPS * R, D)
    config = {"model_type": model_type, "num_attention_heads": 4, "hidden_size": D, "num_layers": 1}
    counted = "multi_query_group_num" if model_type == "chatglm" else "num_key_value_heads"
    attention = wqk.open(Module({f"{name.format(0)}.weight": fused}, config | {counted: GROUPS}))[0]
    x = draw(5, D)
    query, key = (x @ taken(fused, rows).swapaxes(-1, -2) for rows in (queries, keys))
    expected = np.stack([query[h] @ key[h // 2].T for h in range(4)])
    np.testing.assert_allclose(attention.products(x, x), expected, rtol=1e-5, atol=1e-5)
    forms = np.stack([x @ attention[h].dense() @ x.T for h in range(4)])
    np.testing.assert_allclose(forms, expected, rtol=1e-4, atol=1e-4)


# Right where names tell.

# Foreign spellings of a query and the key next to it.
SEPARATE = {
    "openai-whisper": ["decoder.blocks.{}.attn.query", "decoder.blocks.{}.attn.key"],
    "llama2.c": ["layers.{}.attention.wq", "layers.{}.attention.wk"],
    "query_dense": ["bert/layer.{}.query_dense", "bert/layer.{}.key_dense"],
    "Wq": ["net.{}.mixer.Wq", "net.{}.mixer.Wk"],
    "to_q": ["transformer.layers.{}.0.to_q", "transformer.layers.{}.0.to_k"],
    "fairseq": [
        "encoder.sentence_encoder.layers.{}.self_attn.q_proj",
        "encoder.sentence_encoder.layers.{}.self_attn.k_proj",
    ],
    "queries": ["stack.{}.queries", "stack.{}.keys"],
}
FUSED = {
    "timm": ["blocks.{}.attn.qkv.weight", "sectioned"],
    "minGPT": ["transformer.h.{}.attn.c_attn.weight", "sectioned"],
    "nn.MultiheadAttention": ["encoder.layers.{}.self_attn.in_proj_weight", "sectioned"],
    "NeoX": ["model.layers.{}.attention.query_key_value.weight", "grouped"],
    "Conv1D": ["h.{}.attn.c_attn.weight", "conv1d"],
}


def check(model: Module, query: np.ndarray, key: np.ndarray, *, key_heads: int = 4) -> None:
    """The forms read from the model are those of these weights (H R, D) and (G R, D)."""
    for layer in range(2):
        attention = wqk.open(model).block(layer, kind="self")
        width = query.shape[0] // 4
        for head in range(4):
            shared = head // (4 // key_heads)
            expected = (
                query[head * width : (head + 1) * width].T
                @ key[shared * width : (shared + 1) * width]
            )
            np.testing.assert_allclose(attention[head].dense(), expected, atol=1e-4)


@pytest.mark.parametrize("names", SEPARATE.values(), ids=SEPARATE)
def test_siblings_are_queries_and_keys(names: tuple[str, str]) -> None:
    query, key = draw(D, D), draw(GROUPS * R, D)
    tensors = {
        name.format(layer) + ".weight": weight
        for layer in range(2)
        for name, weight in zip(names, (query, key), strict=True)
    }
    model = Module(tensors, {"model_type": "nobody-knows", "n_heads": 4, "n_kv_heads": GROUPS})
    check(model, query, key, key_heads=GROUPS)
    table = wqk.scan(model)
    assert set(table.frame["family"]) == {"inferred"}
    assert "confidence high" in table.metadata["inferred"][0]


@pytest.mark.parametrize(("name", "layout"), FUSED.values(), ids=FUSED)
def test_fused_weights_are_taken_apart(name: str, layout: str) -> None:
    query, key, value = (draw(D, D, seed=n) for n in range(3))
    if layout == "grouped":
        heads = zip(*(np.split(w, 4) for w in (query, key, value)), strict=True)
        fused = np.concatenate([part for head in heads for part in head])
    else:
        fused = np.concatenate([query, key, value])
    fused = fused.T if layout == "conv1d" else fused
    model = Module({name.format(layer): fused for layer in range(2)}, CONFIG)
    check(model, query, key)
    assert "confidence medium" in wqk.scan(model).metadata["inferred"][0]


def test_towers_and_cross_attention_are_told_apart() -> None:
    names = ["encoder.blocks.0.attn", "decoder.blocks.0.attn", "decoder.blocks.0.cross_attn"]
    tensors = {f"{n}.{role}.weight": draw(D, D) for n in names for role in ("query", "key")}
    plans = wqk.open(Module(tensors, {"n_audio_head": 4, "n_text_head": 3})).plans
    assert [(p.stack, p.kind, p.query.heads) for p in plans] == [
        ("encoder", "self", 4),
        ("decoder", "self", 3),
        ("decoder", "cross", 3),
    ]


def test_a_known_type_with_foreign_names_is_guessed_too() -> None:
    tensors = {f"layers.0.attention.w{role}.weight": draw(D, D) for role in "qk"}
    table = wqk.scan(Module(tensors, {"model_type": "llama", "num_attention_heads": 4}))
    assert set(table.frame["family"]) == {"inferred"}


@pytest.mark.parametrize("names", [["sequence.0.weight"], ["q_proj.weight"], ["h.0.q.weight"]])
def test_what_cannot_be_guessed_is_refused(names: list[str]) -> None:
    with pytest.raises(UnknownFamily, match="has a query's name next to a key"):
        wqk.scan(Module({name: draw(D, D) for name in names}, CONFIG))


def test_a_guessed_family_gives_a_real_models_own_attention(shared: Path, tmp_path: Path) -> None:
    # minGPT is no transformers model, but computes what GPT-2 does: the same weights, transposed
    # and renamed, are verified as GPT-2, and must have the same forms as the guess.
    import transformers
    from safetensors.numpy import load_file, save_file

    from wqk.live.verification import verify

    source = shared / "checkpoints" / "gpt-nano-sort"
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    tensors = {
        name: np.ascontiguousarray(value.T) if name.endswith(transposed) else value
        for name, value in load_file(source / "model.safetensors").items()
    }
    vocabulary, width = tensors["transformer.wte.weight"].shape
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=len(tensors["transformer.wpe.weight"]),
        n_embd=width,
        n_layer=3,
        n_head=3,
        tie_word_embeddings=False,
        architectures=["GPT2LMHeadModel"],
    )
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert verify(tmp_path, length=8).ok
    columns = ["layer", "head", "norm", "symmetry", "directionality"]
    guessed, proven = (wqk.scan(ref).frame.select(columns) for ref in (source, tmp_path))
    assert guessed.equals(proven)


def test_layers_whose_weights_are_in_another_form_are_not_left_out() -> None:
    tensors = pair("layers.0.attn") | pair("layers.1.attn")
    for form in ("qweight", "weight_packed", "base_layer.weight"):
        names = {
            name: name.replace("1.attn.q_proj.weight", f"1.attn.q_proj.{form}") for name in tensors
        }
        mixed = {names[name]: weight for name, weight in tensors.items()}
        with pytest.raises(CheckpointError, match=rf"incomplete, 'layers.1.attn.q_proj.{form}'"):
            wqk.scan(wqk.open(mixed, heads_per_layer=4))


# Besides guesses: known types with a property that contradicts their attention.


def test_queries_that_pass_a_convolution_are_refused() -> None:
    names = ("q_proj.weight", "k_proj.weight", "conv_qk_depthwise.weight")
    tensors = {f"layers.0.self_attn.qkv_proj.{name}": draw(D, D) for name in names}
    for model_type, reason in (("zaya", "more than two tokens"), ("nobody", "not a form of two")):
        with pytest.raises(UnknownFamily, match=reason):
            wqk.scan(Module(tensors, CONFIG | {"model_type": model_type}))


def test_weights_that_are_rounded_as_the_model_runs_are_partial() -> None:
    tensors = pair("layers.0.self_attn")
    config = {"model_type": "bitnet", "num_attention_heads": 4, "num_hidden_layers": 1}
    config["num_key_value_heads"] = 4
    rounded = config | {"quantization_config": {"quant_method": "bitnet"}}
    assert set(wqk.scan(Module(tensors, config)).frame["status"]) == {"ok"}
    table = wqk.scan(Module(tensors, rounded))
    assert set(table.frame["status"]) == {"partial"}
    assert "three values" in str(table.metadata["partial"])


def test_layers_that_share_keys_are_read_with_those_they_use() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    weights = {
        f"layers.{layer}.self_attn.{side}_proj.weight": draw(D, D, seed=layer + 9 * (side == "k"))
        for layer in range(4)
        for side in "qk"
    }
    config = {"num_attention_heads": 4, "hidden_size": 24, "layer_types": kinds}
    model = Module(weights, config | {"num_kv_shared_layers": 2})
    for layer, source in enumerate((0, 1, 0, 1)):
        attention = wqk.open(model)[layer]
        for factor, side, number in ((attention.query, "q", layer), (attention.key, "k", source)):
            stored = weights[f"layers.{number}.self_attn.{side}_proj.weight"]
            np.testing.assert_array_equal(factor.weight.reshape(D, D), stored)
    assert any("keys of layer 1" in note for note in explain(model).notes)


def test_a_part_without_forms_refuses_the_whole() -> None:
    config = {"model_type": "of-tomorrow", "text_config": {"model_type": "zaya"}}
    with pytest.raises(UnknownFamily, match=r"text_config: .* more than two tokens"):
        wqk.scan(Module(pair("model.layers.0.self_attn"), config))
