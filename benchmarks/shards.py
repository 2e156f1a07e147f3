"""Opening a checkpoint of many files: ``python -m benchmarks.shards --shards 5000 --tensors 80``.

A mixture of experts has that many tensors. Every tensor but queries and keys is a hole. Times are
of the processor and by the clock, in a process of its own for each size, with its peak memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WIDTH, HEADS, LAYERS = 64, 4, 48

RUN = """
import json, resource, sys, time
import wqk
wqk.scan, wqk.open
start, busy = time.perf_counter(), time.process_time()
model = wqk.open(sys.argv[1])
model.plans
opened = time.process_time() - busy
rows = len(wqk.scan(model))
print(json.dumps([opened, time.process_time() - busy, time.perf_counter() - start, rows,
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def write_shards(folder: Path, shards: int, tensors: int) -> Path:
    """Return a Mixtral-like checkpoint in that many files, each with that many tensors."""
    random = np.random.default_rng(0)
    folder.mkdir()
    place: dict[str, str] = {}
    query_and_key_names = [
        f"model.layers.{layer}.self_attn.{side}_proj.weight"
        for layer in range(LAYERS)
        for side in "qk"
    ]
    step = max(1, shards // len(query_and_key_names))
    for number in range(shards):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        layer = number * LAYERS // shards
        names = [
            f"model.layers.{layer}.block_sparse_moe.experts.{number * tensors + k}.w1.weight"
            for k in range(tensors)
        ]
        header: dict[str, object] = {}
        end, weights = 0, b""
        if number % step == 0 and number // step < len(query_and_key_names):
            values = random.standard_normal((WIDTH, WIDTH)).astype("<f2")
            weights, end = values.tobytes(), values.nbytes
            names[0] = query_and_key_names[number // step]
            header[names[0]] = {
                "dtype": "F16",
                "shape": [WIDTH, WIDTH],
                "data_offsets": [0, end],
            }
        for name in names:
            if name not in header:
                header[name] = {"dtype": "F16", "shape": [8, 8], "data_offsets": [end, end + 128]}
                end += 128
        place |= dict.fromkeys(names, file)
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.writelines([len(text).to_bytes(8, "little"), text, weights])
            out.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {
        "model_type": "mixtral",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def main() -> None:
    """Print a row for each size up to the one that is asked for."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shards", type=int, default=5000)
    parser.add_argument("--tensors", type=int, default=80)
    options = parser.parse_args()
    print("| files | tensors | open and plan | whole scan | by the clock | peak memory |")
    print("|--:" * 6 + "|")
    for shards in sorted({max(100, options.shards // 10), options.shards}):
        with tempfile.TemporaryDirectory() as place:
            folder = write_shards(Path(place) / "model", shards, options.tensors)
            done = subprocess.run(
                [sys.executable, "-c", RUN, str(folder)], capture_output=True, check=True, text=True
            )
        opened, scanned, clock, rows, memory = json.loads(done.stdout)
        assert rows == LAYERS * (1 + HEADS)
        print(
            f"| {shards:,} | {shards * options.tensors:,} | {opened:.2f} s | {scanned:.2f} s | "
            f"{clock:.2f} s | {memory:.0f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
