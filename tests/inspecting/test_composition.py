"""Composition of heads: against dense products, planted pairs, and a model that copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from tests import small
from tests.small import sizes

import wqk
from wqk.attention.factors import Coordinates
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.inspecting import composition

LAYERS, HEADS, KEY_HEADS, WIDTH, RANK = 3, 4, 2, 48, 6
PAIRS = 3 * HEADS**2  # of three layers
SIZES = {
    "layers": LAYERS,
    "heads": HEADS,
    "key_heads": KEY_HEADS,
    "head_width": RANK,
    "width": WIDTH,
}


# With such a threshold, chance is a rotation of the whole stream.
NO_OUTLIERS = 1e6


def model(seed: int = 0) -> StateDict:
    """Random weights with the names of Llama's, in three layers with grouped heads."""
    made = small.llama(**SIZES, sides="qkvo", norms=True, seed=seed)
    return StateDict(
        {n: w.astype(np.float32) for n, w in made._arrays.items()}, made.config, "tiny"
    )


def matrices(ref: Any, circuit: str, **coordinates: Any) -> list[np.ndarray]:
    """Every head of every block as a matrix, (H, D, D) for each block."""
    forms = (block.forms(Coordinates(circuit, **coordinates)) for block in wqk.open(ref))
    stacks = (form.dense() for ((_, form),) in forms)
    return [stack.reshape(-1, *stack.shape[-2:]).astype(np.float64) for stack in stacks]


def by_definition(ref: Any, **coordinates: Any) -> dict[tuple[Any, ...], float]:
    """Scores by kind, writing layer and head, and reading layer and head, from dense matrices."""
    qk, ov = (matrices(ref, circuit, **coordinates) for circuit in ("qk", "ov"))
    scores = {}
    for earlier in range(len(ov)):
        for later in range(earlier + 1, len(ov)):
            for h, writer in enumerate(ov[earlier]):
                for k in range(len(ov[later])):
                    readers = {"q": qk[later][k], "k": qk[later][k].T, "v": ov[later][k]}
                    for kind, reader in readers.items():
                        norms = np.linalg.norm(writer) * np.linalg.norm(reader)
                        score = np.linalg.norm(writer @ reader) / norms
                        scores[kind, earlier, h, later, k] = score
    return scores


def scores_of(table: wqk.CompositionTable) -> dict[tuple[Any, ...], float]:
    """The scores of a table, keyed like those by definition."""
    columns = ("kind", "writer_layer", "writer_head", "reader_layer", "reader_head", "score")
    return {tuple(row[:-1]): row[-1] for row in table.frame.select(columns).rows()}


@pytest.mark.parametrize("fold_norm", [False, True])
def test_scores_are_those_of_dense_products(fold_norm: bool):
    table = wqk.compose(model(), fold_norm=fold_norm)
    expected = by_definition(model(), fold_norm=fold_norm)
    assert len(table) == 3 * PAIRS == len(expected)
    assert scores_of(table) == pytest.approx(expected, rel=1e-5)


def planted(seed: int, kind: str) -> StateDict:
    """Head 2 of layer 2 reads, with its queries or values, what head 1 of layer 0 writes."""
    made = model(seed)
    output, side = (
        f"model.layers.{at}_proj.weight" for at in ("0.self_attn.o", f"2.self_attn.{kind}")
    )
    written = made._arrays[output].reshape(WIDTH, HEADS, RANK)[:, 1]
    weight, head = made._arrays[side].reshape(-1, RANK, WIDTH), 2 if kind == "q" else 1
    size = np.linalg.norm(weight[head])
    weight[head] = written.T / np.linalg.norm(written) * size
    return made


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_a_planted_composition_is_found(kind: str):
    frame = wqk.compose(planted(1, kind)).frame
    readers = {2} if kind == "q" else {2, 3}  # which share a key head
    first = frame.head(len(readers))
    assert set(first["reader_head"]) == readers
    assert first.select("kind", "writer_layer", "writer_head", "reader_layer").unique().rows() == [
        (kind, 0, 1, 2)
    ]
    assert (first["p_corrected"] < 1e-9).all()
    rest = frame.slice(len(readers))
    # Heads of one norm that were not planted.
    others = rest.filter(~((pl.col("writer_layer") == 0) & (pl.col("writer_head") == 1)))
    assert others["p_corrected"].min() > 0.01


def test_nothing_is_found_in_random_models():
    tables = [wqk.compose(model(seed)).frame for seed in range(6)]
    everything = pl.concat(tables)
    assert sum(table["p_corrected"].min() < 0.05 for table in tables) <= 2
    assert everything["z"].mean() == pytest.approx(0, abs=0.1)
    assert everything["z"].std() == pytest.approx(1, abs=0.1)
    assert (everything["p"] < 0.1).mean() == pytest.approx(0.1, abs=0.03)


