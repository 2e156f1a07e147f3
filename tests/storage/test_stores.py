"""Checkpoints in buckets and behind https, of servers that others wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tests import small
from tests.checkpoints.serving import Handler, Site, bert_folder, serving, serving_bert
from tests.storage.servers import SECRET, Bucket, azurite, moto, nginx_with_tls

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.errors import CheckpointError, HubError, WqkError
from wqk.scanning.surveys.watch import watch
from wqk.storage import patience

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and short waits."""
    monkeypatch.setenv("WQK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(patience, "PATIENCE", patience.Patience(first=0.01, longest=0.05))


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def bucket(request: Any, tmp_path_factory: Any) -> Iterator[Bucket]:
    """A bucket of each kind."""
    scheme, environment = request.param, dict[str, str]()
    folder = tmp_path_factory.mktemp("store")
    server = azurite(folder, environment) if scheme == "az" else moto(environment)
    with server as requests, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield Bucket(scheme, requests)


@pytest.fixture(scope="module")
def s3() -> Iterator[Bucket]:
    """A bucket of S3."""
    environment: dict[str, str] = {}
    with moto(environment) as requests, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield Bucket("s3", requests)


def plain(folder: Path) -> str:
    """One file of safetensors."""
    shutil.copytree(wqk.demo_model("decoder"), folder)
    return "model.safetensors"


def sharded(folder: Path) -> str:
    """Two files of safetensors with an index."""
    folder.mkdir()
    tensors = load_file(wqk.demo_model("decoder") / "model.safetensors")
    names, places = sorted(tensors), {}
    for number in range(2):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        stored = {name: tensors[name] for name in names[number::2]}
        save_file(stored, folder / file)
        places |= dict.fromkeys(stored, file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)
    shutil.copy(wqk.demo_model("decoder") / "config.json", folder)
    return "model.safetensors.index.json"


def archive(folder: Path) -> str:
    """A torch archive."""
    folder.mkdir()
    tensors = load_file(wqk.demo_model("decoder") / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    shutil.copy(wqk.demo_model("decoder") / "config.json", folder)
    return "pytorch_model.bin"


def distributed(folder: Path) -> str:
    """A distributed checkpoint."""
    tensors = load_file(wqk.demo_model("decoder") / "model.safetensors")
    dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    shutil.copy(wqk.demo_model("decoder") / "config.json", folder)
    return ".metadata"


FORMATS = {"plain": plain, "sharded": sharded, "archive": archive, "distributed": distributed}


def scores(ref: Any) -> bytes:
    return wqk.scan(ref).frame.drop("checkpoint").write_csv().encode()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_bucket_gives_the_scores_of_the_folder(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    FORMATS[kind](folder)
    bucket.upload(folder, kind)
    checkpoint = open_checkpoint(f"{bucket.url}/{kind}")
    assert checkpoint.name == f"{bucket.url}/{kind}"
    assert scores(checkpoint) == scores(folder)
    assert checkpoint.bytes_fetched
    # A second scan transfers the listing alone.
    if bucket.requests is not None:
        bucket.requests.clear()
    again = open_checkpoint(f"{bucket.url}/{kind}")
    assert scores(again) == scores(folder)
    assert again.bytes_fetched == 0
    assert all("list-type=2" in request for request in bucket.requests or ())


def test_an_adapter_in_a_bucket_takes_a_base_from_elsewhere(s3: Bucket, tmp_path: Path) -> None:
    query, matrix = "model.layers.0.self_attn.q_proj", np.ones((16, 16), np.float32)
    base = small.save(tmp_path / "base", {f"{query}.weight": matrix}, {"model_type": "llama"})
    factors = {f"{query}.lora_A.weight": matrix[:1], f"{query}.lora_B.weight": matrix[:, :1].copy()}
    s3.upload(small.adapter(tmp_path / "adapter", "./gone", factors, r=1, lora_alpha=1), "adapter")
    with pytest.raises(CheckpointError, match="its base model is missing"):
        open_checkpoint("s3://bucket/adapter")
    (weight,) = open_checkpoint("s3://bucket/adapter", base=base).read([Part(f"{query}.weight")])
    np.testing.assert_array_equal(weight, 2 * matrix)


@pytest.mark.parametrize("kind", FORMATS)
def test_https_with_a_private_authority_gives_the_scores_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "www").mkdir()
    FORMATS[kind](tmp_path / "www" / "model")
    with nginx_with_tls(tmp_path, tmp_path / "www") as (url, bundle):
        with pytest.raises(CheckpointError, match="certificate is not trusted; set SSL_CERT_FILE"):
            open_checkpoint(f"{url}/model")
        monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
        assert scores(f"{url}/model") == scores(tmp_path / "www" / "model")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nowhere.pem"))
        with pytest.raises(HubError, match="certificates cannot be read"):
            open_checkpoint(f"{url}/model")


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_bert() as proxy:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "")
        checkpoint = open_checkpoint("http://weights.invalid/m")
        assert len(checkpoint.tensors()) == 37
        assert all(r.path.startswith("http://weights.invalid/m/") for r in proxy.log)


def test_only_the_rows_of_queries_and_keys_leave_a_bucket(s3: Bucket, tmp_path: Path) -> None:
    """A distributed checkpoint is read in the same way, plus directories of archives."""
    from tests.checkpoints.serving import bert_weights, query_key_bytes

    tensors = {name: torch.from_numpy(value.copy()) for name, value in bert_weights().items()}
    moments = {f"optim.state.{name}": value for name, value in tensors.items()}
    dcp.save({"model": tensors, **moments}, checkpoint_id=tmp_path / "m", no_dist=True)
    (tmp_path / "m" / "config.json").write_bytes(bytes(bert_folder()["config.json"]))  # type: ignore[arg-type]
    s3.upload(tmp_path / "m", "bert")
    checkpoint = open_checkpoint("s3://bucket/bert")
    wqk.scan(checkpoint)
    needed_bytes = query_key_bytes(bert_weights())
    stored_bytes = sum(path.stat().st_size for path in (tmp_path / "m").iterdir())
    directories = 16 * 2 * 4096 + (tmp_path / "m" / ".metadata").stat().st_size + 1000
    assert checkpoint.bytes_fetched is not None
    assert (
        needed_bytes
        < checkpoint.bytes_fetched
        < 1.05 * needed_bytes + directories
        < stored_bytes / 5
    )


def test_an_adapter_in_a_bucket_is_opened_on_the_base_model_of_the_option(
    s3: Bucket, tmp_path: Path
) -> None:
    weight = np.ones((16, 16), np.float32)
    query = "model.layers.0.self_attn.q_proj"
    base = small.save(tmp_path / "base", {f"{query}.weight": weight}, {"model_type": "llama"})
    factors = {
        f"{query}.lora_A.weight": np.ones((2, 16), np.float32),
        f"{query}.lora_B.weight": np.ones((16, 2), np.float32),
    }
    small.adapter(tmp_path / "adapter", "./gone", factors, lora_alpha=4)
    s3.upload(tmp_path / "adapter", "adapter")
    with pytest.raises(CheckpointError, match="give it with base=PATH"):
        open_checkpoint("s3://bucket/adapter")
    (adapted,) = open_checkpoint("s3://bucket/adapter", base=base).read([Part(f"{query}.weight")])
    np.testing.assert_array_equal(adapted, weight + 4 / 2 * 2)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://bucket/nothing", "nothing under this address"),
        ("s3://elsewhere/run", "no such bucket"),
        ("s3://", "names no bucket"),
        ("s3://bucket/x/model.safetensors", "nothing under this address|is missing"),
        ("s3://bucket/x/model.onnx", "ONNX"),
    ],
)
def test_what_is_not_in_a_bucket_is_one_line(s3: Bucket, address: str, message: str) -> None:
    with pytest.raises(WqkError, match=message) as caught:
        open_checkpoint(address)
    assert "\n" not in str(caught.value)


