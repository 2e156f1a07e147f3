"""Placing: against a loop over the printed rows, and as a sentence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.lab.atlas.making import layers

from wqk.tables.score_table import join
from wqk_lab.atlas import place, published

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
