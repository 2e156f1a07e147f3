"""Pictures of a table in one call."""

from __future__ import annotations

import numpy as np
import pytest

import wqk
from wqk.errors import TableError


@pytest.fixture(scope="module")
def table() -> wqk.ScoreTable:
    return wqk.join([wqk.scan(wqk.demo_model(name)) for name in ("encoder", "decoder")])


def test_layers_are_curves_that_differ_by_more_than_color(table: wqk.ScoreTable) -> None:
    figure = table.plot()
    figure.draw_without_rendering()
    scores = table.layers.frame
    curves = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in curves] == ["demo:encoder", "demo:decoder"]
    for line in curves:
        name = line.get_label().removeprefix("demo:")
        rows = scores.filter(scores["checkpoint"].str.ends_with(name))
        np.testing.assert_array_equal(line.get_ydata(), rows["symmetry"])
    assert len({(line.get_marker(), line.get_linestyle()) for line in curves}) == 2
    assert [text.get_text() for text in figure.axes[0].texts] == ["by chance"]
    assert figure.axes[0].get_ylim() == (-1, 1)


def test_heads_are_maps_of_layers_and_heads(table: wqk.ScoreTable) -> None:
    figure = table.plot("heads")
    figure.draw_without_rendering()
    image = figure.axes[3].images[0].get_array()
    heads = table.heads.frame
    decoder = heads.filter(heads["checkpoint"].str.ends_with("decoder"))
    np.testing.assert_array_equal(image, decoder["directionality_excess"].to_numpy().reshape(4, 4))


def test_what_cannot_be_plotted_is_said(table: wqk.ScoreTable) -> None:
    with pytest.raises(TableError, match="view is 'layers', 'heads', 'models'; got 'rows'"):
        table.plot("rows")
    with pytest.raises(TableError, match="no rows of heads"):
        table.layers.plot("heads")
