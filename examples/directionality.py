"""Train decoders that differ in one ingredient, and score the directionality of their forms.

``python examples/directionality.py wikipedia.jsonl.xz runs.csv --seeds 1-15`` trains small pre-norm
decoders of `transformers` on characters, and adds two lines to the table for each, of its start and
of its end. All conditions of a seed come before the next seed; interrupted, the same command goes
on, and further seeds are added by a larger range.

================  ==============================================================================
as recorded       the decoder of ``examples/convert.toml``: RoBERTa-PreLayerNorm, whose embeddings
                  contain a constant token-type vector and pass a layer norm; AdamW
no embedding norm without that layer norm
no token type     without that vector
SGD               the same model, trained by stochastic gradient descent with momentum
================  ==============================================================================

The models of a seed start from equal weights and see the same blocks of text. Directionality is by
excess, a mean over both layers; ``symmetry`` is recorded next to it.
"""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from linear import batches
from starts import SYMBOLS, encoded

import wqk

LAYERS, HEADS, WIDTH, BLOCK = 2, 4, 64, 32
STEPS, WARMUP, DEVIATION = 400, 50, 0.085
ADAM_RATE, ADAM_DECAY = 3e-3, 0.1
SGD_RATE, SGD_MOMENTUM = 0.3, 0.9
HELD_OUT = 32  # batches
PADDING = SYMBOLS + 1  # occurs nowhere
CONDITIONS = ("as recorded", "no embedding norm", "no token type", "SGD")
COLUMNS = (
    "start",
    "seed",
    "step",
    "held_out_loss",
    "mean_symmetry",
    "mean_directionality",
    "directionality_0",
    "directionality_1",
)


def build(condition: str, seed: int) -> Any:
    """Return a new decoder; the decoders of a seed have equal weights."""
    torch.manual_seed(seed)
    config = transformers.RobertaPreLayerNormConfig(
        vocab_size=SYMBOLS + 2,
        pad_token_id=PADDING,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=BLOCK + PADDING + 1,
        type_vocab_size=1,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        initializer_range=DEVIATION,
        is_decoder=True,
        use_cache=False,
    )
    model = transformers.RobertaPreLayerNormForCausalLM(config)
    embeddings = model.roberta_prelayernorm.embeddings
    if condition == "no embedding norm":
        embeddings.LayerNorm = torch.nn.Identity()
    if condition == "no token type":
        embeddings.token_type_embeddings.weight.requires_grad_(False).zero_()
    return model


def optimizer_of(condition: str, model: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a condition."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if condition == "SGD":
        return torch.optim.SGD(weights, lr=SGD_RATE, momentum=SGD_MOMENTUM)
    return torch.optim.AdamW(weights, lr=ADAM_RATE, weight_decay=ADAM_DECAY)


def scored(name: str, seed: int, step: int, model: Any, text: np.ndarray) -> dict[str, Any]:
    """Return a line of the table: held-out loss in nats, and scores of the layers."""
    blocks = batches(text, "decoder", 0)
    with torch.no_grad():
        loss = np.mean([model(**next(blocks)).loss.item() for _ in range(HELD_OUT)])
    layers = wqk.scan(model).layers.frame.sort("layer")
    directionality = layers["directionality_excess"]
    scores = (layers["symmetry"].mean(), directionality.mean(), *directionality)
    values = [f"{value:.5f}" for value in (loss, *scores)]
    return dict(zip(COLUMNS, (name, seed, step, *values), strict=True))


def trained(condition: str, seed: int, text: np.ndarray, steps: int) -> list[dict[str, Any]]:
    """Train a decoder; return its lines of the table, at the start and at the end."""
    held_out, text = text[: len(text) // 20], text[len(text) // 20 :]
    model = build(condition, seed)
    start = scored(f"{condition} at the start", seed, 0, model, held_out)
    optimizer = optimizer_of(condition, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1.0)
    )
    blocks = batches(text, "decoder", seed)
    for _ in range(steps):
        loss = model(**next(blocks)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return [start, scored(condition, seed, steps, model, held_out)]


def main() -> None:
    """Train what the table lacks, all conditions of a seed before the next seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", default="1-15")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, _, last = options.seeds.partition("-")
    recorded = set()
    if options.table.exists():
        with options.table.open(newline="") as file:
            recorded = {(row["start"], int(row["seed"])) for row in csv.DictReader(file)}
    else:
        options.table.write_text(",".join(COLUMNS) + "\n")
    text = encoded(options.text)
    for seed in range(int(first), int(last or first) + 1):
        for condition in options.conditions:
            if (condition, seed) in recorded:
                continue
            lines = trained(condition, seed, text, options.steps)
            with options.table.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(lines)
            for line in lines:
                print(", ".join(f"{k} {v}" for k, v in line.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
