"""Products of forms against the matrices themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk.forms import BilinearForm
from wqk_lab.theory.evidence import cosine, inner_product


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_products_are_those_of_the_matrices(
    seed: int, width: int, rank: int, other_rank: int
) -> None:
    random = np.random.default_rng(seed)
    form = BilinearForm.from_factors(*random.standard_normal((2, width, rank)))
    other_form = BilinearForm.from_factors(*random.standard_normal((2, width, other_rank)))
    m, n = form.dense(), other_form.dense()
    assert inner_product(form, other_form) == pytest.approx((m * n).sum(), abs=1e-9)
    assert inner_product(form, other_form.T) == pytest.approx(np.trace(m @ n), abs=1e-9)
    expected = (m * n).sum() / np.linalg.norm(m) / np.linalg.norm(n)
    assert cosine(form, other_form) == pytest.approx(expected, abs=1e-9)
