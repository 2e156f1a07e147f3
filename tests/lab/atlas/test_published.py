"""The transcription against the published files, and finding a row by what one types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk.errors import UnknownName
from wqk.scanning.surveys.model_sets import model_set, model_sets
from wqk_lab.atlas import __file__ as atlas_file
from wqk_lab.atlas import flags, lookup, published

MISSING_ROWS = [
    ("BERT-bass", ["did you mean BERT-base"]),
    ("mixtral", ["Mixtral-8x22B"]),
    ("qqqqqq", ["wqk lab atlas lists"]),
    ("", ["wqk lab atlas lists"]),
    ("openai/whisper-tinny", ["openai/whisper-tiny"]),
]

DATA = Path(atlas_file).parent / "data"

# The published files' own name of each row, in the order of the tables: left half, right half.
FILES = """\
BERT bert-tiny bert-mini bert-small bert-medium bert-base bert-large bert-distill
BERT google/bert_uncased_L-2_H-128_A-2 google/bert_uncased_L-4_H-256_A-4
BERT google/bert_uncased_L-4_H-512_A-8 google/bert_uncased_L-8_H-512_A-8
BERT bert-base-uncased bert-large-uncased distilbert-base-uncased
BERT microsoft/beit-base-patch16-224-pt22k microsoft/beit-large-patch16-224-pt22k
BERT microsoft/beit-base-patch16-224 microsoft/beit-large-patch16-224
BERT microsoft/beit-base-patch16-384 microsoft/beit-large-patch16-384
BERT microsoft/beit-large-patch16-512
ALBERT albert-base-v2 albert-large-v2 albert-xlarge-v2 albert-xxlarge-v2
ROBERTA FacebookAI/roberta-base FacebookAI/roberta-large FacebookAI/xlm-roberta-base
ROBERTA FacebookAI/xlm-roberta-large FacebookAI/roberta-large-mnli distilbert/distilroberta-base
ModernBERT answerdotai/ModernBERT-base
GPT gpt1 gpt2 gpt2-medium
GPT-neo gpt-neo-1.3b gpt-neo-2.7b gpt-j-6b
GPT openai-gpt gpt2-xl distilbert/distilgpt2
GPT-neo EleutherAI/gpt-neo-125m EleutherAI/gpt-neo-1.3B EleutherAI/gpt-neo-2.7B EleutherAI/gpt-j-6B
LLAMA llama2-7b llama2-13b llama3-8b llama3.1-8b llama3.2-8b llama3.2-1b llama3.2-3b
LLAMA meta-llama/Llama-2-7b-hf meta-llama/Llama-2-70b-hf meta-llama/Llama-2-7b-chat-hf
LLAMA meta-llama/Llama-2-13b-chat-hf meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-70B
LLAMA meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-70B meta-llama/Llama-3.1-405B
LLAMA meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B
MISTRAL mistralai/Mistral-7B-v0.1 mistralai/Mixtral-8x22B-v0.1
MobileLLM facebook/MobileLLM-125M facebook/MobileLLM-350M
phi-1 microsoft/phi-1_5 microsoft/phi-1
phi-2 microsoft/phi-2
"""
SOURCES = [
    (source, name)
    for line in FILES.strip().splitlines()
    for source, *names in [line.split()]
    for name in names
]


Layers = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def files(shared: Path) -> dict[tuple[str, str], Layers]:
    """The layers' scores of each row of the published files."""
    frame = pl.read_csv(shared / "reference" / "published_scores.csv").sort("layer")
    columns = ("symmetry", "directionality", "parameters")
    rows = {source: frame.filter(source_file=source[0], model=source[1]) for source in SOURCES}
    layers_by_source = {}
    for source, row in rows.items():
        layers_by_source[source] = {column: row[column].to_numpy() for column in columns}
    return layers_by_source


@pytest.fixture(scope="module")
def rows_with_layers(files: dict[tuple[str, str], Layers]) -> list[tuple[dict[str, Any], Layers]]:
    """Every printed row with its layers."""
    return list(zip(published().to_dicts(), files.values(), strict=True))


def test_every_printed_number_is_the_files_to_two_decimals(rows_with_layers: Any) -> None:
    absent = []
    for row, layers in rows_with_layers:
        for score in ("symmetry", "directionality"):
            if row[score] is None:
                absent.append((row["name"], score))
                continue
            low, middle, high = np.percentile(layers[score], [25, 50, 75])
            assert row[score] == pytest.approx(middle, abs=0.00501), row
            assert row[f"{score}_below"] == pytest.approx(middle - low, abs=0.00501), row
            assert row[f"{score}_above"] == pytest.approx(high - middle, abs=0.00501), row
    assert absent == [("GPT2-medium", "directionality"), ("Phi-2", "directionality")]


def test_rows_of_one_model_have_one_symmetry_unless_a_flag_says_why(rows_with_layers: Any) -> None:
    for row, layers in rows_with_layers:
        own_symmetry = layers["symmetry"]
        untrained = np.abs(own_symmetry).max() < 0.002
        assert ("random-looking" in row["flags"]) == untrained, row
        symmetries = [
            other_layers["symmetry"]
            for other_row, other_layers in rows_with_layers
            if other_row["model"] == row["model"] and "random-looking" not in other_row["flags"]
        ]
        assert ("missing-layers" in row["flags"]) == (
            len(own_symmetry) < max(map(len, symmetries))
        ), row
        for symmetry in symmetries:
            shared_layers = min(len(own_symmetry), len(symmetry))
            change = np.abs(own_symmetry[:shared_layers] - symmetry[:shared_layers]).max()
            assert untrained or change < 1e-5, row


