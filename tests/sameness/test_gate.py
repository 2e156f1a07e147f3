"""`same` as a gate: the assertion, the fixture, and JUnit's report."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.command import run
from tests.sameness.conversions import edit, pairs, right
from tests.small import save

import wqk


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A model, and its conversion whose rows were not permuted."""
    monkeypatch.chdir(tmp_path)
    save(Path("original"), *right("llama"))
    tensors, config = right("llama")
    edit("qk", pairs)(tensors, config)
    save(Path("converted"), tensors, config)
    return "original", "converted"


def test_an_assertion_begins_with_its_cause(folders, assert_same):
    with pytest.raises(AssertionError, match=r"\Arotary order: stored interleaved"):
        assert_same(*folders)


def test_an_assertion_says_the_cause_and_its_repair(folders, assert_same):
    assert assert_same is wqk.assert_same
    assert assert_same("original", "original", everything=True).same
    with pytest.raises(
        AssertionError, match=r"layers 0-2: .*stored interleaved(.|\n)*w.unflatten\(0, \(-1, 8, 2"
    ):
        assert_same(*folders)


def test_a_report_for_continuous_integration(folders: tuple[str, str]) -> None:
    run("same", *folders, "--junit", "report.xml", exits=1)
    suite = ElementTree.parse("report.xml").getroot()  # our own file
    assert suite.get("failures") == "3"
    assert int(suite.get("tests", 0)) == len(suite)
    assert "stored interleaved" in str(suite.find("testcase/failure").get("message"))


def test_a_report_that_cannot_be_written_is_refused_before_the_comparison(folders) -> None:
    for verb in (("same", *folders), ("verify", folders[0])):
        refused = run(*verb, "--junit", "no/report.xml", exits=2)
        assert refused.stdout == ""
        assert "there is no folder no" in refused.stderr


def test_an_error_replaces_the_report_of_an_earlier_run(folders: tuple[str, str]) -> None:
    run("same", *folders, "--junit", "report.xml", exits=1)
    run("same", folders[0], "nowhere", "--junit", "report.xml", exits=2)
    suite = ElementTree.parse("report.xml").getroot()  # our own file
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("1", "1", "0")
    assert "nowhere" in str(suite.find("testcase/error").get("message"))


def test_a_folder_is_the_same_as_its_tensors_without_their_configuration(tmp_path: Path) -> None:
    """The family of the bare tensors is guessed, without the output's tensor."""
    width = 16
    random = np.random.default_rng(0)
    shapes = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"transformer.h.0.{name}.weight"] = random.standard_normal(shape)
        tensors[f"transformer.h.0.{name}.bias"] = random.standard_normal(shape[1:])
    config = {"model_type": "gpt2", "n_embd": width, "n_head": 4, "n_layer": 1}
    folder = save(tmp_path / "gpt2", tensors, config)
    assert wqk.same(folder, tensors).same
    tensors["transformer.h.0.attn.c_proj.weight"] = np.ones((width, width))
    (tensor,) = [tensor for tensor in wqk.same(folder, tensors).tensors if not tensor.outcome.same]
    assert (tensor.name, tensor.outcome.value) == ("transformer.h.0.attn.c_proj.weight", "differs")


def test_freedoms_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("wqk.sameness.same.same", lambda *_, up_to, **__: asked.append(up_to))
    run("same", ".", ".", "--up-to", "heads,stream", "--up-to", "neurons", exits=None)
    assert asked == [["heads", "stream", "neurons"]]
