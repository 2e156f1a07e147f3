"""Train the pair of small models that `wqk demo` scores: an encoder and a decoder.

Both have one architecture (four pre-norm layers), see the same blocks of the same text, character
by character, and take the same number of steps. They differ only in what the paper says matters:
the encoder predicts masked characters from both sides, the decoder the next character from the
left. The encoder's query-key forms should come out symmetric, the decoder's directional.

    python examples/train_demo_pair.py wikipedia.jsonl.xz --out demo

Only the query and key weights are kept, under the names that a full checkpoint gives them.
"""

import argparse
import bz2
import gzip
import json
import lzma
import math
import platform
import statistics
from collections import Counter
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedModel,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForCausalLM,
    RobertaPreLayerNormForMaskedLM,
)

LAYERS, WIDTH, HEADS = 4, 128, 4
BLOCK, BATCH = 64, 32
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.1
INITIAL_STD = 0.06
MASKED_SHARE = 0.15
TRAINING_CHARACTERS, HELD_OUT_CHARACTERS = 16_000_000, 131_072
VOCABULARY = 128
PADDING, MASK, UNKNOWN = 0, 1, 2
IGNORED = -100


def read_text(path: Path, characters: int) -> str:
    openers = {".gz": gzip.open, ".xz": lzma.open}
    pieces, length = [], 0
    with openers.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            pieces.append(json.loads(line)["text"] + "\n\n")
            length += len(pieces[-1])
            if length >= characters:
                break
    return "".join(pieces)[:characters]


def encode(text: str) -> Tensor:
    common = [c for c, _ in Counter(text).most_common(VOCABULARY - 3)]
    numbers = {c: n for n, c in enumerate(common, start=3)}
    return torch.tensor([numbers.get(c, UNKNOWN) for c in text])


def unigram_entropy(ids):
    p = ids.bincount().double() / len(ids)
    p = p[p > 0]
    return -(p * p.log()).sum().item()


def build(kind, seed):
    torch.manual_seed(seed)
    config = RobertaPreLayerNormConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        max_position_embeddings=BLOCK + 1 + PADDING, type_vocab_size=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=INITIAL_STD, pad_token_id=PADDING, bos_token_id=None, eos_token_id=None,
        is_decoder=kind == "decoder",
    )
    cls = RobertaPreLayerNormForCausalLM if kind == "decoder" else RobertaPreLayerNormForMaskedLM
    return cls(config)


def mask(ids, g):
    count = round(MASKED_SHARE * ids.shape[1])
    chosen = torch.rand(ids.shape, generator=g).argsort(1)[:, :count]
    labels = torch.full_like(ids, IGNORED).scatter(1, chosen, ids.gather(1, chosen))
    return ids.masked_fill(labels != IGNORED, MASK), labels


def loss_of(model, ids, g):
    if model.config.is_decoder:
        return model(input_ids=ids, labels=ids).loss
    inputs, labels = mask(ids, g)
    return model(input_ids=inputs, labels=labels).loss


def score(model):
    out = []
    for layer in model.roberta_prelayernorm.encoder.layer:
        q = layer.attention.self.query.weight.detach().double().T
        k = layer.attention.self.key.weight.detach().double().T
        m = q @ k.T
        row = {"symmetry": ((m * m.T).sum() / (m * m).sum()).item()}
        r, c = m.norm(dim=1), m.norm(dim=0)
        tr, tc = r.mean() + 2 * r.std(), c.mean() + 2 * c.std()
        for name, ex in (("directionality", 0), ("directionality_excess", 1)):
            R, C = (r - ex * tr)[r > tr].sum(), (c - ex * tc)[c > tc].sum()
            row[name] = ((R - C) / (R + C)).item() if R + C > 0 else 0.0
        out.append(row)
    return out
