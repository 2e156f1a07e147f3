"""Pairs of tokens against all scores written out, and against the modules of a running model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import small
from tests.command import ENCODER, refuse, run

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.cli import display
from wqk.errors import CheckpointError
from wqk.inspecting import tokens
from wqk.inspecting.tokens import embedding_table, extreme_pairs, match_tokens, token_names

VOCABULARY, D, H, R = 40, 24, 4, 6


def model(tensors: dict[str, np.ndarray] | None = None, **config: Any) -> StateDict:
    """One layer with embeddings, with further tensors and another configuration."""
    checkpoint = small.llama(layers=1, key_heads=H, norms=True, **config)
    embeddings = np.random.default_rng(1).standard_normal((VOCABULARY, D))
    further = {"model.embed_tokens.weight": embeddings} | (tensors or {})
    return StateDict(checkpoint._arrays | further, checkpoint.config, "tiny")


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_extreme_pairs_are_those_of_all_products(queries, keys, top, seed):
    random = np.random.default_rng(seed)
    query = random.standard_normal((queries, 3)) * random.lognormal(0, 2, (queries, 1))
    key = random.standard_normal((keys, 3)) * random.lognormal(0, 2, (keys, 1))
    block, tokens.SCORE_BLOCK = tokens.SCORE_BLOCK, (7, 11)
    try:
        largest, smallest = extreme_pairs(query, key, top)
    finally:
        tokens.SCORE_BLOCK = block
    scores = np.sort((query @ key.T).ravel())
    largest_scores = np.sum(query[largest[0]] * key[largest[1]], axis=-1)
    smallest_scores = np.sum(query[smallest[0]] * key[smallest[1]], axis=-1)
    np.testing.assert_allclose(largest_scores, scores[::-1][:top], rtol=1e-9)
    np.testing.assert_allclose(smallest_scores, scores[:top], rtol=1e-9)


@pytest.mark.parametrize("fold_norm", [False, True])
@pytest.mark.parametrize(
    ("kind", "distance", "rows"),
    [("gpt2", 0, 8192), ("falcon", 0, 7), ("bert", 0, 8192), ("qwen2", 0, 7), ("qwen2", 3, 8192)],
)
def test_pairs_are_the_largest_of_the_models_own_scores(
    kind: str, distance: int, rows: int, fold_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of both sides count, with rotary positions and without."""
    monkeypatch.setattr("wqk.inspecting.tokens.EMBEDDING_ROWS", rows)
    checkpoint = biased(kind)
    plan = wqk.open(checkpoint).plans[0]
    attention = wqk.open(checkpoint)[0]
    table = checkpoint.read([wqk.checkpoints.Part(embedding_table(checkpoint, D))])[0]
    x = table.astype(np.float64)
    if fold_norm:
        norm = plan.query.input_norm
        gain, *shift = checkpoint.read([*norm.gain, *norm.bias])
        x = x - x.mean(-1, keepdims=True) * (norm.kind == "layer")
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon) * gain + sum(shift)
    scores = attention.logits(x, x, distance=distance)[1]
    matches = match_tokens(checkpoint, 0, 1, top=10, fold_norm=fold_norm, distance=distance)
    for largest, smallest, values in (
        (matches.largest, matches.smallest, scores.ravel()),
        (matches.most_alike, matches.least_alike, np.diag(scores)),
    ):
        expected = np.sort(values)
        largest_scores = [pair.score for pair in largest]
        smallest_scores = [pair.score for pair in smallest]
        np.testing.assert_allclose(largest_scores, expected[::-1][:10], rtol=1e-4)
        np.testing.assert_allclose(smallest_scores, expected[:10], rtol=1e-4)
        for pair in (*largest, *smallest):
            assert scores[pair.query, pair.key] == pytest.approx(pair.score, rel=1e-4)


def test_pairs_have_the_attention_factor_of_yarn() -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    positions = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        num_attention_heads=H,
        hidden_size=D,
        intermediate_size=8,
        rope_parameters={**positions, "original_max_position_embeddings": 16},
    )
    live = transformers.LlamaModel(config)
    attention = live.layers[0].self_attn
    scale = live.rotary_emb.attention_scaling**2 * R**-0.5
    with torch.no_grad():
        x = live.layers[0].input_layernorm(live.embed_tokens.weight)
        query = attention.q_proj(x).view(-1, H, R)[:, 1]
        key = attention.k_proj(x).view(-1, H, R)[:, 1]
        scores = np.sort((query @ key.T * scale).numpy().ravel())
    matches = match_tokens(live, layer=0, head=1, top=2, fold_norm=True)
    assert [pair.score for pair in matches.largest] == pytest.approx(scores[::-1][:2], rel=1e-4)


