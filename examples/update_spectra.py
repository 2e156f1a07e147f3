"""Whether the spectrum of the query-key update announces that a run will diverge.

Trains one small decoder with a learning rate that is raised step by step until the loss diverges,
and the same decoder with a healthy one under three seeds, and looks every few steps at the loss, at
the update of each layer's form since the look before, and at the form itself. What is asked: which
of these leaves the range of the healthy runs, and how long before the loss does.

    python examples/update_spectra.py TEXT.txt --out FOLDER

Axes: B batch, T tokens, L layers, H heads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqk import read_attention
from wqk.forms.spectra import spectral_norm, spectrum
from wqk.forms.updates import update_terms

B, T, STEPS, EVERY = 16, 64, 2000, 20
HEALTHY, WARMUP, RAISED_FROM, DOUBLING = 1e-3, 100, 500, 150


def learning_rate(step: int, raised: bool) -> float:
    """Warm-up, then constant; in the raised run doubled again and again."""
    rate = HEALTHY * min(1.0, (step + 1) / WARMUP)
    return rate * 2 ** ((step - RAISED_FROM) / DOUBLING) if raised and step > RAISED_FROM else rate


def train(tokens: torch.Tensor, seed: int, raised: bool) -> list[dict[str, Any]]:
    """One run's looks: step, loss, and medians over layers of what is measured."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=96, intermediate_size=192, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=T, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    rows, before, losses = [], None, []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            now = [read_attention(model, layer).form for layer in range(4)]
            if before is not None:
                if not all(np.isfinite(form.query).all() for form in now):
                    break
                rows.append({"step": step, "loss": float(np.mean(losses)), **measured(before, now)})
                losses = []
            before = now
        starts = torch.randint(len(tokens) - T - 1, (B,), generator=generator)
        batch = torch.stack([tokens[s : s + T] for s in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, raised)
        optimizer.step()
        losses.append(loss.item())
    return rows


def measured(before: list[Any], now: list[Any]) -> dict[str, float]:
    """Medians over layers: of the update's first- and second-order term, and of the form."""
    looks = []
    for old, new in zip(before, now, strict=True):
        first, second = update_terms(old, new)
        spectra = spectrum(first)
        looks.append(
            {
                "update_stable_rank": float(spectra.stable_rank),
                "update_effective_rank": float(spectra.effective_rank),
                "update_norm": float(first.norm / old.norm),
                "second_order": float(second.norm / first.norm),
                "spectral_norm": float(spectral_norm(new)),
                "stable_rank": float((new.norm / spectral_norm(new)) ** 2),
            }
        )
    return {name: float(np.median([look[name] for look in looks])) for name in looks[0]}


def leaves(run: list[float], healthy: np.ndarray, looks: int = 5) -> int | None:
    """The first of ``looks`` in a row outside the healthy runs' range, widened by itself."""
    low, high = healthy.min(axis=0), healthy.max(axis=0)
    margin = high - low
    outside = [
        not lo - m <= value <= hi + m
        for value, lo, hi, m in zip(run, low, high, margin, strict=False)
    ]
    for i in range(len(outside) - looks + 1):
        if all(outside[i : i + looks]):
            return i
    return None


def main() -> None:
    """Train, compare, print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    content = options.text.read_bytes()[:2_000_000]
    tokens = torch.tensor(np.frombuffer(content, np.uint8).clip(max=127).astype(np.int64))
    runs = {}
    for name, seed, raised in (("raised", 0, True), *((f"seed{s}", s, False) for s in range(3))):
        runs[name] = train(tokens, seed, raised)
        (options.out / f"{name}.json").write_text(json.dumps(runs[name], indent=1))
        print(name, "loss", runs[name][-1]["loss"], "at step", runs[name][-1]["step"], flush=True)
    healthy = [runs[f"seed{s}"] for s in range(3)]
    for column in runs["raised"][0]:
        if column == "step":
            continue
        values = np.asarray([[row[column] for row in run] for run in healthy])
        place = leaves([row[column] for row in runs["raised"]], values)
        step = None if place is None else runs["raised"][place]["step"]
        print(f"{column:24} leaves the healthy range at step {step}")


if __name__ == "__main__":
    main()
