"""Columns on request against dense float64 matrices; tables with and without them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests import small
from tests.command import run

import wqk
from wqk import BilinearForm
from wqk.attention import Block
from wqk.errors import CheckpointError
from wqk.forms.spectra import spectrum
from wqk.tables.columns import MEASURES, Measure

D, H, G, R = 24, 4, 2, 6
model = partial(small.llama, biases="q", norms=True)


@pytest.fixture(scope="module")
def table() -> wqk.ScoreTable:
    return wqk.scan(model(), measures=["spectrum", "ceiling", "bands"], distances=[0, 5])


def test_rows_have_the_spectra_and_the_ceilings_of_their_forms(table: wqk.ScoreTable) -> None:
    attention = wqk.open(model())[1]
    ceiling = attention.ceiling([0, 5])
    for row in table.frame.filter(layer=1).iter_rows(named=True):
        distance, head = row["distance"], row["head"]
        if distance == 0:
            form = attention.form if head is None else attention[head]
            expected = spectrum(BilinearForm(form.query, form.key))
            spectrum_of_row = [row[name] for name in expected._fields]
            assert spectrum_of_row == pytest.approx([float(value) for value in expected], abs=1e-6)
        if head is not None:
            bounds = {
                "score_ceiling": ceiling.at_distance[distance][head],
                "score_ceiling_any_distance": ceiling.any_distance[head],
                "query_norm": ceiling.query_norm[head],
                "key_norm": ceiling.key_norm[head],
            }
            assert {name: row[name] for name in bounds} == pytest.approx(bounds)


def test_bands_are_those_of_dense_matrices(table: wqk.ScoreTable) -> None:
    attention = wqk.open(model())[0]
    bands, turning = attention.bands(), attention.plan.rotary
    back = replace(turning, frequencies=-turning.frequencies)  # as nanochat turns
    turned = Block(model(), replace(attention.plan, rotary=back)).bands()
    assert turned.frequencies == pytest.approx(bands.frequencies)
    for head in range(H):
        form = attention[head]
        energies = [
            np.linalg.norm(form.query[:, [k, k + R // 2]])
            * np.linalg.norm(form.key[:, [k, k + R // 2]])
            for k in range(R // 2)
        ]
        assert bands.energies[head] == pytest.approx(energies)
        row = table.frame.filter(layer=0, head=head, distance=0).row(0, named=True)
        # Of three planes, the slowest one is the slower half.
        assert row["rotary_low_share"] == pytest.approx(energies[2] / sum(energies))


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_a_measure_fills_its_columns_and_no_others(measure: Measure) -> None:
    plain, table = wqk.scan(model()), wqk.scan(model(), measures=[measure.name])
    added = {name: table[name] for name in table.frame.columns if name not in plain.frame.columns}
    assert set(added) == {column.name for column in measure.columns}, f"compute of {measure.name}"
    assert not any(values.is_null().any() for values in added.values())
    assert (f"--{measure.name} " in run("scan", "--help").output) == bool(measure.help)


def test_chosen_layers_and_what_is_refused() -> None:
    assert wqk.scan(model(), layers=[1], heads=False).frame["layer"].to_list() == [1]
    with pytest.raises(CheckpointError, match="no layer 7; layers are numbered from 0 to 1"):
        wqk.scan(model(), layers=[1, 7])
    with pytest.raises(CheckpointError, match="no measure 'rank'"):
        wqk.scan(model(), measures=["rank"])
    with pytest.raises(CheckpointError, match="for queries and keys"):
        wqk.scan(model(), measures=["bands"], circuit="ov")


def test_where_no_norm_feeds_a_block_there_is_no_ceiling() -> None:
    table = wqk.scan(wqk.demo_model("decoder"), measures=["ceiling"], heads=False)
    assert "score_ceiling" not in table.frame.columns
    assert "no norm is known" in table.metadata["no_ceiling"]["decoder"]


def test_an_attention_factor_is_no_change_with_distance() -> None:
    stretched = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 16}
    plain, with_factor = (
        wqk.scan(small.llama(rope_parameters=stretched | more), distances=[0, 1, 5]).frame
        for more in ({}, {"attention_factor": 1.5})
    )
    for score in ("norm", "symmetry"):
        np.testing.assert_allclose(with_factor[score], plain[score])
