"""Train models whose start has one effect of a symmetric start each; without wqk.

``python examples/starts.py wikipedia.jsonl.xz starts.csv --seeds 1-15`` trains small BERTs of
`transformers` on characters, one for each arm and seed, and adds a line to the table when one has
ended; interrupted, the same command goes on. ``--jobs 2`` trains two at a time. ``--layers 4
--width 256 --rate 3e-4 --prefix "larger "`` trains larger models; each recipe needs a table of its
own, and names of its own in the records.

A symmetric start, W_k = W_q, makes tokens attend to themselves, makes similar tokens attract each
other, and makes the form symmetric. All arms have heads of one mean norm. The *excess* is what the
symmetric start of a seed adds to a token's logit with itself, beyond its logits with others: a mean
over tokens, for each head, at the start.
"""

import argparse
import csv
import json
import lzma
import sys
from collections import Counter
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

HEADS = 4
BLOCK, BATCH, HIDDEN = 32, 32, 10  # characters in a block, blocks in a step, masked characters
SYMBOLS, CHARACTERS = 62, 4_000_000
DEVIATION = 0.04
MASK, UNKNOWN = 0, 1
STEPS, PLATEAU = 600, slice(300, 600)
COLUMNS = ("start", "seed", "step", "plateau_loss", "first_below", "last_loss", "excess")


class Recipe(NamedTuple):
    """Number of layers, width, and learning rate."""

    layers: int
    width: int
    rate: float


SMALL = Recipe(layers=2, width=128, rate=1e-3)


class Arm(NamedTuple):
    """Keys as queries times a sign (0: as drawn), and what is done to the logits."""

    sign: int = 0
    itself: float = 0.0  # times the excess, added to a token's logit with itself
    same: float = 0.0  # the same for all tokens with the same character
    learned: bool = False  # whether what is added is trained
    tied: bool = False  # whether W_k = W_q is held
    even: float = 1.0  # factor of (S + Sᵀ)/2 in the logits
    odd: float = 1.0  # factor of (S − Sᵀ)/2


ARMS = {
    "random": Arm(),
    "self-bias": Arm(itself=1),
    "symmetric without self": Arm(sign=1, itself=-1),
    "symmetric": Arm(sign=1),
    "negated": Arm(sign=-1),
    "negated without self": Arm(sign=-1, itself=1),
    "same-token": Arm(same=1),
    "learned self-bias": Arm(itself=1, learned=True),
    "tied": Arm(sign=1, tied=True),
    "symmetric part": Arm(odd=0),
    "skew part": Arm(even=0),
}


class Scores(torch.nn.Module):
    """Self-attention whose logits an arm changes, in place of the softmax of plain products."""

    def __init__(self, arm: Arm, layers: int) -> None:
        super().__init__()
        self.arm = arm
        self.tokens: torch.Tensor | None = None  # the characters that the model sees, (B, N)
        self.measured: list[torch.Tensor] | None = None
        self.added = torch.nn.Parameter(torch.zeros(layers, HEADS), requires_grad=arm.learned)

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """The heads' outputs (B, N, H, R), from queries, keys and values (B, H, N, R)."""
        logits = query @ key.mT / query.shape[-1] ** 0.5
        if self.measured is not None:
            diagonal = logits.diagonal(dim1=-2, dim2=-1)
            mean_of_others = (logits.sum(-1) - diagonal) / (BLOCK - 1)
            self.measured.append((diagonal - mean_of_others).mean(dim=(0, 2)))
        arm = self.arm
        if (arm.even, arm.odd) != (1.0, 1.0):
            even, odd = (logits + logits.mT) / 2, (logits - logits.mT) / 2
            logits = arm.even * even + arm.odd * odd
        if arm.itself or arm.same:
            assert self.tokens is not None
            equal = (
                torch.eye(BLOCK) if arm.itself else self.tokens[:, :, None] == self.tokens[:, None]
            )
            equal = equal.float() if arm.itself else equal[:, None].float()
            logits = logits + self.added[module.layer_idx][:, None, None] * equal
        return (logits.softmax(-1) @ value).transpose(1, 2), None


class Tied(torch.nn.Module):
    """Keys that are computed by the queries' weights."""

    def __init__(self, query: torch.nn.Linear) -> None:
        super().__init__()
        self.queries = [query]  # hidden from the optimizer, which has it already

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the query's projection."""
        return self.queries[0](x)


@cache
def encoded(path: str) -> np.ndarray:
    """The beginning of a text as numbers of its most frequent characters."""
    text = ""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        while len(text) < CHARACTERS:
            text += json.loads(next(file))["text"].lower() + "\n"
    common = [symbol for symbol, _ in Counter(text).most_common(SYMBOLS - 1)]
    numbers = {symbol: number for number, symbol in enumerate(common, UNKNOWN + 1)}
    return np.array([numbers.get(symbol, UNKNOWN) for symbol in text])


