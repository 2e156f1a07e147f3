"""Observe the attention of every model type of transformers, and compare kernels.

``python -m tools.observing OUT.jsonl [TYPE...]`` builds a tiny random model of each type, runs it
in float64 with eager attention and with PyTorch's fused kernels, and writes a line for each type:
how many attentions ran, whether logits or only scores were observed, how far the recomputed logits
are from the softmax's own input where nothing was added, and how far the two kernels are apart.

``python -m tools.observing --count OUT.jsonl`` counts.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.deriving.building import build
from tools.deriving.feeding import adapted, model_feeds
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import wqk
from wqk.live.calls import ObservedCall
from wqk.live.observing import Observer
from wqk.live.running import double_precision

SECONDS = 90  # that a type may take


class Comparison:
    """Softmaxes of a pass: the recomputed logits next to the input of the softmax."""

    def __init__(self) -> None:
        self.logits = self.scores = 0
        self.plain = self.changed = 0
        self.difference = 0.0

    def add(self, call: ObservedCall) -> None:
        """Compare a call, tile by tile."""
        if not call.has_logits:
            self.scores += 1
            return
        self.logits += 1
        arranged = call.by_head()
        if arranged is None or call.scores is None:
            return
        residue, size = 0.0, 1.0
        for tile in arranged.tiles():
            visible = torch.ones_like(tile.logits, dtype=torch.bool)
            visible = visible if tile.visible is None else tile.visible.expand(tile.logits.shape)
            gap = (tile.scores - tile.logits)[visible].abs()
            residue = max(residue, float(gap.amax()) if gap.numel() else 0.0)
            shown = tile.logits[visible].abs()
            size = max(size, float(shown.amax()) if shown.numel() else 0.0)
        if residue / size < 1e-6:
            self.plain += 1
            self.difference = max(self.difference, residue / size)
        else:
            self.changed += 1


def exact(model: Any) -> Any:
    """The model in float64 and evaluation mode, without experts' kernels."""
    configs = [model.config, *(getattr(model.config, n, None) for n in model.config.sub_configs)]
    for config in filter(None, configs):
        config._experts_implementation = "eager"
    return model.double().eval()


def feed(model: Any) -> dict[str, Any] | None:
    """Return the first inputs that the model runs on."""
    for inputs in model_feeds(model):
        tried: dict[str, Any] | None = inputs
        for _ in range(5):
            if tried is None:
                break
            try:
                with torch.no_grad(), double_precision():
                    model(**tried)
                return tried
            except Exception as error:  # each model's code has its own
                tried = adapted(tried, f"{type(error).__name__}: {error}")
    return None


def measured(model: Any, inputs: dict[str, Any], kernel: str) -> Any:
    """Logits of one pass with a kernel; None if the model does not take the kernel."""
    try:
        model.set_attn_implementation(kernel)
    except (ValueError, AttributeError, ImportError):
        return None
    torch.manual_seed(0)
    np.random.seed(0)
    with double_precision():
        return wqk.logits(model, copy.deepcopy(inputs))


def apart(one: Any, other: Any) -> tuple[float, str]:
    """Largest difference of two measurements, relative to values above 1, and where it is."""
    worst, where = 0.0, ""
    if one.blocks.keys() != other.blocks.keys():
        return math.inf, "other blocks"
    for name in one.blocks:
        for field in ("max_logit", "logit_std", "attention_entropy", "attention_top_share"):
            a, b = getattr(one.blocks[name], field), getattr(other.blocks[name], field)
            if a.shape != b.shape:
                return math.inf, f"{name}: heads"
            gap = float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b))))
            if not gap <= worst:
                worst, where = gap, f"{name} {field}"
    return worst, where


def row_of(model_type: str) -> dict[str, Any]:
    """Return the observations of one type."""
    row: dict[str, Any] = {"type": model_type}
    reason = "nothing to build"
    for variant in range(4):
        try:
            with double_precision():
                model = exact(build(model_type, variant, False, None)[0])
        except Exception as error:
            reason = f"not built: {type(error).__name__}: {str(error)[:100]}"
            continue
        if hasattr(model, "set_attn_implementation"):
            with suppress(ValueError, ImportError):
                model.set_attn_implementation("eager")
        inputs = feed(model)
        if inputs is None:
            reason = "not run"
            continue
        comparison = Comparison()
        torch.manual_seed(0)
        np.random.seed(0)
        with torch.no_grad(), double_precision(), Observer(model, comparison.add):
            model(**copy.deepcopy(inputs))
        row |= {"ran": True, "logits": comparison.logits, "scores": comparison.scores}
        row |= {"plain": comparison.plain, "changed": comparison.changed}
        row |= {"difference": comparison.difference}
        if comparison.logits + comparison.scores == 0:
            return row
        eager = measured(model, inputs, "eager")
        if eager is None:
            with double_precision():
                eager = wqk.logits(model, copy.deepcopy(inputs))
        row["named"] = sum(not isinstance(name, str) for name in eager.blocks)
        row["blocks"] = len(eager.blocks)
        row["missing"] = {str(name): why for name, why in eager.missing.items()}
        fused = measured(model, inputs, "sdpa")
        if fused is not None:
            row["sdpa"], row["where"] = apart(eager, fused)
        return row
    return row | {"ran": False, "reason": reason}


def main() -> None:
    """Write a line for each type, or count them."""
    if sys.argv[1] == "--count":
        count(Path(sys.argv[2]))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out, types = Path(sys.argv[1]), sys.argv[2:] or sorted(CONFIG_MAPPING)
    done = (
        {json.loads(line)["type"] for line in out.read_text().splitlines()} if out.exists() else {}
    )

    def too_long(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    for model_type in types:
        if model_type in done:
            continue
        signal.alarm(SECONDS)
        try:
            row = row_of(model_type)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            row = {"type": model_type, "failed": f"{type(error).__name__}: {str(error)[:200]}"}
        signal.alarm(0)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def count(path: Path) -> None:
    """Print what the lines add up to."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ran = [row for row in rows if row.get("ran")]
    attending = [row for row in ran if row["logits"] + row["scores"]]
    whole = [row for row in attending if not row["scores"] and not row["missing"]]
    plain = max((row["difference"] for row in attending), default=0.0)
    fused = [row for row in attending if "sdpa" in row]
    near = [row for row in fused if row["sdpa"] <= 1e-6]
    print(f"types {len(rows)}, ran {len(ran)}, attended {len(attending)}")
    print(f"every attention measured with its logits: {len(whole)}")
    print(f"only scores somewhere: {sorted(r['type'] for r in attending if r['scores'])}")
    print(f"missing somewhere: {sorted(r['type'] for r in attending if r.get('missing'))}")
    print(
        f"softmaxes {sum(r['plain'] + r['changed'] for r in attending)}, of which plain "
        f"{sum(r['plain'] for r in attending)}, apart by at most {plain:.1e}"
    )
    print(f"fused kernels {len(fused)}, within 1e-6 {len(near)}")
    print("others:", [(r["type"], r["sdpa"], r["where"]) for r in fused if r["sdpa"] > 1e-6])
    print("failed:", [(r["type"], r["failed"]) for r in rows if "failed" in r])
    print("not run:", len([r for r in rows if r.get("ran") is False]))


if __name__ == "__main__":
    main()