def test_every_stage_keeps_its_own_outlying_dimensions():
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    model = transformers.SwinModel(config)
    with torch.no_grad():
        for layer in model.encoder.layers[1].blocks:  # everything writes one dimension a lot
            for name, weight in layer.attention.named_parameters():
                if "output" in name or "o_proj" in name:
                    weight[7] *= 40
    table = wqk.compose(model)
    assert table.metadata["outlying"] == {"encoder, width 16": [], "encoder, width 32": [7]}
    kept, turned = (
        wqk.compose(model, gamma=gamma).filter(pl.col("reader_layer") == 3).frame["expected"]
        for gamma in (2.0, NO_OUTLIERS)
    )
    assert (kept != turned).all()


def scaled(factors: np.ndarray) -> StateDict:
    """Everything reads and writes each dimension of the stream so many times as much."""
    made = model(3)
    for name in made._arrays:
        if "proj" in name:
            made._arrays[name] *= factors[:, None] if "o_proj" in name else factors
    return made


def test_outlying_dimensions_are_no_composition():
    made = scaled(np.where(np.isin(np.arange(WIDTH), [5, 9]), 4, 1))
    kept, turned = (wqk.compose(made, gamma=gamma) for gamma in (2.0, NO_OUTLIERS))
    assert kept.metadata["outlying"] == {"decoder": [5, 9]}
    assert turned.frame["z"].mean() > 3
    assert abs(kept.frame["z"].mean()) < 0.5
    assert scores_of(kept) == pytest.approx(scores_of(turned), rel=1e-6)


def test_a_higher_gamma_leaves_fewer_outlying_dimensions():
    made = scaled(np.exp(np.linspace(0, 2, WIDTH)))
    counts = [
        len(wqk.compose(made, gamma=gamma).metadata["outlying"].get("decoder", ()))
        for gamma in (0.25, 1.0, 1.5)
    ]
    assert counts[0] > counts[1] > counts[2]


def test_p_values_are_corrected_as_holm_does():
    frame = wqk.compose(model()).frame
    assert frame["excess"].is_sorted(descending=True)
    p, corrected = frame.sort("p").select("p", "p_corrected").to_numpy().T
    expected = np.maximum.accumulate(p * np.arange(len(p), 0, -1)).clip(max=1)
    np.testing.assert_allclose(corrected, expected)


def test_memory_for_one_writer_at_a_time_gives_the_same(monkeypatch):
    whole = wqk.compose(model()).frame
    monkeypatch.setattr(composition, "MEMORY", 1)
    monkeypatch.setattr(composition, "FREE_SHARE", 0)
    done: list[tuple[int, int]] = []
    parts = wqk.compose(model(), on_progress=lambda *n: done.append(n)).frame
    keys = ["kind", "writer_layer", "writer_head", "reader_layer", "reader_head"]
    assert parts.sort(keys).equals(whole.sort(keys))
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_a_pruned_head_has_no_score():
    made = model()
    made._arrays["model.layers.0.self_attn.o_proj.weight"][:, RANK : 2 * RANK] = 0
    frame = wqk.compose(made).frame
    pruned = frame.filter(writer_layer=0, writer_head=1)
    assert set(pruned["status"]) == {"degenerate"}
    assert pruned["score"].null_count() == pruned["p_corrected"].null_count() == len(pruned)
    rest = frame.filter(pl.col("status") != "degenerate")
    assert rest["score"].null_count() == rest["p_corrected"].null_count() == 0
    assert frame.tail(len(pruned))["status"].unique().to_list() == ["degenerate"]


def joined(frame: pl.DataFrame) -> set[tuple[Any, ...]]:
    """Which blocks write to which, by stack, attention and layer, and how they are read."""
    ends = [f"{end}_{of}" for end in ("writer", "reader") for of in ("stack", "attention", "layer")]
    return {(tuple(row[1:4]), row[0], tuple(row[4:])) for row in frame.select("kind", *ends).rows()}


def test_encoder_and_decoder_are_joined_by_cross_attention_alone():
    import transformers

    config = transformers.T5Config(
        vocab_size=11, d_model=16, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=2, num_heads=2
    )
    table = wqk.compose(transformers.T5Model(config))
    pairs = joined(table.frame)
    crossing = {pair for pair in pairs if pair[0][0] != pair[2][0]}
    assert crossing == {
        (("encoder", "self", i), kind, ("decoder", "cross", j))
        for i in (0, 1)
        for j in (0, 1)
        for kind in "kv"
    }
    within = {pair for pair in pairs if pair[0][0] == "decoder"}
    order = [("decoder", kind, layer) for layer in (0, 1) for kind in ("self", "cross")]
    assert within == {
        (writer, kind, reader)
        for n, writer in enumerate(order)
        for reader in order[n + 1 :]
        for kind in ("q" if reader[1] == "cross" else "qkv")
    }
    # The pairs of a head of one stack are without those of the other stack's head of that number.
    every = joined(table.around(1, 0).frame)
    of_decoder = joined(table.around(1, 0, stack="decoder").frame)
    assert of_decoder == {pair for pair in every if ("decoder", "self", 1) in (pair[0], pair[2])}
    assert of_decoder < every


