"""Children of tiny models, of every kind that `benchmarks.kinship` counts.

Weights are NumPy arrays by their names in transformers. Axes: H query heads, G key heads, R head
width, D model width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.populations import ARCHITECTURES, RECIPES, build, read_text, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

# Where queries and keys, their norms and embeddings are, by architecture.
_NAMES = {
    "llama": ("model.layers.{}.self_attn.{}_proj.weight", "q", "k", "model.embed_tokens.weight"),
    "bert": (
        "bert.encoder.layer.{}.attention.self.{}.weight",
        "query",
        "key",
        "bert.embeddings.word_embeddings.weight",
    ),
}
_NAMES["grouped"] = _NAMES["llama"]
# A layer's number follows one of these.
_LAYERS = ("model.layers.", "bert.encoder.layer.")


@dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint in memory."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @classmethod
    def load(cls, folder: Path) -> Model:
        """From the folder that transformers saved it in."""
        from safetensors.numpy import load_file

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(folder.name, config, load_file(folder / "model.safetensors"))

    @property
    def family(self) -> str:
        """The architecture's name in `benchmarks.populations`."""
        return self.name.split("-", maxsplit=1)[0]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def heads(self) -> int:
        """H."""
        return int(self.config["num_attention_heads"])

    @property
    def key_heads(self) -> int:
        """G."""
        return int(self.config.get("num_key_value_heads") or self.heads)

    @property
    def embedding(self) -> np.ndarray:
        """Embeddings of the characters that occur, (tokens, D)."""
        return self.tensors[_NAMES[self.family][3]][32:127].astype(np.float64)

    def place(self, layer: int, side: int) -> str:
        """Return the name of a layer's queries (0) or keys (1)."""
        template, *sides, _ = _NAMES[self.family]
        return template.format(layer, sides[side])

    def queries_and_keys(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield queries (H R, D) and keys (G R, D) of each layer."""
        for layer in range(self.layers):
            query, key = (self.tensors[self.place(layer, side)] for side in (0, 1))
            yield query.astype(np.float64), key.astype(np.float64)

    def changed(self, what: Callable[[np.ndarray, int, int], np.ndarray]) -> Model:
        """With other queries and keys: ``what(weight, layer, side)``."""
        tensors = dict(self.tensors)
        for layer in range(self.layers):
            for side in (0, 1):
                name = self.place(layer, side)
                tensors[name] = what(tensors[name], layer, side).astype(np.float32)
        return replace(self, tensors=tensors)

    def with_layers(self, order: Sequence[int]) -> Model:
        """Return a model with these layers, in this order."""
        (prefix,) = (p for p in _LAYERS if any(name.startswith(p) for name in self.tensors))
        tensors = {k: v for k, v in self.tensors.items() if not k.startswith(prefix)}
        for new, old in enumerate(order):
            start = f"{prefix}{old}."
            tensors |= {
                f"{prefix}{new}.{name[len(start) :]}": value
                for name, value in self.tensors.items()
                if name.startswith(start)
            }
        return replace(
            self, tensors=tensors, config={**self.config, "num_hidden_layers": len(order)}
        )

    def with_noise(self, size: float, random: np.random.Generator) -> Model:
        """Every weight matrix with noise of this size, relative to its own."""
        return replace(
            self,
            tensors={
                name: value
                if value.ndim < 2
                else (value + size * value.std() * random.standard_normal(value.shape)).astype(
                    np.float32
                )
                for name, value in self.tensors.items()
            },
        )


def orthogonal(size: int, seed: int) -> np.ndarray:
    """Return a random rotation."""
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]


def fold_norms(model: Model) -> Model:
    """Return the gains of a LLaMA's norms moved into the weights that they feed."""
    tensors = dict(model.tensors)
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        for norm, fed in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            gain = tensors[f"{at}{norm}.weight"]
            for name in fed:
                tensors[f"{at}{name}.weight"] = tensors[f"{at}{name}.weight"] * gain
            tensors[f"{at}{norm}.weight"] = np.ones_like(gain)
    gain = tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * gain
    tensors["model.norm.weight"] = np.ones_like(gain)
    return replace(model, tensors=tensors)


def rotate_stream(model: Model, seed: int) -> Model:
    """Return the residual stream rotated: all of a LLaMA, of BERT only queries and keys."""
    turn = orthogonal(int(model.config["hidden_size"]), seed)
    if model.family == "bert":
        return model.changed(lambda weight, layer, side: weight @ turn)
    tensors = dict(fold_norms(model).tensors)
    for name, value in tensors.items():
        if value.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name] = (turn.T @ value if writes else value @ turn).astype(np.float32)
    return replace(model, tensors=tensors)


