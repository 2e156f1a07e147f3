"""References as they may be shown, and names that are no text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.limits import within

import wqk
from wqk.checkpoints import open_checkpoint, steps_of
from wqk.errors import CheckpointError, WqkError
from wqk.scanning.surveys.jobs import expand
from wqk.storage.references import redacted, without_secrets

# All with a secret, as addresses of every kind are mistyped.
SECRETS = Path(__file__).with_name("secrets.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("reference", SECRETS)
def test_nothing_secret_is_shown(reference: str, tmp_path: Path):
    assert "hunter2" not in redacted(reference).lower()
    (job,) = expand([reference])
    assert "hunter2" not in (job.key + job.title + str(job.problem)).lower()
    with pytest.raises(WqkError) as caught:
        open_checkpoint(reference, revision="x", local_files_only=True)
    assert "hunter2" not in str(caught.value).lower()


def test_an_existing_path_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("me:pw@host", "run;1", "a?b#c", "x@y"):
        (tmp_path / name).mkdir()
        assert redacted(name) == name
        assert redacted(str(tmp_path / name)) == str(tmp_path / name)


def test_what_is_no_address_is_told_as_it_was_written():
    for name in ("owner/model", "runs/missing", "/data/user@host/run", "C:/models/x", "model@v2 x"):
        assert redacted(name) == name


@pytest.mark.parametrize("noise", ["a", "?", "%3F", "a:", "a.b-", "://", "a@:/", "&a=", "http://"])
def test_secrets_are_looked_for_in_linear_time(noise: str):
    """A quadratic search through 300,000 characters takes minutes."""
    for text in (noise * (300_000 // len(noise)), "http://" + noise * (300_000 // len(noise))):
        with within(10):
            messages = without_secrets(text), redacted(text)
        assert max(map(len, messages)) <= len(text)


def test_addresses_that_differ_in_their_query_are_two_checkpoints():
    for first_query, second_query in (
        ("id=1", "id=2"),
        ("signature=a", "signature=b"),
        ("id=1", ""),
    ):
        jobs = expand(
            [f"https://example.org/m.safetensors?{query}" for query in (first_query, second_query)]
        )
        assert len({job.key for job in jobs}) == len({job.name for job in jobs}) == 2
    # Also where they do not meet in one survey, unless it is only signed anew.
    keys = [expand([f"https://example.org/m?{q}"])[0].key for q in ("id=1&sig=a", "id=2", "id=1")]
    assert keys[0] == keys[2] != keys[1]


def test_a_survey_of_a_signed_address_keeps_no_secret(tmp_path: Path):
    address = "http://me:hunter2@127.0.0.1:9/model.safetensors?signature=hunter2"
    (job,) = expand([address])
    assert "hunter2" not in job.key + job.title + job.name
    assert job.location == address
    # A new signature is the same checkpoint.
    assert expand([address.replace("signature=hunter2", "signature=other")])[0].key == job.key


@pytest.mark.parametrize(
    "reference", ["a" * 5000, "/" + "a/" * 3000, "nul\0", "\udcff", "~", "a\nb"]
)
def test_a_reference_that_is_nothing(reference: str):
    assert steps_of(reference) == [reference]
    with pytest.raises(WqkError) as caught:
        open_checkpoint(reference, local_files_only=True)
    str(caught.value).encode("utf-8", "backslashreplace")
    assert len(expand([reference])) == 1


def test_a_folder_whose_name_is_no_text_is_scanned(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"run-\xff")
    folder.mkdir()
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    names = [f"layers.{n}.{side}_proj.weight" for n in range(2) for side in "qk"]
    save_file(dict.fromkeys(names, weight), folder / "model.safetensors")
    table = wqk.scan(wqk.open(folder, heads_per_layer=2))
    assert table.frame["checkpoint"].unique().to_list() == [f"{tmp_path}/run-\\udcff"]


def test_halves_of_characters_in_a_configuration_are_replaced(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "a\\ud800", "emoji": "\\ud83d\\ude00"}')
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config == {"model_type": "a?", "emoji": "\U0001f600"}


def test_a_tensor_whose_name_is_no_text_is_refused(tmp_path: Path):
    header = json.dumps(
        {"a\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not text"):
        open_checkpoint(tmp_path)


def test_few_open_files_are_an_error_in_one_line(tmp_path: Path):
    names = [f"model-{n}.safetensors" for n in range(20)]
    for n, name in enumerate(names):
        save_file({f"t{n}": np.zeros(2, np.float32)}, tmp_path / name)
    code = (
        "import resource, sys\nfrom wqk.checkpoints import open_checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\n"
        "from wqk.errors import CheckpointError\n"
        "try: open_checkpoint(sys.argv[1])\nexcept CheckpointError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot be opened (Too many open files)" in result.stdout


@pytest.mark.parametrize("name", ["encoder", "decoder", "induction"])
def test_small_models_of_the_package_have_references(name: str) -> None:
    """``demo:NAME`` and the folder of the model open one checkpoint."""
    opened, folder = wqk.open(f"demo:{name}"), wqk.open(wqk.demo_model(name))
    assert opened.checkpoint.name == folder.checkpoint.name
    assert wqk.same(f"demo:{name}", wqk.demo_model(name)).same


def test_a_file_comes_before_a_small_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is called ``demo:encoder`` is what is opened."""
    shutil.copytree(wqk.demo_model("decoder"), tmp_path / "demo:encoder")
    monkeypatch.chdir(tmp_path)
    assert wqk.open("demo:encoder").family == wqk.open(wqk.demo_model("decoder")).family


def test_an_unknown_small_model_is_refused_with_the_known_ones() -> None:
    """The message lists the models of the package."""
    with pytest.raises(CheckpointError, match="are demo:decoder, demo:encoder, demo:induction"):
        wqk.open("demo:bert")
