"""Mistakes of converters outside attention: each is named once, for all layers, and undone.

The mistakes are those of converters of transformers, torchtitan, LitGPT, Megatron-Bridge, mlx-lm,
and mergekit, made in tiny models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests import small

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.sameness.execution import ProgramTensors, run
from wqk.sameness.mismatches import Kind

LAYERS, WIDTH, HIDDEN, EXPERTS, VOCABULARY = 3, 24, 40, 4, 56
Tensors = dict[str, np.ndarray]
Edit = Callable[[np.ndarray], np.ndarray]


def tensors() -> Tensors:
    """A LLaMA with feed-forward networks, experts, norms, embeddings and a head."""
    original = small.llama(layers=LAYERS, width=WIDTH, sides="qkvo", norms=True)._arrays
    random = np.random.default_rng(1)
    changed = dict(original)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        changed[f"{prefix}post_attention_layernorm.weight"] = random.uniform(0.5, 2, WIDTH)
        for name in ("gate_proj", "up_proj"):
            changed[f"{prefix}mlp.{name}.weight"] = random.standard_normal((HIDDEN, WIDTH))
        changed[f"{prefix}mlp.down_proj.weight"] = random.standard_normal((WIDTH, HIDDEN))
        for expert in range(EXPERTS):
            for name in ("w1", "w2", "w3"):
                weight = random.standard_normal((32, WIDTH))
                changed[f"{prefix}moe.experts.{expert}.{name}.weight"] = weight
        changed[f"{prefix}moe.fused"] = random.standard_normal((EXPERTS, 12, WIDTH))
        changed[f"{prefix}moe.gate.weight"] = random.standard_normal((EXPERTS, WIDTH))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        changed[name] = random.standard_normal((VOCABULARY, WIDTH))
    return {name: value.astype(np.float32) for name, value in changed.items()}


def model(arrays: Tensors, name: str, **config: Any) -> StateDict:
    about = small.llama(layers=LAYERS, width=WIDTH).config
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return StateDict(arrays, {**about, **sizes, **config}, name)


def exchange(first: str, second: str) -> Callable[[Tensors], Tensors]:
    """Exchange the tensors with one word in their names for those with another."""

    def other(name: str) -> str:
        if first in name:
            return name.replace(first, second)
        return name.replace(second, first) if second in name else name

    return lambda arrays: {other(name): value for name, value in arrays.items()}


def edit(pattern: str, change: Edit) -> Callable[[Tensors], Tensors]:
    """Change the tensors whose names match a pattern."""
    return lambda arrays: {
        name: change(value) if re.search(pattern, name) else value for name, value in arrays.items()
    }


def move_experts(order: list[int], names: str = "w1|w2|w3") -> Callable[[Tensors], Tensors]:
    """Give each expert the tensors of another one; their router stays."""

    def moved(arrays: Tensors) -> Tensors:
        result = dict(arrays)
        for name in arrays:
            match = re.fullmatch(rf"(.*experts\.)(\d+)(\.(?:{names})\.weight)", name)
            if match is not None:
                result[name] = arrays[f"{match[1]}{order[int(match[2])]}{match[3]}"]
        return result

    return moved


def shift_layers(arrays: Tensors) -> Tensors:
    """Give each layer the feed-forward weights of the next one."""
    result = dict(arrays)
    for name in arrays:
        match = re.fullmatch(r"(model\.layers\.)(\d+)(\.mlp\..*)", name)
        if match is not None:
            result[name] = arrays[f"{match[1]}{(int(match[2]) + 1) % LAYERS}{match[3]}"]
    return result


def join_shards(arrays: Tensors) -> Tensors:
    """Join gate and up projections of two ranks one after the other, and cut them in the middle."""
    result = dict(arrays)
    for layer in range(LAYERS):
        gate, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        shards = zip(np.split(arrays[gate], 2), np.split(arrays[up], 2), strict=True)
        joined = np.concatenate([np.concatenate(shard) for shard in shards])
        result[gate], result[up] = np.split(joined, 2)
    return result


def halves_exchanged(rows: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.roll(rows, rows.shape[axis] // 2, axis)


def interleaved(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(2, -1, *rows.shape[1:]).swapaxes(0, 1)).reshape(
        rows.shape
    )


def padded(table: np.ndarray) -> np.ndarray:
    return np.concatenate([table, np.zeros((8, table.shape[1]), np.float32)])


class Mistake(NamedTuple):
    """A converter's mistake: the change, the kind of its cause, and a part of the reason."""

    description: str
    change: Callable[[Tensors], Tensors]
    kind: Kind
    reason: str


