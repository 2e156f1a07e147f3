"""How near likely ceilings are to the largest logits of a text: ``python -m benchmarks.likely``.

For models with their texts, the moments of every block's inputs are taken from some texts, and the
likely ceilings that follow from them are compared with the largest logit of each head in other
texts of the same length. Two models are trained here, byte by byte; others are given as folders,
with or without a tokenizer: without one, texts are sampled from the model itself.
"""

from __future__ import annotations

import argparse
import lzma
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import wqk
from wqk.attention.block import Block
from wqk.attention.measures import ceilings
from wqk.live.listening import module_of
from wqk_lab.theory.likely import Moments, likely_ceilings

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS, FIT, HELD_OUT, SHARE = 64, 96, 192, 0.05


def rows_of(name: str, model: Any, texts: torch.Tensor) -> Iterator[str]:
    """A row of the table for each layer; texts (FIT + HELD_OUT, N)."""
    checkpoint = wqk.open_checkpoint(model.eval())
    plans = [plan for plan in wqk.open(checkpoint).plans if plan.kind == "self"]
    inputs: dict[int, np.ndarray] = {}

    def keep(layer: int, module: Any, args: Any) -> None:
        inputs[layer] = args[0].double().numpy()

    for plan in plans:
        module = model.get_submodule(module_of(plan.query.tensor))
        module.register_forward_pre_hook(partial(keep, plan.layer))
    with torch.no_grad():
        model(texts)
    for plan in plans:
        attention = Block(checkpoint, plan)
        own = inputs[plan.layer]
        moments, length = Moments.of(own[:FIT]), texts.shape[1]
        likely = likely_ceilings(attention, moments, length, SHARE)
        any_way = likely_ceilings(attention, moments, length, SHARE, independent=False)
        maxima = _maxima(attention, own[FIT:])
        normal = np.random.default_rng(0).multivariate_normal(*moments, own[FIT:].shape[:2])
        drawn = _maxima(attention, normal).max(axis=0)
        bounds = ceilings(attention)
        times = likely / maxima.max(axis=0)
        whole = "–"
        if bounds is not None:
            whole = f"{np.median(bounds.any_distance / maxima.max(axis=0)):.1f}"
        over = (maxima > likely).mean(axis=0)
        wide = any_way / maxima.max(axis=0)
        # The product of these is `wide`.
        parts = any_way / likely, likely / drawn, drawn / maxima.max(axis=0)
        yield (
            f"| {name} | {plan.layer} | {maxima.max():.1f} | {np.median(times):.2f} "
            f"({times.min():.2f} to {times.max():.2f}) | {whole} | {over.mean():.2%} | "
            f"{over.max():.1%} | {np.median(wide):.2f} ({wide.min():.2f} to {wide.max():.2f}) | "
            f"{(maxima > any_way).mean():.2%} | "
            + " | ".join(f"{np.median(part):.2f}" for part in parts)
            + " |"
        )


def _maxima(attention: Block, inputs: np.ndarray) -> np.ndarray:
    """The largest logit of each text (B, N, D) in each head, (B, H)."""
    logits = attention.logits(inputs, inputs)
    if attention.plan.causal:
        logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
    return np.asarray(logits.max(axis=(-2, -1)))


def trained(kind: str, data: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A small model of bytes, and texts."""
    from transformers import BertConfig, BertForMaskedLM

    from benchmarks.clipping import decoder

    torch.manual_seed(0)
    batches = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        starts = torch.randint(len(data) - TOKENS, (count, 1), generator=batches)
        return data[starts + torch.arange(TOKENS)]

    config = BertConfig(
        vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=192, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = decoder() if kind == "decoder" else BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(400):
        rows = drawn(8)
        hidden = torch.rand(rows.shape, generator=batches) < 0.3
        given = rows if kind == "decoder" else rows.masked_fill(hidden, 256)
        labels = rows if kind == "decoder" else rows.masked_fill(~hidden, -100)
        loss = model(given, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, drawn(FIT + HELD_OUT)


def stored(folder: Path, text: str) -> tuple[Any, torch.Tensor]:
    """A model in a folder, and texts: of its tokenizer, or its own samples."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    count = FIT + HELD_OUT
    if any(folder.glob("*vocab*")) or (folder / "tokenizer.json").exists():
        tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        rows = torch.tensor(tokens[: count * TOKENS]).reshape(count, TOKENS)
        return AutoModel.from_pretrained(folder), rows
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    first = torch.ones(count, 1, dtype=torch.long)
    with torch.no_grad():
        rows = model.generate(
            first, do_sample=True, min_new_tokens=TOKENS - 1, max_new_tokens=TOKENS - 1
        )
    return model, rows


def main() -> None:
    """Print a row for each layer."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a text, .xz")
    parser.add_argument("folders", type=Path, nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = lzma.decompress(options.text.read_bytes())
    data = torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64))
    print(
        "| model | layer | largest logit | likely ceiling, times that | ceiling, times that | "
        "texts above | of the worst head | if tokens depend, times that | texts above | "
        "of it dependence | the bound | the normal law |\n"
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for kind in ("decoder", "encoder"):
        print(*rows_of(f"trained {kind}", *trained(kind, data)), sep="\n", flush=True)
    for folder in options.folders:
        model, texts = stored(folder, content.decode())
        print(*rows_of(folder.name, model, texts), sep="\n", flush=True)


if __name__ == "__main__":
    main()