def permute_heads(model: Model, seed: int) -> Model:
    """Heads in another order, those of a key head together; a LLaMA computes the same."""
    random = np.random.default_rng(seed)
    tensors = dict(model.tensors)
    for layer in range(model.layers):
        order = random.permutation(model.key_heads)

        def permuted(weight: np.ndarray, order: np.ndarray = order) -> np.ndarray:
            blocks = weight.reshape(model.key_heads, -1, weight.shape[-1])
            return blocks[order].reshape(weight.shape)

        for side in (0, 1):
            name = model.place(layer, side)
            tensors[name] = permuted(tensors[name])
        if model.family != "bert":
            at = f"model.layers.{layer}.self_attn."
            tensors[f"{at}v_proj.weight"] = permuted(tensors[f"{at}v_proj.weight"])
            tensors[f"{at}o_proj.weight"] = permuted(tensors[f"{at}o_proj.weight"].T).T.copy()
    return replace(model, tensors=tensors)


def turn_dimensions(model: Model, seed: int) -> Model:
    """W_q R and W_k R⁻ᵀ: of BERT any R, of a LLaMA a turn and a factor in each rotary plane."""
    random = np.random.default_rng(seed)
    width = int(model.config["hidden_size"]) // model.heads
    turns: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for layer in range(model.layers):
        if model.family == "bert":
            mixing = random.standard_normal((model.heads, width, width)) + 2 * np.eye(width)
            turns[layer] = mixing, np.linalg.inv(mixing).swapaxes(-1, -2)
            continue
        angles = random.uniform(0, 2 * np.pi, (model.key_heads, width // 2))
        factors = np.exp(random.uniform(-1, 1, angles.shape))
        cosine, sine = (np.stack([np.diag(row) for row in f(angles)]) for f in (np.cos, np.sin))
        plane = np.block([[cosine, -sine], [sine, cosine]])
        scale = np.concatenate([factors, factors], axis=1)[..., None]
        turns[layer] = scale * plane, plane / scale

    def turned(weight: np.ndarray, layer: int, side: int) -> np.ndarray:
        by = turns[layer][side]
        blocks = weight.reshape(-1, width, weight.shape[-1])
        return (by.repeat(len(blocks) // len(by), axis=0) @ blocks).reshape(weight.shape)

    return model.changed(turned)


def prune_heads(model: Model, keep: int) -> Model:
    """Return the first half of the key heads, and the query heads that share them."""
    share = keep / model.key_heads
    tensors = dict(model.tensors)
    for layer in range(model.layers):
        for side in (0, 1):
            name = model.place(layer, side)
            for tensor_name in (name, name.replace(".weight", ".bias")):
                if tensor_name in tensors:
                    tensors[tensor_name] = tensors[tensor_name][
                        : round(share * len(tensors[tensor_name]))
                    ]
    width = int(model.config["hidden_size"]) // model.heads
    config = {
        **model.config,
        "num_attention_heads": round(share * model.heads),
        "num_key_value_heads": keep,
        "head_dim": width,
    }
    return replace(model, tensors=tensors, config=config)


def quantized(model: Model, bits: int) -> Model:
    """Round to integers, with a scale for every 32 weights of a row."""

    def rounded(weight: np.ndarray, layer: int, side: int) -> np.ndarray:
        blocks = weight.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
        return (np.round(blocks / step) * step).reshape(weight.shape)

    return model.changed(rounded)


def mixed(first: Model, second: Model, share: float, way: str) -> Model:
    """Mix queries and keys of two models: on a line, on an arc, or the largest differences."""
    if first.layers > second.layers:
        second = second.with_layers([*range(second.layers)] * 2)

    def mix(weight: np.ndarray, layer: int, side: int) -> np.ndarray:
        second_weight = second.tensors[second.place(layer, side)]
        if way == "linear":
            return share * weight + (1 - share) * second_weight
        if way == "ties":
            difference = weight - second_weight
            kept = np.abs(difference) >= np.quantile(np.abs(difference), 1 - share)
            return second_weight + difference * kept
        cosine = (
            (weight * second_weight).sum() / np.linalg.norm(weight) / np.linalg.norm(second_weight)
        )
        angle = np.arccos(np.clip(cosine, -1, 1))
        return (
            np.sin(share * angle) * weight + np.sin((1 - share) * angle) * second_weight
        ) / np.sin(angle)

    return first.changed(mix)


def _of_llama(way: Callable[[Model], Model]) -> Callable[..., Model | None]:
    return lambda p, o, n: None if p.family == "bert" else way(p)


def _noisy(size: float) -> Callable[..., Model]:
    return lambda p, o, n: p.with_noise(size, np.random.default_rng(n))


# Of a parent, a stranger of the same shape, and a seed; None where a kind makes no sense.
CHANGES: dict[str, Callable[[Model, Model, int], Model | None]] = {
    "copy": lambda p, o, n: p,
    "float16": lambda p, o, n: p.changed(lambda w, _, __: w.astype(np.float16)),
    "quantized, 8 bits": lambda p, o, n: quantized(p, 8),
    "quantized, 4 bits": lambda p, o, n: quantized(p, 4),
    "norms folded": _of_llama(fold_norms),
    "heads permuted": lambda p, o, n: permute_heads(p, n),
    "stream rotated": lambda p, o, n: rotate_stream(p, n),
    "W_q R, W_k R⁻ᵀ": lambda p, o, n: turn_dimensions(p, n),
    "stream rotated, heads permuted": lambda p, o, n: permute_heads(rotate_stream(p, n), n),
    "stream rotated, W_q R, W_k R⁻ᵀ": lambda p, o, n: turn_dimensions(rotate_stream(p, n), n),
    "heads permuted, W_q R, W_k R⁻ᵀ": lambda p, o, n: turn_dimensions(permute_heads(p, n), n),
    "all three": lambda p, o, n: turn_dimensions(permute_heads(rotate_stream(p, n), n), n),
    "noise, half the weights": _noisy(0.5),
    "noise, as large as the weights": _noisy(1),
    "noise, twice the weights": _noisy(2),
    "stream rotated, noise as large": lambda p, o, n: _noisy(1)(rotate_stream(p, n), o, n),
    "half of the heads": lambda p, o, n: prune_heads(p, p.key_heads // 2),
    "half of the layers": lambda p, o, n: p.with_layers(range(0, p.layers, 2)),
    "depth up-scaled": lambda p, o, n: p.with_layers([*range(p.layers - 1), *range(1, p.layers)]),
    "layers reversed": lambda p, o, n: p.with_layers(range(p.layers)[::-1]),
    "every second layer a stranger's": lambda p, o, n: p.changed(
        lambda w, layer, side: o.tensors[o.place(layer, side)] if layer % 2 else w
    ),
    "half a stranger, linear": lambda p, o, n: mixed(p, o, 0.5, "linear"),
    "half a stranger, SLERP": lambda p, o, n: mixed(p, o, 0.5, "arc"),
    "a stranger with the largest fifth of differences": lambda p, o, n: mixed(p, o, 0.2, "ties"),
}

# Share of the recipe's steps, whether on another text, backwards, by an adapter, from the start.
TRAINED: dict[str, tuple[float, str]] = {
    "another text, 1 % of the steps": (0.01, "text"),
    "another text, 10 % of the steps": (0.1, "text"),
    "another text, 100 % of the steps": (1.0, "text"),
    "another objective, 100 % of the steps": (1.0, "objective"),
    "adapter of rank 2 merged, another text": (1.0, "adapter"),
    "nothing but the initialization, another text": (1.0, "initialization"),
}


def train_child(parent: Model, kind: str, texts: Sequence[Path], kept: Path) -> Model:
    """Return a child that is trained on, kept in a folder for the next time."""
    import torch

    share, way = TRAINED[kind]
    folder = kept / f"{parent.name}-{way}-{share:g}"
    if (folder / "config.json").exists():
        return Model.load(folder)
    torch.set_num_threads(1)
    family, text, recipe, seed = parent.name.split("-")
    text_number = int(text.removeprefix("text"))
    place = list(ARCHITECTURES).index(family)
    number = RECIPES[recipe][-1] + 1000 * int(seed.removeprefix("seed")) + 10 * text_number + place
    model = build(family, number)
    if way != "initialization":
        model.load_state_dict(
            {k: torch.from_numpy(v) for k, v in parent.tensors.items()}, strict=False
        )
    content = read_text(texts[text_number if way == "objective" else 1 - text_number])
    if way == "objective":
        content = content[::-1].copy()
    if way == "adapter":
        _train_adapter(model, content, recipe)
    else:
        train(model, content, recipe, share=share, order=1)
    model.save_pretrained(folder)
    return Model.load(folder)


def _train_adapter(model: Any, content: np.ndarray, recipe: str) -> None:
    """Train W + B A of rank 2 for queries, keys and values, and merge it."""
    import torch
    from torch.nn.utils import parametrize

    class Adapter(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(0.1 * torch.randn(2, weight.shape[1]))
            self.b = torch.nn.Parameter(torch.zeros(weight.shape[0], 2))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + self.b @ self.a

    model.requires_grad_(False)
    torch.manual_seed(0)
    adapted_names = ("q_proj", "k_proj", "v_proj", "query", "key", "value")
    adapted = [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] in adapted_names]
    for module in adapted:
        parametrize.register_parametrization(module, "weight", Adapter(module.weight))
    train(model, content, recipe, order=1)
    for module in adapted:
        parametrize.remove_parametrizations(module, "weight")
    model.requires_grad_(True)


def held_out_loss(model: Model, text: Path) -> float:
    """Nats for the next character, on blocks of another text."""
    import torch
    import transformers

    config, kind, _ = ARCHITECTURES[model.family]
    built = getattr(transformers, kind)(getattr(transformers, config)(**model.config))
    built.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in model.tensors.items()})
    content = read_text(text)
    starts = np.random.default_rng(5).integers(0, len(content) - 64, 64)
    tokens = torch.from_numpy(np.stack([content[s : s + 64] for s in starts]))
    with torch.no_grad():
        return float(built.eval()(input_ids=tokens, labels=tokens).loss)
