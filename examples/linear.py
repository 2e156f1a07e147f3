"""Compare the forms of linear attention and of softmax, in encoders and in decoders.

``python examples/linear.py wikipedia.jsonl.xz runs.csv --seeds 1-5`` trains small pre-norm models
of `transformers` on characters: an encoder that fills in masked characters and a decoder that
predicts the next one, each with softmax and with linear attention, and adds lines to the table when
one has ended; interrupted, the same command goes on. All four start from the same weights of a
seed, and see the same blocks of the same text. Linear attention is that of lightning attention
without its decay and gate: SiLU(q_i)ᵀ SiLU(k_j) v_j, summed over the tokens that i may see, with an
RMS norm of each head's sum; the encoder's is not masked.

Scores are those of the layers' forms W_q W_kᵀ, before the activation: means over layers, and each.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from starts import MASK, SYMBOLS, encoded

import wqk

LAYERS, HEADS, WIDTH, BLOCK, BATCH, STEPS = 2, 4, 128, 32, 32, 1000
RATE, DECAY, DEVIATION, HIDDEN, HELD_OUT = 2e-3, 1.0, 0.06, 0.3, 32
PADDING = SYMBOLS + 1  # occurs nowhere
SCORES = {"symmetry": "symmetry", "directionality": "directionality_excess"}
COLUMNS = (
    "start",
    "seed",
    "step",
    "held_out_loss",
    *(f"mean_{name}" for name in SCORES),
    *(f"{name}_{layer}" for name in SCORES for layer in range(LAYERS)),
)
CELLS = [f"{kind} {mode}" for kind in ("linear", "softmax") for mode in ("encoder", "decoder")]


def linear(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """The heads' outputs (B, N, H, R), from queries, keys and values (B, H, N, R)."""
    silu = torch.nn.functional.silu
    scores = silu(query) @ silu(key).mT
    out = (scores.tril() if module.config.is_decoder else scores) @ value
    return torch.nn.functional.rms_norm(out, out.shape[-1:]).transpose(1, 2), None


transformers.AttentionInterface.register("linear-without-decay", linear)


def build(cell: str, seed: int) -> Any:
    """A new model; the cells of a seed have equal weights."""
    torch.manual_seed(seed)
    kind, mode = cell.split()
    head = "MaskedLM" if mode == "encoder" else "CausalLM"
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
        is_decoder=mode == "decoder",
        use_cache=False,
    )
    name = {"linear": "linear-without-decay", "softmax": "eager"}[kind]
    return getattr(transformers, f"RobertaPreLayerNormFor{head}")._from_config(
        config, attn_implementation=name
    )


def batches(text: np.ndarray, mode: str, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Blocks at random places, the same for both modes; an encoder's are masked."""
    places, masks = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    while True:
        begins = places.integers(0, len(text) - BLOCK, BATCH)
        tokens = torch.tensor(text[begins[:, None] + np.arange(BLOCK)])
        hidden = torch.tensor(masks.random(tokens.shape) < HIDDEN)
        if mode == "encoder":
            labels = tokens.masked_fill(~hidden, -100)
            yield {"input_ids": tokens.masked_fill(hidden, MASK), "labels": labels}
        else:
            yield {"input_ids": tokens, "labels": tokens}


def scored(cell: str, seed: int, step: int, model: Any, text: np.ndarray) -> dict[str, Any]:
    """A line of the table: held-out loss in nats, and the scores of the layers."""
    blocks = batches(text, cell.split()[1], 0)
    with torch.no_grad():
        loss = np.mean([model(**next(blocks)).loss.item() for _ in range(HELD_OUT)])
    frame = wqk.scan(model).layers.frame.sort("layer")
    values = [f"{loss:.5f}"]
    values += [f"{frame[column].mean():.5f}" for column in SCORES.values()]
    values += [f"{value:.5f}" for column in SCORES.values() for value in frame[column]]
    return dict(zip(COLUMNS, (cell, seed, step, *values), strict=True))


def trained(cell: str, seed: int, text: np.ndarray, steps: int = STEPS) -> list[dict[str, Any]]:
    """Train a model; its lines of the table, at the start (of its kind) and at the end."""
    held_out, text = text[: len(text) // 20], text[len(text) // 20 :]
    model = build(cell, seed)
    lines = [scored(f"{cell} at the start", seed, 0, model, held_out)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, (steps - step) / steps)
    )
    blocks = batches(text, cell.split()[1], seed)
    for _ in range(steps):
        loss = model(**next(blocks)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return [*lines, scored(cell, seed, steps, model, held_out)]


def main() -> None:
    """Train what the table lacks, all cells of a seed before the next seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", default="1-5")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, _, last = options.seeds.partition("-")
    done = set()
    if options.table.exists():
        with options.table.open(newline="") as file:
            done = {(row["start"], int(row["seed"])) for row in csv.DictReader(file)}
    else:
        options.table.write_text(",".join(COLUMNS) + "\n")
    for seed in range(int(first), int(last or first) + 1):
        for cell in options.cells:
            if (cell, seed) in done:
                continue
            lines = trained(cell, seed, encoded(options.text), options.steps)
            with options.table.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(lines)
            for line in lines:
                print(", ".join(f"{k} {v}" for k, v in line.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
