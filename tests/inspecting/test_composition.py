"""Composition of heads: against dense products, planted pairs, and a model that copies."""

from __future__ import annotations

import itertools
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
    checkpoint = small.llama(**SIZES, sides="qkvo", norms=True, seed=seed)
    arrays = {name: weight.astype(np.float32) for name, weight in checkpoint._arrays.items()}
    return StateDict(arrays, checkpoint.config, "tiny")


def matrices(ref: Any, circuit: str, **coordinates: Any) -> list[np.ndarray]:
    """Every head of every block as a matrix, (H, D, D) for each block."""
    heads_by_block = []
    for block in wqk.open(ref):
        ((_, form),) = block.forms(Coordinates(circuit, **coordinates))
        stack = form.dense()
        heads_by_block.append(stack.reshape(-1, *stack.shape[-2:]).astype(np.float64))
    return heads_by_block


def by_definition(ref: Any, **coordinates: Any) -> dict[tuple[Any, ...], float]:
    """Scores by kind, writing layer and head, and reading layer and head, from dense matrices."""
    qk = matrices(ref, "qk", **coordinates)
    ov = matrices(ref, "ov", **coordinates)
    scores = {}
    for earlier, later in itertools.combinations(range(len(ov)), 2):
        for writing_head, writer in enumerate(ov[earlier]):
            for reading_head in range(len(ov[later])):
                reading_form = qk[later][reading_head]
                readers = {"q": reading_form, "k": reading_form.T, "v": ov[later][reading_head]}
                for kind, reader in readers.items():
                    place = (kind, earlier, writing_head, later, reading_head)
                    norms = np.linalg.norm(writer) * np.linalg.norm(reader)
                    scores[place] = np.linalg.norm(writer @ reader) / norms
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
    checkpoint = model(seed)
    output = checkpoint._arrays["model.layers.0.self_attn.o_proj.weight"]
    written = output.reshape(WIDTH, HEADS, RANK)[:, 1]
    side = checkpoint._arrays[f"model.layers.2.self_attn.{kind}_proj.weight"]
    weight = side.reshape(-1, RANK, WIDTH)
    head = 2 if kind == "q" else 1
    size = np.linalg.norm(weight[head])
    weight[head] = written.T / np.linalg.norm(written) * size
    return checkpoint


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_a_planted_composition_is_found(kind: str):
    frame = wqk.compose(planted(1, kind)).frame
    readers = {2} if kind == "q" else {2, 3}  # which share a key head
    first = frame.head(len(readers))
    assert set(first["reader_head"]) == readers
    places = first.select("kind", "writer_layer", "writer_head", "reader_layer").unique()
    assert places.rows() == [(kind, 0, 1, 2)]
    assert (first["p_corrected"] < 1e-9).all()
    remainder = frame.slice(len(readers))
    # Heads of one norm that were not planted.
    unplanted = remainder.filter(~((pl.col("writer_layer") == 0) & (pl.col("writer_head") == 1)))
    assert unplanted["p_corrected"].min() > 0.01


def test_nothing_is_found_in_random_models():
    tables = [wqk.compose(model(seed)).frame for seed in range(6)]
    frame = pl.concat(tables)
    assert sum(table["p_corrected"].min() < 0.05 for table in tables) <= 2
    assert frame["z"].mean() == pytest.approx(0, abs=0.1)
    assert frame["z"].std() == pytest.approx(1, abs=0.1)
    assert (frame["p"] < 0.1).mean() == pytest.approx(0.1, abs=0.03)


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
    reads_in_layer_3 = pl.col("reader_layer") == 3
    kept = wqk.compose(model, gamma=2.0).filter(reads_in_layer_3).frame
    turned = wqk.compose(model, gamma=NO_OUTLIERS).filter(reads_in_layer_3).frame
    assert (kept["expected"] != turned["expected"]).all()


def scaled(factors: np.ndarray) -> StateDict:
    """Scale each dimension of the stream, for all readers and writers, by its factor."""
    checkpoint = model(3)
    for name in checkpoint._arrays:
        if "proj" in name:
            checkpoint._arrays[name] *= factors[:, None] if "o_proj" in name else factors
    return checkpoint


def test_outlying_dimensions_are_no_composition():
    checkpoint = scaled(np.where(np.isin(np.arange(WIDTH), [5, 9]), 4, 1))
    kept = wqk.compose(checkpoint, gamma=2.0)
    turned = wqk.compose(checkpoint, gamma=NO_OUTLIERS)
    assert kept.metadata["outlying"] == {"decoder": [5, 9]}
    assert turned.frame["z"].mean() > 3
    assert abs(kept.frame["z"].mean()) < 0.5
    assert scores_of(kept) == pytest.approx(scores_of(turned), rel=1e-6)


def test_a_higher_gamma_leaves_fewer_outlying_dimensions():
    checkpoint = scaled(np.exp(np.linspace(0, 2, WIDTH)))
    tables = [wqk.compose(checkpoint, gamma=gamma) for gamma in (0.25, 1.0, 1.5)]
    counts = [len(table.metadata["outlying"].get("decoder", ())) for table in tables]
    assert counts[0] > counts[1] > counts[2]
    assert wqk.compose(checkpoint).metadata["gamma"] == 2.0


def test_p_values_are_corrected_as_holm_does():
    frame = wqk.compose(model()).frame
    assert frame["excess"].is_sorted(descending=True)
    p, corrected = frame.sort("p").select("p", "p_corrected").to_numpy().T
    expected = np.maximum.accumulate(p * np.arange(len(p), 0, -1)).clip(max=1)
    np.testing.assert_allclose(corrected, expected)


