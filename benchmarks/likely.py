"""Likely ceilings next to the largest logits of a text: ``python -m benchmarks.likely``.

For models with their texts, the moments of every block's inputs are taken from some texts, and the
likely ceilings that follow from them are compared with the largest logit of each head in other
texts of the same length. Two models are trained here, byte by byte; others are given as folders,
with or without a tokenizer: without one, texts are sampled from the model itself.

If the mean m and the covariance C of a block's inputs are known, queries and keys have the means
and covariances that the weights make of them, and if they are normal, s = scale · qᵀk is a
quadratic form of a normal vector whose cumulant function is known: with (q, k) = μ + L ξ, and λ, U
the eigenvalues and -vectors of its symmetric matrix,

    ψ(t) = t s₀ + Σ_i [t² c_i² / (2 (1 − 2 t λ_i)) − ln(1 − 2 t λ_i) / 2],   0 < t < 1 / (2 max λ).

The largest of P logits exceeds min_t (ln(P/δ) + ψ(t)) / t with probability at most δ (Chernoff's
bound, and the union of P events). Two tokens that depend on each other in an unknown way have no
such ψ, but a bound of it.

Axes: B texts, H query heads, R head width, D width, N tokens.
"""

from __future__ import annotations

import argparse
import lzma
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import wqk
from wqk.attention.block import Block
from wqk.attention.factors import Factor
from wqk.attention.measures import ceilings
from wqk.live.listening import module_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS, FIT, HELD_OUT, SHARE = 64, 96, 192, 0.05

# Where t is tried, as a share of its limit.
SHARES = np.geomspace(1e-4, 0.999, 200)


class VectorMoments(NamedTuple):
    """Mean (D,) and covariance (D, D) of the inputs of a block's projections."""

    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, inputs: np.ndarray) -> VectorMoments:
        """Those of some inputs (..., D)."""
        rows = np.asarray(inputs, np.float64).reshape(-1, inputs.shape[-1])
        centered = rows - rows.mean(axis=0)
        return cls(rows.mean(axis=0), centered.T @ centered / len(rows))


class VectorPair(NamedTuple):
    """s = constant + left·η + right·ξ + ξᵀ form η, for standard normal ξ and η."""

    form: np.ndarray
    left: np.ndarray
    right: np.ndarray
    constant: float


