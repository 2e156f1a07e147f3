"""Evidence with planted numbers: a small model's weights, and gradients made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.lab.theory import subjects

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.forms import BilinearForm
from wqk_lab.theory.evidence import Evidence
from wqk_lab.theory.gradients import LayerGradient, blocks_of, mixing_error
from wqk_lab.theory.subject import Subject
from wqk_lab.theory.text import Text

U, L, B, H, N, D = 5, 3, 6, 2, 8, 32
R = D // H


@cache
def blocks() -> tuple[Block, ...]:
    """The layers of a BERT, whose weights are replaced."""
    checkpoint = open_checkpoint(subjects.bert(num_hidden_layers=L, hidden_size=D))
    return tuple(blocks_of(checkpoint, wqk.open(checkpoint).plans))


def weighted(layer: int, random: np.random.Generator) -> Block:
    """A layer with random weights and no biases."""
    query, key = random.standard_normal((2, H, R, D)) / np.sqrt(D)
    return blocks()[layer].with_weights(query, key, biases=False)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def inputs(random: np.random.Generator, batch: int = B) -> np.ndarray:
    return random.standard_normal((batch, N, D))


def betas(random: np.random.Generator, batch: int = B) -> np.ndarray:
    """Rows that sum to 0, as a softmax makes them."""
    beta = random.standard_normal((batch, H, N, N))
    return np.asarray(beta - beta.mean(axis=-1, keepdims=True))


def layer_of(attention: Block, x: np.ndarray, beta: np.ndarray, **fields: Any) -> LayerGradient:
    """A layer's gradient; its attention is uniform and its error β, unless given."""
    planted = {"probabilities": np.full(beta.shape, 1 / N), "error": beta, **fields}
    shares, error = planted.pop("probabilities"), planted.pop("error")
    return LayerGradient(attention, x, x, shares, error, beta, **planted)


def subject(objective: Any = "masked", batches: int = U) -> Subject:
    tokens = np.random.default_rng(0).integers(4, 30, (batches, B, N))
    mask = None if objective == "causal" else 1
    return Subject("planted", None, objective, tokens, mask, mask_share=0.5)


class PlantedEvidence(Evidence):
    """Evidence whose passes yield the gradients that were planted."""

    def passes(self) -> Iterator[list[LayerGradient]]:
        yield from self.gradients


def evidence(
    make: Callable[[np.random.Generator, int, int], LayerGradient] | None = None,
    objective: Any = "masked",
    seed: int = 0,
    text: Text | None = None,
    **kept: Any,
) -> Evidence:
    """Evidence whose gradients a function makes of randomness, batch and layer."""
    made = PlantedEvidence(subject(objective), text or subjects.text())
    plans = [block.plan for block in blocks()]
    random = np.random.default_rng(seed)
    planted: dict[str, Any] = {"plans": plans, "blocks": blocks(), **kept}
    if make:
        gradients = []
        for batch in range(U):
            gradients.append([make(random, batch, layer) for layer in range(L)])
        planted["gradients"] = gradients
        values = kept.get("values", {})
        for layers in gradients:
            for layer in layers:
                label = str(layer.attention.plan.layer)
                error = mixing_error(layer, values.get(label))
                made.mixing_errors.setdefault(label, []).append(error)
    made.__dict__.update(planted)
    return made


def with_updates(
    form: Callable[[int, int], BilinearForm], units: int = U, **settings: Any
) -> Evidence:
    """Evidence whose updates are forms of the batch and the layer."""
    updates = {}
    for layer in range(L):
        forms = (form(batch, layer) for batch in range(units))
        updates[str(layer)] = [SimpleNamespace(form=drawn) for drawn in forms]
    return evidence(updates=updates, **settings)


def spread_form(
    columns: np.ndarray, rows: np.ndarray, random: np.random.Generator, rank: int = 60
) -> BilinearForm:
    """A random form whose columns and rows have norms near some numbers."""
    query, key = random.standard_normal((2, len(rows), rank))
    return BilinearForm(rows[:, None] * query, columns[:, None] * key)


def log_normal(random: np.random.Generator, width: int = 60) -> np.ndarray:
    return np.exp(0.7 * random.standard_normal(width))