def test_missing_credentials_and_accounts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")
    with pytest.raises(WqkError, match="AZURE_STORAGE_ACCOUNT_NAME") as caught:
        open_checkpoint("az://container/run")
    assert "\n" not in str(caught.value)


class OddBucket(Site):
    """A bucket that lists a file, and then refuses to give it: the credentials have expired."""

    code = "ExpiredToken"

    def respond(self, handler: Handler) -> None:
        if "list-type=2" in handler.path:
            contents = "".join(
                f"<Contents><Key>m/{name}</Key><Size>{len(bytes(content))}</Size>"  # type: ignore[arg-type]
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;a&quot;</ETag>"
                "</Contents>"
                for name, content in bert_folder().items()
            )
            answer = f"<ListBucketResult><Name>b</Name>{contents}</ListBucketResult>"
            handler.answer(200, {"Content-Type": "application/xml"}, answer.encode())
            return
        body = f"<Error><Code>{self.code}</Code><Message>{SECRET}</Message></Error>"
        handler.answer(400, body=body.encode())


def test_credentials_that_expire_are_one_line_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(OddBucket) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(HubError, match="credentials have expired; log in again") as caught:
            open_checkpoint("s3://bucket/m")
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_secret_is_written_or_shown(
    s3: Bucket, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(wqk.demo_model("decoder"), tmp_path / "m")
    s3.upload(tmp_path / "m", "secret")
    table = wqk.scan("s3://bucket/secret?X-Amz-Signature=hunter2")
    table.write(tmp_path / "table.jsonl")
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    printed = "".join(capfd.readouterr())
    for secret in (SECRET, "hunter2"):
        assert secret.encode() not in written
        assert secret not in printed


# Following a run, and surveys.


def command(*arguments: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "wqk", *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_in_a_bucket_is_watched_as_it_grows(s3: Bucket, tmp_path: Path) -> None:
    distributed(tmp_path / "model")
    s3.upload(tmp_path / "model", "growing/step-5")
    described = (tmp_path / "model" / ".metadata").read_bytes()
    (tmp_path / "model" / ".metadata").unlink()
    s3.upload(tmp_path / "model", "growing/step-10")
    waited: list[str] = []

    def finish(folder: str, reason: str) -> None:
        waited.append(reason)
        s3.put("growing/step-10/.metadata", described)

    options: Any = {"out": tmp_path / "out", "until": 10, "every": 0.01, "heads": False}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        *_, table = watch("s3://bucket/growing", executor=threads, on_wait=finish, **options)
    assert sorted(table.frame["step"].unique()) == [5, 10]
    assert set(table.frame["checkpoint"]) == {
        "s3://bucket/growing/step-5",
        "s3://bucket/growing/step-10",
    }
    assert "without .metadata" in waited[0]


def test_a_killed_watch_of_a_bucket_goes_on(s3: Bucket, tmp_path: Path) -> None:
    plain(tmp_path / "model")
    for step in (1, 2, 3):
        s3.upload(tmp_path / "model", f"killed/checkpoint-{step}")
    arguments = ("watch", "s3://bucket/killed", "--out", str(tmp_path / "out"), "--every", "0.1")
    process = command(*arguments)
    parts, end = tmp_path / "out" / "parts", time.monotonic() + 120
    while not list(parts.glob("*.parquet")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = command(*arguments, "--until", "3")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    table = wqk.read_table(tmp_path / "out" / "scores.parquet")
    expected = wqk.scan(tmp_path / "model", heads=False).frame["symmetry"].to_list()
    for step in (1, 2, 3):
        name = f"s3://bucket/killed/checkpoint-{step}"
        rows = table.frame.filter(table.frame["checkpoint"] == name)
        assert rows["symmetry"].to_list() == expected


def test_models_of_a_bucket_are_surveyed_by_pattern_and_by_list(s3: Bucket, tmp_path: Path) -> None:
    plain(tmp_path / "model")
    for name in ("alpha", "beta"):
        s3.upload(tmp_path / "model", f"models/{name}")
    from concurrent.futures import ThreadPoolExecutor

    addresses = ["s3://bucket/models/alpha", "s3://bucket/models/beta"]
    (tmp_path / "list.txt").write_text("\n".join(addresses))
    with ThreadPoolExecutor(1) as threads:
        for number, ref in enumerate(["s3://bucket/models/*", f"@{tmp_path / 'list.txt'}"]):
            table = wqk.survey([ref], out=tmp_path / str(number), executor=threads)
            assert sorted(set(table.frame["checkpoint"])) == addresses
            assert not table.metadata["failed"]
        table = wqk.survey(["s3://bucket/none*"], out=tmp_path / "none", executor=threads)
    assert "no folder there matches 'none*'" in table.metadata["failed"][0]["reason"]