def test_mislabeled_rows_are_not_the_models_of_their_names(files: Any) -> None:
    def change(first_name: str, other_name: str) -> float:
        pair = [files["LLAMA", name]["symmetry"] for name in (first_name, other_name)]
        return float(np.abs(pair[0] - pair[1]).max())

    hub = "meta-llama/Llama-2-"
    assert change("llama2-7b", f"{hub}7b-chat-hf") == 0
    assert change("llama2-7b", f"{hub}7b-hf") > 0.001
    assert change("llama2-13b", f"{hub}13b-chat-hf") == 0
    assert change("llama3.2-8b", "llama3.2-1b") == 0
    mislabeled = published().filter(pl.col("flags").list.contains("mislabeled"))
    assert mislabeled.select("name", "model").rows() == [
        ("LLaMA2-7B", f"{hub}7b-chat-hf"),
        ("LLaMA2-13B", f"{hub}13b-chat-hf"),
        ("LLaMA3.2-8B", "meta-llama/Llama-3.2-1B"),
        ("LLaMA2-7B-chat", f"{hub}7b-hf"),
    ]


def test_contradicted_rows_have_one_symmetry_and_two_directionalities(
    rows_with_layers: Any,
) -> None:
    for row, layers in rows_with_layers:
        last = [
            other_layers
            for other_row, other_layers in rows_with_layers
            if other_row["model"] == row["model"]
        ][-1]
        has_equal_symmetry = len(layers["symmetry"]) == len(last["symmetry"]) and np.array_equal(
            layers["symmetry"].round(5), last["symmetry"].round(5)
        )
        moved = (
            has_equal_symmetry
            and np.abs(layers["directionality"] - last["directionality"]).mean() > 0.03
        )
        assert ("contradicted" in row["flags"]) == moved, row


def test_parameters_are_those_of_the_models(rows_with_layers: Any) -> None:
    for row, layers in rows_with_layers:
        # The files leave out an output layer that is a tensor of its own.
        assert row["parameters"] == pytest.approx(layers["parameters"][0], rel=0.13), row


def test_every_flag_is_known_and_every_model_is_in_a_set() -> None:
    models = set().union(*map(model_set, model_sets()))
    rows = published()
    assert set(rows["model"]) <= models
    assert set(rows["flags"].explode().drop_nulls()) <= flags().keys()
    for flag in flags().values():
        assert flag.title
        assert flag.explanation.endswith(".")
        assert "  " not in flag.explanation
        assert set(flag.drawn) <= models - set(rows["model"])


def test_grouped_and_fused_models_are_artifacts_and_others_are_not() -> None:
    rows = published()
    grouped = ("Llama-2-70b", "Llama-3", "Mistral", "Mixtral", "MobileLLM")
    for row in rows.to_dicts():
        expected = any(word in row["model"] for word in grouped)
        assert ("grouped-heads" in row["flags"]) == expected
        assert ("fused-tensor" in row["flags"]) == ("ModernBERT" in row["model"])
    sound = rows.filter("sound")
    assert sound.filter(stack="encoder")["symmetry"].min() == 0.26
    assert sound.filter(stack="decoder")["symmetry"].max() == 0.19


@given(
    st.deferred(lambda: st.sampled_from(published().to_dicts())),
    st.sampled_from(["name", "model", "last"]),
    st.sampled_from([str.lower, str.upper, str.swapcase, lambda text: f" {text} "]),
)
def test_a_row_is_found_by_any_of_its_names(row, column, spelled):  # type: ignore[no-untyped-def]
    name = row["model"].split("/")[1] if column == "last" else row[column]
    matches = lookup(spelled(name))
    scores = [key for key in row if key.startswith(("symmetry", "directionality"))]
    scores_of_matches = matches.select(scores).to_dicts()
    assert {score: row[score] for score in scores} in scores_of_matches
    for match in matches.to_dicts():
        assert match["name"] == row["name"] or match["model"] == row["model"]
    assert not matches.select("model", "flags", *scores).is_duplicated().any()


@pytest.mark.parametrize(("name", "words"), MISSING_ROWS)
def test_a_name_without_a_row_says_what_to_do(name: str, words: list[str]) -> None:
    with pytest.raises(UnknownName) as raised:
        lookup(name)
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def test_at_most_five_names_are_suggested_the_closest_first() -> None:
    with pytest.raises(UnknownName) as raised:
        lookup("LLaMA3-8C")
    assert len(raised.value.close) == 5
    assert raised.value.close[0] == "LLaMA3-8B"


def test_table_1_is_how_the_published_runs_end(shared: Path) -> None:
    losses = pl.read_csv(shared / "reference" / "published_loss.csv").filter(mode="encoder")
    models = {"4-layer": "bert_small", "12-layer": "bert"}
    ends: dict[tuple[str, str], float] = {}
    for row in pl.read_csv(DATA / "table1.csv", comment_prefix="#").iter_rows(named=True):
        run = losses.filter(
            model=models[row["size"]],
            dataset=row["dataset"].lower().replace(" ", "_"),
            init=row["initialization"],
        ).sort("step")
        end = run["loss"][-1]
        assert row["loss"] == pytest.approx(end, abs=0.00051), row
        cell = (row["size"], row["dataset"])
        if row["initialization"] == "random":
            ends[cell] = end
            continue
        reached = run.filter(pl.col("loss") <= ends[cell])["step"]
        saved = 1 - reached[0] / run["step"][-1] if len(reached) else 0.0
        assert row["speed_up"] == pytest.approx(saved, abs=0.00501), row
