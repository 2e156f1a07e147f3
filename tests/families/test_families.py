"""Every family, proven: a random model attends with the forms read from its saved weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.families.proving import (
    BART,
    BERT,
    GROUPED,
    LONGROPE,
    TOKENS,
    YARN,
    Architecture,
    edit_config,
    edit_tensors,
    prove_attention,
    prove_input_norms,
    prove_live,
    prove_values_and_outputs,
    save,
)

from wqk.attention import Attention, attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import families, find_family
from wqk.forms import BilinearForm
from wqk.scores import coupling, head_terms, symmetry
from wqk.verification import verify

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

if TYPE_CHECKING:
    from collections.abc import Callable


DISENTANGLED = BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
GPT2 = TOKENS | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
GPT_NEO = TOKENS | {
    "hidden_size": 32,
    "num_heads": 4,
    "num_layers": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 5,
    "max_position_embeddings": 64,
}
MODERNBERT = BERT | {
    "cls_token_id": 1,
    "sep_token_id": 2,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "global_attn_every_n_layers": 3,
    "attention_bias": True,
}
T5 = TOKENS | {
    "d_model": 32,
    "num_heads": 4,
    "d_kv": 12,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES = [
    Architecture("bert", "BertForMaskedLM", BERT),
    Architecture("bert-without-prefix", "BertModel", BERT),
    Architecture("bert-decoder", "BertLMHeadModel", BERT | {"is_decoder": True}),
    Architecture("roberta", "RobertaForMaskedLM", BERT),
    Architecture("xlm-roberta", "XLMRobertaModel", BERT),
    Architecture("electra", "ElectraForPreTraining", BERT | {"embedding_size": 16}),
    Architecture("camembert", "CamembertModel", BERT),
    Architecture("roberta-prelayernorm", "RobertaPreLayerNormModel", BERT),
    Architecture(
        "distilbert",
        "DistilBertForMaskedLM",
        TOKENS | {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 24},
    ),
    Architecture("albert", "AlbertForMaskedLM", BERT | {"embedding_size": 16}),
    # Three passes, dealt to two groups (two and one) of two layers each.
    Architecture(
        "albert-groups",
        "AlbertModel",
        BERT | {"num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2},
        blocks=6,
    ),
    Architecture("deberta", "DebertaForMaskedLM", DISENTANGLED),
    Architecture(
        "deberta-one-term",
        "DebertaModel",
        DISENTANGLED | {"pos_att_type": ["p2c"]},
        hub={"pos_att_type": "p2c"},
    ),
    Architecture("deberta-v2", "DebertaV2ForMaskedLM", DISENTANGLED),
    Architecture(
        "deberta-v2-convolution",
        "DebertaV2Model",
        DISENTANGLED | {"conv_kernel_size": 3, "conv_act": "gelu"},
    ),
    Architecture(
        "deberta-v3",
        "DebertaV2Model",
        DISENTANGLED | {"share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
        hub={"pos_att_type": "p2c|c2p"},
    ),
    Architecture("modernbert", "ModernBertForMaskedLM", MODERNBERT, blocks=4),
    Architecture(
        "modernbert-hub",
        "ModernBertModel",
        MODERNBERT,
        blocks=4,
        hub={
            "rope_parameters": None,
            "layer_types": None,
            "global_rope_theta": 300.0,
            "local_rope_theta": 50.0,
            "global_attn_every_n_layers": 3,
        },
    ),
    Architecture("openai-gpt", "OpenAIGPTLMHeadModel", GPT2),
    Architecture("gpt2", "GPT2LMHeadModel", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    Architecture("gpt2-without-scale", "GPT2Model", GPT2 | {"scale_attn_weights": False}),
    Architecture(
        "gpt2-hub",
        "GPT2Model",
        GPT2,
        hub={"scale_attn_weights": None, "scale_attn_by_inverse_layer_idx": None},
    ),
    Architecture("gpt-neo", "GPTNeoForCausalLM", GPT_NEO, blocks=4),
    Architecture("gpt-neo-hub", "GPTNeoModel", GPT_NEO, blocks=4, hub={"attention_layers": None}),
    Architecture("gptj", "GPTJForCausalLM", GPT2 | {"rotary_dim": 4}),
    Architecture(
        "gpt-neox",
        "GPTNeoXForCausalLM",
        BERT | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    Architecture(
        "gpt-neox-hub",
        "GPTNeoXModel",
        BERT,
        hub={"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 100},
    ),
    Architecture("llama", "LlamaForCausalLM", GROUPED | {"attention_bias": True}),
    Architecture("llama3", "LlamaModel", GROUPED | {"rope_parameters": LLAMA3}),
    Architecture(
        "llama3-hub",
        "LlamaForCausalLM",
        GROUPED,
        hub={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3},
    ),
    Architecture(
        "llama-linear",
        "LlamaModel",
        GROUPED,
        hub={"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.5}},
    ),
    Architecture(
        "llama-dynamic",
        "LlamaModel",
        GROUPED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0}},
    ),
    Architecture("llama-yarn", "LlamaModel", GROUPED | {"rope_parameters": YARN}),
    Architecture(
        "llama-yarn-weighted",
        "LlamaModel",
        GROUPED | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    Architecture("mistral", "MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    Architecture("mistral-full", "MistralModel", GROUPED | {"sliding_window": None}),
    Architecture("mixtral", "MixtralForCausalLM", GROUPED | {"num_local_experts": 2}),
    Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    Architecture(
        "qwen2-hub",
        "Qwen2Model",
        GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        hub={"layer_types": None},
    ),
    Architecture("qwen3", "Qwen3ForCausalLM", GROUPED),
    Architecture("gemma", "GemmaForCausalLM", GROUPED | {"num_key_value_heads": 1}),
    Architecture("phi", "PhiForCausalLM", GROUPED | {"head_dim": 8}),
    Architecture(
        "phi-norms",
        "PhiModel",
        GROUPED | {"head_dim": 8, "qk_layernorm": True},
        hub={"rope_parameters": None, "partial_rotary_factor": 0.25, "rope_theta": 50.0},
    ),
    Architecture("phi3", "Phi3ForCausalLM", GROUPED | {"sliding_window": 5}),
    Architecture(
        "phi4-mini",
        "Phi3Model",
        GROUPED
        | {
            "hidden_size": 96,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 64,
            "rope_parameters": LONGROPE | {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    ),
    Architecture(
        "phi4-mini-hub",
        "Phi3Model",
        GROUPED | {"hidden_size": 96, "head_dim": 16, "max_position_embeddings": 128},
        hub={
            "original_max_position_embeddings": 64,
            "rope_parameters": None,
            "rope_scaling": {**LONGROPE, "type": "longrope"},
            "partial_rotary_factor": 0.5,
            "rope_theta": 50.0,
        },
    ),
    Architecture("t5", "T5ForConditionalGeneration", T5, blocks=8),
    Architecture(
        "t5-equal-depth",
        "T5Model",
        T5 | {"num_decoder_layers": 2},
        blocks=6,
        hub={"num_decoder_layers": None},
    ),
    Architecture("mt5", "MT5ForConditionalGeneration", T5, blocks=8),
    Architecture("bart", "BartForConditionalGeneration", BART, blocks=8),
    Architecture("mbart", "MBartModel", BART, blocks=8),
]


def named(name: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.name == name)


@pytest.fixture(autouse=True, scope="module")
def quiet_transformers() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(params=ARCHITECTURES, ids=lambda a: a.name, scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An architecture, its model, and the folder that the model is saved in."""
    folder = tmp_path_factory.mktemp(request.param.name)
    return request.param, save(request.param, folder), folder


