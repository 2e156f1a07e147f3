"""Subjects out of checkpoints, runs, configurations and texts; what cannot be one is refused."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.theory import subjects
from tests.lab.theory.subjects import MASK, VOCABULARY, torch

import wqk
from wqk.errors import (
    LONGEST_MESSAGE,
    CheckpointError,
    CorpusError,
    RunError,
    UnknownFamily,
    WqkError,
)
from wqk.tables.run import create_run
from wqk_lab.theory.counts import cut
from wqk_lab.theory.opening import block_of, open_subjects
from wqk_lab.theory.subject import Subject, choose
from wqk_lab.theory.text import Text, open_text

SMALL: dict[str, Any] = {"batches": 2, "batch": 2, "block": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT, its decoder, a run of two steps, and a text."""
    folder = tmp_path_factory.mktemp("subjects")
    subjects.save(subjects.bert(), folder / "bert")
    subjects.save(subjects.bert(), folder / "mute")  # without a tokenizer
    subjects.save(subjects.bert(decoder=True), folder / "decoder")
    subjects.run_of({0: subjects.bert(decoder=True), 7: subjects.llama()}, folder / "run")
    subjects.tokens_file(folder)
    write_store(folder / "store")
    for name in ("bert", "decoder"):
        own_tokenizer(folder, name)
    return folder


def own_tokenizer(folder: Path, name: str) -> None:
    """Give a model the store's vocabulary."""
    tokenizer = (folder / "store/tokenizer.json").read_bytes()
    (folder / name / "tokenizer.json").write_bytes(tokenizer)


def write_store(folder: Path) -> None:
    from wqk_lab.training.corpus import CorpusOptions, build_corpus

    source = folder.with_suffix(".txt")
    source.write_text("\n\n".join("ab cd ef gh"[i % 7 :] * 20 for i in range(60)))
    options = CorpusOptions(text="characters", document="paragraph", held_out=2)
    build_corpus([source], folder, options)


def opened(ref: Path | str, corpus: Any, **options: Any) -> Subject:
    """The first state of a subject, on little text."""
    return next(open_subjects(str(ref), corpus, **{**SMALL, **options})[1])


@given(st.integers(2, 40), st.floats(0.001, 0.999), st.integers(0, 100))
def test_every_block_has_the_same_number_of_masked_tokens(length, share, seed):
    counts = set(choose(np.random.default_rng(seed), (4, length), share).sum(axis=1).tolist())
    assert len(counts) == 1
    assert 1 <= counts.pop() <= length - 1


def test_masked_examples_hide_what_they_ask_for() -> None:
    subject = subjects.subject(None, "masked", batches=3, mask_share=0.25)
    for tokens, (inputs, labels) in zip(subject.blocks, subject.examples(), strict=True):
        asked = labels != -100
        assert (asked.sum(axis=1) == 4).all()
        assert (inputs[asked] == MASK).all()
        assert (labels[asked] == tokens[asked]).all()
        assert (inputs[~asked] == tokens[~asked]).all()
    first, second = (labels for _, labels in list(subject.examples())[:2])
    assert ((first != -100) != (second != -100)).any()
    np.testing.assert_array_equal(next(iter(subject.examples()))[1], first)


def test_a_checkpoint_says_what_it_predicts(place: Path) -> None:
    for name, objective in (("bert", "masked"), ("decoder", "causal")):
        subject = opened(place / name, place / "store")
        assert (subject.name, subject.objective, subject.step) == (name, objective, None)
        assert subject.blocks.shape == (2, 2, 8)
        assert not subject.missing
        assert 1 < subject.model(**next(subject.batches())).loss.item() < 20


def test_one_checkpoint_can_be_made_to_predict_either(place: Path) -> None:
    """Causal: what comes later changes nothing. Masked: it does."""
    for objective, leaks in (("causal", False), ("masked", True)):
        model = opened(place / "bert", place / "store", objective=objective).model
        tokens = torch.arange(8)[None] + 4
        later = torch.cat([tokens[:, :5], tokens[:, 5:] + 1], dim=1)
        with torch.no_grad():
            logits = [model(input_ids=ids).logits[:, :5] for ids in (tokens, later)]
        assert bool((logits[0] != logits[1]).any()) == leaks


def test_the_same_seed_gives_the_same_blocks_and_fresh_weights(place: Path) -> None:
    configuration = subjects.configuration(place)
    drawn = [opened(configuration, place / "store", seed=seed) for seed in (0, 0, 1)]
    assert drawn[0].missing == ()
    assert drawn[0].is_fresh
    assert not opened(place / "bert", place / "store").is_fresh
    weights = [subject.model.state_dict() for subject in drawn]
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert (weights[0][name] == weights[1][name]).all()
    assert (weights[0][name] != weights[2][name]).any()
    np.testing.assert_array_equal(drawn[0].blocks, drawn[1].blocks)
    assert (drawn[0].blocks != drawn[2].blocks).any()


