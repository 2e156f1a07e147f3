"""Forms with norms, biases, distances and values, against the model's own computation."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.small import sizes

import wqk
from wqk.attention import Block
from wqk.attention.factors import Coordinates, omissions
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError

SIZES = sizes(48, 2, 6, vocab_size=60, max_position_embeddings=32, intermediate_size=32)
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": 60, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

# The modules of layer 1: the norm before, projections to queries and keys or to all three, W_o.
LLAMA_MODULES = {
    "norm": "layers.1.input_layernorm",
    "query": "layers.1.self_attn.q_proj",
    "key": "layers.1.self_attn.k_proj",
    "output": "layers.1.self_attn.o_proj",
}
BERT_MODULES = {
    "norm": "encoder.layer.0.output.LayerNorm",
    "query": "encoder.layer.1.attention.self.query",
    "key": "encoder.layer.1.attention.self.key",
    "output": "encoder.layer.1.attention.output.dense",
}
GPT2_MODULES = {"norm": "h.1.ln_1", "fused": "h.1.attn.c_attn", "output": "h.1.attn.c_proj"}

# Models, their configurations, and their modules.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "post-norm, biases": ("BertModel", SIZES, BERT_MODULES),
    "pre-norm, fused Conv1D": ("GPT2Model", GPT2, GPT2_MODULES),
    "RMS norm, grouped, rotary": ("LlamaModel", GROUPED, LLAMA_MODULES),
    "attention factor of YaRN": ("LlamaModel", GROUPED | {"rope_parameters": YARN}, LLAMA_MODULES),
    "biases with rotary positions": ("Qwen2Model", GROUPED, LLAMA_MODULES),
    "gain stored less one": ("GemmaModel", GROUPED, LLAMA_MODULES),
}


class Run:
    """A random model, saved, and the vectors that passed through layer 1 while it ran."""

    def __init__(
        self, name: str, settings: dict[str, Any], modules: dict[str, str], folder: Any
    ) -> None:
        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        config = model_class.config_class(**settings)
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        model = model.double()
        self.seen: dict[str, np.ndarray] = {}
        for role, module in modules.items():
            model.get_submodule(module).register_forward_hook(self._remember(role))
        with torch.no_grad():
            out = model(torch.randint(0, 60, (1, 9)), output_attentions=True)
        self.attention = out.attentions[1][0].numpy()
        if "fused" in modules:
            self.seen["query in"] = self.seen["fused in"]
            width = self.seen["fused out"].shape[-1] // 3
            self.seen["query out"] = self.seen["fused out"][:, :width]
            self.seen["key out"] = self.seen["fused out"][:, width : 2 * width]
        self.checkpoint = open_checkpoint(folder)
        self.plan = wqk.open(self.checkpoint).plans[1]
        self.model, self.output = model, model.get_submodule(modules["output"])

    def _remember(self, role: str) -> Any:
        def hook(_: Any, inputs: Any, output: Any) -> None:
            self.seen[f"{role} in"] = inputs[0][0].double().numpy()
            self.seen[f"{role} out"] = output[0].double().numpy()

        return hook

    def form(self, **coordinates: Any) -> wqk.BilinearForm:
        """The heads (H, ...) of layer 1, in double precision."""
        ((_, form),) = Block(self.checkpoint, self.plan).forms(Coordinates(**coordinates))
        return wqk.BilinearForm(form.query.astype(np.float64), form.key.astype(np.float64))

    def scores(self) -> np.ndarray:
        """The model's own products of queries and keys, before any rotation, (H, N, N)."""
        heads = self.attention.shape[0]
        query = self.seen["query out"].reshape(9, heads, -1)
        key = self.seen["key out"].reshape(9, -1, query.shape[-1])
        key = np.repeat(key, heads // key.shape[1], axis=1)
        return np.einsum("ihr,jhr->hij", query, key)

    def normalized(self) -> np.ndarray:
        """The norm's input, normalized by definition, before the norm's gain and bias."""
        x = self.seen["norm in"]
        if self.plan.rule.input_norm_kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        # The tiny stabilizer under the root is in the config under several names; all are small.
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def flat(scores: np.ndarray) -> np.ndarray:
    return scores.reshape(-1, *scores.shape[-2:])


def with_one(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones((len(x), 1))], axis=-1)


def up_to_rows(scores: np.ndarray) -> np.ndarray:
    """Scores less their means over keys, which the softmax ignores."""
    return scores - scores.mean(-1, keepdims=True)


