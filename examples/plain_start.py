"""When does a start leave the plateau? A check of `wqk lab train` that uses nothing of wqk.

``python examples/plain_start.py wikipedia.jsonl.xz published --seed 1 --steps 800`` trains a plain
BERT of `transformers` on characters, as ``examples/table1-starts.toml`` does, and prints the mean
loss of every 50 steps and the first step at which that mean is below 3.0.
"""

import argparse
import json
import lzma
from collections import Counter

import numpy as np
import torch
import transformers

BLOCK, BATCH, HIDDEN, WIDTH, SYMBOLS, CHARACTERS = 32, 64, 10, 128, 62, 4_000_000
MASK, UNKNOWN, HEADS = 0, 1, 4
# W_k = W_q times these signs, each for an equal share of the dimensions.
SIGNS = {"symmetric": [1.0], "negated": [-1.0], "indefinite": [1.0, -1.0] * (2 * HEADS)}


def encoded(path: str) -> np.ndarray:
    """The beginning of a text as numbers of its most frequent characters."""
    text = ""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        while len(text) < CHARACTERS:
            text += json.loads(next(file))["text"].lower() + "\n"
    common = [symbol for symbol, _ in Counter(text).most_common(SYMBOLS - 1)]
    numbers = {symbol: number for number, symbol in enumerate(common, UNKNOWN + 1)}
    return np.array([numbers.get(symbol, UNKNOWN) for symbol in text])


def head_norm(attention: torch.nn.Module) -> float:
    """Mean norm of the heads' W_q W_kᵀ."""
    query, key = (
        side.weight.detach().view(HEADS, -1, WIDTH) for side in (attention.query, attention.key)
    )
    return float((query.mT @ key).norm(dim=(1, 2)).mean())


def start(model: transformers.BertForMaskedLM, name: str) -> None:
    """Set queries and keys; `random` leaves them as drawn.

    `symmetric`, `negated` and `indefinite` compute keys from queries and keep the heads' mean norm;
    `published` and `published-independent` redraw queries, keys and values as the published code.
    """
    if name in SIGNS:
        for layer in model.bert.encoder.layer:
            attention = layer.attention.self
            before = head_norm(attention)
            signs = torch.tensor(SIGNS[name]).repeat_interleave(WIDTH // len(SIGNS[name]))
            attention.key.weight.data.copy_(signs[:, None] * attention.query.weight.data)
            factor = (before / head_norm(attention)) ** 0.5
            attention.query.weight.data *= factor
            attention.key.weight.data *= factor
        return
    bound = WIDTH**-0.5
    if name == "random":
        return
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        for linear in (attention.query, attention.key, attention.value):
            torch.nn.init.uniform_(linear.weight, -bound, bound)
        if name == "published":
            attention.key.weight.data.copy_(attention.query.weight.data)


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("start", choices=["random", *SIGNS, "published", "published-independent"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = np.random.default_rng(options.seed)
    tokens = encoded(options.text)
    config = transformers.BertConfig(
        vocab_size=SYMBOLS + 1,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=BLOCK,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        initializer_range=0.02,
    )
    model = transformers.BertForMaskedLM(config)
    start(model, options.start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50))
    losses: list[float] = []
    below = None
    for step in range(1, options.steps + 1):
        begins = draw.integers(0, len(tokens) - BLOCK, BATCH)
        inputs = torch.tensor(tokens[begins[:, None] + np.arange(BLOCK)])
        hidden = torch.tensor(draw.permuted(np.arange(BLOCK) < np.full((BATCH, 1), HIDDEN), axis=1))
        labels = inputs.where(hidden, torch.tensor(-100))
        loss = model(input_ids=inputs.masked_fill(hidden, MASK), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
        mean = float(np.mean(losses[-50:]))
        if below is None and step >= 50 and mean < 3.0:
            below = step
        if step % 50 == 0:
            print(f"step {step}: {mean:.3f}", flush=True)
    print(f"{options.start}, seed {options.seed}: below 3.0 at step {below}")


if __name__ == "__main__":
    main()