def test_a_run_is_opened_at_its_last_step_or_at_others(place: Path) -> None:
    run = str(place / "run")
    for steps, expected in ((None, [7]), ((), [0, 7]), ((0,), [0])):
        _, states = open_subjects(run, place / "tokens.npy", steps=steps, **SMALL)
        seen = list(states)
        assert [state.step for state in seen] == expected
        assert {state.name for state in seen} == {"run"}
    with pytest.raises(RunError, match="no checkpoint at step 3; saved are 0, 7"):
        open_subjects(run, place / "tokens.npy", steps=(3,), **SMALL)
    with pytest.raises(RunError, match="only a training run has steps"):
        open_subjects(str(place / "bert"), place / "tokens.npy", steps=(), **SMALL)


def test_a_run_is_read_in_blocks_no_longer_than_its_own(place: Path) -> None:
    for block, expected in ((8, 8), (512, 64)):
        folder = create_run(place / f"block-{block}", {"recipe": {"block": block}}).folder
        assert block_of(str(folder)) == expected
    assert block_of(str(place / "bert")) == block_of("bert") == 64
    subjects.save(subjects.bert(), place / "block-8" / "checkpoint-0")
    subject = opened(place / "block-8", place / "tokens.npy", block=None, objective="causal")
    assert subject.blocks.shape == (2, 2, 8)


def test_tensors_that_are_not_in_the_checkpoint_are_named(place: Path) -> None:
    subjects.save(subjects.bert().bert, place / "headless")
    own_tokenizer(place, "headless")
    missing = opened(place / "headless", place / "store").missing
    assert missing == tuple(sorted(missing))
    assert any(name.startswith("cls.predictions") for name in missing)
    assert not any("encoder" in name for name in missing)


