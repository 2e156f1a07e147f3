"""The models that Figures 2, S1 and S2 show, and their names and stacks there."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.lab.figures.making import row, table

from wqk.errors import TableError
from wqk.reporting.demo import demo_table
from wqk.tables.score_table import ScoreTable
from wqk_lab.atlas import all_published, drawn_models, flags, sound_models
from wqk_lab.figures.by_layer import examples, picture
from wqk_lab.figures.model_sizes import HOLLOW, by_size, left_out, model_rows


def own(figure: str, *rows: dict[str, Any]) -> list[tuple[str, str]]:
    shown = model_rows(figure, table(*rows)).filter(source="own")
    return shown.select("name", "stack").rows()


def test_every_published_model_has_its_place_and_every_artifact_a_reason() -> None:
    rows = pl.concat([model_rows(figure) for figure in ("fig2", "s1", "s2")])
    assert rows.filter("sound").height == sound_models().height + drawn_models()["sound"].sum()
    artifacts = all_published().filter(~pl.col("sound"))
    assert set(rows.filter(~pl.col("sound"))["model"]) == set(artifacts["model"])
    assert set(rows["model"]) == set(all_published()["model"])
    assert set(model_rows("s1")["modality"]) == {"vision", "audio"}
    assert not rows.filter("sound").select("model", "stack").is_duplicated().any()
    assert {name for name, flag in flags().items() if flag.artifact} == set(HOLLOW)
    scores = ["symmetry", "symmetry_below", "symmetry_above", "directionality"]
    bert = model_rows("fig2").filter(name="BERT-base").select(scores)
    assert bert.rows() == [(0.51, 0.09, 0.07, -0.08)]  # as printed


def test_models_of_the_papers_sets_are_shown_where_they_belong() -> None:
    rows = [
        row(0, checkpoint="openai-community/gpt2", stack="decoder"),
        row(0, checkpoint="/models/vit-base-patch16-224"),
        row(0, checkpoint="openai/whisper-tiny"),
        row(0, checkpoint="openai/whisper-tiny", stack="decoder"),
    ]
    assert own("fig2", *rows) == [("gpt2", "decoder")]
    assert own("s1", *rows) == [("vit-base-patch16-224", "encoder")]
    assert own("s2", *rows) == [("whisper-tiny", "encoder"), ("whisper-tiny", "decoder")]


def test_unknown_models_go_by_their_stacks() -> None:
    of_both_stacks = [row(0, checkpoint="both", stack=stack) for stack in ("encoder", "decoder")]
    single = [row(0, checkpoint="mine", stack="vision"), row(0, checkpoint="x", stack="backbone")]
    assert own("fig2", *of_both_stacks, *single) == [("mine", "encoder")]
    assert own("s2", *of_both_stacks, *single) == [("both", "encoder"), ("both", "decoder")]


def test_of_several_steps_the_last_counts() -> None:
    rows = [row(0, step=step, symmetry=step / 100) for step in (0, 50, 20)]
    shown = model_rows("fig2", table(*rows)).filter(source="own")
    assert shown.select("name", "symmetry").rows() == [("model, step 50", 0.5)]


def test_scores_of_other_forms_are_refused() -> None:
    folded = ScoreTable(table(row(0)).frame, {"folded_norms": True})
    with pytest.raises(TableError, match="model: no scores of plain self-attention"):
        model_rows("fig2", folded)


def test_the_shown_forms_are_the_clearest_ones() -> None:
    blocks = demo_table().details.blocks
    layers = demo_table().layers.frame
    encoder = layers.filter(checkpoint="encoder").sort("symmetry")["layer"][-1]
    titles = list(examples(blocks))
    assert titles[0] == f"encoder, layer {encoder}"
    assert titles[1].startswith("decoder, layer")
    assert list(examples(blocks[:1])) == ["encoder, layer 0"]
    image = picture(blocks[0])
    assert image.outlying_rows.nonzero()[0].tolist() == blocks[0].outlying_rows.tolist()
    assert image.pixels.shape == (128, 128)


def test_the_columns_of_a_form_are_uneven_relative_to_its_rows() -> None:
    """The size of a form does not make it uneven."""
    decoder = [block for block in demo_table().details.blocks if block.key.stack == "decoder"]
    ratios = [np.std(block.column_norms) / np.std(block.row_norms) for block in decoder]
    large = decoder[int(np.argmin(ratios))]
    norms = {"row_norms": 100 * large.row_norms, "column_norms": 100 * large.column_norms}
    blocks = [replace(block, **norms) if block is large else block for block in decoder]
    encoder = next(block for block in demo_table().details.blocks if block.key.stack == "encoder")
    _, title = examples([encoder, *blocks])
    assert title == f"decoder, layer {decoder[int(np.argmax(ratios))].key.layer}"


def test_one_model_alone_fills_both_panels() -> None:
    decoder = [block for block in demo_table().details.blocks if block.key.stack == "decoder"]
    pictures = examples(decoder)
    assert len(pictures) == 2
    figure = by_size(model_rows("fig2"), pictures)
    texts = chain.from_iterable(axis.texts for axis in figure.axes)
    letters = [text.get_text() for text in texts]
    assert {"a", "b", "c", "d"} <= set(letters)


def test_the_models_that_matter_are_named() -> None:
    figure = by_size(model_rows("fig2"))
    names = {text.get_text() for text in figure.axes[0].texts}
    assert {"BERT-2L-128", "LLaMA2-13B-chat"} <= names
    assert len(names) < 12


def test_a_checkpoint_of_queries_and_keys_alone_has_no_size() -> None:
    shape = {"rank": 64, "d_query": 64, "d_key": 64, "heads": 4, "key_heads": 4}
    weights = 2 * 64 * 64
    attention_alone = row(0, checkpoint="alone", parameters=weights + 128, **shape)
    complete = row(0, checkpoint="whole", parameters=10 * weights, **shape)
    assert own("fig2", attention_alone, complete) == [("whole", "encoder")]
    scores = table(attention_alone, complete)
    (line,) = left_out(scores)
    assert line.startswith("alone: queries and keys alone, without the other parameters")
    assert "--parameters alone=N, in Python" in line
    with pytest.raises(TableError) as caught:
        own("fig2", attention_alone)
    message = str(caught.value)
    assert message.startswith("fig2 places models by their size; alone: queries and keys alone, ")
    assert '; give its size: --parameters alone=N, in Python Sources(..., parameters={"' in message
    assert "or" not in message.split()  # one reason, not a list of possible ones
    sized = model_rows("fig2", scores, {"alone": 12_345}).filter(source="own")
    assert sized.select("name", "parameters").rows() == [
        ("alone", 12_345),
        ("whole", 10 * weights),
    ]
    assert left_out(scores, {"alone": 12_345}) == []


def test_each_model_that_is_not_placed_has_its_own_reason() -> None:
    scores = table(
        row(0, checkpoint="org/bert-base-uncased", parameters=None),
        row(0, checkpoint="far", distance=4),
        row(0, checkpoint="wide", stack="backbone"),
        row(0, checkpoint="good"),
    )
    unsized, far, wide = left_out(scores)
    assert unsized.startswith("bert-base-uncased: no number of parameters in the table")
    assert "--parameters bert-base-uncased=109000000, in Python" in unsized  # the published size
    assert far.startswith("far: no scores of plain self-attention")
    assert wide == "wide: neither an encoder nor a decoder"
    sized = model_rows("fig2", scores, {"org/bert-base-uncased": 5, "good": 7})
    assert sized.filter(source="own")["parameters"].to_list() == [5, 7]


def test_sizes_are_of_checkpoints_of_the_table() -> None:
    scores = table(row(0, checkpoint="a/mine"), row(0, checkpoint="b/mine"), row(0))
    for parameters, message in (
        ({"modle": 5}, "no such checkpoint in the table; did you mean 'model'?"),
        ({"x": 5}, "no such checkpoint in the table; there are: mine, mine, model"),
        ({"mine": 5}, "several checkpoints have this name; expected one of a/mine, b/mine"),
        ({"model": 0}, "parameters of model: expected a whole number from 1 on, got 0"),
    ):
        with pytest.raises(TableError, match=re.escape(message)):
            model_rows("fig2", scores, parameters)
    with pytest.raises(TableError, match="no such checkpoint in the table; there are: none"):
        model_rows("fig2", None, {"mine": 5})


def test_a_form_of_zeros_or_that_is_not_square_is_no_example_of_symmetry() -> None:
    encoder = [block for block in demo_table().details.blocks if block.key.stack == "encoder"]
    first, second, third = encoder[:3]
    zeros = replace(first, image=np.zeros_like(first.image))
    oblong = replace(second, image=np.ones((4, 6)))
    title, _ = examples([zeros, oblong, third])
    assert title == f"encoder, layer {third.key.layer}"