UP, DOWN, TABLES = r"up_proj", r"down_proj", r"embed_tokens|lm_head"
MISTAKES = [
    Mistake(
        "gate and up exchanged",
        exchange("gate_proj", "up_proj"),
        Kind.TENSOR,
        "gate_proj and up_proj have changed places",
    ),
    Mistake(
        "the two norms of a layer exchanged",
        exchange("input_layernorm", "post_attention_layernorm"),
        Kind.TENSOR,
        "input_layernorm and post_attention_layernorm have changed places",
    ),
    Mistake(
        "head and embeddings exchanged",
        exchange("model.embed_tokens", "lm_head"),
        Kind.TENSOR,
        "have changed places",
    ),
    Mistake(
        "experts in another order",
        move_experts([0, 2, 1, 3]),
        Kind.EXPERTS,
        "1 holds 2, 2 holds 1",
    ),
    Mistake(
        "experts of one rank on both",
        move_experts([0, 1, 0, 1]),
        Kind.COPIES,
        "2 holds 0, 3 holds 1",
    ),
    Mistake(
        "one weight of all experts that of the first",
        move_experts([0, 0, 0, 0], "w2"),
        Kind.COPIES,
        "experts copied from others (w2): 1 holds 0",
    ),
    Mistake(
        "the router in another order",
        edit(r"moe\.gate", lambda w: w[::-1].copy()),
        Kind.ROWS,
        "gate: rows in another order: in reverse order",
    ),
    Mistake(
        "the entries of a norm in another order",
        edit(r"post_attention", lambda w: w[::-1].copy()),
        Kind.ROWS,
        "post_attention_layernorm: entries in another order: in reverse order",
    ),
    Mistake(
        "feed-forward weights of the next layer",
        shift_layers,
        Kind.LAYER,
        "layer 0 has those of layer 1",
    ),
    Mistake(
        "shards of gate and up joined in one",
        join_shards,
        Kind.ROWS,
        "rows of gate_proj and up_proj lie in another order",
    ),
    Mistake(
        "columns of two shards exchanged",
        edit(DOWN, lambda w: halves_exchanged(w, 1)),
        Kind.COLUMNS,
        "down_proj: columns",
    ),
    Mistake(
        "halves of a fused weight of experts exchanged",
        edit(r"moe\.fused", lambda w: halves_exchanged(w, 1)),
        Kind.ROWS,
        "along axis 1",
    ),
    Mistake("rows interleaved", edit(UP, interleaved), Kind.ROWS, "up_proj: rows lie as"),
    Mistake(
        "a weight not transposed", edit(UP, lambda w: w.T.copy()), Kind.TRANSPOSED, "transposed"
    ),
    Mistake(
        "one added to gains",
        edit("post_attention", lambda w: w + 1),
        Kind.OFFSET,
        "1 was added",
    ),
    Mistake(
        "gains not converted",
        edit("post_attention", np.ones_like),
        Kind.CONSTANT,
        "all are 1",
    ),
    Mistake(
        "a rate instead of its logarithm",
        edit("post_attention", lambda w: -np.exp(w)),
        Kind.EXPONENTIAL,
        "post_attention_layernorm: stored as an exponential, −exp of it",
    ),
    Mistake("a weight of zeros", edit(UP, np.zeros_like), Kind.ZERO, "up_proj: all zero"),
    Mistake("embeddings scaled", edit("embed", lambda w: w * 4.9), Kind.SCALED, "scaled by 4.9"),
    Mistake("vocabulary padded", edit(TABLES, padded), Kind.RESIZED, "64 rows instead of 56"),
    Mistake(
        "vocabulary cut off",
        edit(TABLES, lambda w: w[:50].copy()),
        Kind.RESIZED,
        "resized vocabulary: 50 rows instead of 56, the first 50 equal",
    ),
    Mistake(
        "no head where none is tied",
        lambda arrays: {name: value for name, value in arrays.items() if name != "lm_head.weight"},
        Kind.SETTING,
        "lm_head.weight is missing, but tie_word_embeddings is false",
    ),
    Mistake(
        "norms left out",
        lambda arrays: {name: value for name, value in arrays.items() if "post_" not in name},
        Kind.MISSING,
        "post_attention_layernorm: missing from the file",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.description for mistake in MISTAKES])
