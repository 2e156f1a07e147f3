"""Views of one form: a row for each dimension, with the norms of a dense product."""

from __future__ import annotations

import numpy as np
from tests import small

import wqk
from wqk.inspecting.showing import form_view


def test_a_view_has_a_row_for_each_dimension() -> None:
    block = wqk.open(small.llama())[1]
    frame = form_view(block, "layer 1").frame
    dense = block.form.dense()
    assert frame["place"].to_list() == list(range(len(dense)))
    np.testing.assert_allclose(frame["row_norms"], np.linalg.norm(dense, axis=1))
    np.testing.assert_allclose(frame["column_norms"], np.linalg.norm(dense, axis=0))
