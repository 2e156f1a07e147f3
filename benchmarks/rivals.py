"""Other measures of kinship between weights, as far as their published descriptions go.

Larger is closer. All of them compare layer i with layer i, up to the smaller depth.

- ``cosine``: mean cosine of W_q and W_k, as stored.
- ``spectra``: after GhostSpec (arXiv:2511.06390): mean correlation of the logarithms of the
  singular values of each layer's summed W_q W_kᵀ.
- ``AWM`` (arXiv:2510.06738, and its code): coordinates are matched by the embeddings of the tokens
  (a linear assignment of absolute cosines, with signs), then the unbiased centered kernel alignment
  of W_q and of W_k is averaged.
- ``MDIR`` (arXiv:2508.06309), its statistic without its p-value: the orthogonal polar factor of the
  two embeddings' product, and the mean of its entries that a linear assignment picks.

The last two read embeddings, which `wqk kin` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.descendants import Model


def _pairs(a: Model, b: Model) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first, second in zip(a.queries_and_keys(), b.queries_and_keys(), strict=False):
        yield from zip(first, second, strict=True)


def cosine(a: Model, b: Model) -> float:
    """Mean cosine of weights of one shape; 0 of others."""
    cosines = [
        float((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)) if x.shape == y.shape else 0.0
        for x, y in _pairs(a, b)
    ]
    return float(np.mean(cosines))


def spectra(a: Model, b: Model) -> float:
    """Mean correlation of the log singular values of layers' forms."""
    likenesses = []
    for weights, other_weights in zip(a.queries_and_keys(), b.queries_and_keys(), strict=False):
        first, second = (_spectrum(m, *pair) for m, pair in ((a, weights), (b, other_weights)))
        size = min(len(first), len(second))
        likenesses.append(float(np.corrcoef(first[:size], second[:size])[0, 1]))
    return float(np.mean(likenesses))


def _spectrum(model: Model, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    grouped = query.reshape(model.key_heads, model.heads // model.key_heads, -1, query.shape[-1])
    values = np.linalg.svd(grouped.sum(axis=1).reshape(key.shape).T @ key, compute_uv=False)
    return np.asarray(np.log(values[values > 1e-6 * values[0]]))


def awm(a: Model, b: Model) -> float:
    """Unbiased CKA of queries and keys after matching coordinates by embeddings."""
    from scipy.optimize import linear_sum_assignment

    first, second = (m.embedding / np.linalg.norm(m.embedding, axis=0) for m in (a, b))
    likeness = first.T @ second
    rows, columns = linear_sum_assignment(-np.abs(likeness))
    order = rows[np.argsort(columns)]
    signs = np.sign(likeness[order, np.arange(likeness.shape[1])])
    alignments = [
        _unbiased_alignment(x[:, order] * signs, y) if x.shape[1] == y.shape[1] else 0.0
        for x, y in _pairs(a, b)
    ]
    return float(np.mean(alignments))


def _unbiased_alignment(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased centered kernel alignment of the coordinates that two weights read."""
    first, second = x.T @ x, y.T @ y
    return _independence(first, second) / np.sqrt(
        max(_independence(first, first) * _independence(second, second), 1e-30)
    )


def _independence(first: np.ndarray, second: np.ndarray) -> float:
    """Return the unbiased estimator of the Hilbert-Schmidt independence criterion."""
    first, second = first - np.diag(np.diag(first)), second - np.diag(np.diag(second))
    n = len(first)
    product = first @ second
    total = np.trace(product) + first.sum() * second.sum() / (n - 1) / (n - 2)
    return float((total - 2 * product.sum() / (n - 2)) / n / (n - 3))


def mdir(a: Model, b: Model) -> float:
    """Mean assigned entry of the polar factor of the embeddings' product."""
    from scipy.optimize import linear_sum_assignment

    left_basis, _, right = np.linalg.svd(a.embedding.T @ b.embedding)
    polar = left_basis @ right
    rows, columns = linear_sum_assignment(-polar)
    return float(polar[rows, columns].mean())


RIVALS: dict[str, Callable[[Model, Model], float]] = {
    "cosine": cosine,
    "spectra": spectra,
    "AWM": awm,
    "MDIR": mdir,
}
