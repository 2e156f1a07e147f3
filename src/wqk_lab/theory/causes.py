"""Causes of directional updates: the order of the text, the mean of the inputs, coordinates.

A layer's update Σ_ij β_ij x_i x_jᵀ and the tails of its rows and columns are computed again with
one change. Every row of β sums to 0. Therefore the mean of the inputs cancels on the context side
of an update, but not on the prediction side.

Axes: B batch, N tokens (i predicted, j context), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wqk.forms import BilinearForm
from wqk_lab.theory.evidence import Evidence, LayerUpdate, StatementMeasure
from wqk_lab.theory.subject import Subject
from wqk_lab.theory.tails import (
    RATIO,
    Tails,
    in_updates,
    lost,
    sample_of_tails,
    tails_and_width,
)
from wqk_lab.theory.verdict import Estimate, Finding, Sample

# Directions with less than this share of the largest variance are rounding.
FLAT = 1e-6


def in_isolation(
    updates: Sequence[LayerUpdate], seed: int = 0
) -> dict[str, Iterator[BilinearForm]]:
    """Return one layer's updates on several batches, with one change, computed one by one.

    ``centered``: inputs minus their mean over all batches. ``isotropic``: centered, with equal
    variance in all directions. ``rotated``: in a random orthonormal basis. ``random signs``: each
    β_ij with a random sign.

    Examples
    --------
    >>> from wqk_lab.theory.evidence import LayerUpdate
    >>> random = np.random.default_rng(0)
    >>> beta = np.tril(random.standard_normal((2, 8, 8)))
    >>> sorted(in_isolation([LayerUpdate(5 + random.standard_normal((2, 8, 4)), beta)]))
    ['centered', 'isotropic', 'random signs', 'rotated']
    """
    random = np.random.default_rng(seed)
    width = updates[0].inputs.shape[-1]
    inputs = np.concatenate([update.inputs.reshape(-1, width) for update in updates])
    inputs = inputs.astype(np.float64)
    mean = inputs.mean(axis=0)
    whitening = _whitening(inputs)
    basis, _ = np.linalg.qr(random.standard_normal((width, width)))

    changes: dict[str, Callable[[LayerUpdate], LayerUpdate]] = {
        "centered": lambda update: update._replace(inputs=update.inputs - mean),
        "isotropic": lambda update: update._replace(inputs=(update.inputs - mean) @ whitening),
        "rotated": lambda update: update._replace(inputs=update.inputs @ basis),
        "random signs": lambda update: update._replace(
            beta=update.beta * random.choice([-1.0, 1.0], update.beta.shape)
        ),
    }
    return {name: _changed_forms(change, updates) for name, change in changes.items()}


def _whitening(vectors: np.ndarray) -> np.ndarray:
    """Return Σ^(−1/2) of vectors (N, D), in the directions in which there is any variance."""
    variances, directions = np.linalg.eigh(np.cov(vectors, rowvar=False))
    is_kept = variances > FLAT * variances.max()
    kept_directions = directions[:, is_kept]
    return np.asarray(kept_directions / np.sqrt(variances[is_kept]) @ kept_directions.T)


def _changed_forms(
    change: Callable[[LayerUpdate], LayerUpdate], updates: Sequence[LayerUpdate]
) -> Iterator[BilinearForm]:
    """Yield the form of each update after a change."""
    for update in updates:
        yield change(update).form


def rearranged(subject: Subject) -> dict[str, Subject]:
    """Return the subject with shuffled blocks, and with reversed blocks.

    Examples
    --------
    >>> from wqk_lab.theory.subject import Subject
    >>> subject = Subject("none", None, "causal", np.arange(8).reshape(1, 2, 4))
    >>> rearranged(subject)["reversed"].blocks.tolist()
    [[[3, 2, 1, 0], [7, 6, 5, 4]]]
    """
    random = np.random.default_rng(subject.seed)
    return {
        "shuffled": replace(subject, blocks=random.permuted(subject.blocks, axis=-1)),
        "reversed": replace(subject, blocks=np.ascontiguousarray(subject.blocks[..., ::-1])),
    }


def _order(evidence: Evidence) -> Sample:
    samples = {"as it is": evidence.once(in_updates)}
    for name, subject in rearranged(evidence.subject).items():
        samples[name] = _in_passes(evidence.on(subject))
    return lost(samples)


def _in_passes(evidence: Evidence) -> Sample:
    """Return the tails of `in_updates`, with the gradients of one batch in memory at a time."""
    measured: dict[str, list[tuple[Tails, int]]] = {}
    for layers in evidence.passes():
        for layer in layers:
            tails_by_batch = measured.setdefault(evidence.label(layer.attention.plan), [])
            tails_by_batch.append(tails_and_width(LayerUpdate.of(layer).form))
    return sample_of_tails(measured)


def _coordinates(evidence: Evidence) -> Sample:
    names = ("isotropic", "centered", "rotated", "random signs")
    measured: dict[str, dict[str, list[tuple[Tails, int]]]] = {name: {} for name in names}
    for layer, updates in evidence.updates.items():
        changed = in_isolation(updates, evidence.subject.seed)
        for name in names:
            measured[name][layer] = [tails_and_width(form) for form in changed[name]]
    samples = {"as it is": evidence.once(in_updates)}
    for name, tails_by_layer in measured.items():
        samples[name] = sample_of_tails(tails_by_layer)
    return lost(samples)


MEASURES: dict[str, StatementMeasure] = {"order": _order, "coordinates": _coordinates}


def curves(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the tails of the updates by layer, unchanged and with one change, for a figure.

    A layer is identified by its label, which includes the name of the stack if the model has
    several.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for finding in findings:
        sample = finding.sample
        if sample is None:
            continue
        tables = dict(sample.details) if "as it is" in sample.details else {}
        if finding.statement.quantity == f"{RATIO} of Σ β K":
            tables = {"as it is": sample.values}
        for change, values in tables.items():
            for layer, column in zip(sample.layers, values.T, strict=True):
                estimate = Estimate.of(Sample(column[:, None], sample.unit))
                rows[change, layer] = {
                    "change": change,
                    "layer": layer,
                    "log_variance_ratio": estimate.value,
                    "log_variance_ratio_error": estimate.high - estimate.value,
                }
    return list(rows.values())
