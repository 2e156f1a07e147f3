"""Keep of a trained pair what `wqk` reads: ``python examples/keep_queries_and_keys.py DIR``.

DIR holds the runs ``encoder`` and ``decoder``, and their ``corpus``. Their query and key weights
and biases go to ``DIR/models`` in float16, under the names that the full checkpoints give them,
with their configurations; ``training.json`` says how they came about. Its scores are computed here
from dense matrices in float64, apart from wqk's own arithmetic.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from wqk.tables.run import Run, open_run
from wqk_lab.training.corpus import TokenStore


def directionality(form: np.ndarray, *, excess: bool) -> float:
    """(R - C) / (R + C) over the rows and columns whose norm exceeds mean + 2 std; else 0."""
    totals = []
    for norms in (np.linalg.norm(form, axis=1), np.linalg.norm(form, axis=0)):
        threshold = norms.mean() + 2 * norms.std(ddof=1)
        outlying = norms[norms > threshold]
        totals.append((outlying - threshold if excess else outlying).sum())
    rows, columns = totals
    return float((rows - columns) / (rows + columns)) if rows + columns else 0.0


def scores(tensors: dict[str, np.ndarray]) -> list[dict[str, float]]:
    """Each layer's, of the weights as rounded for the file."""
    layers = []
    for name in sorted(name for name in tensors if name.endswith("query.weight")):
        query, key = (
            tensors[part].astype(float).T for part in (name, name.replace("query", "key"))
        )
        form = query @ key.T
        layers.append(
            {
                "symmetry": float((form * form.T).sum() / (form**2).sum()),
                "directionality": directionality(form, excess=False),
                "directionality_excess": directionality(form, excess=True),
            }
        )
    return layers


def keep(run: Run, folder: Path) -> dict[str, Any]:
    """Write one model, and tell how it ended."""
    _, checkpoint = run.checkpoints[-1]
    tensors = {
        name: tensor.astype(np.float16)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if ".self.query." in name or ".self.key." in name
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_bytes()) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    last = run.metrics.row(-1, named=True)
    losses = {"training_loss": last["loss"], "held_out_loss": last["held_out_loss"]}
    return losses | {"layers": scores(tensors)}


def main() -> None:
    """Keep both models and the record of their training."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with encoder, decoder and corpus")
    out = parser.parse_args().folder
    runs = {mode: open_run(out / mode) for mode in ("encoder", "decoder")}
    store = TokenStore.open(out / "corpus")
    train, recipe = store.splits["train"], runs["encoder"].recipe
    shares = np.bincount(store.tokens("train")) / train.tokens
    shares = shares[shares > 0]
    environment = runs["encoder"].settings["environment"]
    record = {
        "steps": recipe["steps"],
        "tokens": recipe["steps"] * recipe["batch"] * recipe["block"],
        "seed": recipe["seed"],
        "text": f"{store.about['sources'][0]['name']} by character: "
        f"{store.splits['held_out'].documents} documents held out, {train.characters:,} "
        "characters to train on",
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        **{mode: keep(run, out / "models" / mode) for mode, run in runs.items()},
        "versions": {name: environment[name] for name in ("python", "torch", "transformers")},
    }
    (out / "models" / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
