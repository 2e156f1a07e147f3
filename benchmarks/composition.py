"""All compositions of heads of a model: ``python -m benchmarks.composition [--layers 32]``.

From disk to table, for a model of BERT-base's shape and one of LLaMA-3-8B's (4 layers, or as many
as asked for). Next to it the products alone that TransformerLens computes in memory, if that is
installed, on the smaller of the two; otherwise its formula, in a loop over pairs of heads.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import wqk
from benchmarks.generate import BERT_BASE, LLAMA_3_8B
from benchmarks.rounds import alternate, estimate
from wqk import compose
from wqk.attention import Block
from wqk.attention.factors import Coordinates
from wqk.checkpoints import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.generate import Shape
    from benchmarks.rounds import Seconds


# Seconds by the clock that all pairs of a shape's layers are to take at most, on two cores.
AIMS = {(LLAMA_3_8B.name, 32): 180.0}


def write_whole(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Return a checkpoint with queries, keys, values and outputs, under the names of Llama's."""
    random, offset = np.random.default_rng(seed), 0
    rows = {
        "q": shape.heads * shape.head_width,
        "k": shape.key_heads * shape.head_width,
        "v": shape.key_heads * shape.head_width,
    }
    sizes = {role: (count, shape.width) for role, count in rows.items()}
    sizes["o"] = (shape.width, rows["q"])
    header = {}
    for layer in range(shape.layers):
        for role, size in sizes.items():
            stop = offset + 2 * size[0] * size[1]
            header[f"model.layers.{layer}.self_attn.{role}_proj.weight"] = {
                "dtype": "F16",
                "shape": size,
                "data_offsets": [offset, stop],
            }
            offset = stop
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.writelines([len(text).to_bytes(8, "little"), text])
        for _ in range(shape.layers):
            for size in sizes.values():
                weight = random.standard_normal(size, np.float32) * np.float32(0.02)
                file.write(weight.astype(np.float16).tobytes())
    config = {
        "model_type": "llama",
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def transformer_lens(folder: Path) -> Callable[[], Any] | None:
    """TransformerLens' own function on all pairs of heads; None if it is not installed."""
    try:
        import torch
        from transformer_lens import FactoredMatrix
        from transformer_lens.utilities import composition_scores
    except ImportError:
        return None
    checkpoint = open_checkpoint(folder)

    def factored(circuit: Any) -> Any:
        forms = []
        for plan in wqk.open(checkpoint).plans:
            ((_, form),) = Block(checkpoint, plan).forms(Coordinates(circuit))
            factors = (
                np.broadcast_to(f, (*form.stack, *f.shape[-2:])) for f in (form.query, form.key)
            )
            forms.append([torch.tensor(f).flatten(0, 1) for f in factors])
        left, right = (torch.stack(side) for side in zip(*forms, strict=True))
        return FactoredMatrix(left, right.transpose(-1, -2))

    qk, ov = factored("qk"), factored("ov")
    return lambda: [
        composition_scores(ov, reader, broadcast_dims=True) for reader in (qk, qk.T, ov)
    ]


def loop(folder: Path) -> Callable[[], Any]:
    """‖W R‖ / (‖W‖ ‖R‖) of all pairs, one after the other, from factors in memory.

    The formula of TransformerLens's `composition_scores`, with the far factors replaced by the
    triangles of their QR decompositions; without a zero.
    """
    sides: dict[str, list[np.ndarray]] = {"write": [], "q": [], "k": [], "v": []}
    for plan in wqk.open(folder).plans:
        for circuit, ends in (("ov", ("v", "write")), ("qk", ("q", "k"))):
            ((_, form),) = Block(open_checkpoint(folder), plan).forms(Coordinates(circuit))
            factors = [
                np.broadcast_to(f, (*form.stack, *f.shape[-2:])).reshape(-1, *f.shape[-2:])
                for f in (form.query, form.key)
            ]
            for end, near, far in zip(ends, factors, factors[::-1], strict=True):
                side = near @ np.linalg.qr(far, mode="r").swapaxes(-1, -2)
                sides[end].append(side / np.linalg.norm(side, axis=(-2, -1), keepdims=True))

    def scores() -> list[float]:
        return [
            float(np.linalg.norm(writer.T @ reader))
            for kind in ("q", "k", "v")
            for later in range(1, len(sides["write"]))
            for earlier in range(later)
            for writer in sides["write"][earlier]
            for reader in sides[kind][later]
        ]

    return scores


def peak_memory() -> float:
    """Return the peak memory of the process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def print_composition(place: Path, shape: Shape, rounds: int) -> None:
    """One line for each way: pairs, seconds, and the process's peak memory when it first ended.

    Ours comes first, so that its memory is its own; that of what follows can be below it.
    """
    folder = write_whole(place / f"{shape.name}-whole", shape)
    ways: dict[str, Callable[[], Any]] = {"wqk compose": lambda: compose(folder)}
    peer = transformer_lens(folder) if shape is BERT_BASE else None
    if peer is not None:
        ways["TransformerLens, in memory"] = peer
    elif shape is BERT_BASE:
        ways["a loop over pairs, in memory, scores alone"] = loop(folder)
    peaks: dict[str, float] = {}

    def noted(name: str) -> Callable[[], object]:
        def run() -> None:
            ways[name]()
            peaks.setdefault(name, peak_memory())

        return run

    pairs = shape.layers * (shape.layers - 1) // 2 * shape.heads**2
    seconds = alternate({name: noted(name) for name in ways}, rounds, warm_up=rounds > 1)
    for name in ways:
        clock, processor = (estimate(values).median for values in seconds[name])
        print(
            f"| {shape.name}, {shape.layers} layers | {name} | 3 × {pairs:,} pairs | {clock:.2f} s "
            f"| {processor:.2f} s | {peaks[name]:.0f} MB | {told(shape, name, seconds[name])} |",
            flush=True,
        )


def told(shape: Shape, name: str, seconds: Seconds) -> str:
    """Return whether an aim by the clock is met, if there is an aim."""
    aim = AIMS.get((shape.name, shape.layers)) if name == "wqk compose" else None
    return f"{aim:g} s: {estimate(seconds.clock).against(aim)}" if aim else ""


def main() -> None:
    """Print both shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B.layers)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["bert", "llama"])
    options = parser.parse_args()
    print("| model | way | | time | processor | peak memory | aim |\n|:--|:--|--:|--:|--:|--:|:--|")
    with tempfile.TemporaryDirectory() as place:
        if options.only != "bert":
            llama = replace(LLAMA_3_8B, layers=options.layers)
            print_composition(Path(place), llama, 1 if options.layers > 8 else options.rounds)
        if options.only != "llama":
            print_composition(Path(place), BERT_BASE, options.rounds)


if __name__ == "__main__":
    main()
