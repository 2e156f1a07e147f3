"""Conversions of a tiny LLaMA, faithful and faulty: each fault is named, each freedom unseen."""

from __future__ import annotations

import gc
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests import small
from tests.cases import cases
from tests.command import run
from tests.small import sizes

import wqk
from wqk import _machine
from wqk._console import plain as plain_text
from wqk.checkpoints import Part
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.families import Place
from wqk.sameness import blocks, circuits, matching, stored_tensors, weight_pairs
from wqk.sameness.answer import CheckpointComparison
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.contents import find_by_content
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.printing import printed
from wqk.sameness.rotary_settings import other_rotary
from wqk.sameness.same import same
from wqk.sameness.stored_tensors import compare_stored
from wqk.sameness.tensor_roles import roles
from wqk.sameness.weight_pairs import WeightPair

LAYERS, D, H, G, R = 2, 48, 6, 2, 8
CONFIG = sizes(D, LAYERS, H, model_type="llama", num_key_value_heads=G, head_dim=R, rope_theta=1e4)
# The same model as its authors wrote it, and one whose scores are not scaled.
ORIGINAL, UNSCALED = (Path(__file__).with_name(f"{name}.toml") for name in ("original", "unscaled"))

Tensors = dict[str, np.ndarray]


def llama(dtype: str = "float32") -> Tensors:
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for side, heads in (("q", H), ("k", G)):
            weight = random.standard_normal((heads * R, D)) / np.sqrt(D)
            tensors[f"{at}.self_attn.{side}_proj.weight"] = weight.astype(dtype)
            bias = random.standard_normal(heads * R)
            tensors[f"{at}.self_attn.{side}_proj.bias"] = bias.astype(dtype)
        gain = 1 + 0.3 * random.standard_normal(D)
        tensors[f"{at}.input_layernorm.weight"] = gain.astype(dtype)
    return tensors


def opened(tensors: Tensors, **changes: Any) -> StateDict:
    return StateDict(tensors, CONFIG | changes, "tiny")


def edited(
    edit: Callable[[np.ndarray], np.ndarray], side: str, layer: int | None = None
) -> Tensors:
    """The model with the heads (heads, R, D) or (heads, R) of one side edited."""
    tensors = llama()
    for name, value in tensors.items():
        if f".{side}_proj." in name and (layer is None or f".{layer}." in name):
            heads = value.reshape(-1, R, *value.shape[1:])
            tensors[name] = edit(heads).reshape(value.shape).astype(value.dtype)
    return tensors


