"""Cost and agreement of wqk on a GPU and on the CPU: ``python -m benchmarks.gpu``.

- Every function that takes a model in memory, on the GPU and on a copy of the model on the CPU: in
  float32, with products that the process lets PyTorch round (TF32), and in bfloat16.
- Scans of a generated checkpoint on both, in turn.
- A training step next to a look of the monitor, a step whose attention logits are measured, and one
  that ends with QK-clip.

Times are by the clock, once the GPU has done its work. ``--device cpu --small`` tries the script.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

import wqk
from benchmarks.composition import write_whole
from benchmarks.generate import BERT_BASE, LLAMA_3_8B
from benchmarks.rounds import alternate, estimate
from wqk.live.logits import LogitMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCORES = ("norm", "symmetry", "directionality", "symmetry_within_heads", "symmetry_between_heads")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 500,
    "intermediate_size": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"num_key_value_heads": 2},
    "Qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 64},
    "Gemma2": SIZES | {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 16},
    "GPT2": {
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 500,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "DeepseekV3": SIZES
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "Bert": SIZES,
}
PRECISIONS = ("float32", "TF32", "bfloat16")


def build(name: str, device: str, dtype: torch.dtype) -> Any:
    """Return a random model with queries and keys large enough for meaningful logits."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    last = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    model = getattr(transformers, name + last)(config).eval()
    for weight in model.parameters():  # alone, as from_pretrained does: tables of angles stay
        weight.data = (weight.data * (3 if weight.ndim == 2 else 1)).to(dtype)
    return model.to(device)


def scores(table: wqk.ScoreTable) -> np.ndarray:
    """Return the scores of all rows, one column after the other."""
    return np.concatenate([table.frame[name].fill_null(0).to_numpy() for name in SCORES])


def logits(model: Any, inputs: torch.Tensor) -> np.ndarray:
    """Return the largest logit of every head."""
    return wqk.logits(model, {"input_ids": inputs.to(model.device)}).frame["max_logit"].to_numpy()


def clipped(model: Any, inputs: torch.Tensor) -> np.ndarray:
    """Return the largest logits after half of the heads were clipped, and the promised ones."""
    model = copy.deepcopy(model)
    before = logits(model, inputs)
    limit = float(np.median(before))
    wqk.clip_(model, limit, logits=wqk.logits(model, {"input_ids": inputs.to(model.device)}))
    return logits(model, inputs) / limit


def initialized(model: Any) -> np.ndarray:
    """Return the scores after a symmetric start."""
    model = copy.deepcopy(model)
    wqk.initialize_(model, "symmetric", seed=0)
    return scores(wqk.scan(model))


def monitored(model: Any, device: str | None = None) -> np.ndarray:
    """Return the rows of a look."""
    monitor = wqk.Monitor(model, device=device)
    monitor.look(0)
    return scores(monitor.table)


