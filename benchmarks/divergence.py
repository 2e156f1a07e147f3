"""Does the spectrum of a query-key update announce divergence? ``python -m benchmarks.divergence``.

Small decoders are trained on the standard library's sources, byte by byte, in three ways: at one
learning rate; with a rate that doubles every 15 steps from step 120 on, until training diverges;
and with a rate that doubles in the same way but stops at four times the first, as a control. Only
measures that do not grow with the rate itself are compared. A run gives a warning where a measure
is further from the mean of the healthy runs at that step than four times their largest distance
from it, at three looks in a row; the same rule is put to the loss. Every healthy run is judged by
the other two.

Axes: B batch, N tokens, D width, H heads, R head width.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from wqk import BilinearForm
from wqk.forms.chaining import update_terms
from wqk.forms.spectra import spectrum

D, H, LAYERS, N, B = 64, 4, 2, 32, 16
LOOK, RAMP, DOUBLING, RATE = 5, 120, 15, 1e-3
MARGIN, LOOKS_IN_A_ROW = 4.0, 3
MEASURES = ("loss", "stable_rank", "effective_rank", "eigenvalue_positivity")


class TinyBlock(nn.Module):  # type: ignore[misc]
    """Attention and a perceptron behind layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.query, self.key, self.value, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.perceptron = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, D) to (B, N, D)."""
        y = self.norms[0](x)
        split = (
            part(y).view(*y.shape[:2], H, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(y.shape))
        return x + self.perceptron(self.norms[1](x))


class Decoder(nn.Module):  # type: ignore[misc]
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, D), nn.Embedding(N, D)
        self.blocks = nn.Sequential(*(TinyBlock() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, N) to logits (B, N, 256)."""
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight))


def forms(model: Decoder) -> list[BilinearForm]:
    """Each layer's heads as a stack (H,)."""

    def factor(linear: nn.Linear) -> np.ndarray:
        weight = linear.weight.detach().double().numpy().copy()
        return weight.reshape(H, -1, D).swapaxes(-1, -2)

    return [BilinearForm(factor(b.query), factor(b.key)) for b in model.blocks]


def rate(step: int, doublings: float) -> float:
    """Return the learning rate after a warm-up of 20 steps."""
    return RATE * min(1.0, (step + 1) / 20) * 2.0 ** min(doublings, max(0, step - RAMP) / DOUBLING)


def train(text: torch.Tensor, seed: int, doublings: float, steps: int) -> dict[str, list[float]]:
    """Train, and return the loss and the median measures of Δ₂ of one step, at each look."""
    torch.manual_seed(seed)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    curves: dict[str, list[float]] = {name: [] for name in MEASURES}
    losses: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, doublings)
        starts = torch.randint(len(text) - N - 1, (B, 1))
        rows = text[starts + torch.arange(N + 1)]
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        is_look = step % LOOK == LOOK - 1
        before = forms(model) if is_look else []
        optimizer.step()
        losses.append(loss.item())
        if not is_look:
            continue
        curves["loss"].append(float(np.mean(losses[-LOOK:])))
        spectra = [
            spectrum(update_terms(*pair).first) for pair in zip(before, forms(model), strict=True)
        ]
        for name in MEASURES[1:]:
            curves[name].append(float(np.median([getattr(measures, name) for measures in spectra])))
    return curves


def warning(curve: np.ndarray, healthy: np.ndarray) -> int | None:
    """Return the first step at which a curve has left the healthy ones', (runs, looks), if any."""
    mean = healthy.mean(axis=0)
    spread = np.abs(healthy - mean).max(axis=0)
    smooth = np.convolve(np.pad(spread, 4, mode="edge"), np.ones(9) / 9, mode="valid")
    outside = ~(np.abs(curve - mean) <= MARGIN * smooth)
    for look in range(LOOKS_IN_A_ROW - 1, len(outside)):
        if outside[look - LOOKS_IN_A_ROW + 1 : look + 1].all():
            return (look + 1) * LOOK
    return None


def diverged(losses: np.ndarray) -> int | None:
    """Return the first step from which the loss stays half a nat above its minimum until then."""
    above = ~(losses <= np.minimum.accumulate(losses) + 0.5)
    return None if not above[-1] else int(len(above) - np.argmin(above[::-1])) * LOOK + LOOK


def main() -> None:
    """Print one line for each run: where it diverged, and where each measure gave a warning."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=270)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write all curves to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
    kinds = {"healthy": 0.0, "raised fourfold": 2.0, "raised until it diverges": 99.0}
    runs = {
        kind: [
            {n: np.asarray(v) for n, v in train(text.long(), seed, most, options.steps).items()}
            for seed in range(options.seeds)
        ]
        for kind, most in kinds.items()
    }
    print("| run | seed | diverged | " + " | ".join(MEASURES) + " |")
    print("|:--|--:|--:|" + "--:|" * len(MEASURES))
    for kind, group in runs.items():
        for seed, run in enumerate(group):
            healthy_runs = [r for r in runs["healthy"] if r is not run]
            steps = [warning(run[n], np.stack([r[n] for r in healthy_runs])) for n in MEASURES]
            cells = (str(step or "–") for step in (diverged(run["loss"]), *steps))
            print(f"| {kind} | {seed} | " + " | ".join(cells) + " |")
    if options.out:
        plain = {k: [{n: v.tolist() for n, v in r.items()} for r in g] for k, g in runs.items()}
        options.out.write_text(json.dumps(plain), encoding="utf-8")


if __name__ == "__main__":
    main()