def test_a_mistake_is_one_cause_whose_repair_undoes_it(mistake: Mistake) -> None:
    wrong = mistake.change(tensors())
    reference, candidate = model(tensors(), "reference"), model(wrong, "candidate")
    answer = wqk.same(reference, candidate, everything=True)
    assert answer.same is False
    assert [cause.mismatch.verdict for cause in answer.causes] == [mistake.kind]
    assert mistake.reason in answer.causes[0].mismatch.reason
    assert mistake.reason in answer.sentence
    assert answer.unexplained == ()
    mended = ProgramTensors(wrong)
    config = dict(candidate.config)
    run(answer.repair, mended, ProgramTensors(tensors()), config)
    repaired = model({**wrong, **mended.changed}, "repaired", **config)
    assert wqk.same(reference, repaired, everything=True).same is True


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6)])
def test_kernels_with_exchanged_axes_are_turned_back(sizes: tuple[int, int]) -> None:
    name = "model.patches.projection.weight"
    kernel = np.random.default_rng(3).standard_normal((8, 3, *sizes)).astype(np.float32)
    right = tensors() | {name: kernel}
    wrong = tensors() | {name: np.ascontiguousarray(kernel.swapaxes(2, 3))}
    answer = wqk.same(model(right, "reference"), model(wrong, "candidate"), everything=True)
    assert [cause.mismatch.verdict for cause in answer.causes] == [Kind.TRANSPOSED]
    mended = ProgramTensors(wrong)
    run(answer.repair, mended, {})  # the reference supplies nothing
    np.testing.assert_array_equal(mended.changed[name], kernel)


def test_a_right_model_has_no_cause() -> None:
    answer = wqk.same(model(tensors(), "a"), model(tensors(), "b"), everything=True)
    assert answer.same is True
    assert answer.causes == ()


def test_exchanged_norms_are_named_without_the_other_tensors() -> None:
    wrong = exchange("input_layernorm", "post_attention_layernorm")(tensors())
    answer = wqk.same(model(tensors(), "a"), model(wrong, "b"))
    assert "input_layernorm holds post_attention_layernorm of the original" in answer.sentence


def test_tensors_of_a_dropped_layer_have_one_cause_with_it() -> None:
    """The norm of another layer was printed as a repair of its own, which mixed two layers."""
    original = tensors()
    kept = {name: value for name, value in original.items() if ".layers." not in name}
    for place, layer in enumerate((0, 2)):
        for name, value in original.items():
            if f".layers.{layer}." in name:
                kept[name.replace(f".layers.{layer}.", f".layers.{place}.")] = value
    candidate = model(kept, "b", num_hidden_layers=2)
    comparison = wqk.same(model(original, "a"), candidate, everything=True)
    (cause,) = comparison.causes
    assert "layer 1 is missing, and layer 1 has those of layer 2" in cause.mismatch.reason
    assert comparison.unexplained == ()
    assert comparison.repair.startswith('config["num_hidden_layers"] = 3')
    assert "for layer, source in ((2, 1),):" in comparison.repair


def test_a_head_that_contradicts_its_configuration_is_reported() -> None:
    tied = {name: value for name, value in tensors().items() if name != "lm_head.weight"}
    reference = model(tied, "tied", tie_word_embeddings=True)
    candidate = model(tensors(), "untied", tie_word_embeddings=True)
    answer = wqk.same(reference, candidate, everything=True)
    assert answer.same is False
    text = "lm_head.weight differs from the embeddings, but tie_word_embeddings is true"
    assert text in answer.sentence


def test_weights_of_another_training_have_no_cause() -> None:
    random = np.random.default_rng(9)
    wrong = edit(UP, lambda w: random.standard_normal(w.shape).astype(np.float32))(tensors())
    answer = wqk.same(model(tensors(), "a"), model(wrong, "b"), everything=True)
    assert answer.causes == ()
    assert len(answer.unexplained) == LAYERS


def test_noise_of_gains_is_no_order_of_them() -> None:
    """Near gains exchange their ranks by noise; the printed order of 400 entries did not run."""
    random = np.random.default_rng(3)
    original = tensors()
    name = "model.layers.0.moe.scale"
    original[name] = random.uniform(0.5, 2, 1024).astype(np.float32)
    noise = 1e-3 * random.standard_normal(1024).astype(np.float32)
    noisy = model(original | {name: original[name] + noise}, "b")
    comparison = wqk.same(model(original, "a"), noisy, everything=True)
    assert comparison.same is False
    assert comparison.causes == ()


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_long_order_without_a_name_is_printed_as_code_that_runs(share: float) -> None:
    random = np.random.default_rng(3)
    original = tensors()
    name = "model.layers.0.moe.table"
    original[name] = random.standard_normal((800, 4)).astype(np.float32)
    order = np.arange(800)
    chosen = random.permutation(800)[: int(share * 800)]
    order[np.sort(chosen)] = chosen
    moved = original | {name: original[name][order]}
    comparison = wqk.same(model(original, "a"), model(moved, "b"), everything=True)
    (cause,) = comparison.causes
    assert cause.mismatch.verdict is Kind.ROWS
    mended = ProgramTensors(moved)
    run(comparison.repair, mended, ProgramTensors(original))
    np.testing.assert_array_equal(mended.changed[name], original[name])
