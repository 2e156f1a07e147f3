"""Limits of the machine: reading, multiplying, and the least that a scan needs of both.

Axes: H query heads, G key heads, R head width, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
from threadpoolctl import threadpool_limits

import wqk
from wqk._machine import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.generate import Shape

SIDE = 2048  # of the product whose rate counts
PRODUCT = 2 * SIDE**3  # its operations


def product(threads: int | None = None) -> Callable[[], object]:
    """Return a call that computes one large float32 product, on all threads or that many."""
    a, b = np.random.default_rng(0).standard_normal((2, SIDE, SIDE), np.float32)

    def multiply() -> None:
        with threadpool_limits(threads, user_api="blas"):
            a @ b

    return multiply


def reading(path: Path, count: int) -> Callable[[], object]:
    """Return a call that reads a file's first ``count`` bytes, out of the page cache."""
    buffer = bytearray(2**22)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            for _ in range(0, count, len(buffer)):
                file.readinto(buffer)

    return read


def own_products(folder: Path) -> Callable[[], object]:
    """Return a function that repeats the matrix products of a scan of this checkpoint.

    Their operands are kept as the scan had them, in the same layout of memory; but they are made in
    this thread, since they would take the memory that a scan's own threads use again.
    """
    operands: list[tuple[np.ndarray, np.ndarray]] = []
    multiply = np.matmul

    def recorded(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        operands.append((a, b))
        return multiply(a, b)

    pool = mock.MagicMock()
    pool.return_value.__enter__.return_value.map = map
    with (
        mock.patch.object(np, "matmul", recorded),
        mock.patch("wqk.scanning.scan.ThreadPoolExecutor", pool),
    ):
        wqk.scan(folder)

    def repeat() -> None:
        with one_blas_thread():
            for a, b in operands:
                multiply(a, b)

    return repeat


def operations(shape: Shape, heads: bool) -> float:
    """Fewest floating-point operations known for a layer's, and its heads', scores.

    A layer of rank r = G R: two symmetric Gram matrices at D r² each, BᵀA, and the row and column
    norms at 2 D r² each; or all of M at 2 D² r. Its within-heads term: BᵀA of every head. A head:
    the same Gram matrices (the key's shared in its group) and norms with R for r.
    """
    width, rank = shape.width, shape.key_heads * shape.head_width
    each = width * shape.head_width**2
    layer = min(8 * width * rank**2, 2 * width**2 * rank) + shape.heads * 2 * each
    return layer + (shape.heads * 5 * each + shape.key_heads * each if heads else 0)
