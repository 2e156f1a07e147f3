"""Tiny random models, and the proofs that their families are read rightly from their files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import torch as safetensors
from tests.families.architectures import Architecture
from tests.families.completeness import absent, omissions, other_in_memory
from tools.deriving.probing import epsilon_of

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.families import AttentionPlan, Norm, find_family
from wqk.live.recording import recording, require_records
from wqk.live.running import (
    PADDING_MASKS,
    double_precision,
    inputs_of,
    load_model,
    models_within,
)
from wqk.live.verification import verify


def build(architecture: Architecture) -> Any:
    """The random model: attention far from uniform, biases and gains all different."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture.model)
    model = model_class(model_class.config_class(**architecture.config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(2 * noise / math.sqrt(parameter[0].numel()))
            else:
                parameter.add_(0.3 * noise)
    return model


def save(architecture: Architecture, folder: Path) -> Any:
    """Write the model as `save_pretrained` does, with the hub's older keys, and return it."""
    model = build(architecture)
    model.save_pretrained(folder)
    edit_config(folder, architecture.hub)
    if architecture.spelling:
        edit_tensors(folder, lambda tensors: respelled(tensors, architecture.spelling))
    return model


def respelled(tensors: dict[str, Any], spelling: dict[str, str]) -> dict[str, Any]:
    """The tensors under other names; every pattern has to be met."""
    for pattern, replacement in spelling.items():
        renamed = {re.sub(pattern, replacement, name): value for name, value in tensors.items()}
        assert len(renamed) == len(tensors)
        assert renamed.keys() != tensors.keys(), pattern
        tensors = renamed
    return tensors


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({k: v for k, v in config.items() if v is not None or k not in changes})
    )


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "model.safetensors"
    safetensors.save_file(edit(safetensors.load_file(path)), path, {"format": "pt"})


def prove_attention(architecture: Architecture, folder: Path) -> None:
    """The saved model attends with the forms that are read from its files."""
    verification = verify(folder)
    assert len(verification.blocks) == architecture.block_count
    if not isinstance(architecture.blocks, int):
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for block in verification.blocks:
            counts[block.stack][block.kind] += 1
        assert counts == architecture.blocks
    # Far from uniform in every block: other weights would be noticed.
    assert min(block.contrast for block in verification.blocks) > 0.02
    assert verification.difference < 1e-12
    assert verification.ok
    for block in verification.blocks:
        assert block.ceiling is None or block.largest_score <= block.ceiling * (1 + 1e-12)


def prove_live(architecture: Architecture, model: Any, folder: Path) -> None:
    """The live module holds the same blocks as the files."""
    # Loaded anew: its configuration has today's keys even where the file has older ones.
    is_told = "is_causal" not in architecture.hub
    stored = open_checkpoint(folder)
    live = open_checkpoint(type(model).from_pretrained(folder) if is_told else model)
    pairs = list(zip(wqk.open(stored).plans, wqk.open(live).plans, strict=True))
    assert sum(a.applications for a, _ in pairs) == architecture.block_count
    places = [(a.stack, a.kind, a.layer) for a, _ in pairs]
    assert len(set(places)) == len(places), "two attentions of one name"
    if "architectures" not in architecture.hub:  # no class of its own that lifts the mask
        built = wqk.open(open_checkpoint(model)).plans
        assert [a.causal for a, _ in pairs] == [plan.causal for plan in built]
    assert other_in_memory(stored, find_family(stored), live) == []
    for a, b in pairs:
        read, held = Block(stored, a), Block(live, b)
        for one_side, other_side in ((read.query, held.query), (read.key, held.key)):
            np.testing.assert_array_equal(one_side.weight, other_side.weight)
            np.testing.assert_array_equal(one_side.bias, other_side.bias)


def prove_values_and_outputs(model: Any, folder: Path) -> None:
    """The value's and the output's tensors are there, one for each block."""
    for checkpoint in (open_checkpoint(folder), open_checkpoint(model)):
        plans = wqk.open(checkpoint).plans
        assert absent(plans) == []
        for plan in plans:
            assert plan.value is not None, plan.rule.stack
            assert plan.output is not None, plan.rule.stack


def prove_variety(folder: Path) -> None:
    """No two heads are alike, and biases are not zero: mistaking one for another is noticed."""
    checkpoint = open_checkpoint(folder)
    for plan in wqk.open(checkpoint).plans:
        attention = Block(checkpoint, plan)
        for weight in (attention.query.weight, attention.key.weight):
            assert len({head.tobytes() for head in weight}) == len(weight)
        for bias in (attention.query.bias, attention.key.bias):
            assert bias is None or np.abs(bias).max() > 0.01


# Architectures some of whose queries or keys are seen to be fed by a norm that no rule can name.
UNNAMED = {
    "albert-groups": "within a group, a layer is fed by another layer's norm of the group",
    "bert-encoder-decoder": "the decoder's file cannot know by which model its keys are fed",
    "deberta-v2-convolution": "the second layer is fed by a convolution's norm, others are not",
    "mobilebert": "published models have an affine map in the norm's place",
}


def prove_norms(architecture: Architecture, folder: Path) -> None:
    """Inputs of queries and keys are outputs of the named norms, which are of the named kind.

    Inputs are taken from the record of the run, which contains PyTorch's own attention, too.
    """
    checkpoint = open_checkpoint(folder)
    outputs: dict[str, list[np.ndarray]] = {}
    with double_precision(), torch.no_grad(), ExitStack() as stack:
        model, _ = load_model(folder, checkpoint, find_family(checkpoint), {})
        plans = wqk.open(open_checkpoint(model)).plans
        records = stack.enter_context(recording(model, plans, plans))
        for norm in {norm for plan in plans for norm in _norms(plan).values()}:
            module = model.get_submodule(norm.gain[0].name.rpartition(".")[0])
            assert epsilon_of(module) in (None, norm.epsilon), norm.gain[0].name
            module.register_forward_hook(partial(_normalized, norm=norm, outputs=outputs))
        outputs_by_name: dict[str, list[np.ndarray]] = {}
        for name, module in model.named_modules():
            if epsilon_of(module) is not None and hasattr(module, "weight"):
                module.register_forward_hook(partial(_put_out, name=name, outputs=outputs_by_name))
        for prefix, part in models_within(model):
            own_attention = [
                r for p, r in zip(plans, records, strict=True) if p.query.tensor.startswith(prefix)
            ]
            if not own_attention or any(own_attention):
                continue
            inputs = inputs_of(part, None, length=24, seed=0)
            # Texts without padding, which some models set to zero after the norm.
            masks = {name: inputs[name] for name in PADDING_MASKS if name in inputs}
            inputs |= {name: torch.ones_like(mask) for name, mask in masks.items()}
            part(**inputs, output_attentions=True)
    require_records(model, plans, records)
    for plan, applications in zip(plans, records, strict=True):
        named = plan.rule.input_norm
        later = plan.layer > 0 or not plan.rule.first_input_norm
        is_in_this_layer = named and "{previous}" not in named[0]
        assert plan.query.input_norm or not (later and is_in_this_layer), (
            f"layer {plan.layer} has no norm"
        )
        for side in {"query_input", "key_input"} - _norms(plan).keys():
            inputs_of_runs = [getattr(application, side) for application in applications]
            feeding = [
                name
                for name, outputs_of_norm in outputs_by_name.items()
                if all(_feeds(outputs_of_norm, tokens) for tokens in inputs_of_runs)
            ]
            crossing = plan.kind == "cross" and side == "query_input"
            left_out = feeding and (crossing or architecture.name not in UNNAMED)
            assert not left_out, f"{feeding[0]} feeds the {side} of {plan.query.tensor}"
        for side, norm in _norms(plan).items():
            inputs_of_runs = [getattr(application, side) for application in applications]
            feeds = _feeds_windows if plan.rule.window_axes == 2 else _feeds
            assert all(feeds(outputs[norm.gain[0].name], tokens) for tokens in inputs_of_runs), (
                f"{norm.gain[0].name} does not feed the {side} of layer {plan.layer}"
            )
    assert bool(outputs) == architecture.fed_by_norms


def _norms(plan: AttentionPlan) -> dict[str, Norm]:
    """The norms that are named, by what they feed in an application of the attention."""
    sides = {"query_input": plan.query.input_norm, "key_input": plan.key.input_norm}
    return {side: norm for side, norm in sides.items() if norm is not None}


def _normalized(
    module: Any, args: Any, output: Any, norm: Norm, outputs: dict[str, list[np.ndarray]]
) -> None:
    """Keep a norm's output after a check that a norm of the declared kind has this output."""
    parameters = {name.rpartition(".")[2]: value for name, value in module.named_parameters()}
    gain = parameters[norm.gain[0].name.rpartition(".")[2]] + norm.offset
    shift = parameters[norm.bias[0].name.rpartition(".")[2]] if norm.bias else 0.0
    (vectors,) = args
    centered = vectors - vectors.mean(-1, keepdim=True) if norm.kind == "layer" else vectors
    along = torch.cosine_similarity((output - shift) / gain, centered, dim=-1)
    # A picture's tiles that are not used are zero.
    assert along[vectors.abs().amax(-1) > 0].min() > 0.999, (
        f"{norm.gain[0].name} is no {norm.kind} norm"
    )
    outputs.setdefault(norm.gain[0].name, []).append(norm.factor * output.numpy())


def _put_out(
    module: Any, args: Any, output: Any, name: str, outputs: dict[str, list[np.ndarray]]
) -> None:
    """Keep what a norm puts out."""
    outputs.setdefault(name, []).append(output.numpy())


def _feeds(outputs: Sequence[np.ndarray], tokens: np.ndarray) -> bool:
    """Return whether the tokens are all of one output."""
    return any(np.array_equal(tokens.ravel(), output.ravel()) for output in outputs)


def _feeds_windows(outputs: Sequence[np.ndarray], tokens: np.ndarray) -> bool:
    """Return whether every token is a token of an output; edges of windows are zeros."""
    vectors = np.concatenate([output.reshape(-1, output.shape[-1]) for output in outputs])
    tokens = tokens.reshape(-1, tokens.shape[-1])
    tokens = tokens[np.abs(tokens).max(axis=-1) > 0]
    return bool(np.abs(tokens[:, None] - vectors).max(axis=-1).min(axis=-1).max() < 1e-9)


def assert_same_blocks(reference: Path, candidate: Path) -> None:
    """A model under other names is read as the known one, but for its mask; nothing is left out."""
    checkpoint = open_checkpoint(candidate)
    assert omissions(checkpoint, find_family(checkpoint)) == []
    for block, candidate_block in zip(wqk.open(reference), wqk.open(candidate), strict=True):
        for attribute in ("scale", "softcap", "clip", "window", "position", "applications"):
            assert getattr(block.plan, attribute) == getattr(candidate_block.plan, attribute)
        assert block.plan.rotary.order == candidate_block.plan.rotary.order
        np.testing.assert_array_equal(
            block.plan.rotary.frequencies, candidate_block.plan.rotary.frequencies
        )
        for side, candidate_side in (
            (block.query, candidate_block.query),
            (block.key, candidate_block.key),
        ):
            np.testing.assert_array_equal(side.weight, candidate_side.weight)
            np.testing.assert_array_equal(side.bias, candidate_side.bias)
        for weight, candidate_weight in zip(
            block.weights("ov"), candidate_block.weights("ov"), strict=True
        ):
            np.testing.assert_array_equal(weight, candidate_weight)
        for plan_side, candidate_plan_side in (
            (block.plan.query, candidate_block.plan.query),
            (block.plan.key, candidate_block.plan.key),
        ):
            _assert_same_norm(block, plan_side.norm, candidate_block, candidate_plan_side.norm)
            assert plan_side.input_norm is not None
            _assert_same_norm(
                block, plan_side.input_norm, candidate_block, candidate_plan_side.input_norm
            )


def _assert_same_norm(
    block: Block, norm: Norm | None, candidate_block: Block, candidate_norm: Norm | None
) -> None:
    assert (norm is None) == (candidate_norm is None)
    if norm is not None and candidate_norm is not None:
        for attribute in ("kind", "offset", "epsilon", "alone"):
            assert getattr(norm, attribute) == getattr(candidate_norm, attribute)
        np.testing.assert_array_equal(
            block.read(norm.gain), candidate_block.read(candidate_norm.gain)
        )