def test_the_model_attends_with_the_forms_that_are_read(saved: Any) -> None:
    architecture, _, folder = saved
    prove_attention(architecture, folder)


def test_the_live_module_holds_the_same_blocks(saved: Any) -> None:
    prove_live(*saved)


def test_values_and_outputs_are_there(saved: Any) -> None:
    _, model, folder = saved
    prove_values_and_outputs(model, folder)


def test_the_named_norms_feed_queries_and_keys(saved: Any) -> None:
    _, model, _ = saved
    prove_input_norms(model)


# --- spellings of older files --------------------------------------------------------------------


def without_prefix(tensors: dict[str, Any]) -> dict[str, Any]:
    """As the hub's gpt2: no ``transformer.``, and the causal mask among the weights."""
    renamed = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    return renamed | masks


def gamma_and_beta(tensors: dict[str, Any]) -> dict[str, Any]:
    """As files converted from TensorFlow."""
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in tensors.items()
    }


def with_buffers(tensors: dict[str, Any]) -> dict[str, Any]:
    """As Pythia: masks and rotary frequencies among the weights."""
    return tensors | {
        f"gpt_neox.layers.{layer}.attention.{name}": value
        for layer in range(2)
        for name, value in {
            "bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(),
            "masked_bias": torch.tensor(-1e9),
            "rotary_emb.inv_freq": torch.ones(4),
        }.items()
    }


