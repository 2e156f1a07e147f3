"""The products q·k that a running model computes, compared with those of the forms.

A guessed family does not describe positions, mask and scale, and some models do not report their
attention. What can still be compared is the product of queries and keys before anything is added,
without rotary positions: it is x_i W_q W_kᵀ y_jᵀ up to one factor, and up to what biases add to
whole rows and columns, which centering both removes.

Axes: B texts, H query heads, N tokens (I queries, J keys), D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.attention import Block

if TYPE_CHECKING:
    from wqk.inspecting.verification.recording import Application

# Operations of PyTorch that multiply batches of matrices; the last two arguments are the factors.
BATCHED = ("aten::bmm", "aten::baddbmm")

# Rounding of float64 products, relative to the largest, and how far a contrast must exceed it.
ROUNDING, MIN_SIGNAL = 1e-13, 1e3


class Products:
    """Batched products that are computed within attention modules."""

    def __init__(self) -> None:
        self._depth = 0
        self._kept: list[Any] = []

    def enter(self) -> None:
        """An attention module begins."""
        if self._depth == 0:
            self._kept.clear()
        self._depth += 1

    def leave(self) -> None:
        """It ends."""
        self._depth = max(0, self._depth - 1)

    def within(self) -> tuple[np.ndarray, ...]:
        """What the outermost running module has computed so far."""
        return tuple(product.numpy() for product in self._kept)

    @contextmanager
    def open(self, flat: bool) -> Iterator[None]:
        """Record what is computed; if ``flat``, with all angles of rotary positions set to zero."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils._python_dispatch import TorchDispatchMode

        flattened = {
            "aten::cos": lambda output: torch.ones_like(output),
            "aten::sin": lambda output: torch.zeros_like(output),
            "aten::polar": lambda output: torch.polar(output.abs(), torch.zeros_like(output.abs())),
        }
        products = self

        class Recording(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                output = func(*args, **(kwargs or {}))
                name = func._schema.name
                if name in BATCHED and products._depth:
                    products._kept.append(torch.bmm(*args[-2:]))
                return flattened[name](output) if flat and name in flattened else output

        self._depth = 0
        with sdpa_kernel(SDPBackend.MATH), Recording():
            yield


def form_difference(block: Block, application: Application | None) -> float | None:
    """The largest difference of a product from the form's, relative to the largest product.

    Of the computed products the closest counts; None if none is of all heads, queries and keys.
    """
    if application is None:
        return None
    x, y = application.query_input, application.key_input
    found = [
        _difference(expected, product)
        for last in {product.shape[-1] for product in application.products}
        for expected in _expected(block, x, y, last)
        for product in _of_size(application.products, expected)
    ]
    telling = [one for one in found if one == one]
    # One that cannot tell may be the product of these queries and keys.
    return min(telling) if telling and (len(telling) == len(found) or min(telling) < 1e-6) else None


def _expected(block: Block, x: np.ndarray, y: np.ndarray, keys: int) -> Iterator[np.ndarray]:
    """The forms' products (B, H, I, J) of inputs with this many keys; tokens may come first."""
    heads = block.heads
    if (x.shape[-1], y.shape[-1]) != heads.shape or (y.size // y.shape[-1]) % keys:
        return
    texts = y.size // y.shape[-1] // keys
    if (x.size // x.shape[-1]) % texts:
        return
    swaps = (False, True) if x.ndim == y.ndim == 3 and 1 not in x.shape[:2] else (False,)
    for swapped in swaps:
        given = (side.swapaxes(0, 1) if swapped else side for side in (x, y))
        left, right = (side.reshape(texts, -1, side.shape[-1]) for side in given)
        yield block.products(left, right)


def _of_size(products: tuple[np.ndarray, ...], expected: np.ndarray) -> Iterator[np.ndarray]:
    """Products of the expected size, in its shape; several texts may have one product each."""
    texts, keys = len(expected), expected.shape[-1]
    alike = [product for product in products if product.shape[-1] == keys]
    for product in alike:
        if product.size == expected.size:
            yield product.reshape(expected.shape)
    apart = [product for product in alike if product.size * texts == expected.size]
    if texts > 1:
        for start in range(len(apart) - texts + 1):
            yield np.concatenate(apart[start : start + texts]).reshape(expected.shape)


def _difference(expected: np.ndarray, product: np.ndarray) -> float:
    """Difference beyond rounding, relative to the largest centered product; NaN if it is noise."""
    rounding = ROUNDING * np.abs(product).max()
    expected, product = _centered(expected), _centered(product)
    size, square = np.abs(product).max(), float((expected**2).sum())
    if not (size > MIN_SIGNAL * rounding and 0 < square < np.inf):
        return np.nan
    factor = max(0.0, float((expected * product).sum()) / square)
    return float(max(0.0, np.abs(product - factor * expected).max() - rounding) / size)


def _centered(products: np.ndarray) -> np.ndarray:
    products = products - products.mean(axis=-1, keepdims=True)
    return np.asarray(products - products.mean(axis=-2, keepdims=True))