@pytest.fixture(params=MODELS, scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(*MODELS[request.param], tmp_path_factory.mktemp("model"))


def test_the_augmented_form_gives_the_scores_with_biases(run: Run) -> None:
    x = with_one(run.seen["query in"])
    scores = flat(run.form(bias=True)(x, x))
    np.testing.assert_allclose(up_to_rows(scores), up_to_rows(run.scores()), rtol=1e-5, atol=1e-4)
    if run.plan.rotary is not None:
        np.testing.assert_allclose(scores, run.scores(), rtol=1e-5, atol=1e-4)


def test_folded_norms_give_the_scores_of_normalized_vectors(run: Run) -> None:
    x = with_one(run.normalized())
    scores = up_to_rows(flat(run.form(fold_norm=True, bias=True)(x, x)))
    expected = up_to_rows(run.scores())
    scale = np.abs(expected).max()
    np.testing.assert_allclose(scores / scale, expected / scale, atol=1e-4)


def test_value_output_forms_give_what_attention_writes(run: Run) -> None:
    forms = flat(run.form(circuit="ov", bias=True).dense())
    written = (run.attention @ with_one(run.seen["query in"]) @ forms).sum(0)[:, :-1]
    bias = getattr(run.output, "bias", None)
    expected = run.seen["output out"] - (0 if bias is None else bias.detach().numpy())
    np.testing.assert_allclose(written, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("distance", [0, 1, 5])
def test_forms_at_a_distance_give_the_rotated_scores(run: Run, distance: int) -> None:
    if run.plan.rotary is None:
        with pytest.raises(wqk.WqkError, match="no rotary positions"):
            list(Block(run.checkpoint, run.plan).forms(Coordinates(distances=(1,))))
        return
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    heads = run.attention.shape[0]
    query = torch.tensor(run.seen["query out"]).reshape(1, 9, heads, -1).transpose(1, 2)
    key = torch.tensor(run.seen["key out"]).reshape(1, 9, -1, query.shape[-1]).transpose(1, 2)
    cosine, sine = run.model.rotary_emb(query, torch.arange(9)[None])
    query, key = apply_rotary_pos_emb(query, key, cosine.double(), sine.double())
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    expected = torch.diagonal(query @ key.transpose(-1, -2), -distance, -2, -1)[0].numpy()
    x = with_one(run.seen["query in"])
    scores = flat(run.form(bias=True, distances=(distance,))(x, x))
    # Queries and keys have the attention factor at every distance; no form has it.
    actual = np.diagonal(scores, -distance, -2, -1) * run.plan.rotary.amplitude**2
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def test_the_attention_factor_is_said_to_be_left_out(run: Run) -> None:
    factor = run.plan.rotary.amplitude if run.plan.rotary else 1.0
    left_out = omissions(run.plan, Coordinates(distances=(0, 1)))
    terms = [omission.term for omission in left_out]
    assert any("attention factor" in term for term in terms) == (factor != 1)


def test_each_distance_has_its_own_rows(run: Run) -> None:
    if run.plan.rotary is None:
        pytest.skip("positions are not rotary")
    table = wqk.scan(run.checkpoint, distances=(0, 1, 7))
    plain = wqk.scan(run.checkpoint)
    near = table.frame.filter(distance=0)
    assert near.drop("distance").equals(plain.frame.drop("distance"))
    assert len(table) == 3 * len(plain)
    far = table.frame.filter(distance=7)
    assert not np.allclose(far["symmetry"], near["symmetry"])
    # A rotation changes no norm of a head's factor, so a head's trace changes, its rank does not.
    assert set(far["rank"]) == set(near["rank"])


def test_every_pair_of_coordinates_combines_and_is_told_in_the_table(run: Run) -> None:
    places = [("qk", 0), ("ov", 0), *[("qk", 3)] * (run.plan.rotary is not None)]
    for (circuit, distance), bias, fold_norm in product(places, (False, True), (False, True)):
        coordinates = {"circuit": circuit, "bias": bias, "fold_norm": fold_norm}
        form = run.form(**coordinates, distances=(distance,))
        assert form.shape[-1] == run.form().shape[-1] + bias
        assert np.isfinite(form.norm).all()
    table = wqk.scan(run.checkpoint, **coordinates, distances=(distance, distance), heads=False)
    assert table["d_query"].to_list() == [49] * 2  # a distance that is named twice is scored once
    assert set(zip(table["circuit"], table["distance"], strict=True)) == {(circuit, distance)}
    assert (table.metadata["biases"], table.metadata["folded_norms"]) == (True, True)


def test_bytes_told_are_those_of_the_circuit(run: Run) -> None:
    updates = []
    wqk.scan(run.checkpoint, circuit="ov", heads=False, on_progress=updates.append)
    tensors = {}
    for plan in wqk.open(run.checkpoint).plans:
        for part in (*plan.value.parts, *plan.output.parts):
            tensors[part.name] = part
    expected = sum(part.nbytes(run.checkpoint.info(name)) for name, part in tensors.items())
    assert updates[-1].bytes_read == expected


def test_distances_are_made_one_by_one(run: Run) -> None:
    # A thousand rotated copies of a large block would not fit into memory.
    forms = Block(run.checkpoint, run.plan).forms(Coordinates(distances=(0,) * 1000))
    first, second = next(forms), next(forms)
    assert first[0] == second[0] == 0


@pytest.mark.usefixtures("unchecked_arguments")
def test_what_is_no_distance_and_what_nobody_knows_of_a_guess_is_refused() -> None:
    for distances in ((), (1.5,)):
        with pytest.raises(CheckpointError, match=r"distances.* whole numbers"):
            wqk.scan(wqk.demo_model("decoder"), distances=distances)
    with pytest.raises(wqk.WqkError, match="positions do not act on values"):
        wqk.scan(wqk.demo_model("encoder"), circuit="ov", distances=(0, 1))
    sides = {f"layers.0.attn.{side}_proj.weight": np.ones((8, 8), np.float32) for side in "qk"}
    biases = {f"layers.0.attn.{side}_proj.bias": np.ones(8, np.float32) for side in "qk"}
    with pytest.raises(wqk.WqkError, match="positions are not known"):
        wqk.scan(wqk.open(sides, heads_per_layer=2), distances=(1,))
    with pytest.raises(wqk.WqkError, match="leave out the biases"):
        wqk.scan(wqk.open(sides | biases, heads_per_layer=2), bias=True)