def with_bias_in_cross_attention(tensors: dict[str, Any]) -> dict[str, Any]:
    """As the first T5 files, which hold a relative bias that is not used."""
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return tensors | {name: torch.randn(8, 4)}


def with_a_draft_layer(tensors: dict[str, Any]) -> dict[str, Any]:
    """As models with layers for multi-token prediction after their own."""
    extra = {
        name.replace("layers.1.", "layers.2."): value.clone()
        for name, value in tensors.items()
        if "layers.1." in name
    }
    return tensors | extra


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("gpt2", without_prefix),
        ("bert", gamma_and_beta),
        ("electra", gamma_and_beta),
        ("deberta", gamma_and_beta),
        ("gpt-neox", with_buffers),
        ("t5", with_bias_in_cross_attention),
        ("mistral", with_a_draft_layer),
    ],
)
def test_older_files(
    name: str, edit: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    architecture = named(name)
    save(architecture, tmp_path)
    edit_tensors(tmp_path, edit)
    verification = verify(tmp_path)
    assert len(verification.blocks) == architecture.blocks
    assert verification.difference < 1e-12


def test_mobilellm_runs_as_llama_and_shares_layers(tmp_path: Path) -> None:
    save(replace(named("llama"), config=GROUPED), tmp_path)
    edit_config(tmp_path, {"model_type": "mobilellm", "layer_sharing": True})
    assert [plan.applications for plan in attention_plans(open_checkpoint(tmp_path))] == [2, 2]
    verification = verify(tmp_path)
    assert verification.family == "mobilellm"
    assert verification.difference < 1e-12


@pytest.mark.parametrize("folder", ["stories260k", "llama2xs-260k"])
def test_real_weights(folder: str, shared: Path) -> None:
    verification = verify(shared / "checkpoints" / folder)
    assert len(verification.blocks) == 5
    assert verification.ok
    assert verification.difference < 1e-12


def test_a_given_text_is_read(shared: Path) -> None:
    verification = verify(shared / "checkpoints" / "stories260k", tokens=[1, 403, 407, 261, 378])
    assert verification.ok


# --- what no shipped family needs, in a family of the user's own ----------------------------------

DECODER = """
name = "own"
model_types = ["own"]
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
    verification = verify(tmp_path, family=path)
    assert len(verification.blocks) == architecture.blocks
    assert min(block.contrast for block in verification.blocks) > 0.02
    assert verification.difference < 1e-12


# --- what must fail ------------------------------------------------------------------------------


def swapped(a: str, b: str) -> Callable[[str], str]:
    return lambda text: text.replace(a, "\0").replace(b, a).replace("\0", b)


def replaced(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


def added(line: str) -> Callable[[str], str]:
    return lambda text: text.replace("[[attention]]\n", f"[[attention]]\n{line}\n")


def dropped(key: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        lines = text.splitlines()
        kept = [line for line in lines if line.partition(" ")[0] != key]
        assert len(kept) < len(lines)
        return "\n".join(kept)

    return edit


WRONG = {
    "queries for keys": ("bert", swapped("self.query", "self.key")),
    "values for keys": ("bert", replaced("self.key", "self.value")),
    "too few heads": ("bert", added('heads = "wrong"\ndefaults = { wrong = 2 }')),
    "too many heads": ("bert", added('heads = "wrong"\ndefaults = { wrong = 8 }')),
    "grouped as sectioned": ("gpt-neox", replaced("grouped", "sectioned")),
    "sectioned as grouped": ("modernbert", replaced("sectioned", "grouped")),
    "heads of a fused tensor": ("deberta", replaced('"grouped"', '"sectioned"')),
    "order of a fused tensor": ("phi3", added('order = "qvk"')),
    "rotary order": ("llama", replaced('"half"', '"interleaved"')),
    "rotary order, reversed": ("gptj", replaced('"interleaved"', '"half"')),
    "rotary width": ("gptj", dropped("width")),
    "rotary base": ("gpt-neox-hub", dropped("base")),
    "no local rotary base": ("modernbert-hub", dropped("local_base")),
    "a scale where there is none": ("t5", dropped("scale")),
    "no scale": ("bert", added("scale = []")),
    "no scale by layer": ("gpt2", replaced("layer_number ** -1", "1")),
    "no scale by terms": ("deberta-v2", replaced(', "score_terms ** -0.5"', "")),
    "no position bias": ("t5", dropped("position")),
    "no query bias": ("deberta", dropped("query_bias")),
    "no norms": ("qwen3", lambda text: dropped("query_norm")(dropped("key_norm")(text))),
    "gain stored from 1": ("qwen3", added("norm_offset = 1.0")),
    "kind of norm": ("phi-norms", dropped("norm")),
    "not causal": ("llama", dropped("causal")),
    "causal": ("bert", added("causal = true")),
    "no window": ("mistral", dropped("window")),
    "softcap": ("llama", added('softcap = "cap"\ndefaults = { cap = 1.0 }')),
    "linear biases": ("llama", added('position = "alibi"')),
}


UNFIT = {
    "conv1d as linear": ("gpt2", replaced("conv1d", "sectioned")),
    "grouped queries for keys": ("llama", swapped("q_proj", "k_proj")),
    "heads for key heads": ("llama", added('key_heads = "num_attention_heads"')),
}


def wrong_family(name: str, edit: Callable[[str], str], folder: Path) -> Path:
    """Save a model, and its family with a mistake."""
    save(named(name), folder)
    family = find_family(open_checkpoint(folder))
    shipped = resources.files("wqk.families") / "data" / f"{family.name}.toml"
    path = folder / "wrong.toml"
    path.write_text(edit(shipped.read_text(encoding="utf-8")), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "edit"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_family_fails(name: str, edit: Callable[[str], str], tmp_path: Path) -> None:
    verification = verify(tmp_path, family=wrong_family(name, edit, tmp_path))
    assert not verification.ok
    assert verification.difference > 1e-3


@pytest.mark.parametrize(("name", "edit"), UNFIT.values(), ids=UNFIT.keys())
def test_a_family_that_does_not_fit_is_refused(
    name: str, edit: Callable[[str], str], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"do not (divide|fit)"):
        verify(tmp_path, family=wrong_family(name, edit, tmp_path))


def test_pairing_heads_with_the_wrong_key_heads_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(named("llama"), tmp_path)
    assert verify(tmp_path).ok

    def paired_modulo(attention: Attention) -> BilinearForm:
        heads, width, d_query = attention.query_weight.shape
        groups = attention.key_head_count
        query = attention.query_weight.reshape(heads // groups, groups, width, d_query)
        key = attention.key_weight[:, None].swapaxes(-1, -2)
        return BilinearForm(query.swapaxes(0, 1).swapaxes(-1, -2), key)

    monkeypatch.setattr(Attention, "heads", property(paired_modulo))
    verification = verify(tmp_path)
    assert not verification.ok
    assert verification.difference > 1e-3


def test_uniform_attention_proves_nothing(tmp_path: Path) -> None:
    save(named("bert"), tmp_path)

    def without_queries(tensors: dict[str, Any]) -> dict[str, Any]:
        return {n: v * 0 if ".self.query." in n else v for n, v in tensors.items()}

    edit_tensors(tmp_path, without_queries)
    verification = verify(tmp_path)
    assert verification.difference < 1e-12
    assert not verification.ok


# --- errors --------------------------------------------------------------------------------------


def test_a_model_that_transformers_does_not_know(tmp_path: Path) -> None:
    save(named("llama"), tmp_path)
    edit_config(tmp_path, {"model_type": "nobody"})
    llama = resources.files("wqk.families") / "data" / "llama.toml"
    with pytest.raises(UnknownFamily, match="no code for model type 'nobody'"):
        verify(tmp_path, family=Path(str(llama)))


def test_transformers_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(named("bert"), tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match="transformers is not installed"):
        verify(tmp_path)


def test_what_is_run_is_a_folder(tmp_path: Path) -> None:
    model = save(named("bert"), tmp_path)
    for ref in (model, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match="name the folder"):
            verify(ref)


def test_rotary_scaling_without_its_numbers(tmp_path: Path) -> None:
    save(named("llama"), tmp_path)
    edit_config(tmp_path, {"rope_parameters": {"rope_type": "llama3"}})
    with pytest.raises(CheckpointError, match="rotary scaling 'llama3'"):
        attention_plans(open_checkpoint(tmp_path))


# --- forms of known symmetry, through a checkpoint -----------------------------------------------


@pytest.fixture
def planted(tmp_path: Path) -> Attention:
    """A layer of 6 heads over 2 key heads, whose forms are planted in a saved model.

    Heads 0 and 1 are symmetric, head 3 is skew, 2 and 4 are each other's transposes across the
    groups, head 5 is zero.
    """
    rng = np.random.default_rng(0)
    width, d = 12, 48
    # Orthonormal columns, so that the heads' norms are those of their cores.
    keys = np.linalg.qr(rng.standard_normal((d, 2 * width)))[0].T.reshape(2, width, d)
    core = rng.standard_normal((width, width))
    queries = np.stack(
        [
            (core + core.T) @ keys[0],
            np.eye(width) @ keys[0],
            keys[1],
            (core - core.T) @ keys[1],
            keys[0],
            0 * keys[1],
        ]
    )
    save(replace(named("llama"), config=GROUPED), tmp_path)

    def plant(tensors: dict[str, Any]) -> dict[str, Any]:
        prefix = "model.layers.1.self_attn"
        return tensors | {
            f"{prefix}.q_proj.weight": torch.tensor(queries.reshape(-1, d)).contiguous(),
            f"{prefix}.k_proj.weight": torch.tensor(keys.reshape(-1, d)).contiguous(),
        }

    edit_tensors(tmp_path, plant)
    checkpoint = open_checkpoint(tmp_path)
    assert verify(tmp_path).ok
    return load_attention(checkpoint, attention_plans(checkpoint)[1])


def test_planted_heads_have_their_known_scores(planted: Attention) -> None:
    scores = symmetry(planted.heads).reshape(-1)
    np.testing.assert_allclose(scores[[0, 1, 3]], [1, 1, -1], atol=1e-12)
    assert np.isnan(scores[5])
    pairs = coupling(planted.heads)
    np.testing.assert_allclose([pairs[2, 4], pairs[4, 2]], 1, atol=1e-12)
    np.testing.assert_allclose([pairs[0, 2], pairs[0, 3], pairs[2, 2]], 0, atol=1e-12)


def test_planted_heads_add_up_to_the_known_layer(planted: Attention) -> None:
    matrices = [planted.head(index).dense() for index in range(6)]
    square = np.linalg.norm(sum(matrices)) ** 2
    within = sum(np.trace(m @ m) for m in matrices) / square
    terms = head_terms(planted.heads)
    np.testing.assert_allclose(terms.within, within)
    layer = sum(matrices)
    np.testing.assert_allclose(terms.within + terms.between, np.trace(layer @ layer) / square)
    # The symmetric heads and the transposed pair against the skew one, which is orthogonal to them.
    skew = np.linalg.norm(matrices[3]) ** 2
    np.testing.assert_allclose(symmetry(planted.form), 1 - 2 * skew / square)


# --- the families together -----------------------------------------------------------------------


def test_every_model_type_belongs_to_one_family() -> None:
    kinds = [kind for family in families().values() for kind in family.model_types]
    assert len(kinds) == len(set(kinds))
