"""Placing: against a loop over the printed rows, and as a sentence."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from tests.command import run
from tests.lab.atlas.making import layers

import wqk
from wqk.tables.score_table import ScoreTable, join
from wqk_lab.atlas import place, published, sound_models
from wqk_lab.atlas.ranks import typical_symmetry

SCORE = st.floats(-1, 1)


def exceeded(value: float, score: str, stack: str) -> str:
    """By brute force: ``n of m``, every sound model once."""
    row_by_model = {row["model"]: row for row in published().to_dicts() if row["sound"]}
    stored_values = [row[score] for row in row_by_model.values() if row["stack"] == stack]
    values = [stored for stored in stored_values if stored is not None]
    if score == "symmetry":
        below = [stored for stored in values if stored < round(value, 2)]
        return f"{len(below)} of {len(values)}"
    above = [stored for stored in values if stored > round(value, 2)]
    return f"{len(above)} of {len(values)}"


@given(SCORE, SCORE)
def test_standings_are_counted_over_the_sound_models(symmetry: float, directional: float) -> None:
    (placement,) = place(layers([symmetry], [directional]))
    for score, value, position in (
        ("symmetry", symmetry, placement.symmetry),
        ("directionality", directional, placement.directionality),
    ):
        assert position.value == value
        assert str(position.encoders) == exceeded(value, score, "encoder")
        assert str(position.decoders) == exceeded(value, score, "decoder")


def test_a_published_row_does_not_exceed_itself() -> None:
    row = published().filter(name="BERT-tiny").row(0, named=True)
    (placement,) = place(layers([row["symmetry"] + 0.004], [row["directionality"] - 0.004]))
    assert str(placement.symmetry.encoders) == "23 of 24"
    assert str(placement.directionality.encoders) == "23 of 24"


def test_it_is_one_sentence() -> None:
    (placement,) = place(layers([0.95, 0.95], [0.9, 0.9]))
    assert str(placement) == (
        "more symmetric than 24 of 24 published encoders and 15 of 15 decoders; "
        "columns more dominant than in 0 of 24 published encoders and 0 of 13 decoders"
    )


def test_stacks_are_placed_apart_and_cross_attention_is_not() -> None:
    table = join(
        [
            layers([0.4], [0.0]),
            layers([0.1], [-0.5], stack="decoder"),
            layers([None], [-0.5], stack="decoder", kind="cross"),
        ]
    )
    assert [p.stack for p in place(table)] == ["encoder", "decoder"]


def test_without_symmetry_only_directionality_is_told() -> None:
    (placement,) = place(layers([None], [-0.99]))
    assert placement.symmetry is None
    assert str(placement) == (
        "columns more dominant than in 24 of 24 published encoders and 13 of 13 decoders"
    )


def test_what_does_not_compare_is_not_placed() -> None:
    assert place(layers([0.4], [0.0], metadata={"folded_norms": True})) == []
    assert place(layers([float("nan")], [float("nan")], status="degenerate")) == []


def test_a_median_is_typical_of_what_lies_between_nine_tenths_of_models() -> None:
    """Between the 10 % and the 90 % quantile of a stack; equal ends belong to it."""
    values = {stack: [] for stack in ("encoder", "decoder")}
    for row in {row["model"]: row for row in published().to_dicts() if row["sound"]}.values():
        if row["symmetry"] is not None:
            values[row["stack"]].append(row["symmetry"])
    ends = {
        stack: [float(end) for end in np.quantile(each, [0.1, 0.9]).round(2)]
        for stack, each in values.items()
    }
    assert {stack: list(typical_symmetry(stack)) for stack in ends} == ends
    named = {stack: f"{stack}s ({low:.2f} to {high:.2f})" for stack, (low, high) in ends.items()}
    (encoder_low, encoder_high), (decoder_low, decoder_high) = ends.values()
    both = f"published {named['encoder']} and {named['decoder']}"
    assert decoder_high < encoder_low
    for value, judgment in (
        (encoder_low, f"typical of published {named['encoder']}, not of {named['decoder']}"),
        (decoder_high, f"typical of published {named['decoder']}, not of {named['encoder']}"),
        (decoder_high + 0.01, f"between {both}"),
        (encoder_high + 0.01, f"above most {both}"),
        (decoder_low - 0.01, f"below most {both}"),
    ):
        (placement,) = place(layers([value], [0.0]))
        assert placement.meaning == f"A median symmetry of {value:.2f} is {judgment}."
    (without,) = place(layers([None], [-0.5]))
    assert without.meaning == ""


def test_a_placement_has_the_models_that_it_is_among() -> None:
    (placement,) = place(layers([0.3], [0.0]))
    assert (placement.name, placement.stack) == ("up", "encoder")
    columns = {"name", "stack", "symmetry", "directionality"}
    assert {frozenset(model) for model in placement.others} == {frozenset(columns)}
    scored = sound_models().drop_nulls(["symmetry", "directionality"])
    assert [model["name"] for model in placement.others] == scored["name"].to_list()


def test_models_that_look_untrained_or_are_guessed_are_not_placed() -> None:
    """From half of the layers on."""
    for count, placed in ((1, 1), (2, 0)):
        looks = ["random-looking"] * count + ["ok"] * (4 - count)
        rows = [
            layers([0.3], [0.0], status=status).frame.with_columns(layer=pl.lit(number, pl.Int64))
            for number, status in enumerate(looks)
        ]
        assert len(place(ScoreTable(pl.concat(rows), {}))) == placed
    assert place(layers([0.3], [0.0], family="inferred")) == []
    assert len(place(layers([0.3], [0.0], family="bert"))) == 1


def test_chosen_layers_have_no_rank_among_medians_of_whole_models() -> None:
    model = wqk.demo_model("encoder")
    assert place(wqk.scan(model))
    assert place(wqk.scan(model, layers=[0, 1, 2, 3]))
    assert not place(wqk.scan(model, layers=[0]))
    shown = run("scan", model, "--layers", "0,-1").stdout
    assert "layers 0, 3 of 4" in shown
    assert "rank" not in shown
    assert "layer 0 of 4" in run("scan", model, "--layers", "0", "--heads").stdout
