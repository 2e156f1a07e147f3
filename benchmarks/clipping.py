"""Does QK-clip save a run, and which signal comes first? ``python -m benchmarks.clipping``.

Small decoders are trained with Muon on a text, byte by byte, in three ways: at one learning rate
(``healthy``); with a rate that doubles every ``DOUBLING`` steps from step ``RAMP`` on until it is
``RAISED`` times the first, and stays (``unclipped``); and in the same way with `wqk.clip_` after
every step (``clipped``). At every step the loss and the logits of all heads are recorded, at every
tenth the largest singular value of the heads' forms and the effective rank of their change since
the last.

A signal's alarm is what no healthy run of another seed has shown at any step, by a factor of
``MARGIN``; a healthy run is judged by the other seeds. The loss has moved where it is above its
least mean so far by ``MOVED`` nats. Each run is a file; runs that are there are not repeated.

Axes: H heads, R head width.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import wqk
from wqk._files import write_atomically
from wqk._style import CATEGORIES, GRAY, PAPER_WIDTH, TEAL, WINE, new_figure, save_figure, style
from wqk.attention import Block
from wqk.forms.chaining import change
from wqk.forms.spectra import spectral_norm, spectrum
from wqk.live.logits import LogitMeter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

D, H, LAYERS, N, B = 64, 4, 2, 64, 8
STEPS, WARMUP, LOOK = 320, 20, 10
RAMP, DOUBLING, RATE, RAISED = 120, 20, 0.02, 32.0
LIMIT = 100.0
ARMS = ("healthy", "unclipped", "clipped")
SEEDS = 5
MARGIN, MOVED = 1.5, 0.2


def decoder() -> Any:
    """Return a Llama of about 0.15 million parameters."""
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


def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for the rest."""
    inner = {id(p) for p in model.model.layers.parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if id(p) in inner]
    outer = [p for p in model.parameters() if id(p) not in inner]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0),
        torch.optim.AdamW(outer, lr=3e-3, weight_decay=0),
    ]


def raised(step: int, arm: str) -> float:
    """Return the factor of the learning rates at a step."""
    doublings = 0.0 if arm == "healthy" else max(0, step - RAMP) / DOUBLING
    return min(1.0, (step + 1) / WARMUP) * min(RAISED, 2.0**doublings)


def train(text: torch.Tensor, arm: str, seed: int) -> dict[str, Any]:
    """One run's record."""
    torch.manual_seed(seed)
    model = decoder().train()
    optimizers = optimizers_of(model)
    peaks = [[group["lr"] for group in item.param_groups] for item in optimizers]
    batches = torch.Generator().manual_seed(seed)
    meter = LogitMeter(model)
    record: dict[str, Any] = {
        name: [] for name in ("loss", "max_logit", "entropy", "clipped", "sigma", "rank")
    }
    checkpoint = wqk.open_checkpoint(model)
    plans = wqk.open(checkpoint).plans
    before = [Block(checkpoint, plan).heads for plan in plans]
    for step in range(STEPS):
        starts = torch.randint(len(text) - N, (B, 1), generator=batches)
        rows = text[starts + torch.arange(N)]
        meter.start()
        loss = model(rows, labels=rows).loss
        logits = meter.logits
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group, largest in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = largest * raised(step, arm)
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
            after = [Block(checkpoint, plan).heads for plan in plans]
            record["sigma"].append([spectral_norm(form).ravel().tolist() for form in after])
            changes = [change(*pair) for pair in zip(before, after, strict=True)]
            record["rank"].append(
                [spectrum(item).effective_rank.ravel().tolist() for item in changes]
            )
            before = after
    return record


def smoothed(losses: Any) -> np.ndarray:
    """Return the means of the last `LOOK` losses, at every step from the tenth on."""
    return np.convolve(losses, np.ones(LOOK) / LOOK, mode="valid")