def test_text_in_the_models_own_tokens(place: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = subjects.save(subjects.bert(), place / "with-tokenizer")
    vocabulary = {"[UNK]": 0, "[MASK]": 1, "one": 2, "two": 3, "fish": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)
    path = place / "fish.jsonl"
    path.write_text('{"text": "one fish two fish"}\n{"text": ""}\n{"text": "red fish"}\n')
    text = open_text(path, str(folder))
    assert text.tokens.tolist() == [2, 4, 3, 4, 0, 4]
    assert text.documents.tolist() == [0, 4, 6]
    assert (text.vocabulary_size, text.mask_token) == (5, 1)
    assert open_text(path, str(folder), limit=3).documents.tolist() == [0, 4]


def test_text_in_another_vocabulary_is_refused_or_doubted(place: Path) -> None:
    def doubt(ref: Path, corpus: str) -> str:
        return opened(ref, place / corpus).caveat

    assert doubt(place / "bert", "store") == ""
    assert doubt(subjects.configuration(place), "store") == ""  # its weights know no words
    assert "token ids alone" in doubt(place / "decoder", "tokens.npy")
    assert "no tokenizer" in doubt(place / "run", "tokens.npy")
    # Without a tokenizer the sizes have to be equal: 40 entries against those of the store.
    with pytest.raises(CorpusError, match="uses another vocabulary"):
        doubt(place / "run", "store")
    size = open_text(place / "store", "unused").vocabulary_size
    subjects.save(subjects.bert(vocab_size=size), place / "bare")
    assert "no tokenizer" in doubt(place / "bare", "store")
    # The same words with other numbers are another vocabulary.
    renumbered = subjects.save(subjects.bert(), place / "other")
    tokenizer = json.loads((place / "store/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (renumbered / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CorpusError, match="give a text in the model's own tokens"):
        doubt(renumbered, "store")


def test_everything_that_prevents_a_run_is_one_message(place: Path) -> None:
    prose = place / "prose.txt"
    prose.write_text("One sentence.\n\nAnother sentence.\n")
    demo = str(wqk.demo_model("decoder"))
    with pytest.raises(WqkError) as caught:
        opened(demo, prose, block=64)
    message = str(caught.value)
    assert "(1) most statements need more than the checkpoint's queries and keys" in message
    assert "(2) --block 64: the model has 32 positions; take 32 or less" in message
    assert "(3) " in message
    assert "has no tokenizer that encodes text" in message
    assert "(4) the model's vocabulary has 128 entries" in message
    assert 'wqk.demo_model("induction")' in message
    assert len(message) <= LONGEST_MESSAGE  # a longer one is cut where it is printed
    with pytest.raises(CorpusError) as caught:
        opened(demo, place / "store")
    assert "uses another vocabulary" in str(caught.value)
    assert "(128)" in str(caught.value)
    assert "wqk lab corpus FILE --tokenizer" in str(caught.value)
    assert "the checkpoint's queries and keys" in str(caught.value)
    with pytest.raises(CorpusError, match=r"\(2\) masking needs a mask token"):
        opened(str(wqk.demo_model("encoder")), place / "tokens.npy")
    # A single problem of a checkpoint with all weights is reported as it is.
    with pytest.raises(CheckpointError, match=r"^decoder: --block 40: the model has 32 positions"):
        opened(place / "decoder", place / "tokens.npy", block=40)


def test_blocks_are_no_longer_by_default_than_the_positions_of_the_model(place: Path) -> None:
    subject = opened(place / "decoder", place / "tokens.npy", block=None)
    assert subject.blocks.shape == (2, 2, 32)
    expected = "blocks of 32 tokens instead of 64, the model has no more positions"
    assert subject.shortened == expected
    short = opened(place / "decoder", place / "tokens.npy", block=16)
    assert short.shortened == ""
    # Rotary positions have no table: a longer block that is asked for is run.
    subjects.save(subjects.llama(), place / "llama")
    longer = opened(place / "llama", place / "tokens.npy", block=40)
    assert longer.blocks.shape == (2, 2, 40)


def test_no_code_of_a_checkpoint_is_run(place: Path) -> None:
    folder = subjects.save(subjects.bert(), place / "hostile")
    (folder / "evil.py").write_text("raise SystemExit('run')\n")
    automatic = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(automatic))
    (place / "words.txt").write_text("one two\n\nthree")
    with pytest.raises(CorpusError, match="has no tokenizer"):
        open_text(place / "words.txt", str(folder))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WqkError):
        opened(folder, place / "tokens.npy")


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_of_token_ids_are_documents(place: Path, order: Literal["C", "F"]) -> None:
    ids = subjects.text().tokens[:120].reshape(5, 24)
    np.save(place / "generated.npy", np.asarray(ids, order=order))
    for corpus in (place / "generated.npy", str(place / "generated.npy"), ids, torch.tensor(ids)):
        text = open_text(corpus, str(place / "decoder"))
        assert text.tokens.tolist() == ids.ravel().tolist()
        assert text.documents.tolist() == [0, 24, 48, 72, 96, 120]
        assert opened(place / "decoder", corpus).blocks.shape == (2, 2, 8)
    text = open_text(ids, "decoder")
    assert text.name == "token ids"
    assert len(cut(text.documents, "documents", 8).starts) == 5
    with pytest.raises(CorpusError, match="token ids: expected token ids, whole numbers from 0"):
        open_text([[0.5]], "decoder")


def test_a_decoder_without_a_tokenizer_is_offered_token_ids(place: Path) -> None:
    (place / "plain.txt").write_text("some words")
    subjects.save(subjects.llama(), place / "mute-decoder")
    with pytest.raises(CorpusError, match=r"entries, or give token ids: corpus=IDS\.npy$"):
        opened(place / "mute-decoder", place / "plain.txt")
    with pytest.raises(CorpusError, match=r"has [0-9]+ entries$"):  # ids alone have no mask token
        opened(place / "mute", place / "plain.txt")


def test_blocks_are_pieces_of_the_text() -> None:
    blocks = subjects.text().blocks(4, 5, 16, seed=3)
    windows = np.lib.stride_tricks.sliding_window_view(subjects.text().tokens, 16)
    for block in blocks.reshape(-1, 16):
        assert (windows == block).all(axis=1).any()
    with pytest.raises(CorpusError, match="take fewer or shorter"):
        subjects.text(100).blocks(4, 5, 16, seed=0)


HOSTILE: dict[str, tuple[str, dict[str, Any], type[WqkError], str]] = {
    "no model": ("/nowhere/at/all", {}, CheckpointError, "no such file"),
    "no language model": ("vit.json", {"objective": "causal"}, UnknownFamily, "vit"),
    "no mask token": ("bert", {"corpus": "tokens.npy"}, CorpusError, "mask token"),
    "no text": ("bert", {"corpus": "absent"}, CorpusError, "expected a token store"),
    "unknown text": ("bert", {"corpus": "model.bin"}, CorpusError, "expected a text file"),
    "no tokenizer": ("mute", {"corpus": "plain.txt"}, CorpusError, "has no tokenizer"),
    "no tokenizer in a configuration": (
        "bert.json",
        {"corpus": "plain.txt"},
        CorpusError,
        "is a single file, and has no tokenizer for a text file; give a token store",
    ),
    "no tokenizer of a type": (
        "gpt2",
        {"corpus": "plain.txt"},
        CorpusError,
        "is a model type, and has no tokenizer for a text file; give a token store",
    ),
    "no unknown token": ("no-unknown", {"corpus": "plain.txt"}, CorpusError, "cannot encode"),
    "three axes": ("decoder", {"corpus": "cube.npy"}, CorpusError, r"\(N,\) or \(B, N\); got"),
    "no columns": ("decoder", {"corpus": "empty.npy"}, CorpusError, r"got int64 \(3, 0\)"),
    "pickled": ("decoder", {"corpus": "object.npy"}, CorpusError, "cannot be read"),
    "negative": ("decoder", {"corpus": "negative.npy"}, CorpusError, "token ids"),
    "foreign": ("decoder", {"corpus": "large.npy"}, CorpusError, r"vocabulary \(1001 entries"),
    "short": ("decoder", {"corpus": "tokens.npy", "batches": 10**4}, CorpusError, "take fewer"),
    "long blocks": ("bert", {"block": 64}, CheckpointError, "take 32 or less"),
    "revision": ("bert", {"revision": "main"}, CheckpointError, "only a Hub repository has"),
    "all masked": ("bert", {"mask_share": 1.0}, CorpusError, r"lies in \(0, 1\)"),
}


def make_without_unknown(folder: Path) -> None:
    """Save a model whose tokenizer lacks the entry that stands for unknown words."""
    import transformers
    from tokenizers import Tokenizer, models

    subjects.save(subjects.bert(), folder)
    pieces = models.WordPiece({"[MASK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(pieces), mask_token="[MASK]"
    )
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("case", HOSTILE)
def test_what_cannot_be_tested_is_refused_in_a_line(case: str, place: Path) -> None:
    ref, options, error, message = HOSTILE[case]
    (place / "model.bin").write_bytes(b"\0" * 8)
    (place / "plain.txt").write_text("some words")
    (place / "bert.json").write_text(json.dumps(subjects.bert().config.to_dict()))
    make_without_unknown(place / "no-unknown")
    (place / "vit.json").write_text('{"model_type": "vit"}')
    np.save(place / "cube.npy", np.ones((2, 2, 2), int))
    np.save(place / "empty.npy", np.ones((3, 0), int))
    np.save(place / "negative.npy", np.arange(-3, 300))
    np.save(place / "large.npy", np.arange(1001))
    np.save(place / "object.npy", np.array([{}, 1], object), allow_pickle=True)
    corpus = place / options.get("corpus", "store")
    with pytest.raises(error, match=message) as caught:
        opened(
            ref if ref == "gpt2" else place / ref,
            corpus,
            **{k: v for k, v in options.items() if k != "corpus"},
        )
    assert "\n" not in str(caught.value)


def test_a_folder_named_like_a_model_type_is_a_checkpoint(place, monkeypatch):
    monkeypatch.chdir(place)
    subject = opened("bert", "store")
    assert not subject.missing
    weight = subject.model.bert.encoder.layer[0].attention.self.query.weight
    assert (weight == subjects.bert().bert.encoder.layer[0].attention.self.query.weight).all()


def test_a_vocabulary_is_that_of_the_text_for_a_bare_type() -> None:
    from wqk_lab.theory.opening import State, load_model

    assert State("distilbert").is_fresh
    with torch.device("meta"):  # the type's own sizes are large
        model, objective, _ = load_model(State("distilbert"), vocabulary_size=VOCABULARY)
    assert objective == "masked"
    assert model.get_input_embeddings().num_embeddings == VOCABULARY


def test_a_bare_type_is_no_model_of_another_vocabulary(place: Path) -> None:
    _, states = open_subjects("distilbert", place / "store", **SMALL)
    assert isinstance(states, Iterator)  # no weights are drawn before the first is asked for


def test_blocks_of_a_text_lie_side_by_side_from_where_the_seed_begins() -> None:
    numbers = Text("numbers", np.arange(107), np.array([0, 107]), 107, None)
    begins = set()
    for seed in range(30):
        blocks = numbers.blocks(2, 5, 10, seed)
        np.testing.assert_array_equal(blocks, numbers.blocks(2, 5, 10, seed))
        first = blocks[..., 0].ravel()
        np.testing.assert_array_equal(blocks.reshape(-1, 10), first[:, None] + np.arange(10))
        assert len(set(first // 10)) == len(set(first)) == 10  # without overlap
        begins |= set(first % 10)
    assert begins == set(range(8))  # seven tokens are left over


def test_defaults_of_the_command_are_those_of_the_functions() -> None:
    from wqk_lab.cli.theory import theory

    options = {option.name: option.default for option in theory.params}
    compared = set()
    for function, ours in ((open_subjects, "batches"), (Subject, "seed")):
        for name, parameter in inspect.signature(function).parameters.items():
            is_number = isinstance(parameter.default, int | float)
            if name in options and is_number:
                assert options[name] == parameter.default, name
                compared.add(name)
        assert ours in compared
    assert compared == {"batches", "batch", "mask_share", "seed"}
