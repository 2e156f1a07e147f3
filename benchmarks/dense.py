"""The plain way: build the d × d matrix, then measure it. Written to be compared with."""

from __future__ import annotations

import numpy as np


def dense_scores(matrix: np.ndarray, gamma: float = 2.0) -> tuple[float, float]:
    """Symmetry and directionality of a matrix, or the sums of them over a stack."""
    square_norm = np.sum(matrix * matrix, axis=(-2, -1))
    symmetry = np.sum(matrix * np.swapaxes(matrix, -1, -2), axis=(-2, -1)) / square_norm
    rows = np.linalg.norm(matrix, axis=-1)
    columns = np.linalg.norm(matrix, axis=-2)
    sums = []
    for norms in (rows, columns):
        threshold = norms.mean(-1, keepdims=True) + gamma * norms.std(-1, ddof=1, keepdims=True)
        sums.append(np.where(norms > threshold, norms, 0).sum(-1))
    directionality = (sums[0] - sums[1]) / np.maximum(sums[0] + sums[1], 1e-30)
    return float(np.sum(symmetry)), float(np.sum(directionality))


def layer_product(query: np.ndarray, key: np.ndarray) -> None:
    """One layer: keys repeated for their queries, one d × d product. Weights are (H, R, D)."""
    keys = np.repeat(key, query.shape[0] // key.shape[0], axis=0)
    width = query.shape[-1]
    dense_scores(query.reshape(-1, width).T @ keys.reshape(-1, width))


def head_loop(query: np.ndarray, key: np.ndarray) -> None:
    """Every head: a loop of d × d products."""
    sharing = query.shape[0] // key.shape[0]
    for head, weight in enumerate(query):
        dense_scores(weight.T @ key[head // sharing])


def head_batch(query: np.ndarray, key: np.ndarray) -> None:
    """Every head: one batched product of H matrices d × d."""
    keys = np.repeat(key, query.shape[0] // key.shape[0], axis=0)
    dense_scores(np.swapaxes(query, -1, -2) @ keys)
