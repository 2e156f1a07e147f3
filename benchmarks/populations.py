"""Tiny models for the evidence of `benchmarks.kinship`: trained once, and resumable.

``python -m benchmarks.populations OUT --text FILE FILE`` trains every architecture on every text
from every seed, without any weight in common. Models of one architecture and text see the same
batches in the same order: what they share besides weights is as much as can be shared.
"""

from __future__ import annotations

import argparse
import lzma
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

WIDTH, HEADS, BLOCK = 64, 8, 64
MASK, VOCABULARY = 128, 129  # characters are bytes below 128

# Architecture, configuration and model class of transformers, mode, configuration.
_SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": BLOCK,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_SIZES, "num_hidden_layers": 4}),
    "grouped": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**_SIZES, "num_hidden_layers": 4}),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_SIZES, "num_hidden_layers": 5}),
}
# Steps, blocks in a batch, tokens in a block; and where its seeds begin, so that none are shared.
RECIPES = {"long": (400, 16, 64, 0), "medium": (250, 8, 32, 50_000), "short": (150, 4, 32, 100_000)}


def read_text(path: Path) -> np.ndarray:
    """Return the characters of a text below 128, as numbers."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rb") as file:
        content = np.frombuffer(file.read(), np.uint8)
    return content[content < MASK].astype(np.int64)


def build(architecture: str, seed: int) -> PreTrainedModel:
    """Return a new model, whose weights are the seed's alone."""
    import torch
    import transformers

    config, model, values = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    built: PreTrainedModel = getattr(transformers, model)(getattr(transformers, config)(**values))
    return built


def batches(text: np.ndarray, seed: int, batch: int, block: int) -> Iterator[torch.Tensor]:
    """Blocks of the text, in an order that is the seed's."""
    import torch

    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - block, batch)
        yield torch.from_numpy(np.stack([text[s : s + block] for s in starts]))


def loss_of(model: PreTrainedModel, tokens: torch.Tensor, random: Any) -> torch.Tensor:
    """Next characters of a decoder, 30 % masked ones of an encoder; in nats."""
    import torch

    if model.config.model_type != "bert":
        return model(input_ids=tokens, labels=tokens).loss
    masked = torch.from_numpy(random.random(tokens.shape) < 0.3)
    return model(
        input_ids=tokens.masked_fill(masked, MASK), labels=tokens.masked_fill(~masked, -100)
    ).loss


def train(
    model: PreTrainedModel,
    text: np.ndarray,
    recipe: str = "short",
    *,
    share: float = 1.0,
    order: int = 0,
    learning_rate: float = 3e-3,
) -> float:
    """Train in place with AdamW for a share of the recipe's steps; the loss of the last tenth."""
    import torch

    random = np.random.default_rng(order)
    steps, batch, block, _ = RECIPES[recipe]
    steps = max(1, round(share * steps))
    trained_parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained_parameters, lr=learning_rate, weight_decay=0.1)
    losses = []
    model.train()
    for step, tokens in zip(range(steps), batches(text, order, batch, block), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, (step + 1) / 40, 1.1 - step / steps)
        loss = loss_of(model, tokens, random)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return float(np.mean(losses[-max(1, steps // 10) :]))


def main() -> None:
    """Train what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, nargs=2, required=True, metavar="FILE")
    parser.add_argument("--recipe", choices=RECIPES, default="short")
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    texts = [read_text(path) for path in options.text]
    for seed in range(options.seeds):
        for number, text in enumerate(texts):
            for place, architecture in enumerate(ARCHITECTURES):
                folder = options.out / f"{architecture}-text{number}-{options.recipe}-seed{seed}"
                if folder.exists():
                    continue
                start = time.perf_counter()
                # No two models share a seed, and so no two share an initialization.
                first = RECIPES[options.recipe][-1]
                model = build(architecture, first + 1000 * seed + 10 * number + place)
                loss = train(model, text, options.recipe)
                staged = folder.with_name("." + folder.name)
                model.save_pretrained(staged)
                staged.rename(folder)
                print(f"{folder.name}: {loss:.3f}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