def test_memory_for_one_writer_at_a_time_gives_the_same(monkeypatch):
    frame = wqk.compose(model()).frame
    monkeypatch.setattr(composition, "MEMORY", 1)
    monkeypatch.setattr(composition, "FREE_SHARE", 0)
    done: list[tuple[int, int]] = []
    frame_by_writer = wqk.compose(model(), on_progress=lambda *n: done.append(n)).frame
    keys = ["kind", "writer_layer", "writer_head", "reader_layer", "reader_head"]
    assert frame_by_writer.sort(keys).equals(frame.sort(keys))
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_a_pruned_head_has_no_score():
    checkpoint = model()
    checkpoint._arrays["model.layers.0.self_attn.o_proj.weight"][:, RANK : 2 * RANK] = 0
    frame = wqk.compose(checkpoint).frame
    pruned = frame.filter(writer_layer=0, writer_head=1)
    assert set(pruned["status"]) == {"degenerate"}
    assert pruned["score"].null_count() == pruned["p_corrected"].null_count() == len(pruned)
    scored = frame.filter(pl.col("status") != "degenerate")
    assert scored["score"].null_count() == scored["p_corrected"].null_count() == 0
    assert frame.tail(len(pruned))["status"].unique().to_list() == ["degenerate"]


def joined(frame: pl.DataFrame) -> set[tuple[Any, ...]]:
    """Writing block, kind and reading block of all pairs; a block is (stack, attention, layer)."""
    writer = ("writer_stack", "writer_attention", "writer_layer")
    reader = ("reader_stack", "reader_attention", "reader_layer")
    rows = frame.select("kind", *writer, *reader).rows()
    return {(tuple(row[1:4]), row[0], tuple(row[4:])) for row in rows}


def test_encoder_and_decoder_are_joined_by_cross_attention_alone():
    import transformers

    config = transformers.T5Config(
        vocab_size=11, d_model=16, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=2, num_heads=2
    )
    table = wqk.compose(transformers.T5Model(config))
    pairs = joined(table.frame)
    crossing = {pair for pair in pairs if pair[0][0] != pair[2][0]}
    encoders = [("encoder", "self", 0), ("encoder", "self", 1)]
    decoders = [("decoder", "cross", 0), ("decoder", "cross", 1)]
    assert crossing == set(itertools.product(encoders, "kv", decoders))
    within = {pair for pair in pairs if pair[0][0] == "decoder"}
    order = [("decoder", "self", 0), decoders[0], ("decoder", "self", 1), decoders[1]]
    expected = set()
    for writer, reader in itertools.combinations(order, 2):
        kinds = "q" if reader[1] == "cross" else "qkv"
        expected.update((writer, kind, reader) for kind in kinds)
    assert within == expected
    # Pairs of a head in one stack are without the pairs of the other stack's head of that number.
    of_both_stacks = joined(table.around(1, 0).frame)
    of_decoder = joined(table.around(1, 0, stack="decoder").frame)
    assert of_decoder == {
        pair for pair in of_both_stacks if ("decoder", "self", 1) in (pair[0], pair[2])
    }
    assert of_decoder < of_both_stacks


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

    architecture = sizes(16, 4, 2, vocab_size=11, embedding_size=8, num_hidden_groups=1)
    config = transformers.AlbertConfig(**architecture, intermediate_size=8)
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
    (tensor,) = open_checkpoint(COPIER).read([wqk.checkpoints.Part(name)])
    return tensor.astype(np.float64)


def attention_of_the_copier(tokens: np.ndarray) -> list[np.ndarray]:
    """The attention of both layers of the model that copies, (H, N, N) each, in plain NumPy."""
    stream = copied("model.embed_tokens.weight")[tokens]
    attentions: list[np.ndarray] = []
    for layer, written in enumerate(matrices(COPIER, "ov")):
        gain = copied(f"model.layers.{layer}.input_layernorm.weight")
        x = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + 1e-6) * gain
        logits = wqk.open(COPIER)[layer].logits(x, x)
        logits = np.where(np.tri(len(tokens), dtype=bool), logits, -np.inf)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        attention = weight / weight.sum(-1, keepdims=True)
        attentions.append(attention)
        stream = stream + (attention @ (x @ written)).sum(0)
    return attentions


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
    scale = 16**-0.5 if circuit == "qk" else 1
    matrix = matrices(COPIER, circuit)[1][3] * scale
    if through is not None:
        written = matrices(COPIER, "ov")[0][2]
        matrix = matrix @ written.T if circuit == "qk" else written @ matrix
    last = copied("lm_head.weight" if circuit == "ov" else "model.embed_tokens.weight")
    scores = copied("model.embed_tokens.weight") @ matrix @ last.T
    expected = [scores[pair.query, pair.key] for pair in matches.largest]
    np.testing.assert_allclose(expected, -np.sort(-scores.ravel())[:5])
    actual = [pair.score for pair in matches.largest]
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_a_system_that_does_not_report_its_free_memory_composes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels before 3.14 lack the number, and other systems the file."""
    expected = wqk.compose(wqk.demo_model("induction")).frame
    for content in ("MemTotal: 16 kB\n", "MemAvailable:"):
        monkeypatch.setattr(composition.Path, "read_text", lambda *_, text=content: text)
        assert wqk.compose(wqk.demo_model("induction")).frame.equals(expected)