def head_norm(attention: Any) -> float:
    """Mean norm of the heads' W_q W_kᵀ."""
    query, key = (
        side.weight.detach().unflatten(0, (HEADS, -1)) for side in (attention.query, attention.key)
    )
    return float((query.mT @ key).norm(dim=(1, 2)).mean())


def build(arm: Arm, seed: int, recipe: Recipe = SMALL) -> tuple[Any, Scores]:
    """A new model with an arm's start, and its attention."""
    torch.manual_seed(seed)
    scores = Scores(arm, recipe.layers)
    transformers.AttentionInterface.register("starts", scores.attend)
    config = transformers.BertConfig(
        vocab_size=SYMBOLS + 1,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * recipe.width,
        max_position_embeddings=BLOCK,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        initializer_range=DEVIATION,
    )
    model = transformers.BertForMaskedLM._from_config(config, attn_implementation="starts")
    for index, layer in enumerate(model.bert.encoder.layer):
        attention = layer.attention.self
        attention.layer_idx = index
        if arm.sign:
            before = head_norm(attention)
            attention.key.weight.data.copy_(arm.sign * attention.query.weight.data)
            factor = (before / head_norm(attention)) ** 0.5
            attention.query.weight.data *= factor
            attention.key.weight.data *= factor
        if arm.tied:
            attention.key = Tied(attention.query)
    return model, scores


def excess(seed: int, tokens: torch.Tensor, recipe: Recipe = SMALL) -> torch.Tensor:
    """What the symmetric start adds to a token's logit with itself, (layers, heads)."""
    model, scores = build(ARMS["symmetric"], seed, recipe)
    scores.measured = []
    with torch.no_grad():
        model(input_ids=tokens)
    return torch.stack(scores.measured)


def trained(
    name: str, seed: int, text: np.ndarray, recipe: Recipe = SMALL, steps: int = STEPS
) -> dict[str, Any]:
    """Train an arm, and return its line of the table."""
    arm = ARMS[name]
    draw = np.random.default_rng(seed)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        begins = draw.integers(0, len(text) - BLOCK, BATCH)
        inputs = torch.tensor(text[begins[:, None] + np.arange(BLOCK)])
        hidden = torch.tensor(draw.permuted(np.arange(BLOCK) < np.full((BATCH, 1), HIDDEN), axis=1))
        return inputs.masked_fill(hidden, MASK), inputs.where(hidden, torch.tensor(-100))

    first = batch()[0]
    added = excess(seed, first, recipe)
    model, scores = build(arm, seed, recipe)
    scores.added.data.copy_((arm.itself or arm.same) * added)
    parameters = [*model.parameters(), *([scores.added] if arm.learned else [])]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.rate, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50))
    losses: list[float] = []
    for _ in range(steps):
        scores.tokens, labels = batch()
        loss = model(input_ids=scores.tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
    means = np.convolve(losses, np.ones(50) / 50, "valid")
    below = np.flatnonzero(means < 3.0)
    return dict(
        zip(
            COLUMNS,
            (
                name,
                seed,
                steps,
                f"{np.mean(losses[PLATEAU] or losses):.5f}",
                int(below[0]) + 50 if len(below) else "",
                f"{means[-1]:.5f}",
                f"{added.mean():.4f}",
            ),
            strict=True,
        )
    )


def run(job: tuple[str, int, str, Recipe]) -> dict[str, Any]:
    """Train an arm in a process of its own."""
    torch.set_num_threads(1)
    name, seed, path, recipe = job
    return trained(name, seed, encoded(path), recipe)


def main() -> None:
    """Train what the table lacks, all arms of a seed before the next seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", default="1-15")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, default=SMALL.layers)
    parser.add_argument("--width", type=int, default=SMALL.width)
    parser.add_argument("--rate", type=float, default=SMALL.rate)
    parser.add_argument("--prefix", default="", help="put before the names of the arms")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    done = set()
    if options.table.exists():
        with options.table.open(newline="") as file:
            done = {(row["start"], int(row["seed"])) for row in csv.DictReader(file)}
    else:
        options.table.write_text(",".join(COLUMNS) + "\n")
    recipe = Recipe(options.layers, options.width, options.rate)
    missing_runs = [
        (name, seed, options.text, recipe)
        for seed in range(int(first), int(last or first) + 1)
        for name in options.arms
        if (options.prefix + name, seed) not in done
    ]
    with get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap_unordered(run, missing_runs):
            row["start"] = options.prefix + row["start"]
            with options.table.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
