"""Products of forms against the matrices themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk.forms import BilinearForm
from wqk_lab.theory.evidence import cosine, inner_product


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_products_are_those_of_the_matrices(seed: int, width: int, rank: int, other: int) -> None:
    random = np.random.default_rng(seed)
    one = BilinearForm.from_factors(*random.standard_normal((2, width, rank)))
    two = BilinearForm.from_factors(*random.standard_normal((2, width, other)))
    m, n = one.dense(), two.dense()
    assert inner_product(one, two) == pytest.approx((m * n).sum(), abs=1e-9)
    assert inner_product(one, two.T) == pytest.approx(np.trace(m @ n), abs=1e-9)
    expected = (m * n).sum() / np.linalg.norm(m) / np.linalg.norm(n)
    assert cosine(one, two) == pytest.approx(expected, abs=1e-9)