def signals(record: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return steps and values of each signal, one number for the model."""
    every, looks = np.arange(len(record["loss"])), np.arange(len(record["sigma"])) * LOOK + LOOK - 1

    def over_heads(name: str, reduce: Any) -> np.ndarray:
        values = np.asarray(record[name], float)
        return np.asarray(reduce(values.reshape(len(values), -1), axis=1))

    return {
        "largest logit": (every, over_heads("max_logit", np.max)),
        "mean entropy": (every, over_heads("entropy", np.mean)),
        "σ₁": (looks, over_heads("sigma", np.max)),
        "effective rank of ΔW_qk": (looks, over_heads("rank", np.median)),
    }


def alarm(steps: np.ndarray, values: np.ndarray, healthy: list[np.ndarray]) -> int | None:
    """Return the first step at which a signal leaves what healthy runs have shown, if it does."""
    low, high = min(curve.min() for curve in healthy), max(curve.max() for curve in healthy)
    outside = (values < low / MARGIN) | ~(values <= high * MARGIN)
    return int(steps[outside.argmax()]) if outside.any() else None


def moved(losses: Any) -> int | None:
    """Return the first step at which the mean loss is above its least so far by `MOVED`."""
    means = smoothed(losses)
    above = ~(means <= np.minimum.accumulate(means) + MOVED)
    return int(above.argmax()) + LOOK - 1 if above.any() else None


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return a row for each run: its loss, its largest logit, and where each alarm is."""
    names = list(signals(runs["healthy"][0]))
    rows = [
        "| run | seed | loss, last 10 | least | largest logit | heads clipped | loss moves | "
        + " | ".join(names)
        + " |",
        "|:--|" + "--:|" * (6 + len(names)),
    ]
    for arm, group in runs.items():
        for seed, record in enumerate(group):
            healthy_runs = [
                record_or_step for record_or_step in runs["healthy"] if record_or_step is not record
            ]
            steps = [
                alarm(
                    *signals(record)[name],
                    [signals(record_or_step)[name][1] for record_or_step in healthy_runs],
                )
                for name in names
            ]
            means = smoothed(record["loss"])
            largest = signals(record)["largest logit"][1].max()
            shown = [
                "–" if record_or_step is None else str(record_or_step)
                for record_or_step in (moved(record["loss"]), *steps)
            ]
            clips = str(sum(record["clipped"])) if arm == "clipped" else "–"
            cells = [f"{means[-1]:.2f}", f"{means.min():.2f}", f"{largest:,.0f}", clips, *shown]
            rows.append(f"| {arm} | {seed} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def figure(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draw the largest logit of each head with and without clipping, and the losses of all runs."""
    colors = {"healthy": GRAY, "unclipped": WINE, "clipped": TEAL}
    drawn = new_figure(PAPER_WIDTH, 2.5)
    left, middle, right = drawn.subplots(1, 3, gridspec_kw={"width_ratios": [1, 1, 1.15]})
    middle.sharey(left)
    for axes, arm in ((left, "unclipped"), (middle, "clipped")):
        heads = np.asarray(runs[arm][0]["max_logit"])
        for layer in range(heads.shape[1]):
            for head in range(heads.shape[2]):
                color = CATEGORIES[layer % 3]
                label = f"layer {layer}" if head == 0 else None
                axes.plot(heads[:, layer, head], color=color, linewidth=0.7, label=label)
        axes.axhline(LIMIT, color="black", linewidth=0.6, linestyle=":")
        axes.annotate(
            f"limit {LIMIT:g}",
            (len(heads), LIMIT),
            xytext=(0, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=6,
        )
        axes.axvline(RAMP, color=GRAY, linewidth=0.6)
        axes.set(yscale="log", xlabel="step", title=arm, ylim=(0.3, None))
    left.set_ylabel("largest logit of each head")
    middle.tick_params(labelleft=False)
    left.legend(loc="upper left")
    for arm, group in runs.items():
        for seed, record in enumerate(group):
            means = smoothed(record["loss"])
            steps = np.arange(LOOK - 1, LOOK - 1 + len(means))
            label = arm if seed == 0 else None
            right.plot(steps, means, color=colors[arm], linewidth=0.8, label=label)
    right.axvline(RAMP, color=GRAY, linewidth=0.6)
    right.annotate(
        "rate rises", (RAMP, 3.2), xytext=(3, -2), textcoords="offset points", va="top", fontsize=6
    )
    right.set(
        xlabel="step",
        ylabel="loss, mean of ten steps (nats)",
        title="5 seeds each",
        ylim=(1.8, 3.2),
    )
    right.legend(loc="lower left")
    return drawn


def main() -> None:
    """Train the runs that are missing, print the table, and draw the figure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a text, plain or .xz")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    content = options.text.read_bytes()
    content = lzma.decompress(content) if options.text.suffix == ".xz" else content
    text = torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64))
    for seed in range(SEEDS):
        for arm in ARMS:
            path = options.out / f"{arm}-{seed}.json"
            if not path.exists():
                record = train(text, arm, seed)
                write_atomically(path, json.dumps(record).encode())
                print(path, record["loss"][-1], np.max(record["max_logit"][-1]), flush=True)
    runs = {
        arm: [
            json.loads((options.out / f"{arm}-{seed}.json").read_bytes()) for seed in range(SEEDS)
        ]
        for arm in ARMS
    }
    print(table(runs))
    with style():
        save_figure(figure(runs), options.out / "clipping.png")


if __name__ == "__main__":
    main()