def biased(kind: str) -> StateDict:
    """A block with large biases, in the layouts of four libraries."""
    random = np.random.default_rng(3)
    names = {
        "gpt2": ("wte", "h.0.attn.c_attn", (D, 3 * D), "h.0.ln_1"),
        "falcon": (
            "word_embeddings",
            "h.0.self_attention.query_key_value",
            (3 * D, D),
            "h.0.input_layernorm",
        ),
        "bert": (
            "embeddings.word_embeddings",
            "encoder.layer.0.attention.self.{}",
            (D, D),
            "embeddings.LayerNorm",
        ),
        "qwen2": (
            "model.embed_tokens",
            "model.layers.0.self_attn.{}_proj",
            (D, D),
            "model.layers.0.input_layernorm",
        ),
    }
    table, projection, shape, norm = names[kind]
    sides = {"bert": ("query", "key"), "qwen2": ("q", "k")}.get(kind, ("",))
    tensors = {f"{table}.weight": random.standard_normal((VOCABULARY, D))}
    for side in sides:
        name = projection.format(side)
        tensors[f"{name}.weight"] = random.standard_normal(shape)
        outputs = shape[1] if kind == "gpt2" else shape[0]
        tensors[f"{name}.bias"] = 5 * random.standard_normal(outputs)
    tensors[f"{norm}.weight"] = 1 + random.random(D)
    if kind != "qwen2":
        tensors[f"{norm}.bias"] = random.standard_normal(D)
    config = {
        "model_type": kind,
        "num_attention_heads": H,
        "num_hidden_layers": 1,
        "n_head": H,
        "n_layer": 1,
        "alibi": True,
        "multi_query": False,
        "num_kv_heads": H,
        "num_key_value_heads": H,
        "layer_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "rms_norm_eps": 1e-6,
    }
    return StateDict(tensors, config, kind)


def test_a_vocabulary_of_equal_scores_is_not_searched_pair_by_pair(monkeypatch):
    monkeypatch.setattr(tokens, "SCORE_BLOCK", (4, 4))
    calls, take = [], tokens._Extremes.take
    monkeypatch.setattr(tokens._Extremes, "take", lambda *a: calls.append(a) or take(*a))
    extreme_pairs(np.zeros((400, 3)), np.zeros((400, 3)), 2)
    assert len(calls) <= 4


@pytest.mark.campaign
def test_a_large_vocabulary_takes_less_than_two_gigabytes(tmp_path: Path) -> None:
    """128,000 embeddings of width 4096 in bfloat16, of which all but a thousand are holes."""
    vocabulary, width, rows = 128_000, 4096, 128
    random = np.random.default_rng(0)
    sizes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.layers.0.self_attn.q_proj.weight": (rows, width),
        "model.layers.0.self_attn.k_proj.weight": (rows, width),
    }
    header, end = {}, 0
    for name, shape in sizes.items():
        start, end = end, end + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in sizes.items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            values = random.standard_normal((min(1000, shape[0]), width), np.float32)
            file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": width}))
    code = (
        "import resource, sys\nfrom wqk.inspecting.tokens import match_tokens\n"
        "found = match_tokens(sys.argv[1], 0, 0, top=5)\n"
        "print(max(p.query for p in found.largest), "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, text=True
    )
    last, kilobytes = map(int, done.stdout.split())
    assert last < 1000
    assert kilobytes < 2 * 2**20


def test_names_come_from_the_tokenizer(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {"the": 0, "of": 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="the"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_names(tmp_path) == {0: "the", 1: "of", 2: "[PAD]"}
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0), ("b", -1.0)]))
    unigram.save(str(tmp_path / "tokenizer.json"))
    assert token_names(tmp_path) == {0: "a", 1: "b"}
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("[PAD]\n\u2028\nthe\n", encoding="utf-8")
    assert token_names(tmp_path) == {0: "[PAD]", 1: "\u2028", 2: "the"}
    (tmp_path / "vocab.txt").unlink()
    assert token_names(tmp_path) == {}


