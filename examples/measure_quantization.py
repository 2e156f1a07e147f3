"""Measure how far quantization moves forms and scores of small models, for docs/formats.md.

    python examples/measure_quantization.py stories260k llama2xs-260k all-MiniLM-L6-v2 RXNMapper

prints, for each model folder (LLaMA's, BERT's or ALBERT's layout) and each way to round, the bits
that are stored for a weight, scales included, the median and the largest relative change of
heads' forms (``wqk diff``), those of the running model's scores where the queries and keys of one
layer are what the library dequantizes, the rank correlation of the two over heads, how far forms
move in units of what rounding to the format explains, and whether ``wqk same`` calls the file
quantized and nothing else. Two ways are calibrated: GPTQ makes up for the rounding of a column in
those that follow it, and AWQ gives the columns that matter a finer grid, both for what the running
model feeds into queries and keys on other texts. Needs the libraries of ``tools/quantizing.py``.
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
from tools.quantizing import GROUP, LIBRARIES, awq, gptq_stored
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import wqk

# Texts that are measured, as many times more that calibrate, and their length.
TEXTS, MORE, TOKENS = 4, 4, 128
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


def compensated(weight: torch.Tensor, inputs: torch.Tensor, bits: int) -> Rounded:
    """GPTQ (Frantar et al. 2023): the error of each column is made up for in those after it.

    ``inputs`` (N, I) are what the weight (O, I) is applied to.
    """
    second = inputs.T.double() @ inputs.double()
    second += 0.01 * second.diagonal().mean() * torch.eye(len(second))
    upper = torch.linalg.cholesky(torch.linalg.inv(second), upper=True)
    remaining, values = weight.double().clone(), torch.zeros_like(weight)
    scales, zeros = torch.zeros(2, len(weight), weight.shape[1] // GROUP).double()
    for at in range(weight.shape[1]):
        group = at // GROUP
        if at % GROUP == 0:
            group_of_columns = remaining[:, at : at + GROUP]
            low, high = group_of_columns.amin(1).clamp(max=0), group_of_columns.amax(1).clamp(min=0)
            scales[:, group] = ((high - low) / (2**bits - 1)).half().double()
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, 2**bits - 1)
        step, zero = scales[:, group], zeros[:, group]
        values[:, at] = (
            (remaining[:, at] / step + zero).round().clamp(0, 2**bits - 1) - zero
        ) * step
        error = (remaining[:, at] - values[:, at]) / upper[at, at]
        remaining[:, at + 1 :] -= error[:, None] * upper[at, at + 1 :]
    group_of = torch.arange(weight.shape[1]) // GROUP
    _, (_, stored, again, configuration) = gptq_stored(
        values, scales.float(), zeros.float(), group_of, bits, False
    )
    return stored, again.float(), configuration


def finer(
    weights: dict[str, torch.Tensor], inputs: torch.Tensor
) -> tuple[dict[str, Rounded], torch.Tensor]:
    """AWQ (Lin et al. 2024): columns times a power of the size of their inputs, then rounded.

    Of the powers, the one that moves the weights' outputs least. Returned with the factors, by
    which whatever makes the inputs has to be divided.
    """
    size = inputs.abs().mean(0)
    candidates = []
    for power in torch.linspace(0, 1, 21):
        factors = size**power
        factors = factors / (factors.max() * factors.min()).sqrt()
        rounded = {}
        for name, weight in weights.items():
            ((_, *rounding),) = awq(weight * factors)
            rounded[name] = (rounding[0], rounding[1].float(), rounding[2])
        errors = (
            (inputs @ (rounding[1] / factors - weights[n]).T).square().sum()
            for n, rounding in rounded.items()
        )
        candidates.append((float(sum(errors)), rounded, factors))
    _, rounded, factors = min(candidates, key=lambda candidate: candidate[0])
    return rounded, factors


def scores_of(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The scores (B, H, N, N) of every layer, less the mean of what a token sees."""
    scores_of_layers = []

    def keep(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **_: Any
    ) -> tuple[torch.Tensor, None]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = scaling * query @ key.transpose(2, 3)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        seen = seen.tril() if module.is_causal else seen
        mean = scores.where(seen, 0).sum(-1, keepdim=True) / seen.sum(-1)[:, None]
        scores_of_layers.append((scores - mean).where(seen, 0))
        attention = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (attention @ value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("keep", keep)
    model.set_attn_implementation("keep")
    with torch.no_grad():
        model(tokens)
    return scores_of_layers


def texts(folder: Path, count: int) -> torch.Tensor:
    """Texts (count, TOKENS) that a model draws itself, token by token; without a head, our pages.

    A masked model starts from masks alone, and fills them from left to right.
    """
    about = json.loads((folder / "config.json").read_text())
    causal = about["model_type"] == "llama"
    if not causal and not about["architectures"][0].endswith("MaskedLM"):
        pages = [Path(__file__).parents[1] / name for name in ("README.md", "docs/log.md")]
        text = "\n".join(page.read_text() for page in pages)
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
        return ids[0, : count * TOKENS].reshape(count, TOKENS)
    kind = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    if causal:
        start, tokens, barred = 1, torch.ones(count, TOKENS, dtype=torch.long), []
    else:
        vocabulary = (folder / "vocab.txt").read_text().split("\n")
        start, mask, barred = (
            vocabulary.index(f"[{special}]") for special in ("CLS", "MASK", "PAD")
        )
        tokens, barred = torch.full((count, TOKENS), mask), [start, mask, barred]
        tokens[:, 0] = start
    with torch.no_grad():
        for at in range(1, TOKENS):
            seen = model(tokens[:, :at] if causal else tokens).logits[:, at - causal]
            seen[:, barred] = -torch.inf
            tokens[:, at] = torch.multinomial(seen.softmax(-1), 1)[:, 0]
    return tokens


def inputs_of(model: Any, names: dict[str, str], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the running model first feeds into each module, (N, I), under the weights' names."""
    inputs_by_name: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_: Any, arguments: Any) -> None:
            inputs_by_name.setdefault(name, arguments[0].flatten(0, -2))

        return keep

    handles = [
        model.get_submodule(module).register_forward_pre_hook(hook(name))
        for name, module in names.items()
    ]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return inputs_by_name


def written(
    folder: Path, weights: dict[str, torch.Tensor], of: dict[str, Rounded], copy: Path
) -> Path:
    """The model with some weights as they are stored quantized."""
    stored, config = {}, json.loads((folder / "config.json").read_text())
    for name, weight in weights.items():
        parts, values, configuration = of.get(name, (0.0, weight.float(), {}))
        config |= configuration
        stem = name.removesuffix("weight")
        plain = isinstance(parts, float)
        under = {name: values} if plain else {stem + part: array for part, array in parts.items()}
        stored |= {key: array.contiguous() for key, array in under.items()}
    save_file(stored, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def main(folder: Path) -> None:
    """Print a line for each way to round."""
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    projections = [name for name in weights if PROJECTIONS.search(name)]
    rounded: dict[str, dict[str, Rounded]] = {}
    for tensor in projections:
        for way, rounded_weight in ways(weights[tensor].float()):
            rounded.setdefault(way, {})[tensor] = rounded_weight
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    prefix = f"{model.base_model_prefix}."
    parameters = {prefix + name: p.data for name, p in model.named_parameters()}
    parameters |= {name: p.data for name, p in model.named_parameters()}
    drawn = texts(folder, TEXTS * (1 + MORE))
    tokens, calibration_tokens = drawn[:TEXTS], drawn[TEXTS:]
    modules = {name: name.removeprefix(prefix).removesuffix(".weight") for name in projections}
    before, inputs = scores_of(model, tokens), inputs_of(model, modules, calibration_tokens)
    # Of AWQ: what else is changed in the file, and weights that do the same without that.
    file_changes: dict[str, dict[str, torch.Tensor]] = {}
    plain_of: dict[str, torch.Tensor] = {}
    for bits in (4, 8):
        rounded[f"GPTQ, calibrated, {bits} bits"] = {
            name: compensated(weights[name].float(), inputs[name], bits) for name in projections
        }
    way = "AWQ, calibrated"
    for name in projections if "q_proj" in projections[0] + projections[1] else ():
        if "q_proj" in name:
            side_weights = {
                tensor: weights[tensor].float()
                for tensor in (name, name.replace("q_proj", "k_proj"))
            }
            finer_weights, factors = finer(side_weights, inputs[name])
            rounded.setdefault(way, {}).update(finer_weights)
            norm = name.replace("self_attn.q_proj", "input_layernorm")
            values = name.replace("q_proj", "v_proj")
            changed = {norm: weights[norm] / factors, values: weights[values] * factors}
            file_changes.setdefault(way, {}).update(changed)
            parts = {tensor: values / factors for tensor, (_, values, _) in finer_weights.items()}
            plain_of.update(parts)
    for way, rounded_tensors in rounded.items():
        errors = []
        for layer in sorted({int(PROJECTIONS.search(name)[1]) for name in rounded_tensors}):
            right = before[layer]
            layer_weights = {
                n: weight[1]
                for n, weight in rounded_tensors.items()
                if PROJECTIONS.search(n)[1] == str(layer)
            }
            layer_weights |= {n: plain_of[n] for n in layer_weights if way in file_changes}
            kept = {name: parameters[name].clone() for name in layer_weights}
            for name, values in layer_weights.items():
                parameters[name].copy_(values)
            change = (scores_of(model, tokens)[layer] - right).square().sum((0, 2, 3))
            errors.append((change / right.square().sum((0, 2, 3))).sqrt())
            for name, values in kept.items():
                parameters[name].copy_(values)
        with tempfile.TemporaryDirectory() as copy:
            quantized = written(
                folder, weights | file_changes.get(way, {}), rounded_tensors, Path(copy)
            )
            frame, verdict = wqk.diff(folder, quantized).heads.frame, wqk.same(folder, quantized)
        moved, errors = frame["moved"].to_numpy(), torch.cat(errors).numpy()
        units = (frame["moved"] / frame["rounding"]).drop_nulls().to_numpy()
        parts, values, _ = next(iter(rounded_tensors.values()))
        bits = (
            parts
            if isinstance(parts, float)
            else (8 * sum(part.nbytes for part in parts.values()) / values.numel())
        )
        ranks = (np.argsort(np.argsort(changes)) for changes in (moved, errors))
        print(
            f"{folder.name} {way}: {bits:.3g} bits, forms {np.median(moved):.2g} "
            f"({moved.max():.2g}), scores {np.median(errors):.2g} ({errors.max():.2g}), "
            f"rank correlation {np.corrcoef(*ranks)[0, 1]:.2f}, "
            f"units {units.min() if units.size else 0:.2g} to {units.max(initial=0):.2g}, "
            f"same: {verdict.same}",
            flush=True,
        )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