def likely_ceilings(
    attention: Block, moments: VectorMoments, tokens: int, independent: bool = True
) -> np.ndarray:
    """Bound the largest logit of a text up to a probability of `SHARE`, (H,).

    Inputs are taken as normal with these moments, and different tokens' as ``independent``; else
    the bound holds whatever the dependence. Logits are before a soft cap and without additive
    position terms; of rotary positions, distances that are powers of 2 are tried. The queries and
    keys have to be linear in the inputs.
    """
    plan = attention.plan
    distances = [2**n for n in range(int(math.log2(max(1, tokens - 1))) + 1)]
    values, vectors = np.linalg.eigh(moments.covariance)
    root = np.asarray(vectors * np.sqrt(values.clip(min=0)))  # L with L Lᵀ = C
    pairs = tokens**2 / (2 if plan.causal else 1)
    # Half of the probability for pairs of a token with itself, half for all others.
    exponent, pair_exponent = math.log(2 * tokens / SHARE), math.log(2 * pairs / SHARE)
    sharing = attention.head_count // attention.key_head_count
    ceilings = []
    for head in range(attention.head_count):
        query, to_query = _centered(attention.query, head, moments, root)
        key, to_key = _centered(attention.key, head // sharing, moments, root)
        kind = "independent" if independent else "any"
        bounds = [bound(_pair(query, to_query, key, to_key, plan.score_scale), exponent, "same")]
        for distance in distances if plan.rotary is not None else (0,):
            turned, to_turned = query, to_query
            if plan.rotary is not None:
                with_shift = np.concatenate([query.T, to_query[None]])
                with_shift = plan.rotary.turning.rotate(
                    with_shift, np.full(len(with_shift), distance)
                )
                with_shift = plan.rotary.stretch(with_shift)
                turned, to_turned = with_shift[:-1].T, with_shift[-1]
            pair = _pair(turned, to_turned, key, to_key, plan.score_scale)
            bounds.append(bound(pair, pair_exponent, kind))
        ceilings.append(max(bounds))
    return np.array(ceilings)


def _pair(
    query: np.ndarray, a: np.ndarray, key: np.ndarray, b: np.ndarray, scale: float
) -> VectorPair:
    """Return the factors of s = scale · (query ξ + a) · (key η + b)."""
    return VectorPair(
        scale * query.T @ key, scale * a @ key, scale * b @ query, scale * float(a @ b)
    )


def _centered(
    factor: Factor, head: int, moments: VectorMoments, root: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a head's queries or keys as a matrix (R, D) of normal numbers, and their mean."""
    weight = factor.weight[head].astype(np.float64)
    bias = 0.0 if factor.bias is None else factor.bias[head]
    return weight @ root, weight @ moments.mean + bias


def bound(pair: VectorPair, level: float, kind: str) -> float:
    """min_t (level + ψ(t)) / t, for η the same as ξ, independent of it, or with any dependence."""
    count = 1.0
    if kind == "same":
        values, vectors = np.linalg.eigh((pair.form + pair.form.T) / 2)
        slopes = vectors.T @ (pair.left + pair.right)
    else:
        u, sizes, v = np.linalg.svd(pair.form, full_matrices=False)
        x, y = u.T @ pair.right, v @ pair.left
        remaining = pair.right @ pair.right - x @ x, pair.left @ pair.left - y @ y
        remaining_lengths = np.sqrt(np.maximum(remaining, 0.0))
        if kind == "independent":
            # ξᵀ form η = Σ σ/2 (((u·ξ + v·η)² − (u·ξ − v·η)²) / 2)
            values = np.concatenate([sizes, -sizes, [0.0, 0.0]]) / 2
            slopes = np.concatenate(
                [(x + y) / math.sqrt(2), (x - y) / math.sqrt(2), remaining_lengths]
            )
        else:
            # At most Σ σ ((u·ξ)² + (v·η)²) / 2, whose two halves Cauchy and Schwarz take apart.
            values = np.concatenate([sizes, sizes, [0.0, 0.0]])
            slopes, count = math.sqrt(2) * np.concatenate([x, y, remaining_lengths]), 0.5
    largest = float(values.max())
    t = SHARES / (2 * largest) if largest > 0 else SHARES * 1e6
    room = 1 - 2 * t[:, None] * values
    terms = t[:, None] ** 2 * slopes**2 / room - count * np.log(room)
    return float(((level + t * pair.constant + terms.sum(axis=1) / 2) / t).min())


def rows_of(name: str, model: Any, texts: torch.Tensor) -> Iterator[str]:
    """Yield a row of the table for each layer; texts (FIT + HELD_OUT, N)."""
    checkpoint = wqk.open_checkpoint(model.eval())
    plans = [plan for plan in wqk.open(checkpoint).plans if plan.kind == "self"]
    inputs: dict[int, np.ndarray] = {}

    def keep(layer: int, module: Any, args: Any) -> None:
        inputs[layer] = args[0].double().numpy()

    for plan in plans:
        module = model.get_submodule(module_of(plan.query.tensor))
        module.register_forward_pre_hook(partial(keep, plan.layer))
    with torch.no_grad():
        model(texts)
    for plan in plans:
        attention = Block(checkpoint, plan)
        inputs_of_layer = inputs[plan.layer]
        moments, length = VectorMoments.of(inputs_of_layer[:FIT]), texts.shape[1]
        likely = likely_ceilings(attention, moments, length)
        any_way = likely_ceilings(attention, moments, length, independent=False)
        maxima = _maxima(attention, inputs_of_layer[FIT:])
        normal = np.random.default_rng(0).multivariate_normal(
            *moments, inputs_of_layer[FIT:].shape[:2]
        )
        drawn = _maxima(attention, normal).max(axis=0)
        bounds = ceilings(attention)
        times = likely / maxima.max(axis=0)
        ratio_to_bound = "–"
        if bounds is not None:
            ratio_to_bound = f"{np.median(bounds.any_distance / maxima.max(axis=0)):.1f}"
        over = (maxima > likely).mean(axis=0)
        wide = any_way / maxima.max(axis=0)
        # The product of these is `wide`.
        parts = any_way / likely, likely / drawn, drawn / maxima.max(axis=0)
        yield (
            f"| {name} | {plan.layer} | {maxima.max():.1f} | {np.median(times):.2f} "
            f"({times.min():.2f} to {times.max():.2f}) | {ratio_to_bound} | {over.mean():.2%} | "
            f"{over.max():.1%} | {np.median(wide):.2f} ({wide.min():.2f} to {wide.max():.2f}) | "
            f"{(maxima > any_way).mean():.2%} | "
            + " | ".join(f"{np.median(part):.2f}" for part in parts)
            + " |"
        )


def _maxima(attention: Block, inputs: np.ndarray) -> np.ndarray:
    """Return the largest logit of each text (B, N, D) in each head, (B, H)."""
    logits = attention.logits(inputs, inputs)
    if attention.plan.causal:
        logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
    return np.asarray(logits.max(axis=(-2, -1)))


def trained(kind: str, data: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return a small model of bytes, and texts."""
    from transformers import BertConfig, BertForMaskedLM

    from benchmarks.clipping import decoder

    torch.manual_seed(0)
    batches = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        starts = torch.randint(len(data) - TOKENS, (count, 1), generator=batches)
        return data[starts + torch.arange(TOKENS)]

    config = BertConfig(
        vocab_size=257,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=TOKENS,
    )
    model = decoder() if kind == "decoder" else BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(400):
        rows = drawn(8)
        hidden = torch.rand(rows.shape, generator=batches) < 0.3
        hidden_rows = rows if kind == "decoder" else rows.masked_fill(hidden, 256)
        labels = rows if kind == "decoder" else rows.masked_fill(~hidden, -100)
        loss = model(hidden_rows, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, drawn(FIT + HELD_OUT)


def stored(folder: Path, text: str) -> tuple[Any, torch.Tensor]:
    """Return a model in a folder, and texts: of its tokenizer, or its own samples."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    count = FIT + HELD_OUT
    if any(folder.glob("*vocab*")) or (folder / "tokenizer.json").exists():
        tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        rows = torch.tensor(tokens[: count * TOKENS]).reshape(count, TOKENS)
        return AutoModel.from_pretrained(folder), rows
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    first = torch.ones(count, 1, dtype=torch.long)
    with torch.no_grad():
        rows = model.generate(
            first, do_sample=True, min_new_tokens=TOKENS - 1, max_new_tokens=TOKENS - 1
        )
    return model, rows


def main() -> None:
    """Print a row for each layer."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a text, .xz")
    parser.add_argument("folders", type=Path, nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = lzma.decompress(options.text.read_bytes())
    data = torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64))
    print(
        "| model | layer | largest logit | likely ceiling, times that | ceiling, times that | "
        "texts above | of the worst head | if tokens depend, times that | texts above | "
        "of it dependence | the bound | the normal law |\n"
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for kind in ("decoder", "encoder"):
        print(*rows_of(f"trained {kind}", *trained(kind, data)), sep="\n", flush=True)
    for folder in options.folders:
        model, texts = stored(folder, content.decode())
        print(*rows_of(folder.name, model, texts), sep="\n", flush=True)


if __name__ == "__main__":
    main()
