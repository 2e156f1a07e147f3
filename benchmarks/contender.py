"""One way to the scores, in a process of its own: ``python -m benchmarks.contender NAME FOLDER``.

Each line on standard input asks for one run, from the file to the table; the answer is a line of
JSON with its seconds by the clock and of the processor, the process's peak resident memory, and a
checksum (the sum of the norms of all heads' forms, which every way can compute). Imports are done
before the first run and are not counted.

Axes: H query heads, G key heads, R head width, D width.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _wqk(folder: Path) -> Callable[[], float]:
    """Norm, symmetry, null, directionality of every layer and head."""
    import wqk

    return lambda: float(wqk.scan(folder).heads.frame["norm"].sum())


def _projections(folder: Path) -> Any:
    """All queries and keys as float32 tensors (H, R, D) and (G, R, D), layer by layer."""
    import torch
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = sorted(name for name in file.keys() if name != "rest")  # noqa: SIM118
        for key, query in zip(names[::2], names[1::2], strict=True):
            q, k = (file.get_tensor(name).to(torch.float32) for name in (query, key))
            width = len(q) // heads
            yield q.view(heads, width, -1), k.view(-1, width, k.shape[1])


def _safetensors(folder: Path) -> Callable[[], float]:
    """Read the same tensors whole and compute nothing."""

    def run() -> float:
        for _ in _projections(folder):
            pass
        return float("nan")

    return run


def _torch_loop(folder: Path) -> Callable[[], float]:
    """Norm, symmetry and directionality of W_q W_kᵀ, built whole for every head in turn."""
    import torch

    def directionality(matrix: Any) -> float:
        sums = []
        for norms in (matrix.norm(dim=1), matrix.norm(dim=0)):
            sums.append(float(norms[norms > norms.mean() + 2 * norms.std()].sum()))
        return (sums[0] - sums[1]) / (sum(sums) or 1.0)

    def run() -> float:
        total = 0.0
        for query, key in _projections(folder):
            for head, q in enumerate(query):
                matrix = q.T @ key[head * len(key) // len(query)]
                square = float((matrix * matrix).sum())
                float((matrix * matrix.T).sum()) / square
                directionality(matrix)
                total += square**0.5
        return total

    with torch.no_grad():
        return run


def _transformer_lens(folder: Path) -> Callable[[], float]:
    """Norm and tr(M M) of every head, by FactoredMatrix."""
    import torch
    from transformer_lens import FactoredMatrix

    def run() -> float:
        total = 0.0
        for query, key in _projections(folder):
            keys = key.repeat_interleave(len(query) // len(key), 0)
            form = FactoredMatrix(query.transpose(-1, -2), keys)
            total += float(form.norm().sum())
            float(torch.einsum("hij,hji->h", form.BA, form.BA).sum())
        return total

    return run


def _weightwatcher(folder: Path) -> Callable[[], float]:
    """Spectra of the stored W_q and W_k, not of their product, and fits to them."""
    import torch
    import weightwatcher

    def run() -> float:
        layers = []
        for query, key in _projections(folder):
            for weight in (query, key):
                layer = torch.nn.Linear(weight.shape[-1], weight.shape[0] * weight.shape[1])
                layer.weight.data = weight.reshape(-1, weight.shape[-1])
                layers.append(layer)
        weightwatcher.WeightWatcher(model=torch.nn.Sequential(*layers)).analyze()
        return float("nan")

    return run


WAYS = {
    "wqk": _wqk,
    "safetensors": _safetensors,
    "torch-loop": _torch_loop,
    "transformer-lens": _transformer_lens,
    "weightwatcher": _weightwatcher,
}


def main() -> None:
    """Answer lines until there are none."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    try:
        run = WAYS[name](folder)
    except ImportError as error:
        print(json.dumps({"absent": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        start, busy = time.perf_counter(), time.process_time()
        checksum = run()
        answer = {
            "seconds": time.perf_counter() - start,
            "processor": time.process_time() - busy,
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "checksum": checksum,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