def test_what_the_scores_lack_is_said() -> None:
    lacks_norm = "the norm in front of the block is not applied"
    assert lacks_norm in match_tokens(model(), 0, 0).caveat
    assert lacks_norm not in match_tokens(model(), 0, 0, fold_norm=True).caveat
    gains = {f"model.layers.0.self_attn.{side}_norm.weight": np.ones(R) for side in "qk"}
    normed = model(gains, model_type="qwen3")
    assert "normalized token by token" in match_tokens(normed, 0, 0).caveat
    guessed = model(model_type="unheard-of")
    assert "scale, positions and masks are unknown" in match_tokens(guessed, 0, 0).caveat


def test_small_negative_scores_are_no_negative_zeros(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = 1e-4 * np.random.default_rng(0).standard_normal((8, D))
    matches = match_tokens(model({"model.embed_tokens.weight": tiny}), 0, 0)
    assert min(pair.score for pair in matches.smallest) < 0
    display.output().print(matches)
    assert "-0.00" not in capsys.readouterr().out


def test_the_table_has_to_be_found() -> None:
    with pytest.raises(CheckpointError, match="must be \\(tokens, 24\\)"):
        match_tokens(model(), 0, 0, embeddings="model.layers.0.input_layernorm.weight")
    several = model({"other.embed_tokens.weight": np.ones((VOCABULARY, D))})
    with pytest.raises(CheckpointError, match="several might be it"):
        match_tokens(several, 0, 0)
    assert embedding_table(several, D, "other.embed_tokens.weight") == "other.embed_tokens.weight"
    with pytest.raises(CheckpointError, match="no head 4"):
        match_tokens(model(), 0, 4)


def test_pairs_of_one_token_are_those_of_its_row_and_its_column() -> None:
    checkpoint = model()
    everything = match_tokens(checkpoint, 0, 1, top=VOCABULARY**2)
    scores = {(pair.query, pair.key): pair.score for pair in everything.largest}
    row = match_tokens(checkpoint, 0, 1, top=3, query=5)
    expected = sorted((score for (i, _), score in scores.items() if i == 5), reverse=True)
    np.testing.assert_allclose([pair.score for pair in row.largest], expected[:3], rtol=1e-5)
    np.testing.assert_allclose([pair.score for pair in row.smallest], expected[:-4:-1], rtol=1e-5)
    assert {pair.query for pair in (*row.largest, *row.smallest)} == {5}
    assert [(pair.query, pair.key) for pair in row.most_alike] == [(5, 5)]
    column = match_tokens(checkpoint, 0, 1, top=1, key="7")
    best = max(score for (_, j), score in scores.items() if j == 7)
    assert column.largest[0].score == pytest.approx(best, rel=1e-5)
    (pair,) = match_tokens(checkpoint, 0, 1, query=5, key=7).largest
    assert pair.score == pytest.approx(scores[5, 7], rel=1e-5)
    assert match_tokens(checkpoint, 0, 1, query=5, key=7).most_alike == ()
    assert "no tokenizer.json" in row.to_dict()["caveat"]
    with pytest.raises(CheckpointError, match="the number of a token, from 0 to 39"):
        match_tokens(checkpoint, 0, 1, query=VOCABULARY)


def two_layers() -> StateDict:
    """Two layers with all four weights, different gains and embeddings."""
    checkpoint = small.llama(heads=H, key_heads=H, width=D, head_width=R, sides="qkvo", norms=True)
    embeddings = np.random.default_rng(1).standard_normal((VOCABULARY, D))
    tensors = checkpoint._arrays | {"model.embed_tokens.weight": embeddings}
    return StateDict(tensors, checkpoint.config, "two layers")


def test_a_virtual_head_has_the_norms_that_its_caveat_names() -> None:
    checkpoint = two_layers()
    tensors = checkpoint._arrays
    embeddings = tensors["model.embed_tokens.weight"]
    first, second = (f"model.layers.{layer}.self_attn" for layer in (0, 1))
    gains = [tensors[f"model.layers.{layer}.input_layernorm.weight"] for layer in (0, 1)]
    epsilon = wqk.open(checkpoint).plans[0].query.input_norm.epsilon
    directions = embeddings / np.sqrt((embeddings**2).mean(axis=1, keepdims=True) + epsilon)
    rows = slice(R, 2 * R)  # of head 1
    values = (gains[0] * directions) @ tensors[f"{first}.v_proj.weight"][rows].T
    written = values @ tensors[f"{first}.o_proj.weight"][:, rows].T
    queries = (gains[1] * directions) @ tensors[f"{second}.q_proj.weight"][rows].T
    keys = (gains[1] * written) @ tensors[f"{second}.k_proj.weight"][rows].T
    scores = queries @ keys.T / np.sqrt(R)
    matches = match_tokens(checkpoint, 1, 1, through=(0, 1), fold_norm=True, top=1)
    assert matches.largest[0].score == pytest.approx(scores.max(), rel=1e-5)
    assert "Embeddings pass the norm in front of the head that reads them." in matches.caveat
    division = "What head 0.1 writes passes the norm in front of layer 1 without the division"
    assert division in matches.caveat
    assert "unembedding" not in matches.caveat


@pytest.mark.parametrize(
    ("through", "norms"),
    [
        (None, "The norm in front of the head is left out (--fold-norm folds it in)."),
        ((0, 1), "The norms in front of the heads are left out (--fold-norm folds them in)."),
    ],
)
def test_norms_that_are_not_folded_in_are_named(through: Any, norms: str) -> None:
    caveat = match_tokens(two_layers(), 1, 1, through=through, circuit="ov").caveat
    assert norms in caveat
    assert caveat.count("The norm before the unembedding is left out.") == 1


def test_tokens_of_an_output_value_circuit_have_names_of_their_own() -> None:
    matches = match_tokens(two_layers(), 1, 1, circuit="ov", top=2)
    pair = matches.largest[0]
    assert (pair.attended, pair.written) == (pair.query, pair.key)
    values = matches.to_dict()["largest"][0]
    assert (values["attended"], values["written"]) == (values["query"], values["key"])
    assert {"attended_name", "written_name"} <= values.keys()
    assert matches.frame["attended"].to_list() == matches.frame["query"].to_list()
    scores = match_tokens(two_layers(), 1, 1, top=2)
    assert "attended" not in scores.to_dict()["largest"][0]
    assert "attended" not in scores.frame.columns


def test_a_checkpoint_of_attention_alone_has_no_embeddings() -> None:
    contents = "got one with queries, keys and values only"
    with pytest.raises(CheckpointError, match=f"no token embeddings; .*{contents}$"):
        match_tokens(small.llama(sides="qkv", biases="qkv"), 0, 1, fold_norm=True)
    line = refuse("tokens", ENCODER, "--layer", 0, "--head", 1, "--fold-norm")
    assert "queries and keys only; the demo model with all weights is demo:induction" in line


def test_without_a_norm_the_message_names_the_argument_or_the_option(tmp_path: Path) -> None:
    checkpoint = small.llama(layers=1)
    embeddings = {"model.embed_tokens.weight": np.ones((VOCABULARY, 24))}
    folder = small.save(tmp_path / "normless", checkpoint._arrays | embeddings, checkpoint.config)
    with pytest.raises(CheckpointError, match=r"no known norm .*; leave out fold_norm=True$"):
        match_tokens(folder, 0, 1, fold_norm=True)
    line = refuse("tokens", folder, "--layer", 0, "--head", 1, "--fold-norm")
    assert line.endswith("no known norm feeds layer 0; leave out --fold-norm")


@pytest.mark.parametrize(
    ("query", "suggestion"),
    [
        ("goodish-re", "a token in the word: 'good', '##ish', '-', 're'?"),
        ("Good", "; did you mean 'good'?"),
        ("goods", "; did you mean 'good'?"),
        ("zzz", "from 0 to 39"),
    ],
)
def test_an_unknown_word_is_answered_with_tokens_near_it(
    query: str, suggestion: str, tmp_path: Path
) -> None:
    checkpoint = model()
    folder = small.save(tmp_path / "named", checkpoint._arrays, checkpoint.config)
    (folder / "vocab.txt").write_text("\n".join(["good", "##ish", "##-", "-", "##re", "re"]))
    with pytest.raises(CheckpointError, match="the name of a single token, or its number") as error:
        match_tokens(folder, 0, 1, query=query)
    assert str(error.value).endswith(suggestion)


@pytest.mark.parametrize("top", [15, 25, VOCABULARY, 10 * VOCABULARY**2])
def test_no_token_and_no_pair_is_in_two_lists(top: int) -> None:
    matches = match_tokens(model(), 0, 1, top=top)
    for first, second, total in (
        (matches.most_alike, matches.least_alike, VOCABULARY),
        (matches.largest, matches.smallest, VOCABULARY**2),
    ):
        pairs = [(pair.query, pair.key) for pair in (*first, *second)]
        assert len(pairs) == len(set(pairs)) == min(2 * top, total)
        scores = [pair.score for pair in (*first, *reversed(second))]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("circuit", ["qk", "ov"])
def test_tokens_with_a_positive_score_with_themselves_are_counted(circuit: Any) -> None:
    matches = match_tokens(two_layers(), 1, 1, top=VOCABULARY, circuit=circuit)
    positive = sum(pair.score > 0 for pair in matches.most_alike)
    assert 0 < positive < VOCABULARY
    assert (matches.positive_tokens, matches.tokens) == (positive, VOCABULARY)
    chosen = match_tokens(two_layers(), 1, 1, query=3, circuit=circuit)
    assert (chosen.positive_tokens, chosen.tokens) == (positive, VOCABULARY)
    assert f"for {positive} of 40 tokens" in matches.sentence
    assert ("more likely" in str(matches)) == (circuit == "ov")
    assert "of 40 tokens" not in chosen.sentence + str(chosen)


def test_the_screen_has_the_names_of_the_lists_in_files() -> None:
    text = str(match_tokens(model(), 0, 1, top=2))
    assert "most to itself (most_alike)" in text
    assert "least to itself (least_alike)" in text
    chosen = str(match_tokens(model(), 0, 1, query=3, top=2))
    assert "most to itself" not in chosen
    assert "3 with itself: " in chosen


@pytest.mark.parametrize(
    ("kind", "tensors", "sentence"),
    [
        (
            "gpt2",
            {"wpe.weight": (7, D)},
            "the model adds rows of wpe.weight to the embeddings",
        ),
        (
            "bert",
            {
                "embeddings.position_embeddings.weight": (7, D),
                "embeddings.token_type_embeddings.weight": (2, D),
                "vision.embeddings.position_embeddings.weight": (9, D),
            },
            "adds rows of embeddings.position_embeddings.weight and "
            "embeddings.token_type_embeddings.weight to the embeddings",
        ),
        (
            "qwen2",
            {},
            "if only the norm, model.layers.0.input_layernorm.weight, lies between the embeddings "
            "and attention. The model has no table of positions to add to the embeddings: "
            "positions rotate queries and keys.",
        ),
        ("falcon", {}, "positions change the scores"),
        ("gpt2", {}, "models can also compute them"),
    ],
)
def test_the_first_layer_names_positions_and_norm(kind: str, tensors: Any, sentence: str) -> None:
    checkpoint = biased(kind)
    arrays = {name: np.ones(shape) for name, shape in tensors.items()}
    complete = StateDict(checkpoint._arrays | arrays, checkpoint.config, kind)
    caveat = match_tokens(complete, 0, 0).caveat
    assert sentence in caveat
    assert ("own scores differ" in caveat) == bool(tensors)


def test_a_file_of_pairs_names_the_head_and_its_form(tmp_path):
    file = tmp_path / "pairs.csv"
    line = ["tokens", wqk.demo_model("induction"), "--layer", "1", "--head", "2"]
    run(*line, "--distance", "1", "--fold-norm", "--top", "2", "-o", file)
    frame = pl.read_csv(file)
    assert frame.columns[-8:] == [
        *("checkpoint", "stack", "layer", "head", "distance", "normalized", "circuit", "through")
    ]
    assert set(frame.rows()[0][-8:-1]) >= {"demo:induction", "decoder", 1, 2, "qk"}
    run(*line, "--through", "0.2", "--circuit", "ov", "-o", file)
    assert pl.read_csv(file, infer_schema=False)["through"].unique().to_list() == ["0.2"]
    run(*line, "--directions", "2", "--circuit", "ov", "-o", file)
    frame = pl.read_csv(file)
    assert frame.columns[-5:] == ["checkpoint", "stack", "layer", "head", "circuit"]


def test_pairs_of_one_token_have_no_sentence_on_all_tokens():
    line = ["tokens", wqk.demo_model("induction"), "--layer", "1", "--head", "2"]
    assert "with itself is above 0 for" in run(*line).stdout
    for option in ("--query", "--key"):
        assert "above 0 for" not in run(*line, option, "3").stdout