@pytest.mark.parametrize("memory", [composition.MEMORY, 1])
def test_nothing_is_paired_across_an_unknown_projection(memory, monkeypatch):
    import transformers

    monkeypatch.setattr(composition, "MEMORY", memory)
    monkeypatch.setattr(composition, "FREE_SHARE", 0)
    size = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    configs = (
        transformers.BertConfig(vocab_size=11, hidden_size=16, **size),
        transformers.BertConfig(
            vocab_size=11, hidden_size=24, is_decoder=True, add_cross_attention=True, **size
        ),
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*configs)
    table = wqk.compose(transformers.EncoderDecoderModel(config))
    pairs = joined(table.frame)
    assert {writer[0] == reader[0] for writer, _, reader in pairs} == {True}
    assert {kind for _, kind, reader in pairs if reader[1] == "cross"} == {"q"}
    assert [note for note in table.metadata["notes"] if "projection" in note] == [
        "decoder cross-attention: what its keys and values read was written at another width; "
        "the projection between the two is not known"
    ]


def test_a_layer_that_is_applied_again_reads_itself():
    import transformers

    chosen = sizes(16, 4, 2, vocab_size=11, embedding_size=8, num_hidden_groups=1)
    config = transformers.AlbertConfig(**chosen, intermediate_size=8)
    pairs = joined(wqk.compose(transformers.AlbertModel(config), kind="q").frame)
    assert pairs == {(("encoder", "self", 0), "q", ("encoder", "self", 0))}


COPIER = wqk.demo_model("induction")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wqk.compose(wqk.demo_model("decoder")), "no values and outputs"),
        (lambda: wqk.compose(small.llama(layers=1, sides="qkvo")), "nothing to compose"),
        (lambda: wqk.compose(COPIER, kind="o"), r"kind must be one of .*, got 'o'"),
        # A virtual head goes from earlier to later.
        (lambda: wqk.match_tokens(COPIER, 1, 2, through=(1, 0)), "one of these, got layer 1"),
    ],
)
def test_what_does_not_compose_is_refused(call: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        call()


def copied(name: str) -> np.ndarray:
    """A tensor of the model that copies."""
    (found,) = open_checkpoint(COPIER).read([wqk.checkpoints.Part(name)])
    return found.astype(np.float64)


def attention_of_the_copier(tokens: np.ndarray) -> list[np.ndarray]:
    """The attention of both layers of the model that copies, (H, N, N) each, in plain NumPy."""
    stream, found = copied("model.embed_tokens.weight")[tokens], []
    for layer, written in enumerate(matrices(COPIER, "ov")):
        gain = copied(f"model.layers.{layer}.input_layernorm.weight")
        x = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + 1e-6) * gain
        logits = wqk.open(COPIER)[layer].logits(x, x)
        logits = np.where(np.tri(len(tokens), dtype=bool), logits, -np.inf)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        found.append(weight / weight.sum(-1, keepdims=True))
        stream = stream + (found[-1] @ (x @ written)).sum(0)
    return found


def test_the_first_pair_is_the_previous_token_head_and_an_induction_head():
    first = wqk.compose(COPIER).frame.row(0, named=True)
    assert first["kind"] == "k"
    tokens = np.tile(np.random.default_rng(0).permutation(32)[:20], 2)
    previous, induction = attention_of_the_copier(tokens)
    n = np.arange(21, 40)
    to_previous = previous[:, n, n - 1].mean(-1)  # of each head of the first layer
    to_following = induction[:, n, n - 20 + 1].mean(-1)
    assert to_previous.argmax() == first["writer_head"]
    assert to_previous[first["writer_head"]] > 0.7
    assert np.delete(to_previous, first["writer_head"]).max() < 0.2
    assert to_following.min() > 0.85  # all heads of the second layer find what followed
    assert to_following[first["reader_head"]] > 0.95


def test_the_neighbors_of_a_head_are_listed():
    table = wqk.compose(model())
    around = table.around(-2, 3).frame  # layer 1
    assert len(around) == 3 * 2 * HEADS
    assert set(around.filter(pl.col("reader_layer") == 1)["reader_head"]) == {3}
    assert set(around.filter(pl.col("writer_layer") == 1)["writer_head"]) == {3}
    with pytest.raises(wqk.errors.TableError, match=r"head 4 of layer 1 .*last head 3$"):
        table.around(1, 4)


@pytest.mark.parametrize("circuit", ["qk", "ov"])
@pytest.mark.parametrize("through", [None, (0, 2)])
def test_token_pairs_of_a_virtual_head_are_those_of_its_matrix(circuit: Any, through: Any):
    matches = wqk.match_tokens(COPIER, 1, 3, circuit=circuit, through=through, top=5)
    matrix = matrices(COPIER, circuit)[1][3] * (16**-0.5 if circuit == "qk" else 1)
    if through is not None:
        written = matrices(COPIER, "ov")[0][2]
        matrix = matrix @ written.T if circuit == "qk" else written @ matrix
    last = copied("lm_head.weight" if circuit == "ov" else "model.embed_tokens.weight")
    scores = copied("model.embed_tokens.weight") @ matrix @ last.T
    found = [scores[pair.query, pair.key] for pair in matches.largest]
    np.testing.assert_allclose(found, -np.sort(-scores.ravel())[:5])
    np.testing.assert_allclose([pair.score for pair in matches.largest], found, rtol=1e-4)
