"""``verify``: a right description passes, a wrong one fails, and others are refused.

The model that transformers runs is the independent computation: a family file that describes
another scale, order or base than the model has must not pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests import small
from tests.attacks.family_files import toml
from tests.attacks.outcomes import Case, Unclean, refused_in_one_line
from tests.command import run

from wqk.errors import WqkError

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 8,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
}
FILE: dict[str, Any] = {
    "stack": "decoder",
    "query": "layers.{layer}.self_attn.q_proj",
    "key": "layers.{layer}.self_attn.k_proj",
    "input_norm": "layers.{layer}.input_layernorm",
    "scale": ["head_width ** -0.5"],
    "causal": True,
    "rotary": {"order": "half"},
}
# Changes of the file, and whether the description stays right.
OF_FILE: dict[str, tuple[tuple[Any, bool], ...]] = {
    "scale": ((["head_width ** -1"], False), (["0.5"], False), (["head_dim ** -0.5"], True)),
    "rotary": (
        ({"order": "interleaved"}, False),
        ({"order": "half", "base": "hidden_size"}, False),
        ({"order": "half", "reversed": True}, False),
        ({"order": "half", "last": True}, True),
        ({"order": "half", "fraction": "no_key"}, True),
    ),
    "query": (("layers.{layer}.self_attn.k_proj", False),),
    "note": (("a note", True),),
    "value": (("layers.{layer}.self_attn.v_proj", True),),
    "softcap": (("hidden_size", False),),
    "norm": (("layer", True),),
}
SCALINGS: tuple[Any, ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "no such", "factor": 2.0},
    None,
)
# Settings that both sides read: whatever they hold, a right reader passes or refuses.
OF_CONFIG: dict[str, tuple[Any, ...]] = {
    "rope_theta": (1.0, 10.0, 1e6, 0, -1, "a", None),
    "rope_scaling": SCALINGS,
    "rms_norm_eps": (1e-2, 0.0, 1.0, "a", -1.0),
    "attention_bias": (True, False, None),
    "head_dim": (6, 4, 12, 0, None),
    "num_key_value_heads": (1, 2, 4, 3, 0, None),
    "num_attention_heads": (1, 2, 4, 8, 3, 0),
    "num_hidden_layers": (0, 1, 2, None),
    "sliding_window": (3, None),
    "model_type": ("llama", "mistral", "qwen2", "gemma", "olmo", "no-such-type", "bert", None, 3),
    "partial_rotary_factor": (0.5, 1.0, 0.0),
    "hidden_size": (16, 8, 0),
    "vocab_size": (30, 5, 1, 0),
    "tie_word_embeddings": (True, False),
    "max_position_embeddings": (1, 4, 64, 0),
    "layer_types": (["full_attention"], ["sliding_attention"], ["no such"], []),
    "hidden_act": ("silu", "gelu", "no such"),
    "torch_dtype": ("float16", "bfloat16", "float32", "no such"),
}


def verified(model: Path, family: Path | None, seed: int) -> int:
    """Exit status of ``verify``: 0 right, 1 wrong or not compared."""
    options = ["--family", family] if family else []
    done = run("verify", model, "--seed", seed, *options, exits=None)
    if done.exit_code == 2:
        refused_in_one_line(done)
        raise WqkError(done.stderr.strip())
    if done.exit_code not in (0, 1, 3) or "Traceback" in done.output:
        raise Unclean(f"exit status {done.exit_code}: {done.output[-500:]}")
    return done.exit_code


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """A small LLaMA under changed family files and changed configurations."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    settings = {key: value for key, value in SIZES.items() if key != "model_type"}
    model = transformers.LlamaModel(transformers.LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_() if parameter.ndim > 1 else parameter.uniform_(0.5, 2)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    place = small.save(folder / "model", tensors, SIZES)
    family = folder / "family.toml"
    while True:
        config, seed = dict(SIZES), dice.randrange(100)
        if dice.random() < 0.4:
            key = dice.choice(sorted(OF_FILE))
            value, stays_right = dice.choice(OF_FILE[key])
            table = {**FILE, key: value}
            lines = [f"{name} = {toml(entry)}" for name, entry in table.items()]
            family.write_text("\n".join(['name = "ours"', "[[attention]]", *lines, ""]))
            (place / "config.json").write_text(json.dumps(config))
            yield Case(
                f"{key} = {value!r}, {'right' if stays_right else 'wrong'}",
                partial(verified, place, family, seed),
                lambda status, right=stays_right: (status == 0) == right,
            )
            continue
        descriptions = []
        for _ in range(dice.choice((1, 1, 2))):
            key = dice.choice(sorted(OF_CONFIG))
            config[key] = dice.choice(OF_CONFIG[key])
            descriptions.append(f"{key} = {config[key]!r}")
        (place / "config.json").write_text(json.dumps(config))
        yield Case("; ".join(descriptions), partial(verified, place, None, seed), (0).__eq__)
