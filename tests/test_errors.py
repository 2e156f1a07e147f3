"""Errors: facts as attributes, whole messages in one line, and through a process boundary."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import wqk
from wqk import errors
from wqk._files import check_output
from wqk.errors import OutputError, UnknownName, WqkError, first_line


@pytest.mark.parametrize("name", [n for n in vars(errors) if n.endswith(("Error", "Weights"))])
def test_every_error_is_a_wqk_error_with_its_message(name):
    error = getattr(errors, name)("what happened")
    assert isinstance(error, WqkError)
    assert str(error) == "what happened"


def test_facts_are_attributes_and_survive_pickling():
    error = OutputError("t.csv: cannot be written", path=Path("t.csv"), reason="disk full")
    again = pickle.loads(pickle.dumps(error))
    assert (again.path, again.reason, str(again)) == (error.path, error.reason, str(error))
    assert UnknownName("x").name is None
    with pytest.raises(AttributeError):
        OutputError("a fact that the class does not have", color="red")


def test_errors_know_their_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    tensors = {"tower.mix.weight": np.zeros((4, 4), np.float32)}
    for ref, kind in ((tmp_path, errors.CheckpointError), ("no/repository", errors.HubError)):
        with pytest.raises(kind) as raised:
            wqk.open_checkpoint(ref, local_files_only=True)
        assert raised.value.checkpoint == str(ref)
    with pytest.raises(errors.UnknownFamily) as raised:
        wqk.scan(tensors)
    assert raised.value.checkpoint == "state dict"


def test_the_first_line_of_any_message():
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError(" \n\n")) == "ValueError"
    assert first_line(KeyError("a\nb")) == r"'a\nb'"
    assert len(first_line(ValueError("x" * 100_000))) < 600


def test_an_output_is_checked_before_the_work(tmp_path):
    check_output(tmp_path / "t.csv", "a table", [".csv"])
    assert not list(tmp_path.iterdir())
    for path, reason in (
        (tmp_path / "t.doc", "a table is written as .csv"),
        (tmp_path / "missing" / "t.csv", "No such file or directory"),
        (Path("/proc/t.csv"), "No such file or directory"),
    ):
        with pytest.raises(OutputError) as raised:
            check_output(path, "a table", [".csv"])
        assert (raised.value.path, raised.value.reason) == (path, reason)
    with pytest.raises(OutputError, match="is a folder"):
        check_output(Path(tmp_path.parent) / f"{tmp_path.name}", "a folder", [tmp_path.suffix])
