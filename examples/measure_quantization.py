"""How far quantization moves the forms and the scores of small LLaMAs: what docs/formats.md shows.

    python examples/measure_quantization.py stories260k llama2xs-260k

prints, for each model folder and each way to round, the median and the largest relative change of
heads' forms (``wqk diff``), those of the running model's scores where the queries and keys of one
layer are what the library dequantizes, and the rank correlation of the two over heads. Needs the
libraries of ``tools/quantizing.py``; its ways to round are those of the tests.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tools.quantizing import LIBRARIES
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import wqk

TEXTS, TOKENS = 4, 128  # the model's own, drawn token by token
# How a library stores a weight, what it makes of it again, and what the configuration says.
Rounded = tuple[dict[str, torch.Tensor] | None, torch.Tensor, dict[str, Any]]


def ways(weight: torch.Tensor) -> Iterator[tuple[str, Rounded]]:
    """A weight as each library rounds it, by name."""
    for library in LIBRARIES:
        if library.__name__ not in ("awq", "gpt_oss"):  # calibrated, or of another layout
            for name, stored, values, configuration in library(weight):
                yield name, (stored, values.float(), configuration)
    for name in ("Q4_0", "Q4_1", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        again = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        yield name, (None, torch.tensor(again), {})


def scores_of(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The scores (B, H, N, N) of every layer, less the mean of what a token sees."""
    found = []

    def keep(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **_: Any
    ) -> tuple[torch.Tensor, None]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = scaling * query @ key.transpose(2, 3)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        mean = scores.where(seen, 0).sum(-1, keepdim=True) / seen.sum(-1)[:, None]
        found.append((scores - mean).where(seen, 0))
        attention = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (attention @ value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("keep", keep)
    model.set_attn_implementation("keep")
    with torch.no_grad():
        model(tokens)
    return found


def drawn(model: Any) -> torch.Tensor:
    """Texts of the model itself."""
    tokens = torch.ones(TEXTS, 1, dtype=torch.long)
    with torch.no_grad():
        while tokens.shape[1] < TOKENS:
            shares = model(tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(shares, 1)], 1)
    return tokens


def forms_moved(folder: Path, weights: dict[str, torch.Tensor], of: dict[str, Rounded]) -> Any:
    """The relative change of every head's form, read by wqk from the file as it is stored."""
    stored, config = {}, json.loads((folder / "config.json").read_text())
    for name, weight in weights.items():
        parts, values, configuration = of.get(name, (None, weight.float(), {}))
        config |= configuration
        stem = name.removesuffix("weight")
        stored |= {stem + part: one.contiguous() for part, one in (parts or {}).items()}
        stored |= {} if parts else {name: values.contiguous()}
    with tempfile.TemporaryDirectory() as copy:
        save_file(stored, Path(copy) / "model.safetensors")
        (Path(copy) / "config.json").write_text(json.dumps(config))
        return wqk.diff(folder, copy).heads.frame["moved"].to_numpy()


def main(folder: Path) -> None:
    """Print a line for each way to round."""
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    rounded: dict[str, dict[str, Rounded]] = {}
    for tensor in weights:
        if "q_proj" in tensor or "k_proj" in tensor:
            for way, one in ways(weights[tensor].float()):
                rounded.setdefault(way, {})[tensor] = one
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = drawn(model)
    before = scores_of(model, tokens)
    for way, of in rounded.items():
        errors = []
        for layer, right in enumerate(before):
            own = {name: one[1] for name, one in of.items() if f"layers.{layer}." in name}
            kept = {name: model.get_parameter(name).data.clone() for name in own}
            for name, values in own.items():
                model.get_parameter(name).data.copy_(values)
            change = (scores_of(model, tokens)[layer] - right).square().sum((0, 2, 3))
            errors.append((change / right.square().sum((0, 2, 3))).sqrt())
            for name, values in kept.items():
                model.get_parameter(name).data.copy_(values)
        moved, errors = forms_moved(folder, weights, of), torch.cat(errors).numpy()
        ranks = (np.argsort(np.argsort(one)) for one in (moved, errors))
        print(
            f"{folder.name} {way}: forms {np.median(moved):.2g} ({moved.max():.2g}), scores "
            f"{np.median(errors):.2g} ({errors.max():.2g}), rank correlation "
            f"{np.corrcoef(*ranks)[0, 1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