def interleaved(heads: np.ndarray) -> np.ndarray:
    """Dimension k and k + R/2 side by side."""
    return (
        heads.reshape(len(heads), 2, R // 2, *heads.shape[2:]).swapaxes(1, 2).reshape(heads.shape)
    )


def noise(shape: tuple[int, ...], size: float) -> np.ndarray:
    return size * np.random.default_rng(7).standard_normal(shape)


def both(edit: Callable[[np.ndarray], np.ndarray]) -> Tensors:
    return edited(edit, "q") | {n: v for n, v in edited(edit, "k").items() if ".k_proj." in n}


def verdicts(comparison: Any) -> list[str]:
    return [m.verdict for m in comparison.blocks[0].mismatches]


def test_rounding_is_not_taken_for_scales_of_blocks() -> None:
    """Factors for each block of columns fit any noise, and undo none of it."""

    def rounded(heads: np.ndarray) -> np.ndarray:
        step = np.abs(heads).max(axis=-1, keepdims=True) / 127
        return np.rint(heads / step) * step

    weights = {n: v for n, v in edited(rounded, "q").items() if not n.endswith("bias")}
    plain = {n: v for n, v in llama().items() if not n.endswith("bias")}
    comparison = same(opened(plain), opened(weights))
    assert verdicts(comparison) == ["close"]
    assert not comparison
    assert comparison.reason.startswith("close")


def test_a_folded_scale_is_not_seen() -> None:
    folded = edited(lambda q: q / np.sqrt(R), "q")
    assert same(opened(llama()), wqk.open(opened(folded), family=UNSCALED)).same
    wrong = same(opened(llama()), wqk.open(opened(llama()), family=UNSCALED))
    assert wrong.blocks[0].reason == "scaled by 2.828 = √8, of the score's scale"
    assert "w = w / 2.828" in wrong.repair


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_rounding_of_the_stored_type_is_not_seen(kind: str) -> None:
    import torch

    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[kind]
    rounded = {name: torch.tensor(value).to(dtype) for name, value in llama().items()}
    comparison = same(opened(llama()), opened(rounded))
    assert comparison.same
    assert comparison.blocks[0].distance[0] > 1e-5
    # Once more than the rounding, in one head: seen.
    faulty = {n: v.clone() for n, v in rounded.items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    faulty[name][:R] += 0.05 * faulty[name][:R].std() * torch.randn(R, D).to(dtype)
    assert [b.same for b in same(opened(llama()), opened(faulty)).blocks] == [True, False]


def original(reorder: bool) -> StateDict:
    """The twin as its authors wrote it; with the weights left as they were, the order is wrong."""
    tensors = both(interleaved) if reorder else llama()
    names = {
        "model.": "",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "input_layernorm": "attention_norm",
    }
    renamed = {}
    for name, value in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = value
    return StateDict(renamed, CONFIG | {"model_type": "original"}, "original")


def test_original_format_twin_in_both_orders() -> None:
    assert same(opened(llama()), wqk.open(original(reorder=True), family=ORIGINAL)).same
    wrong = same(opened(llama()), wqk.open(original(reorder=False), family=ORIGINAL))
    assert verdicts(wrong) == ["other rotary positions"]
    assert wrong.blocks[0].distance[0] < 1e-6 < wrong.blocks[0].distance[1]
    reason = "rotary order: stored half, read as interleaved"
    assert wrong.blocks[0].reason.startswith(reason)
    models = opened(llama()), wqk.open(original(reorder=False), family=ORIGINAL)
    assert other_rotary(*(wqk.open(model).plans[0].rotary for model in models)) == reason


ROTARY = "other rotary positions"
# Tensors, changed settings, the expected verdicts, and a part of the first block's reason.
FAULTS: dict[str, tuple[Tensors, dict[str, Any], list[str], str]] = {
    "rotary order": (both(interleaved), {}, [ROTARY], ""),
    "rotary base": (
        llama(),
        {"rope_theta": 500_000.0},
        [ROTARY],
        "other rotary base (rope_theta): 10000 expected, 500000 found",
    ),
    "rotary scaling": (
        llama(),
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        [ROTARY],
        "",
    ),
    "rotary order of the keys": (edited(interleaved, "k"), {}, [ROTARY], ""),
    "order and base": (both(interleaved), {"rope_theta": 5e5}, [ROTARY] * 2, ""),
    # Key heads 1, 0 with their queries 3, 4, 5, 0, 1, 2.
    "order of heads": (
        both(lambda heads: np.roll(heads, len(heads) // 2, axis=0)),
        {},
        ["same heads in another order"],
        "same heads in another order: query heads 3 4 5 0 1 2, key heads 1 0",
    ),
    # Queries as h mod G would want them.
    "pairing": (
        edited(lambda q: q.reshape(G, H // G, *q.shape[1:]).swapaxes(0, 1), "q"),
        {},
        ["other pairing of query and key heads"],
        "query head h belongs to key head h mod 2; the candidate is read with key head h // 3",
    ),
    "factor": (edited(lambda q: q * np.sqrt(R), "q"), {}, ["scaled"], "scaled by 2.828 = √8"),
    "noise": (edited(lambda q: q + noise(q.shape, 1.0), "q"), {}, ["different weights"], ""),
    "a copy that was trained on": (
        edited(lambda q: q + noise(q.shape, 1e-2), "q"),
        {},
        ["close"],
        "",
    ),
    "window": (llama(), {"model_type": "mistral", "sliding_window": 16}, ["other setting"], ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    tensors, changes, expected, text = FAULTS[fault]
    comparison = same(opened(llama()), opened(tensors, **changes))
    assert verdicts(comparison) == expected
    assert text in comparison.blocks[0].reason
    assert not comparison.same


WINDOWED = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "repair"),
    [
        (WINDOWED | {"sliding_window": None}, 'config["sliding_window"] ='),
        (WINDOWED | {"sliding_window": 8}, 'config["sliding_window"] ='),
        # LLaMA's code has no window, whether or not its configuration names one.
        (WINDOWED | LLAMA, 'config["model_type"] ='),
        (WINDOWED | LLAMA | {"sliding_window": None}, 'config["model_type"] ='),
    ],
)
def test_a_lost_window_is_repaired_as_printed(changes: dict[str, Any], repair: str) -> None:
    original, candidate = opened(llama(), **WINDOWED), opened(llama(), **changes)
    comparison = same(original, candidate)
    assert not comparison.same
    repairs: set[str] = set()
    for block in comparison.blocks:
        repairs |= {cause.repair for cause in block.mismatches}
    (printed,) = repairs
    assert printed.startswith(repair)
    config = dict(candidate.config)
    exec(printed, {"config": config})
    assert same(original, StateDict(llama(), config, "mended")).same


@pytest.mark.parametrize(
    ("fault", "head"),
    [("rotary order of the keys", 1), ("factor", 1), ("order of heads", 4)],
)
def test_faults_are_named_beside_a_pruned_head(fault: str, head: int) -> None:
    """Query head 1 scores nothing; it is head 4 of the model with its heads in another order."""

    def pruned(tensors: Tensors, head: int) -> StateDict:
        tensors = {name: value.copy() for name, value in tensors.items()}
        for name, value in tensors.items():
            if ".q_proj." in name:
                value[head * R : (head + 1) * R] = 0
        return opened(tensors)

    tensors, _, expected, _ = FAULTS[fault]
    assert verdicts(same(pruned(llama(), 1), pruned(tensors, head))) == expected


def test_a_head_pruned_in_one_of_two() -> None:
    pruned = edited(lambda q: q * (np.arange(H) != 1).reshape(-1, *[1] * (q.ndim - 1)), "q")
    forward, backward = same(opened(llama()), opened(pruned)), same(opened(pruned), opened(llama()))
    assert verdicts(forward) == verdicts(backward) == ["heads of other weights"]
    assert forward.blocks[0].mismatches[0].heads == backward.blocks[0].mismatches[0].heads == (1,)
    assert forward.blocks[0].reason.startswith("query heads 1 are zero")
    assert backward.blocks[0].head == 1


@pytest.mark.parametrize(
    ("order", "belong"), [([3, 1, 2, 0, 4, 5], "1 0 0 0 1 1"), ([5, 1, 0, 3, 2, 4], "1 0 0 1 0 1")]
)
def test_a_pairing_without_a_rule_is_told_head_by_head(order: list[int], belong: str) -> None:
    mended = np.argsort(order).tolist()
    stored = edited(lambda q: q[order], "q")
    (mismatch,) = same(opened(llama()), opened(stored)).blocks[0].mismatches
    assert (
        f"query heads 0 1 2 3 4 5 belong to key heads {belong}; the candidate is read"
        in mismatch.reason
    )
    assert f"w.unflatten(0, (-1, 8))[{mended}]" in mismatch.repair
    facts = mismatch.facts
    assert (facts["query_heads"], facts["key_heads"], facts["groups"]) == (
        tuple(mended),
        (0, 0, 0, 1, 1, 1),
        2,
    )


def facts_of_heads(mismatch: Mismatch) -> dict[str, Any]:
    """The facts on heads, as JSON has them."""
    return {key: value for key, value in mismatch.to_dict().items() if key.endswith("heads")}


def test_key_heads_that_move_are_listed_with_their_query_heads() -> None:
    moved = both(lambda heads: np.roll(heads, len(heads) // 2, axis=0))
    (mismatch,) = same(opened(llama()), opened(moved)).blocks[0].mismatches
    order = (3, 4, 5, 0, 1, 2)
    expected = {"heads": order, "query_heads": order, "key_heads": (1, 1, 1, 0, 0, 0)}
    assert facts_of_heads(mismatch) == expected


def test_a_key_head_that_was_replaced_is_listed_with_its_query_heads() -> None:
    copied = edited(lambda key: np.stack([key[0], key[0]]), "k")
    (mismatch,) = same(opened(llama()), opened(copied)).blocks[0].mismatches
    assert mismatch.verdict == Kind.COPIES
    expected = {"heads": (1,), "key_heads": (1,), "query_heads": (3, 4, 5)}
    assert facts_of_heads(mismatch) == expected


def test_value_heads_that_move_are_listed_with_the_query_heads_that_use_them() -> None:
    tensors = small.llama(heads=4, key_heads=2, head_width=8, width=32, sides="qkvo")
    moved = dict(tensors._arrays)
    for name, value in moved.items():
        if ".v_proj." in name:
            moved[name] = np.roll(value, len(value) // 2, axis=0)
    candidate = StateDict(moved, tensors.config, "moved")
    (mismatch,) = same(tensors, candidate).blocks[0].mismatches
    expected = {"heads": (1, 0), "value_heads": (1, 0), "query_heads": (2, 3, 0, 1)}
    assert facts_of_heads(mismatch) == expected


def test_several_weights_of_another_layer_are_one_sentence_with_a_plural_verb() -> None:
    tensors = llama()
    for side in "qk":
        for part in ("weight", "bias"):
            name = f"model.layers.{{}}.self_attn.{side}_proj.{part}"
            tensors[name.format(0)] = tensors[name.format(1)]
    (mismatch,) = same(opened(llama()), opened(tensors)).blocks[0].mismatches
    assert mismatch.reason == "q_proj, k_proj hold weights of layer 1, and their biases"


@pytest.mark.parametrize(
    ("positions", "distances"),
    [
        ((512, 512), [0, 1, 511]),
        ((512, 2048), [0, 1, 511]),
        ((4096, 2048), [0, 1, 1024]),
        ((2, 2), [0, 1]),
        ((1, 1), [0]),
    ],
)
def test_only_distances_between_existing_positions_are_compared(
    positions: tuple[int, int], distances: list[int]
) -> None:
    longest = "max_position_embeddings"
    reference, candidate = (opened(llama(), **{longest: count}) for count in positions)
    comparison = same(reference, candidate)
    assert list(comparison.blocks[0].distance) == distances
    faulty = opened(edited(lambda q: 2 * q, "q"), **{longest: positions[1]})
    printed_comparison = same(reference, faulty)
    assert list(printed_comparison.blocks[0].distance) == distances
    text = "\n".join(map(str, printed(printed_comparison)))
    is_footnote_longer = "last position that both models have" in text
    assert is_footnote_longer == (distances[-1] not in (0, 1024))


def test_models_that_cannot_be_compared() -> None:
    narrow = {n: v[:, : D // 2] if v.ndim > 1 else v for n, v in llama().items()}
    narrow = {n: v[: D // 2] if "norm" in n else v for n, v in narrow.items()}
    with pytest.raises(CheckpointError, match="only equal ones can be compared"):
        same(opened(llama()), opened(narrow))
    fewer = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2 * R}
    of_other_heads = same(opened(llama()), opened(llama(), **fewer))
    reason = of_other_heads.blocks[0].reason
    assert reason.startswith("number of heads: 6 of width 8 against 3 of width 16")
    assert " –" in plain_text(*printed(of_other_heads))
    assert "nan" not in plain_text(*printed(of_other_heads))
    shallow = {n: v for n, v in llama().items() if ".1." not in n}
    comparison = same(opened(llama()), opened(shallow, num_hidden_layers=1))
    assert not comparison.same
    assert comparison.missing == (("decoder", "self", 1),)
    assert comparison.sentence == (
        "Not the same: 1 block only in tiny; layer 1 is missing, decoder self, layer 1. "
        "Equal: attention 1/1 · not compared: values."
    )


def test_a_live_module_and_its_file(tmp_path: Path) -> None:
    import torch
    from tests.families.architectures import NAMED
    from tests.families.proving import build

    model = build(NAMED["llama3"])
    model.save_pretrained(tmp_path)
    assert same(model, tmp_path).same
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    assert [block.same for block in same(model, tmp_path).blocks] == [True, False]


def test_the_picture_shows_the_heads_that_differ_and_why(tmp_path: Path) -> None:
    faulty = edited(lambda q: np.concatenate([q[:2], -q[2:3], q[3:]]), "q", layer=1)
    comparison = same(opened(llama()), opened(faulty))
    assert [head for head, distance in enumerate(comparison.blocks[1].heads) if distance] == [2]
    assert comparison.blocks[1].heads[2] == pytest.approx(2)
    assert not any(comparison.blocks[0].heads)
    figure = comparison.plot()
    (image,) = figure.axes[0].images
    drawn = image.get_array()
    assert [tuple(place) for place in np.argwhere(~drawn.mask)] == [(1, 2)]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    kind = comparison.causes[0].mismatch.verdict
    assert names == [f"{kind} (queries alone)", "the same, up to rounding"]
    demo = str(wqk.demo_model("decoder"))
    run("same", demo, demo, "--picture", tmp_path / "a.txt", exits=2)
    assert not (tmp_path / "a.txt").exists()


def test_each_cause_is_said_once_with_its_layers() -> None:
    done = run("same", *map(str, map(wqk.demo_model, ("encoder", "decoder"))), exits=1)
    lines = [line for line in done.stdout.splitlines() if line.endswith("layers 0-3")]
    assert lines == [
        "• different weights, encoder self, layers 0-3",
        "• mask: none against causal, encoder self, layers 0-3",
    ]
    assert done.stdout.count("different weights") == 1


def test_a_line_names_the_side_of_a_cause_once(tmp_path: Path) -> None:
    demo = wqk.demo_model("encoder")
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["roberta_prelayernorm.encoder.layer.1.attention.self.query.weight"] *= 2
    save_file(weights, tmp_path / "model.safetensors")
    done = run("same", str(demo), str(tmp_path), exits=1)
    assert "• query: scaled by 2, encoder self, layer 1" in done.stdout.splitlines()


def test_what_is_stored_alike_is_read_once_and_all_is_let_go(monkeypatch):
    tensors = llama()
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        tensors[name.replace("q_proj", "o_proj")] = noise((D, H * R), 1.0)
        tensors[name.replace("q_proj", "v_proj")] = noise((G * R, D), 1.0)
    reads: list[str] = []
    monkeypatch.setattr(
        StateDict,
        "_read",
        lambda self, part: reads.append(part.name) or np.array(self._rows(part)[0]),
    )
    changed = tensors | both(interleaved)
    gc.collect()
    gc.disable()  # what is in a circle of references stays
    try:
        comparison = same(opened(tensors), opened(changed))
        kept = [entry for entry in gc.get_objects() if type(entry) is WeightPair]
    finally:
        gc.enable()
    assert verdicts(comparison) == ["other rotary positions"]
    assert comparison.blocks[0].beside == {"values": 0.0}
    for side in "vo":
        assert sum(f"layers.0.self_attn.{side}_proj" in name for name in reads) == 1
    assert not kept


@pytest.mark.parametrize("change", [interleaved, lambda heads: heads[::-1], np.negative])
def test_threads_find_what_one_finds(change, monkeypatch):
    changed = llama("float16") | both(change)
    sequential = same(opened(llama("float16")), opened(changed), everything=True).to_dict()
    for module in (blocks, circuits, matching, weight_pairs):
        monkeypatch.setattr(module, "MANY", -1)
    for name, value in (("MANY_PIECES", 0), ("CACHED", 64)):
        monkeypatch.setattr(stored_tensors, name, value)
    monkeypatch.setattr(matching, "STRETCH", 8)
    monkeypatch.setattr(_machine, "usable_cores", lambda: 3)
    monkeypatch.setattr(stored_tensors, "usable_cores", lambda: 3)
    threaded = same(opened(llama("float16")), opened(changed), everything=True).to_dict()
    assert repr(threaded) == repr(sequential)


def test_an_interruption_ends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "usable_cores", lambda: 2)
    done: list[int] = []

    def work(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt
        time.sleep(0.02)
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        _machine.side_by_side(work, range(1000))
    assert len(done) < 500


def test_of_scalings_that_differ_the_one_key_that_matters_is_named() -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500.0,
        "beta_fast": 2,
        "mrope_section": [2, 1, 1],
    }
    rounded = {key: yarn[key] for key in list(yarn)[:4]}
    kinds = {"full_attention": rounded, "sliding_attention": {"rope_theta": 77.0}}
    # A family whose layers have rotary positions by their kind.
    reference, candidate = (
        opened(llama(), model_type="olmo3", layer_types=["full_attention"] * 2, **settings)
        for settings in ({"rope_scaling": yarn}, {"rope_parameters": kinds})
    )
    (cause,) = same(reference, candidate).causes
    assert "beta_fast 2 expected, beta_fast None found" in cause.mismatch.reason
    assert "mrope" not in cause.mismatch.reason
    assert cause.mismatch.repair.startswith('config["rope_parameters"]["full_attention"] = {')
    assert "'beta_fast': 2" in cause.mismatch.repair


@pytest.mark.parametrize("where", ["input norms", "query and key norms"])
def test_another_epsilon_is_told_and_put_back(where: str) -> None:
    tensors, config = llama(), {**CONFIG, "model_type": "qwen3", "rms_norm_eps": 1e-6}
    for layer in range(LAYERS):
        for side in "qk":
            gain = 1 + np.arange(R, dtype=np.float32) / R
            tensors[f"model.layers.{layer}.self_attn.{side}_norm.weight"] = gain
    first = StateDict(tensors, config, "original")
    comparison = same(first, StateDict(tensors, config | {"rms_norm_eps": 1e-3}, "converted"))
    assert not comparison
    assert f"epsilon of {where}: 1e-06 against 0.001" in comparison.sentence
    assert comparison.repair == 'config["rms_norm_eps"] = 1e-06'
    # Rounded to float32, as GGUF stores it, it is the same.
    rounded = config | {"rms_norm_eps": float(np.float32(1e-6))}
    assert same(first, StateDict(tensors, rounded, "rounded"))


def test_epsilons_of_other_norms_are_compared() -> None:
    """Those of norms that no block names."""
    config = {**CONFIG, "model_type": "llama", "final_norm_eps": 1e-5}
    comparison = same(
        StateDict(llama(), config, "a"), StateDict(llama(), config | {"final_norm_eps": 1e-3}, "b")
    )
    assert "final_norm_eps: 1e-05 against 0.001" in comparison.sentence
    assert comparison.repair == 'config["final_norm_eps"] = 1e-05'


@pytest.mark.parametrize(("kind", "beside", "names", "counts"), cases(__file__, "key_biases"))
def test_a_key_s_bias_is_compared_where_scores_see_it(
    kind: str, beside: dict[str, Any], names: list[str], counts: bool
) -> None:
    at = "encoder.layer.0.attention."
    tensors = {f"{at}{name}.weight": np.eye(8) for name in names}
    tensors |= {f"{at}{name}.bias": np.arange(8.0) for name in names}
    tensors |= {f"{at}{side}_norm.weight": np.ones(8) for side in "qk"}  # InternVL's
    config = {"model_type": kind, **sizes(8, 1, 2), **beside}
    reference = StateDict(tensors, config, "one")
    reversed_bias = tensors | {f"{at}{names[1]}.bias": np.arange(8.0)[::-1]}
    assert bool(same(reference, StateDict(reversed_bias, config, "other"))) != counts
    assert wqk.open(reference)[0].at(bias=True).dense()[:, :-1, -1].any() == (
        kind == "internvl_vision"
    )


@pytest.mark.parametrize("row", cases(__file__, "terms"))
def test_terms_of_positions_are_compared(row: list[Any]) -> None:
    at = "encoder.layer.0.attention.self"
    tensors = {f"{at}.{side}_proj.weight": np.eye(8) for side in ("query", "key")}
    config = {"model_type": "deberta-v2", "relative_attention": True, **sizes(8, 1, 2)}
    assert (
        row[2]
        in same(*(StateDict(tensors, config | settings, "m") for settings in row[:2])).sentence
    )


def test_an_entry_of_a_bias_that_no_form_shows_is_compared() -> None:
    models = []
    for entry in (1e-5, 3e-5):
        tensors = llama()
        for name, value in tensors.items():
            if value.ndim > 1:
                tensors[name] = 1000 * value
        tensors["model.layers.0.self_attn.q_proj.bias"][3] = entry
        models.append(tensors)
    assert "q_proj.bias: 1 of 48 entries differs" in same(*map(opened, models)).sentence


def test_layer_norms_of_two_families_have_one_epsilon() -> None:
    from tests.sameness.plants import right as plain

    tensors, config, _ = plain("BERT")
    for epsilon, is_configured in ((1e-12, False), (1e-5, True)):
        electra = config | {"model_type": "electra", "layer_norm_eps": epsilon}
        pair = StateDict(tensors, config, "a"), StateDict(tensors, electra, "b")
        comparison = same(*pair, everything=True)
        assert ("epsilon of input norms: 1e-12 added to" in comparison.sentence) == is_configured
    # A layout that says nothing of its own is taken for nothing.
    tensors, config, _ = plain("GPT-2")
    turned = {name: value.T if "c_" in name else value for name, value in tensors.items()}
    silent = wqk.open(StateDict(turned, {"model_type": "nanogpt"}, "b"), heads_per_layer=6)
    assert same(StateDict(tensors, config | {"layer_norm_epsilon": 1e-3}, "a"), silent)


def test_where_a_gguf_file_s_tower_may_be_is_said() -> None:
    comparison = CheckpointComparison("a", "b.gguf", (), missing=(Place("vision", "self", 0),))
    assert "mmproj" in comparison.sentence
    assert "0/0" not in comparison.sentence
    assert "mmproj" not in replace(comparison, candidate="b").sentence


def test_what_positions_lack_is_said_without_a_repair() -> None:
    lacking = Mismatch(Kind.ROTARY, "share of rotated dimensions: 16 expected, 8 found")
    block = BlockComparison("decoder", "self", 0, {0: 0.0, 1024: 1.3}, 0, 1e-7, (lacking,))
    assert lacking.reason in CheckpointComparison("a", "b", (block,)).sentence


def test_a_form_that_is_small_at_one_distance_excuses_nothing_at_the_others() -> None:
    # One rotated plane, whose form is (2 cos N θ) u vᵀ: 20 times as small at the last distance.
    base = ((np.pi / 2 - 0.05) / 1024) ** (-R / (R - 2))
    random = np.random.default_rng(0)
    tensors = {
        name: value.astype(np.float16) for name, value in llama().items() if "bias" not in name
    }
    for side, heads in (("q", H), ("k", G)):
        name = f"model.layers.0.self_attn.{side}_proj.weight"
        weight = np.zeros((heads, R, D))
        weight[:, [R // 2 - 1, R - 1]] = random.standard_normal((heads, 1, D))
        tensors[name] = weight.reshape(heads * R, D).astype(np.float16)
    changed = dict(tensors)
    name = "model.layers.0.self_attn.q_proj.weight"
    changed[name] = (1.01 * tensors[name].astype(np.float64)).astype(np.float16)
    assert same(opened(tensors, rope_theta=base), opened(tensors, rope_theta=base)).same
    comparison = same(opened(tensors, rope_theta=base), opened(changed, rope_theta=base))
    assert not comparison.same
    assert comparison.blocks[0].distance[0] > comparison.blocks[0].tolerance


@pytest.mark.parametrize(
    ("layers", "says"), [([0, 9], "no layer 9"), ([-5], "no layer -5"), ([], "no")]
)
def test_layers_that_are_not_there_are_refused(layers: list[int], says: str) -> None:
    demo = wqk.demo_model("encoder")
    with pytest.raises(CheckpointError, match=f"{says}.*; layers are numbered from 0 to 3"):
        wqk.same(demo, demo, layers=layers)
    assert len(wqk.same(demo, demo, layers=[0, -1]).blocks) == 2


def test_what_stands_in_an_attention_belongs_to_it() -> None:
    names = [f"layers.0.{name}.weight" for name in ("mixer.q", "mixer.k", "mixer.o", "up")]
    model = wqk.open({name: np.ones((8, 8)) for name in names}, heads_per_layer=2)
    assert roles(model) == {names[2]: "attention", names[3]: "other"}


def test_what_takes_the_place_of_an_attention_mixes_tokens() -> None:
    attention = [f"layers.{layer}.block.{name}.weight" for layer in (0, 2) for name in "qk"]
    mixing = [f"layers.1.block.{name}.weight" for name in "abcdef"]
    common = [f"layers.{layer}.up.weight" for layer in range(3)]
    weights = {name: np.ones((8, 8)) for name in (*attention, *mixing, *common)}
    model = wqk.open(weights, heads_per_layer=2)
    assert roles(model) == dict.fromkeys(mixing, "mixer") | dict.fromkeys(common, "other")


def test_vectors_are_found_in_one_that_they_are_all_of() -> None:
    fused, parts = {"bias": np.arange(8.0)}, {"q": np.arange(3.0), "k": np.arange(3.0, 8.0)}
    for count, expected in (
        (1, ({}, {})),
        (2, ({"bias": "in q, k"}, dict.fromkeys("qk", "in bias"))),
    ):
        chosen = dict([*parts.items()][:count])
        checkpoints = [StateDict(tensors, {}, "m") for tensors in (fused, chosen)]
        assert find_by_content(checkpoints, ["bias"], [*chosen]) == expected
    scaled = [StateDict({"w": factor * np.arange(8.0)}, {}, "m") for factor in (1, 2)]
    assert compare_stored(scaled, (Part("w"), Part("w"))).reason == "scaled by 2"


def test_a_row_that_is_stored_once_is_not_the_content_of_two_rows() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 8))
    reference = StateDict({"stored": rows}, {}, "m")
    for order, is_found in (([0, 1, 2], True), ([0, 1, 1], False)):
        candidate = StateDict({"renamed": rows[order]}, {}, "m")
        locations = find_by_content([reference, candidate], ["stored"], ["renamed"])
        assert bool(locations.candidate) == is_found


@pytest.mark.parametrize("everything", [False, True])
def test_numbers_that_every_program_takes_where_they_are_absent_are_no_difference(
    everything: bool,
) -> None:
    """As `save_pretrained` writes the default head width into a configuration without one."""
    model = small.llama(heads=4, key_heads=4, sides="qkvo")
    absent = {**model.config}
    del absent["head_dim"], absent["num_key_value_heads"]
    pair = StateDict(model._arrays, absent, "a"), StateDict(model._arrays, model.config, "b")
    assert same(*pair, everything=everything).same
    assert same(*reversed(pair), everything=everything).same


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("num_key_value_heads", {"key_heads": 2}), ("head_dim", {"key_heads": 4, "head_width": 8})],
)
def test_numbers_that_programs_take_otherwise_where_they_are_absent_are_a_difference(
    name: str, sizes: dict[str, int]
) -> None:
    model = small.llama(heads=4, sides="qkvo", **sizes)
    lost = {**model.config}
    del lost[name]
    comparison = same(model, StateDict(model._arrays, lost, "lost"))
    assert not comparison.same
    assert f'config["{name}"] = {model.config[name]}' in comparison.repair


def test_a_cause_has_every_name_of_its_json_as_an_attribute() -> None:
    candidates = [
        opened(edited(lambda q: 2 * q, "q")),
        opened(llama(), rope_theta=5e5),
        opened(both(interleaved)),
    ]
    seen: set[str] = set()
    for candidate in candidates:
        (cause,) = same(opened(llama()), candidate).causes
        for name, value in cause.to_dict().items():
            stored = getattr(cause, name)
            if name == "blocks":
                stored = [place._asdict() for place in stored]
            assert stored == value, name
            seen.add(name)
        assert pickle.loads(pickle.dumps(cause)) == cause
    assert {"verdict", "reason", "repair", "sides", "heads", "blocks", "outside"} < seen
    with pytest.raises(AttributeError, match="did you mean 'verdict'"):
        _ = cause.verdit
