"""A small corpus, and recipes and models of milliseconds a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from wqk_lab.training.corpus import TokenChunk, TokenStore, write_store
from wqk_lab.training.models import build_model
from wqk_lab.training.recipe import Recipe, make_recipe

VOCABULARY = 40
SPECIAL = {"padding": 0, "mask": 1, "unknown": 2, "separator": 3}

SHAPE = {"layers": 2, "width": 32, "heads": 4}
WORK = {"block": 16, "batch": 8, "accumulation": 1, "steps": 12, "warmup": 2}
LOOKS = {"log_every": 5, "held_out_every": 6, "held_out_blocks": 16, "score_every": 6}
SAVES = {"save_every": 4, "keep_checkpoints": "last"}

# Configurations of one's own, by their type.
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDER = SIZES | {"intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = WIDER | {"num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": WIDER,
    "llama": GROUPED,
    "phi3": GROUPED,
    "modernbert": WIDER | {"cls_token_id": 3},
}


def tiny(preset: str = "fast", **fields: Any) -> Recipe:
    """A small recipe; any field can be replaced, and a configuration has its own shape."""
    shape = {} if fields.get("config") else SHAPE
    return make_recipe(preset, **{**shape, **WORK, **LOOKS, **SAVES, **fields})


def tiny_model(architecture: str = "", preset: str = "fast", **fields: Any) -> Any:
    """A model of the preset's architecture, of that with another norm, or of a configuration."""
    if architecture in CONFIGS:
        fields["config"] = {"model_type": architecture, **CONFIGS[architecture]}
    elif architecture:
        fields["norm"] = architecture
    return build_model(tiny(preset, **fields), VOCABULARY, SPECIAL)


def walk(tokens: int, seed: int) -> np.ndarray:
    """Token numbers that depend on the two before them: something to learn, from both sides."""
    steps = np.random.default_rng(seed).choice([1, 2, 5], size=tokens, p=[0.7, 0.2, 0.1])
    return len(SPECIAL) + np.cumsum(steps + np.roll(steps, 1)) % (VOCABULARY - len(SPECIAL))


def one_letter_words(count: int) -> bytes:
    """A tokenizer.json with this many ids: the special tokens, and then letters."""
    names = ["[PAD]", "[MASK]", "[UNK]", "[SEP]", *(chr(97 + n) for n in range(count - 4))]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


def make_store(folder: Path, seed: int) -> TokenStore:
    splits = {
        split: [TokenChunk(walk(size, seed + number), np.array([size]), size)]
        for number, (split, size) in enumerate({"train": 20_000, "held_out": 2_000}.items())
    }
    return store_of(folder, splits)


def store_of(
    folder: Path,
    splits: dict[str, list[TokenChunk]],
    special: dict[str, int] = SPECIAL,
    vocabulary_size: int = VOCABULARY,
) -> TokenStore:
    """A store of characters."""
    tokenizer = one_letter_words(vocabulary_size)
    sizes: Any = {"unit": "characters", "vocabulary_size": vocabulary_size}
    return write_store(folder, splits, special=special, tokenizer=tokenizer, **sizes)


# One layer, for runs whose numbers do not matter.
SMALL = {"layers": 1, "width": 16, "heads": 2, "block": 8, "batch": 4, "held_out_blocks": 4}


def flags(**fields: Any) -> list[str]:
    """Fields of a recipe as options of the command."""
    options = []
    for name, value in fields.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    return options


def experiment(*cells: dict[str, Any], **recipe: Any) -> str:
    """A file of experiments with these cells, whose shared recipe is small."""
    shared = SMALL | {"steps": 6, "corpus": "store", "seeds": [1], "threads": 1} | recipe
    return "\n".join([table("[recipe]", shared), *(table("[[cell]]", cell) for cell in cells)])


def table(name: str, fields: dict[str, Any]) -> str:
    lines = (f"{field.replace('_', '-')} = {json.dumps(v)}" for field, v in fields.items())
    return "\n".join([name, *lines])
