"""How far quantization moves the forms and the scores of small models: what docs/formats.md shows.

    python examples/measure_quantization.py stories260k llama2xs-260k all-MiniLM-L6-v2

prints, for each model folder (LLaMA's or BERT's layout) and each way to round, the bits that are
stored for a weight, scales included, the median and the largest relative change of
heads' forms (``wqk diff``), those of the running model's scores where the queries and keys of one
layer are what the library dequantizes, and the rank correlation of the two over heads. Needs the
libraries of ``tools/quantizing.py``; its ways to round are those of the tests.
"""

from __future__ import annotations

import json
import re
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
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import wqk

TEXTS, TOKENS = 4, 128
PROJECTIONS = re.compile(r"\.(\d+)\..*(q_proj|k_proj|query|key)\.weight$")
# How a library stores a weight (or in how many bits), what it makes of it again, and what the
# configuration says.
Rounded = tuple[dict[str, torch.Tensor] | float, torch.Tensor, dict[str, Any]]


def ways(weight: torch.Tensor) -> Iterator[tuple[str, Rounded]]:
    """A weight as each library rounds it, by name."""
    for library in LIBRARIES:
        if library.__name__ != "gpt_oss":  # of another layout
            for name, stored, values, configuration in library(weight):
                yield name, (stored, values.float(), configuration)
    for name in ("Q4_0", "Q4_1", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        again = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        entries, size = gguf.GGML_QUANT_SIZES[kind]
        yield name, (8 * size / entries, torch.tensor(again), {})


def scores_of(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The scores (B, H, N, N) of every layer, less the mean of what a token sees."""
    found = []

    def keep(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **_: Any
    ) -> tuple[torch.Tensor, None]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = scaling * query @ key.transpose(2, 3)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        seen = seen.tril() if module.is_causal else seen
        mean = scores.where(seen, 0).sum(-1, keepdim=True) / seen.sum(-1)[:, None]
        found.append((scores - mean).where(seen, 0))
        attention = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (attention @ value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("keep", keep)
    model.set_attn_implementation("keep")
    with torch.no_grad():
        model(tokens)
    return found


def texts(folder: Path) -> torch.Tensor:
    """Texts that a decoder draws itself, token by token; of an encoder, those of the README."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "llama":
        text = (Path(__file__).parents[1] / "README.md").read_text()
        found = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
        return found[0, : TEXTS * TOKENS].reshape(TEXTS, TOKENS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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
        parts, values, configuration = of.get(name, (0.0, weight.float(), {}))
        config |= configuration
        stem = name.removesuffix("weight")
        plain = isinstance(parts, float)
        under = {name: values} if plain else {stem + part: one for part, one in parts.items()}
        stored |= {key: one.contiguous() for key, one in under.items()}
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
        if PROJECTIONS.search(tensor):
            for way, one in ways(weights[tensor].float()):
                rounded.setdefault(way, {})[tensor] = one
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = {f"{model.base_model_prefix}.{n}": p.data for n, p in model.named_parameters()}
    parameters |= {name: p.data for name, p in model.named_parameters()}
    tokens = texts(folder)
    before = scores_of(model, tokens)
    for way, of in rounded.items():
        errors = []
        for layer, right in enumerate(before):
            own = {n: one[1] for n, one in of.items() if PROJECTIONS.search(n)[1] == str(layer)}
            kept = {name: parameters[name].clone() for name in own}
            for name, values in own.items():
                parameters[name].copy_(values)
            change = (scores_of(model, tokens)[layer] - right).square().sum((0, 2, 3))
            errors.append((change / right.square().sum((0, 2, 3))).sqrt())
            for name, values in kept.items():
                parameters[name].copy_(values)
        moved, errors = forms_moved(folder, weights, of), torch.cat(errors).numpy()
        parts, values, _ = next(iter(of.values()))
        bits = (
            parts
            if isinstance(parts, float)
            else (8 * sum(one.nbytes for one in parts.values()) / values.numel())
        )
        ranks = (np.argsort(np.argsort(one)) for one in (moved, errors))
        print(
            f"{folder.name} {way}: {bits:.3g} bits, forms {np.median(moved):.2g} "
            f"({moved.max():.2g}), scores {np.median(errors):.2g} ({errors.max():.2g}), "
            f"rank correlation {np.corrcoef(*ranks)[0, 1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
