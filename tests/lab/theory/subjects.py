"""Small models with language-model heads on disk, and texts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tests.small import sizes

from wqk.live.running import quiet
from wqk.tables.run import create_run
from wqk_lab.theory.subject import Subject
from wqk_lab.theory.text import Text

VOCABULARY = 40
MASK = 1

SHAPE = sizes(16, 2, 2, vocab_size=VOCABULARY, intermediate_size=24, max_position_embeddings=32)
LARGE = {"initializer_range": 0.3}


def made(name: str, *, seed: int = 0, **config: Any) -> Any:
    """A model of `transformers` by the name of its class."""
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    with quiet():
        return kind(kind.config_class(**config)).eval()


def bert(*, decoder: bool = False, seed: int = 0, **shape: Any) -> Any:
    """A BERT whose initial weights are large enough to attend to something."""
    name = "BertLMHeadModel" if decoder else "BertForMaskedLM"
    return made(name, seed=seed, **{**SHAPE, **LARGE, **shape}, is_decoder=decoder)


def albert() -> Any:
    """One layer, applied twice."""
    return made("AlbertForMaskedLM", **SHAPE, **LARGE, embedding_size=8)


def bart() -> Any:
    """An encoder, and a decoder with self- and cross-attention."""
    names = ("layers", "ffn_dim", "attention_heads")
    sizes = {f"encoder_{name}": 2 for name in names} | {f"decoder_{name}": 2 for name in names}
    shape = {"d_model": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    return made("BartForConditionalGeneration", **sizes, **shape, **special, init_std=0.3)


def llama() -> Any:
    """Rotary positions and grouped heads."""
    return made("LlamaForCausalLM", **SHAPE, **LARGE, num_key_value_heads=1)


def qwen3() -> Any:
    """Norms of queries and keys: no score is one bilinear form."""
    return made("Qwen3ForCausalLM", **SHAPE, num_key_value_heads=1, head_dim=8)


def text(length: int = 6000) -> Text:
    """Sentences of words that have an order."""
    random = np.random.default_rng(0)
    sentences: list[list[int]] = []
    while sum(map(len, sentences)) < length:
        sentence = 4 + (np.arange(random.integers(4, 20)) + random.integers(3)) % 30
        sentences.append([2, *sentence.tolist(), 3])
    tokens = np.concatenate(sentences).astype(np.uint16)
    return Text("sentences", tokens, np.cumsum([0, *map(len, sentences)]), VOCABULARY, MASK)


def subject(model: Any, objective: Any, batches: int = 2, **settings: Any) -> Subject:
    """A model on some blocks of the text."""
    blocks = text().blocks(batches, 3, 16, seed=0)
    mask = None if objective == "causal" else MASK
    return Subject("tiny", model, objective, blocks, mask, **settings)


def save(model: Any, folder: Path) -> Path:
    """As ``save_pretrained`` leaves it."""
    with quiet():
        model.save_pretrained(folder)
    return folder


def tokens_file(folder: Path) -> Path:
    """Token numbers in a .npy file."""
    path = folder / "tokens.npy"
    np.save(path, text().tokens)
    return path


def run_of(models: dict[int, Any], folder: Path) -> Path:
    """A training run's folder with these models as its checkpoints."""
    create_run(folder, {"recipe": {"steps": max(models)}})
    for step, model in models.items():
        save(model, folder / f"checkpoint-{step}")
    return folder


def configuration(folder: Path, **changes: Any) -> Path:
    """A ``config.json`` without weights."""
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "bert", **SHAPE, **changes}))
    return path
