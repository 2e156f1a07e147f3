"""Checkpoints on a hub: found by revision, fetched in parts, cached; or said why not."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, constants, hf_hub_download
from safetensors.numpy import save
from tests.checkpoints.serving import (
    BERT,
    Hub,
    assert_bert,
    bert_folder,
    bert_weights,
    describe,
    own_hub,
    query,
    query_key_bytes,
    serving,
    sharded_folder,
    silence,
    stand_in,
    status,
    wait_until,
)
from tests.command import run
from tests.limits import within

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.errors import CheckpointError, HubError
from wqk.scanning import scan as scanning
from wqk.storage import patience, remote_file

NAME, EMBEDDINGS = "owner/bert", "embeddings.word_embeddings.weight"
TENSORS = query_key_bytes(bert_weights())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of our own, with an empty cache and no login."""
    with own_hub(tmp_path, monkeypatch) as server:
        server.repositories[NAME] = {"main": bert_folder(), "step1000": bert_folder(seed=1)}
        yield server


def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def header_bytes(files: dict[str, Any]) -> int:
    return sum(
        8 + int.from_bytes(content[:8], "little")
        for name, content in files.items()
        if name.endswith(".safetensors")
    )


def hang_up(handler: Any) -> bool:
    handler.close_connection = True
    return True


def forget(hub: Hub) -> None:
    hub.log.clear()
    hub.cdn.log.clear()
    hub.resolved = 0


def adapter_files(base: str, query_name: str, seed: int = 5) -> dict[str, bytes]:
    """A LoRA adapter of rank 2 on one query weight of the small BERT."""
    random = np.random.default_rng(seed)
    about = {"peft_type": "LORA", "base_model_name_or_path": base, "lora_alpha": 4}
    about["target_modules"] = "all-linear"
    factors = {
        f"base_model.model.{query_name.removesuffix('.weight')}.lora_A.weight": (2, 128),
        f"base_model.model.{query_name.removesuffix('.weight')}.lora_B.weight": (128, 2),
    }
    tensors = {n: random.standard_normal(s).astype(np.float32) for n, s in factors.items()}
    return {
        "adapter_config.json": json.dumps(about).encode(),
        "adapter_model.safetensors": save(tensors),
    }


def adapted(files: dict[str, bytes], query_name: str) -> np.ndarray:
    """The weight with what the adapter adds to it."""
    from safetensors.numpy import load

    down, up = sorted(load(files["adapter_model.safetensors"]).items())
    return bert_weights()[query_name] + 2.0 * up[1] @ down[1]


