"""Tiny random models, and the proof that they attend with the forms read from their files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.verification import verify
from wqk.verification.inputs import inputs_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

if TYPE_CHECKING:
    from collections.abc import Callable

    from wqk.families import AttentionPlan, InputNorm


@dataclass(frozen=True)
class Architecture:
    """A tiny random model of one kind.

    Attributes
    ----------
    name, model
        The test's, and the class in `transformers`.
    config
        Arguments of its configuration.
    blocks
        Number of applications of attention blocks that have to agree; or of each stack and kind.
    hub
        Keys of config.json as older files on the hub have them; None takes a key out.
    spelling
        Patterns and replacements that turn the saved names of tensors into those of older files.
    """

    name: str
    model: str
    config: dict[str, Any]
    blocks: int | dict[tuple[str, str], int] = 2
    hub: dict[str, Any] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)

    @property
    def block_count(self) -> int:
        return self.blocks if isinstance(self.blocks, int) else sum(self.blocks.values())


TOKENS = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BERT = TOKENS | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
# 6 query heads over 2 key heads (H/G ≠ G), of width 12 where hidden/heads is 8.
GROUPED = BERT | {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
BART = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_layers": 3,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


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
        edit_tensors(folder, lambda tensors: respelt(tensors, architecture.spelling))
    return model


def respelt(tensors: dict[str, Any], spelling: dict[str, str]) -> dict[str, Any]:
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
        places = [(block.stack, block.kind) for block in verification.blocks]
        assert {place: places.count(place) for place in places} == architecture.blocks
    # Far from uniform in every block: other weights would be noticed.
    assert min(block.contrast for block in verification.blocks) > 0.02
    assert verification.difference < 1e-12
    assert verification.ok


def prove_live(architecture: Architecture, model: Any, folder: Path) -> None:
    """The live module holds the same blocks as the files."""
    # Loaded anew: its configuration has today's keys even where the file has older ones.
    stored, live = open_checkpoint(folder), open_checkpoint(type(model).from_pretrained(folder))
    pairs = list(zip(attention_plans(stored), attention_plans(live), strict=True))
    assert sum(a.applications for a, _ in pairs) == architecture.block_count
    for a, b in pairs:
        one, other = ((p.stack, p.rule.kind, p.layer, p.scale, p.window) for p in (a, b))
        assert one == other
        assert (a.rotary is None) == (b.rotary is None)
        if a.rotary and b.rotary:
            np.testing.assert_array_equal(a.rotary.frequencies, b.rotary.frequencies)
        read, held = load_attention(stored, a), load_attention(live, b)
        for name in ("query_weight", "key_weight", "query_bias", "key_bias"):
            np.testing.assert_array_equal(getattr(read, name), getattr(held, name))


def prove_values_and_outputs(model: Any, folder: Path) -> None:
    """The value's and the output's tensors are there, one for each block."""
    for checkpoint in (open_checkpoint(folder), open_checkpoint(model)):
        rules = [plan.rule for plan in attention_plans(checkpoint)]
        for rule in rules:
            weights = [[f"{name}.weight" for name in names] for names in (rule.value, rule.output)]
            for spellings in filter(None, [*weights, rule.value_bias]):
                escaped = (re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(s)) for s in spellings)
                pattern = re.compile(rf"(.+\.)?({'|'.join(escaped)})")
                found = [t for t in checkpoint.tensors() if pattern.fullmatch(t)]
                assert len(found) == rules.count(rule), spellings


def prove_input_norms(model: Any) -> None:
    """What goes into queries and keys is what the named norms put out, and of the named kind."""
    plans = attention_plans(open_checkpoint(model))
    module_of = {
        name: model.get_submodule(name.rpartition(".")[0])
        for plan in plans
        for name in _input_names(plan)
    }
    latest: dict[str, tuple[Any, Any]] = {}
    met: list[tuple[str, str]] = []

    def keep(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda module, args, output: latest.update({name: (args[0], output)})

    def meet(name: str, norm: InputNorm) -> Callable[[Any, Any], None]:
        def compare(module: Any, args: Any) -> None:
            if (name, norm.gain.name) in met:  # relative positions may go through it after that
                return
            given, output = latest[norm.gain.name]
            assert torch.equal(args[0], output), f"{norm.gain.name} does not feed {name}"
            parameters = dict(model.named_parameters())
            shift = parameters[norm.bias.name] if norm.bias else 0.0
            normalised = (output - shift) / (parameters[norm.gain.name] + norm.offset)
            centred = given - given.mean(-1, keepdim=True) if norm.kind == "layer" else given
            along = torch.cosine_similarity(normalised, centred, dim=-1)
            assert along.min() > 0.999, f"{norm.gain.name} is no {norm.kind} norm"
            met.append((name, norm.gain.name))

        return compare

    handles = [module.register_forward_hook(keep(name)) for name, module in module_of.items()]
    expected = []
    for plan in plans:
        later = plan.layer > 0 or not plan.rule.first_input_norm
        named = plan.rule.input_norm and "{previous}" not in plan.rule.input_norm[0]
        assert plan.query_input or not (later and named), f"layer {plan.layer} has no norm"
        for side in ("query", "key"):
            norm, name = getattr(plan, f"{side}_input"), getattr(plan, side).tensor
            if norm:
                module = model.get_submodule(name.rpartition(".")[0])
                handles.append(module.register_forward_pre_hook(meet(name, norm)))
                expected.append((name, norm.gain.name))
    with torch.no_grad():
        model.eval()(**inputs_of(model, range(5, 17), length=12, seed=0))
    for handle in handles:
        handle.remove()
    assert set(met) == set(expected)


def _input_names(plan: AttentionPlan) -> set[str]:
    return {norm.gain.name for norm in (plan.query_input, plan.key_input) if norm}