def compared(name: str, precision: str, device: str) -> Iterator[tuple[str, float]]:
    """For each function, the largest difference of GPU and CPU, over the largest value.

    NaN where the function refuses the model.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
    on_device = build(name, device, dtype)
    on_cpu = copy.deepcopy(on_device).cpu()
    inputs = torch.randint(500, (2, 48), generator=torch.Generator().manual_seed(1))
    calls: dict[str, Callable[[Any], np.ndarray]] = {
        "scan": lambda model: scores(wqk.scan(model)),
        "scan --device": lambda model: scores(
            wqk.scan(model, device=device if model is on_device else None)
        ),
        "Monitor": monitored,
        "Monitor, device": lambda model: monitored(model, device if model is on_device else None),
        "logits": lambda model: logits(model, inputs),
        "clip_": lambda model: clipped(model, inputs),
        "initialize_": initialized,
    }
    for call, run in calls.items():
        try:
            expected, got = run(on_cpu), run(on_device)
            yield call, float(np.abs(got - expected).max() / np.abs(expected).max())
        except wqk.WqkError:
            yield call, np.nan
    yield "same", 0.0 if wqk.same(on_device, on_cpu) else np.inf
    yield "verify", wqk.verify(on_device, {"input_ids": inputs}).difference
    torch.set_float32_matmul_precision("highest")


def print_agreement(device: str) -> None:
    """One row for each precision, the largest of all models."""
    print(f"Largest difference of GPU and CPU, in {len(MODELS)} models: {', '.join(MODELS)}.\n")
    for number, precision in enumerate(PRECISIONS):
        models = [dict(compared(name, precision, device)) for name in MODELS]
        if not number:
            print(f"| | {' | '.join(f'`{call}`' for call in models[0])} |")
            print(f"|:--|{'--:|' * len(models[0])}")
        worst = [max(np.nan_to_num(model[call], nan=0) for model in models) for call in models[0]]
        print(
            f"| {precision} | {' | '.join(f'{difference:.1e}' for difference in worst)} |",
            flush=True,
        )


def print_scans(device: str, layers: int, rounds: int) -> None:
    """Print a scan of generated checkpoints, on the CPU and on the GPU."""
    print(
        "| scan with all heads | CPU | GPU | CPU / GPU | largest difference of a score |\n"
        "|:--|--:|--:|--:|--:|"
    )
    with tempfile.TemporaryDirectory() as place:
        for shape in (BERT_BASE, replace(LLAMA_3_8B, layers=layers)):
            folder = write_whole(Path(place) / shape.name, shape)
            times = alternate(
                {
                    "CPU": lambda folder=folder: wqk.scan(folder),
                    "GPU": lambda folder=folder: wqk.scan(folder, device=device),
                },
                rounds,
            )
            on_cpu, on_device = (
                scores(wqk.scan(folder, device=scan_device)) for scan_device in (None, device)
            )
            ratio = estimate(times["CPU"].clock / times["GPU"].clock)
            cells = [f"{np.median(times[name].clock) * 1e3:.0f} ms" for name in times]
            print(
                f"| {shape.name}'s shape, {shape.layers} layers | {' | '.join(cells)} | {ratio} "
                f"| {np.abs(on_cpu - on_device).max():.1e} |",
                flush=True,
            )


def look_of(monitor: wqk.Monitor) -> Callable[[], object]:
    """Look at the next step; the first look, which has no change to score, is taken here."""
    steps = count()
    monitor.look(next(steps))
    return lambda: monitor.look(next(steps))


def print_steps(device: str, small: bool, rounds: int) -> None:
    """Print a training step, and the time that wqk adds to it."""
    layers, batch, tokens = (2, 2, 64) if small else (8, 8, 2048)
    config = transformers.LlamaConfig(
        hidden_size=256 if small else 4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=512 if small else 14336,
        vocab_size=32000,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randint(config.vocab_size, (batch, tokens), device=device)
    meter = LogitMeter(model)

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def train() -> None:
        loss = model(input_ids=inputs, labels=inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        finish()

    def train_measured() -> None:
        meter.start()
        train()
        _ = meter.logits

    def train_clipped() -> None:
        clipper = wqk.Clipper(model, 100.0)
        train()
        clipper()
        clipper.close()
        finish()

    looks = {
        name: look_of(wqk.Monitor(model, device=where))
        for name, where in (("look", None), ("look, device", device))
    }
    measured = {"step, logits measured": train_measured, "step, clip_": train_clipped}
    times = alternate({"step": train} | looks | measured, rounds)
    step = np.median(times["step"].clock)
    print(
        f"{layers} layers of LLaMA-3-8B's, bfloat16, {batch} sequences of {tokens:,} tokens.\n\n"
        "| | by the clock | / step | every 1,000 steps | every 200 |\n|:--|--:|--:|--:|--:|"
    )
    for name, seconds in times.items():
        added = np.median(seconds.clock) - (0 if name in looks else step)
        shares = [f"{added / (every * step):.3%}" for every in (1000, 200)]
        cells = ["", ""] if name == "step" else shares
        ratio = estimate(seconds.clock / times["step"].clock)
        print(
            f"| {name} | {np.median(seconds.clock) * 1e3:.0f} ms | {ratio} | {' | '.join(cells)} |"
        )


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    tables = ("agreement", "scans", "steps")
    parser.add_argument("--only", nargs="+", choices=tables, default=tables)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{name} beside {os.cpu_count()} cores, PyTorch {torch.__version__}.\n")
    if "agreement" in options.only:
        print_agreement(options.device)
    if "scans" in options.only:
        print()
        print_scans(options.device, 1 if options.small else options.layers, options.rounds)
    if "steps" in options.only:
        print()
        print_steps(options.device, options.small, options.rounds)


if __name__ == "__main__":
    main()
