"""``same --up-to``: rewritten and damaged models, compared with their own logits in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from tests import small
from tests.attacks.outcomes import Case, Meaningless, refused_in_one_line
from tests.command import run

from wqk.errors import WqkError

LAYERS, HEADS, KEY_HEADS, WIDTH, D, MIDDLE, TOKENS = 2, 4, 2, 6, 16, 20, 30
CONFIG = {
    "model_type": "llama",
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": WIDTH,
    "intermediate_size": MIDDLE,
    "vocab_size": TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FREEDOMS = ("stream", "heads", "neurons")
Tensors = dict[str, np.ndarray]


def original(seed: int) -> Tensors:
    """A small LLaMA whose norms have no gains, as a rotation of the stream requires."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (TOKENS, D), "lm_head": (TOKENS, D)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj": (HEADS * WIDTH, D),
            f"{at}.self_attn.k_proj": (KEY_HEADS * WIDTH, D),
            f"{at}.self_attn.v_proj": (KEY_HEADS * WIDTH, D),
            f"{at}.self_attn.o_proj": (D, HEADS * WIDTH),
            f"{at}.mlp.gate_proj": (MIDDLE, D),
            f"{at}.mlp.up_proj": (MIDDLE, D),
            f"{at}.mlp.down_proj": (D, MIDDLE),
        }
    tensors = {
        f"{name}.weight": random.standard_normal(shape) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(D)
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = np.ones(D)
    tensors["model.norm.weight"] = np.ones(D)
    return tensors


def normalized(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def turned(x: np.ndarray) -> np.ndarray:
    """Rotary positions of vectors (heads, tokens, width)."""
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    first, second = np.split(x, 2, -1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def logits(tensors: Tensors) -> np.ndarray:
    """The model's output for all its tokens in a row, in float64."""

    def at(name: str) -> np.ndarray:
        return tensors[f"{name}.weight"].astype(np.float64)

    x = at("model.embed_tokens")[np.arange(12) * 5 % TOKENS]
    future = np.triu(np.ones((len(x), len(x)), bool), 1)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        h = normalized(x, at(f"{stem}.input_layernorm"))
        sides = [
            (h @ at(f"{stem}.self_attn.{side}_proj").T).reshape(len(x), -1, WIDTH).swapaxes(0, 1)
            for side in "qkv"
        ]
        query, key = turned(sides[0]), turned(sides[1]).repeat(HEADS // KEY_HEADS, 0)
        scores = query @ key.swapaxes(1, 2) / math.sqrt(WIDTH)
        scores = np.exp(np.where(future, -np.inf, scores))
        mixed = scores / scores.sum(-1, keepdims=True) @ sides[2].repeat(HEADS // KEY_HEADS, 0)
        x = x + mixed.swapaxes(0, 1).reshape(len(x), -1) @ at(f"{stem}.self_attn.o_proj").T
        h = normalized(x, at(f"{stem}.post_attention_layernorm"))
        gate = h @ at(f"{stem}.mlp.gate_proj").T
        middle = gate / (1 + np.exp(-gate)) * (h @ at(f"{stem}.mlp.up_proj").T)
        x = x + middle @ at(f"{stem}.mlp.down_proj").T
    output: np.ndarray = normalized(x, at("model.norm")) @ at("lm_head").T
    return output


def rewritten(tensors: Tensors, freedoms: set[str], random: np.random.Generator) -> Tensors:
    """Another model with the same output."""
    changed = dict(tensors)
    if "stream" in freedoms:
        turn = np.linalg.qr(random.standard_normal((D, D)))[0]
        for name, value in tensors.items():
            if value.ndim == 2:
                writes = "o_proj" in name or "down_proj" in name
                changed[name] = turn.T @ value if writes else value @ turn
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        if "neurons" in freedoms:
            order = random.permutation(MIDDLE)
            for side in ("gate", "up"):
                name = f"{stem}.mlp.{side}_proj.weight"
                changed[name] = changed[name][order]
            name = f"{stem}.mlp.down_proj.weight"
            changed[name] = changed[name][:, order]
        if "heads" in freedoms:
            groups = random.permutation(KEY_HEADS)
            members = [random.permutation(HEADS // KEY_HEADS) for _ in groups]
            order = np.concatenate(
                [
                    group * (HEADS // KEY_HEADS) + member
                    for group, member in zip(groups, members, strict=True)
                ]
            )
            for side, heads in (("q", order), ("k", groups), ("v", groups)):
                name = f"{stem}.self_attn.{side}_proj.weight"
                changed[name] = changed[name].reshape(-1, WIDTH, D)[heads].reshape(-1, D)
            name = f"{stem}.self_attn.o_proj.weight"
            changed[name] = changed[name].reshape(D, -1, WIDTH)[:, order].reshape(D, -1)
    return changed


def damaged(tensors: Tensors, dice: Random) -> tuple[Tensors, str]:
    """Change one tensor so that, most often, the output changes."""
    changed = dict(tensors)
    name = dice.choice(sorted(tensors))
    value = changed[name].copy()
    kind = dice.choice(("row", "factor", "noise", "rolled", "element", "sign", "layers"))
    row = dice.randrange(len(value))
    if kind == "row":
        value[row] *= dice.choice((0, 0.9, 1.1))
    elif kind == "factor":
        value *= dice.choice((0.5, 0.97, 1.05))
    elif kind == "noise":
        random = np.random.default_rng(dice.randrange(2**32))
        value += 0.03 * random.standard_normal(value.shape)
    elif kind == "rolled":
        value = np.roll(value, 1, 0)
    elif kind == "element":
        value.flat[dice.randrange(value.size)] += 0.3
    elif kind == "sign":
        value[row] *= -1
    elif "layers.0" in name:
        next_name = name.replace("layers.0", "layers.1")
        value, changed[next_name] = changed[next_name], value
    changed[name] = value
    return changed, f"{kind} of {name}"


def compared(paths: tuple[Path, Path], freedoms: str) -> int:
    """Exit status of ``same``."""
    done = run("same", *paths, "--all", "--up-to", freedoms, exits=None)
    if done.exit_code == 2:
        refused_in_one_line(done)
        raise WqkError(done.stderr.strip())
    if done.exit_code not in (0, 1, 3):
        raise Meaningless(done.output)
    return done.exit_code


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """Pairs of models, of which one is rewritten, and some are damaged besides."""
    while True:
        seed = dice.randrange(50)
        reference = original(seed)
        random = np.random.default_rng(dice.randrange(2**32))
        applied = {freedom for freedom in FREEDOMS if dice.random() < 0.4}
        allowed = applied | {freedom for freedom in FREEDOMS if dice.random() < 0.3}
        allowed = allowed or {"stream"}
        candidate, description = rewritten(reference, applied, random), "none"
        if dice.random() < 0.7:
            candidate, description = damaged(candidate, dice)
        single = {name: value.astype(np.float32) for name, value in candidate.items()}
        expected = logits({name: value.astype(np.float32) for name, value in reference.items()})
        difference = float(np.abs(logits(single) - expected).max())
        paths = (
            small.save(folder / "a", reference, CONFIG),
            small.save(folder / "b", single, CONFIG),
        )
        # Between both bounds the damage is as small as rounding may be.
        if 1e-5 < difference < 1e-3:
            continue
        right = {0, 3} if difference < 1e-5 else {1, 3}
        if difference < 1e-5 and description != "none":
            right = {0, 1, 3}  # damage without an effect on these tokens, as of a token's own row
        yield Case(
            f"{sorted(applied)} under {sorted(allowed)}, damage {description}, {difference:.1e}",
            partial(compared, paths, ",".join(sorted(allowed))),
            right.__contains__,
        )
