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


def test_the_coupling_has_the_symmetry_within_heads_by_chance() -> None:
    model = wqk.demo_model("encoder")
    view = wqk.show(model, 0, coupling=True)
    layer = wqk.scan(model, layers=[0]).layers
    assert view.values["symmetry_within_random"] == layer["symmetry_within_random"][0]
    assert "0.240 within heads if the rank dimensions were assigned to heads at random" in (
        " ".join(str(view).split())
    )
