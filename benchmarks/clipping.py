"""Does QK-clip save a run, and which signal comes first? ``python -m benchmarks.clipping``.

Small decoders are trained on a text, byte by byte, with a rate that rises linearly over ``WARMUP``
steps and stays: to a healthy rate (``healthy``), and to one that is too large, as it is
(``unclipped``) and with `wqk.clip_` after every step (``clipped``). At every step the loss and the
logits of all heads are recorded, at every tenth the largest singular value of the heads' forms and
the effective rank of their change since the last.

A signal's alarm is what no healthy run of another seed has shown at any step, by a factor of
``MARGIN``; a healthy run is judged by the other seeds. The loss has moved where it is above its
least value so far by ``MOVED`` nats and stays there. Each run is a file; runs that are there are
not repeated.

Axes: H heads, R head width.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wqk
from wqk._files import write_atomically
from wqk.attention import attention_plans, load_attention
from wqk.forms.spectra import spectral_norm, spectrum
from wqk.forms.updates import change
from wqk.live.logits import LogitMeter

D, H, LAYERS, N, B = 64, 4, 2, 64, 8
STEPS, WARMUP, LOOK = 600, 300, 10
LIMIT = 100.0
RATES = {"healthy": 3e-3, "unclipped": 3e-2, "clipped": 3e-2}
SEEDS = 5
MARGIN, MOVED = 1.5, 0.2


def decoder() -> Any:
    """A Llama of about 0.15 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=D,
            num_hidden_layers=LAYERS,
            num_attention_heads=H,
            num_key_value_heads=H,
            intermediate_size=3 * D,
            max_position_embeddings=N,
        )
    )


def optimizers_of(model: Any, rate: float, kind: str) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices between embedding and head, and AdamW for the rest."""
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)]
    inner = {id(p) for p in model.model.layers.parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if id(p) in inner]
    rest = [p for p in model.parameters() if id(p) not in inner]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0),
        torch.optim.AdamW(rest, lr=3e-3, weight_decay=0),
    ]


def train(text: torch.Tensor, arm: str, seed: int, kind: str, rate: float) -> dict[str, Any]:
    """One run's record."""
    torch.manual_seed(seed)
    model = decoder().train()
    optimizers = optimizers_of(model, rate, kind)
    peaks = [[group["lr"] for group in one.param_groups] for one in optimizers]
    batches = torch.Generator().manual_seed(seed)
    meter = LogitMeter(model)
    record: dict[str, Any] = {
        name: [] for name in ("loss", "max_logit", "entropy", "clipped", "sigma", "rank")
    }
    checkpoint = wqk.open_checkpoint(model)
    plans = attention_plans(checkpoint)
    before = [load_attention(checkpoint, plan).heads for plan in plans]
    for step in range(STEPS):
        starts = torch.randint(len(text) - N, (B, 1), generator=batches)
        rows = text[starts + torch.arange(N)]
        meter.start()
        loss = model(rows, labels=rows).loss
        logits = meter.logits
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group, largest in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = largest * min(1.0, (step + 1) / WARMUP)
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        blocks = list(logits.blocks.values())
        record["loss"].append(loss.item())
        record["max_logit"].append([block.max_logit.tolist() for block in blocks])
        record["entropy"].append([block.attention_entropy.tolist() for block in blocks])
        if arm == "clipped":
            record["clipped"].append(len(wqk.clip_(model, LIMIT, logits=logits)))
        if step % LOOK == LOOK - 1 and math.isfinite(loss.item()):
            after = [load_attention(checkpoint, plan).heads for plan in plans]
            record["sigma"].append([spectral_norm(form).ravel().tolist() for form in after])
            changes = [change(*pair) for pair in zip(before, after, strict=True)]
            record["rank"].append(
                [spectrum(one).effective_rank.ravel().tolist() for one in changes]
            )
            before = after
    return record


def main() -> None:
    """Train the runs that are missing."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a text, plain or .xz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    content = options.text.read_bytes()
    content = lzma.decompress(content) if options.text.suffix == ".xz" else content
    text = torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64))
    for seed in range(SEEDS):
        for arm, rate in RATES.items():
            path = options.out / f"{arm}-{seed}.json"
            if not path.exists():
                record = train(text, arm, seed, options.optimizer, rate)
                write_atomically(path, json.dumps(record).encode())
                print(path, record["loss"][-1], np.max(record["max_logit"][-1]), flush=True)


if __name__ == "__main__":
    main()