@pytest.mark.parametrize("kept", ["on the hub", "here"])
def test_an_adapter_is_read_on_its_base_from_the_hub(hub, tmp_path, monkeypatch, kept):
    files = adapter_files(NAME, query(0))
    ref: Any = "owner/adapter"
    if kept == "here":
        ref = tmp_path / "adapter"
        ref.mkdir()
        for name, content in files.items():
            (ref / name).write_bytes(content)
    else:
        hub.repositories["owner/adapter"] = {"main": files}
    checkpoint = open_checkpoint(ref)
    weight, rows, plain_weight = checkpoint.read(
        [Part(query(0)), Part(query(0), ((100, 104), (3, 5))), Part(query(1))]
    )
    np.testing.assert_allclose(weight, adapted(files, query(0)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows, weight[[100, 101, 102, 103, 3, 4]])
    np.testing.assert_array_equal(plain_weight, bert_weights()[query(1)])
    assert checkpoint.name == str(ref)
    assert checkpoint.notes == (f"{NAME} with a LoRA adapter on 1 of its tensors",)
    table = wqk.scan(ref)
    fetched = checkpoint.bytes_fetched
    assert fetched >= (len(files["adapter_model.safetensors"]) if kept == "on the hub" else 1)
    offline(monkeypatch)  # all of it is in the cache now
    assert wqk.scan(ref).frame.equals(table.frame)


def test_an_adapter_on_the_hub_is_no_way_to_files_here(hub, tmp_path):
    for base in (str(tmp_path), "../secret", "~/model"):
        hub.repositories["owner/adapter"] = {"main": adapter_files(base, query(0))}
        with pytest.raises(CheckpointError, match=r"is neither here .* nor a Hub id"):
            open_checkpoint("owner/adapter")
    # Nor can one be its own base.
    hub.repositories["owner/adapter"] = {"main": adapter_files("owner/adapter", query(0))}
    with pytest.raises(CheckpointError, match="an adapter alone"):
        open_checkpoint("owner/adapter")


# What a scan costs.


def test_a_scan_resolves_once_and_fetches_headers_queries_and_keys(hub):
    files = hub.repositories[NAME]["main"]
    table = wqk.scan(NAME)
    # The hub: a listing, the configuration, one resolution. The CDN: two requests for the header,
    # and one for each block, in which queries and keys lie side by side.
    assert [r.path.split("?")[0].split("/")[1] for r in hub.log] == ["api", "owner", "owner"]
    assert hub.resolved == 1
    lengths = sorted(r.body for r in hub.cdn.log)
    assert lengths == [8, header_bytes(files) - 8, *[TENSORS // 4] * 4]
    assert hub.cdn.bytes_sent == TENSORS + header_bytes(files)
    assert set(table.frame["checkpoint"]) == {NAME}


def test_kin_fetches_headers_queries_and_keys_of_both(hub):
    files = hub.repositories[NAME]
    assert not wqk.kin(NAME, f"{NAME}@step1000").related
    headers = sum(header_bytes(files[revision]) for revision in ("main", "step1000"))
    assert hub.cdn.bytes_sent == 2 * TENSORS + headers  # those of two scans
    assert max(r.body for r in hub.cdn.log) == TENSORS // 4  # one block at a time


def test_a_second_scan_asks_for_the_listing_alone(hub):
    table = wqk.scan(NAME)
    forget(hub)
    checkpoint = open_checkpoint(NAME)
    assert wqk.scan(checkpoint).frame.equals(table.frame)
    assert checkpoint.bytes_fetched == 0
    assert (len(hub.log), len(hub.cdn.log)) == (1, 0)
    # Another scan fetches only the further bytes that it needs.
    assert_bert(checkpoint, EMBEDDINGS)
    assert checkpoint.bytes_fetched == 2000 * 128 * 4


@pytest.mark.parametrize("switch", ["local_files_only", "HF_HUB_OFFLINE", "unreachable"])
def test_without_a_network_the_same_is_found_in_the_cache(hub, monkeypatch, switch):
    table = wqk.scan(wqk.open(NAME, revision="main"))
    forget(hub)
    arguments = {"revision": "main"}
    if switch == "local_files_only":
        arguments["local_files_only"] = True
    elif switch == "HF_HUB_OFFLINE":
        offline(monkeypatch)
    else:
        hub.faults.extend([hang_up] * 9)
    assert wqk.scan(wqk.open(NAME, **arguments)).frame.equals(table.frame)
    assert not hub.cdn.log
    if switch != "unreachable":
        assert not hub.log
        with pytest.raises(HubError, match=r"offline, and bytes .* not in the cache"):
            open_checkpoint(NAME, **arguments).read([Part(EMBEDDINGS)])
        with pytest.raises(
            HubError, match="not a local path, not in the cache at revision 'step9'"
        ):
            open_checkpoint(NAME, **{**arguments, "revision": "step9"})


def test_shards_are_resolved_once_each(hub):
    hub.repositories[NAME]["main"] = files = sharded_folder(shards=5)
    checkpoint = open_checkpoint(NAME)
    table = wqk.scan(checkpoint)
    assert hub.resolved == 5
    expected = (
        TENSORS
        + header_bytes(files)
        + sum(len(files[name]) for name in files if name.endswith(".json"))
    )
    assert expected <= checkpoint.bytes_fetched <= expected + 0.02 * TENSORS
    assert checkpoint.bytes_fetched == hub.bytes_sent - hub.log[0].body + hub.cdn.bytes_sent
    assert_bert(checkpoint)
    assert wqk.scan(NAME).frame.equals(table.frame)


def test_revisions_and_their_steps(hub):
    """A revision can be part of the name."""
    for revision, seed, step in ((None, 0, None), ("step1000", 1, 1000)):
        named = f"{NAME}@{revision}" if revision else NAME
        for checkpoint in (open_checkpoint(NAME, revision), open_checkpoint(named)):
            identity = checkpoint.name, checkpoint.revision, checkpoint.step
            assert identity == (NAME, revision, step)
            assert_bert(checkpoint, query(0), seed=seed)
    with pytest.raises(HubError, match=f"{NAME}: has no revision 'step7'"):
        open_checkpoint(NAME, "step7")
    with pytest.raises(CheckpointError, match="given twice, 'step1000' and 'main'"):
        open_checkpoint(f"{NAME}@step1000", "main")
    assert wqk.scan(f"{NAME}@step1000", heads=False).frame["revision"][0] == "step1000"


def test_weights_that_two_repositories_share_are_fetched_once(hub):
    wqk.scan(NAME)
    hub.repositories["other/copy"] = {"main": bert_folder()}
    checkpoint = open_checkpoint("other/copy")
    wqk.scan(checkpoint)
    assert checkpoint.bytes_fetched == 0


def test_what_a_mirror_claims_is_not_believed_of_the_hub(hub, monkeypatch):
    """A mirror serves other weights under the hashes of the hub's."""
    true = wqk.scan(NAME)
    forged = bert_folder(seed=5)
    with serving(Hub) as mirror:
        mirror.repositories[NAME] = {"main": forged}
        claims = {len(content): describe(content) for content in bert_folder().values()}
        patch = "tests.checkpoints.serving.describe"
        monkeypatch.setattr(patch, lambda content: claims[len(content)])
        stand_in(mirror, monkeypatch)
        lied = wqk.scan(NAME)
    assert not lied.frame["norm"].equals(true.frame["norm"])


def test_a_listing_with_nonsense_in_it(hub, monkeypatch):
    def odd(self, repository, commit, files, blobs):
        siblings = [
            {"rfilename": None, "size": 5},
            {"rfilename": "config.json", "size": "many"},
            *({"rfilename": path, "size": -5, "blobId": 7} for path in files),
        ]
        return json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()

    monkeypatch.setattr(Hub, "_info", odd)
    assert_bert(open_checkpoint(NAME))


def test_a_branch_that_moves_is_seen(hub):
    wqk.scan(NAME)
    hub.repositories[NAME]["main"] = bert_folder(seed=3)
    assert_bert(open_checkpoint(NAME), seed=3)


def test_files_in_the_hubs_own_cache_are_used(hub):
    commit = hub.commit(NAME, "main")
    for file in ("config.json", "model.safetensors"):
        hf_hub_download(NAME, file, revision=commit)
    forget(hub)
    checkpoint = open_checkpoint(NAME)
    assert_bert(checkpoint)
    assert checkpoint.bytes_fetched == 0
    assert (len(hub.log), len(hub.cdn.log)) == (1, 0)


def test_a_snapshot_in_the_hubs_own_cache_is_found_offline(hub, monkeypatch):
    for file in ("config.json", "model.safetensors"):
        hf_hub_download(NAME, file)
    offline(monkeypatch)
    checkpoint = open_checkpoint(NAME)
    assert (checkpoint.name, checkpoint.bytes_fetched) == (NAME, None)
    assert_bert(checkpoint)


@pytest.mark.parametrize(
    "damage",
    [
        lambda note: {},
        lambda note: [],
        lambda note: note | {"files": 7},
        lambda note: note | {"files": [1]},
        lambda note: note | {"files": dict.fromkeys(note["files"])},
        lambda note: note | {"files": {key: [1] for key in note["files"]}},
        lambda note: note | {"files": {key: [-1, 5] for key in note["files"]}},
        lambda note: note | {"files": {key: ["a", {}] for key in note["files"]}},
        lambda note: {"files": note["files"]},
        lambda note: note | {"commit": ["..", "\0"]},
    ],
)
def test_a_damaged_note_in_the_cache(hub, monkeypatch, damage):
    wqk.scan(NAME)
    offline(monkeypatch)
    notes = list(Path(constants.HF_ASSETS_CACHE).glob("wqk/notes/*"))
    assert notes
    for path in notes:
        path.write_text(json.dumps(damage(json.loads(path.read_text()))), encoding="utf-8")
    with contextlib.suppress(HubError, CheckpointError):  # anything else would be a traceback
        wqk.scan(NAME)


def test_a_hub_that_tells_no_sizes(hub, monkeypatch):
    info = hub._info
    monkeypatch.setattr(hub, "_info", lambda *arguments: info(*arguments[:-1], False))
    table = wqk.scan(NAME)
    forget(hub)
    assert wqk.scan(NAME).frame.equals(table.frame)
    assert hub.cdn.bytes_sent == 8


def test_the_cache_lies_where_it_is_told_to(hub, tmp_path, monkeypatch):
    wqk.scan(NAME)
    assert (tmp_path / "assets/wqk/ranges").is_dir()
    wqk.scan(wqk.open(NAME, cache_dir=tmp_path / "mine"))
    assert (tmp_path / "mine/wqk/ranges").is_dir()
    monkeypatch.setenv("WQK_CACHE", str(tmp_path / "chosen"))
    wqk.scan(NAME)
    assert (tmp_path / "chosen/ranges").is_dir()


# Signed addresses.


@pytest.mark.parametrize("good_for", [1, 2, 3])
def test_signed_addresses_expire_and_are_resolved_again(hub, good_for):
    hub.cdn.good_for = good_for
    checkpoint = open_checkpoint(NAME)
    for layer in range(4):
        assert_bert(checkpoint, query(layer))
    assert hub.resolved == -(-6 // good_for)
    kept = b"".join(p.read_bytes() for p in Path(constants.HF_ASSETS_CACHE).rglob("*.json"))
    assert kept
    assert b"signature" not in kept


# Logins.


def test_a_private_repository_needs_a_login(hub, monkeypatch):
    hub.private[NAME] = "hf_right"
    for token in (None, False, "hf_wrong"):
        with pytest.raises(HubError, match="nor a repository that this login can see"):
            open_checkpoint(NAME, token=token)
    with pytest.raises(HubError, match="not logged in"):
        open_checkpoint(NAME, token=True)
    assert_bert(open_checkpoint(NAME, token="hf_right"))
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert_bert(open_checkpoint(NAME))
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).write_text("hf_right")
    assert_bert(open_checkpoint(NAME, token=True))


def test_a_gated_repository_says_what_to_do(hub):
    hub.gated[NAME] = "hf_right"
    with pytest.raises(HubError, match="is gated; accept its terms on the hub"):
        open_checkpoint(NAME)
    for ref in (NAME, f"{constants.ENDPOINT}/{NAME}/resolve/main"):
        assert_bert(open_checkpoint(ref, token="hf_right"))


# A hub that has a bad day.


def test_a_busy_hub_is_asked_again(hub):
    hub.faults.extend([status(429, Retry_After="1"), *map(status, (408, 425, 500, 503))])
    assert_bert(open_checkpoint(NAME))
    hub.faults.extend([status(503)] * 9)
    with pytest.raises(HubError, match=f"{NAME}: the hub answers 503"):
        open_checkpoint(NAME)


def test_an_endpoint_that_is_no_hub(hub):
    def page(handler):
        handler.answer(200, {"Content-Type": "text/html"}, b"<html>Welcome</html>")
        return True

    hub.faults.append(page)
    with pytest.raises(HubError, match="does not answer as a hub does"):
        open_checkpoint(NAME)


def test_no_network_and_nothing_cached(hub):
    hub.faults.extend([hang_up] * 9)
    with pytest.raises(HubError, match="not a local path, not in the cache, and the hub cannot be"):
        open_checkpoint(NAME)


# Torch archives.


def archives(seed: int = 0, **more: torch.Tensor) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save({n: torch.tensor(value) for n, value in bert_weights(seed).items()} | more, buffer)
    return {"config.json": json.dumps(BERT).encode(), "pytorch_model.bin": buffer.getvalue()}


def test_archives_are_read_in_ranges(hub, monkeypatch):
    hub.repositories["owner/old"] = {"main": archives(), "step1": archives(1)}
    for revision, seed in ((None, 0), ("step1", 1)):
        checkpoint = open_checkpoint("owner/old", revision)
        assert (checkpoint.name, checkpoint.revision) == ("owner/old", revision)
        assert_bert(checkpoint, seed=seed)
    table = wqk.scan("owner/old")
    offline(monkeypatch)
    assert wqk.scan("owner/old").frame.equals(table.frame)


def test_of_an_archive_little_more_than_queries_and_keys_is_fetched(hub):
    hub.repositories["owner/old"] = {"main": archives(padding=torch.zeros(3000, 1000))}
    checkpoint = open_checkpoint("owner/old")
    wqk.scan(checkpoint)
    assert checkpoint.bytes_fetched < TENSORS * 1.05 + 2 * 2**16 + 5000


@pytest.mark.parametrize("listed", [True, False])
def test_one_file_is_preferred_to_an_index_as_in_transformers(hub, listed):
    stale = {"weight_map": {"a": "model-1.safetensors"}}
    files = bert_folder() | {
        "model.safetensors.index.json": json.dumps(stale).encode(),
        "pytorch_model.bin": b"not read",
    }
    hub.repositories["owner/both"] = {"main": files}
    ref = "owner/both" if listed else f"{constants.ENDPOINT}/owner/both/resolve/main"
    checkpoint = open_checkpoint(ref)
    assert_bert(checkpoint)
    if listed:
        (note,) = checkpoint.notes
        assert note == (
            "read model.safetensors, as transformers does; passed over model.safetensors.index.json"
        )


# What repositories hold besides.


def test_subfolders(hub):
    nested = {f"inner/{name}": content for name, content in bert_folder().items()}
    hub.repositories["owner/nested"] = {"main": nested}
    assert_bert(open_checkpoint("owner/nested", subfolder="inner"))
    with pytest.raises(CheckpointError, match="in its folders inner; choose one"):
        open_checkpoint("owner/nested")
    checkpoint = open_checkpoint(f"{constants.ENDPOINT}/owner/nested/tree/main/inner")
    assert (checkpoint.name, checkpoint.revision) == ("owner/nested", "main")


INDEX, CONFIG = "model.safetensors.index.json", "config.json"
ODD = [
    ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "adap"),
    ({"model.gguf": b"GGUF"}, "truncated, or not a GGUF file"),
    ({"README.md": b"hello"}, r"no weights here; .*, got README.md; choose"),
    (bert_folder() | {CONFIG: b"[1]"}, "expected a JSON object"),
    ({INDEX: b'{"weight_map": {"a": "gone"}}', "other.safetensors": b""}, "shard gone is missing"),
]


@pytest.mark.parametrize(("files", "message"), ODD)
def test_what_cannot_be_scored(hub, files, message):
    hub.repositories["owner/odd"] = {"main": files}
    with pytest.raises(CheckpointError, match=f"^owner/odd.*{message}"):
        open_checkpoint("owner/odd")


# Reading while scoring.


@pytest.mark.parametrize("limit", ["0", "1000000000"])
def test_the_next_block_is_fetched_while_one_is_scored(hub, monkeypatch, limit):
    monkeypatch.setenv("WQK_CACHE_LIMIT", limit)
    monkeypatch.setattr(scanning, "SPARE_MEMORY", 1)  # one block at a time
    real, requests = scanning.score_heads, []

    def fetched() -> int:
        return sum(r.body == TENSORS // 4 for r in hub.cdn.log)

    def score_heads(*arguments, **options):
        done = len(requests)
        wait_until(lambda: fetched() == min(done + 2, 4))
        time.sleep(0.05)
        requests.append(fetched())
        return real(*arguments, **options)

    monkeypatch.setattr(scanning, "score_heads", score_heads)
    wqk.scan(NAME)
    assert requests == [2, 3, 4, 4]  # the next block, and no more: memory is bounded


def test_a_large_tensor_comes_over_several_connections(hub, monkeypatch):
    monkeypatch.setattr(remote_file, "LARGEST_REQUEST", 100_000)
    together = []
    gate = threading.Barrier(8, timeout=5)

    def meet(handler):
        gate.wait()
        together.append(1)
        return False

    checkpoint = open_checkpoint(NAME)
    hub.cdn.faults.extend([meet] * 8)
    assert_bert(checkpoint, EMBEDDINGS)
    assert len(together) == 8


# The command.


def command(hub: Hub, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    surroundings = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    surroundings |= {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "wqk", *arguments],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_says_what_it_will_fetch_and_what_it_fetched(hub):
    assert "A scan reads 528 kB of" in run("explain", NAME, width=200).stdout
    first = run("scan", NAME, "--revision", "step1000", width=200)
    assert f"{NAME} @ step1000" in first.stdout
    assert first.stderr.startswith(f"{NAME}: fetched 53")
    assert " kB of 4." in first.stderr
    second = run("scan", NAME, "--revision", "step1000", width=200)
    assert second.stdout == first.stdout
    assert ": fetched 0 B of 4." in second.stderr
    assert "all that was read was in the cache" in second.stderr
    missing = run("scan", "nobody/nothing", width=200, exits=2)
    assert missing.stderr.startswith("wqk: nobody/nothing: is neither a path")


def test_a_killed_scan_leaves_a_cache_that_goes_on(hub, tmp_path):
    hub.repositories[NAME]["main"] = sharded_folder(shards=5)
    hub.cdn.faults.extend([None] * 14 + [silence] * 20)
    process = command(hub, tmp_path, "scan", NAME, "--json")
    wait_until(lambda: sum(r.status == 0 for r in hub.cdn.log) > 0, 30)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert len(list((tmp_path / "home/assets/wqk/ranges").glob("*/[0-9]*"))) >= 10
    hub.cdn.faults.clear()
    hub.cdn.released.set()
    forget(hub)
    processes = [command(hub, tmp_path, "scan", NAME, "--json") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    expected = wqk.scan(wqk.open(NAME, cache_dir=tmp_path / "fresh"), heads=False)
    rows = json.loads(outputs[0])["rows"]
    assert [row["symmetry"] for row in rows] == pytest.approx(expected.frame["symmetry"].to_list())


@pytest.mark.parametrize("requests", [1, 4])
def test_an_interrupted_scan_waits_for_no_answer(hub, tmp_path, monkeypatch, requests):
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "600")
    hub.cdn.faults.extend([None] * requests + [silence] * 30)
    process = command(hub, tmp_path, "scan", NAME)
    wait_until(lambda: sum(r.status == 0 for r in hub.cdn.log) > 0, 30)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)  # silence alone would last for minutes
    assert process.returncode != 0


def test_a_scan_that_failed_can_be_made_again_with_the_same_checkpoint(hub):
    hub.cdn.faults.extend([None, None, *[status(404)] * 40])
    checkpoint = open_checkpoint(NAME)
    with pytest.raises(HubError):
        wqk.scan(checkpoint)
    hub.cdn.faults.clear()
    assert len(wqk.scan(checkpoint, heads=False)) == 4


# A checkpoint of 811 GB.

PUBLISHED = Path(__file__).parents[1] / "families" / "published.jsonl"
ROWS = map(json.loads, PUBLISHED.read_text("utf-8").splitlines())
LLAMA = next(row["config"] for row in ROWS if row["model"].endswith("Llama-3.1-405B"))
# The tensors of each of its layers.
LAYER = {
    "input_layernorm": (16384,),
    "mlp.down_proj": (16384, 53248),
    "mlp.gate_proj": (53248, 16384),
    "mlp.up_proj": (53248, 16384),
    "post_attention_layernorm": (16384,),
    "self_attn.k_proj": (1024, 16384),
    "self_attn.o_proj": (16384, 16384),
    "self_attn.q_proj": (16384, 16384),
    "self_attn.v_proj": (1024, 16384),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """Its folder: real headers, and sparse files that take no room."""
    folder, places = tmp_path_factory.mktemp("llama"), {}
    further_shapes = {"model.embed_tokens": (128256, 16384), "model.norm": (16384,)}
    shards = [further_shapes | {"lm_head": (128256, 16384)}]
    shards += [{f"model.layers.{n}.{name}": s for name, s in LAYER.items()} for n in range(126)]
    for number, shapes in enumerate(shards):
        header, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + 2 * math.prod(shape)
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            header[f"{name}.weight"] = entry
        file, text = f"model-{number:05}-of-00127.safetensors", json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        places |= dict.fromkeys(header, file)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)
    yield folder
    shutil.rmtree(folder)


QUERIES, KEYS = 126 * 16384 * 16384 * 2, 126 * 1024 * 16384 * 2


def assert_planned(explanation: Any) -> None:
    assert explanation.bytes_to_read == QUERIES + KEYS == 71_873_593_344
    assert explanation.bytes_stored == 2 * 405_853_388_800  # as its authors count parameters


def test_a_405b_folder_is_planned_without_reading_it(llama):
    with within(60):
        assert_planned(wqk.explain(llama))


def test_a_405b_repository_is_planned_from_its_headers(llama, hub):
    small = {path.name: path.read_bytes() for path in llama.glob("*.json")}
    shards = {path.name: path for path in llama.glob("*.safetensors")}
    hub.repositories["meta/llama"] = {"main": small | shards}
    with within(20):  # the server's threads included
        assert_planned(wqk.explain("meta/llama"))
    assert Counter(r.status for r in hub.cdn.log) == {206: 2 * len(shards)}
    assert hub.resolved == len(shards)
    assert hub.cdn.bytes_sent < 400_000
    forget(hub)
    checkpoint = open_checkpoint("meta/llama")
    assert_planned(wqk.explain(checkpoint))
    assert checkpoint.bytes_fetched == 0
    rows = Part("model.layers.77.self_attn.k_proj.weight", ((0, 16), (1000, 1010)))
    (values,) = checkpoint.read([rows])
    assert values.shape == (26, 16384)
    assert checkpoint.bytes_fetched == 26 * 16384 * 2


@pytest.mark.parametrize("hindrance", ["name", "connection"])
def test_without_a_network_a_repository_fails_within_five_seconds(hub, monkeypatch, hindrance):
    """The host's name is searched for in vain, or its address leads nowhere."""

    def sleep(*_, **__):
        hub.released.wait(60)
        raise OSError

    resolve = "getaddrinfo" if hindrance == "name" else "create_connection"
    monkeypatch.setattr(socket, resolve, sleep)
    monkeypatch.setattr(patience, "PATIENCE", patience.Patience())
    monkeypatch.setattr(HfApi, "model_info", sleep)
    with within(5.5), pytest.raises(HubError, match="and the hub cannot be reached") as caught:
        open_checkpoint("owner/elsewhere")
    assert "\n" not in str(caught.value)
    assert caught.value.__context__ is None  # a traceback shows one error
