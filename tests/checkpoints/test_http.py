"""Files behind HTTP: what is fetched, what is tried again, and what is refused."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import close_session, constants
from safetensors.numpy import load
from tests.checkpoints.attacking import dripping, interim, one_byte, redirect, slow_body
from tests.checkpoints.serving import (
    assert_bert,
    bert_folder,
    bert_weights,
    part,
    query,
    query_key_bytes,
    serving,
    serving_bert,
    sharded_folder,
    silence,
    status,
)
from tests.limits import within

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.errors import CheckpointError, HubError
from wqk.storage import patience, remote_file, transfers
from wqk.storage.range_cache import RangeCache
from wqk.storage.remote_file import RemoteFile, coalesce, split
from wqk.storage.stores import web_location
from wqk.storage.transfers import Transfers

WEIGHTS = "/m/model.safetensors"


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A cache of its own, online, and no waiting."""
    monkeypatch.setenv("WQK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield
    close_session()


@pytest.fixture
def limits(monkeypatch):
    """Short waits between attempts."""
    short = patience.Patience(first=0.01, longest=0.05)
    monkeypatch.setattr(patience, "PATIENCE", short)
    return short


@pytest.fixture
def site(limits):
    with serving_bert() as server:
        yield server


@pytest.fixture
def checkpoint(site):
    """The small BERT there, opened."""
    return open_checkpoint(f"{site.url}{WEIGHTS}")


@pytest.fixture
def impatient(limits, monkeypatch):
    """Silence soon counts as a failure."""
    short = limits._replace(answer=0.5, silence=0.5, slowest=2.0**20)
    monkeypatch.setattr(patience, "PATIENCE", short)


def test_a_file_is_opened_with_two_small_requests_and_its_ranges_alone_are_fetched(site):
    checkpoint = open_checkpoint(f"{site.url}{WEIGHTS}")
    header = int.from_bytes(site.files[WEIGHTS][:8], "little")
    asked = [(r.range, r.body) for r in site.log if r.path == WEIGHTS]
    assert asked == [("bytes=0-7", 8), (f"bytes=8-{header + 7}", header)]
    site.log.clear()
    assert_bert(checkpoint, query(1), query(0))
    assert [r.body for r in site.log] == [128 * 128 * 4] * 2
    assert_bert(checkpoint, query(1))
    assert len(site.log) == 2


@pytest.mark.parametrize("address", ["/m/model.safetensors", "/m", "/m/"])
def test_a_scan_fetches_the_queries_and_keys_and_a_second_one_nothing(site, address):
    tensors = bert_weights()
    table = wqk.scan(f"{site.url}{address}")
    first = site.bytes_sent
    header = 8 + int.from_bytes(site.files[WEIGHTS][:8], "little")
    small = header + len(site.files["/m/config.json"])
    assert first <= 1.02 * query_key_bytes(tensors) + small
    assert table.frame["model_type"][0] == "bert"
    site.log.clear()
    again = wqk.scan(f"{site.url}{address}")
    assert all(r.range == "bytes=0-7" for r in site.log if r.status == 206)
    assert site.bytes_sent == 16
    assert again.frame.equals(table.frame)


def test_shards_under_an_address(site):
    site.files = {f"/s/{name}": content for name, content in sharded_folder().items()}
    checkpoint = open_checkpoint(f"{site.url}/s")
    assert_bert(checkpoint)
    assert checkpoint.bytes_fetched == site.bytes_sent


def test_a_subfolder_and_a_key_in_the_address(site):
    checkpoint = open_checkpoint(f"{site.url}/?key=secret", subfolder="m")
    assert_bert(checkpoint, query(0))
    assert all(r.path.endswith("?key=secret") for r in site.log)
    assert "secret" not in checkpoint.name
    with pytest.raises(CheckpointError, match="no weights here") as caught:
        open_checkpoint(f"{site.url}/nothing?key=secret")
    assert "secret" not in str(caught.value)


def test_a_folder_that_the_server_refuses_is_no_folder_without_weights(site):
    site.faults.extend([status(403)] * 40)
    with pytest.raises(CheckpointError, match=r"server refuses .*answers 403 to \d+ requests"):
        open_checkpoint(f"{site.url}/m")


@pytest.mark.parametrize(("code", "message"), [(403, "may not read it"), (404, "no such file")])
def test_a_named_file_of_weights_is_not_optional(site, code, message):
    site.faults.extend([status(code)] * 40)
    with pytest.raises(HubError, match=f"{WEIGHTS}: .*{message}"):
        open_checkpoint(f"{site.url}{WEIGHTS}")


def test_a_server_without_tags_is_read_but_not_cached(site):
    site.tags = dict.fromkeys(site.files)
    wqk.scan(f"{site.url}{WEIGHTS}")
    first = site.bytes_sent
    wqk.scan(f"{site.url}{WEIGHTS}")
    assert site.bytes_sent == 2 * first


# What happens by chance is tried again.


@pytest.mark.parametrize(
    "faults",
    [
        [part(sent=1000)],
        [part(sent=0)],
        [part(sent=10), part(sent=20), part(sent=30)],
        [status(500), status(502), status(503), status(504)],
        [silence],
        [part(sent=64), silence, status(429)],
    ],
)
def test_broken_and_failing_connections_are_tried_again(site, faults, checkpoint, impatient):
    checkpoint = open_checkpoint(f"{site.url}{WEIGHTS}")  # whose connections are impatient
    site.log.clear()
    site.faults.extend(faults)
    assert_bert(checkpoint, query(2))
    assert len(site.log) == len(faults) + 1


def test_faults_may_come_from_the_first_request_on(site):
    site.faults.extend([status(503), part(sent=3), status(503), part(sent=5)])
    assert_bert(open_checkpoint(f"{site.url}{WEIGHTS}"), query(0))


def test_a_server_that_asks_to_wait_is_asked_until_it_answers(site, checkpoint):
    site.faults.extend([status(429, Retry_After="2"), status(503, Retry_After="soon")] * 3)
    assert_bert(checkpoint, query(0))


def test_waits_grow_and_end(site, checkpoint):
    site.log.clear()
    site.faults.extend([status(503)] * 9)
    with pytest.raises(HubError, match="answers 503, 9 times in a row; try again later"):
        checkpoint.read([Part(query(0))])
    assert len(site.log) == 9
    assert_bert(checkpoint, query(0))
    usual = patience.Patience()
    longest = 0.5 + 1 + 2 + 4 + 8 + 16 + 30 + 30
    total = sum(usual.wait(failures) for failures in range(1, usual.attempts))
    assert longest / 2 <= total <= longest  # each wait is drawn from its upper half


def test_nobody_listens(limits):
    with serving() as server:
        address = server.url
    with pytest.raises(HubError, match="cannot be reached, 3 times in a row"):
        open_checkpoint(f"{address}{WEIGHTS}")


def test_a_server_that_never_answers(site, impatient):
    site.faults.extend([silence] * 10)
    with within(5), pytest.raises(HubError, match="does not answer, 2 times in a row"):
        open_checkpoint(f"{site.url}{WEIGHTS}")


# What cannot happen by chance is refused.


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (part(code=200), "does not support range requests"),
        (part(total="9" * 5000), "does not name its range"),
        (part(shift=1), "sends another range"),
        (part(Content_Range="bytes 8-7/9"), "sends another range"),
        (part(Content_Range=""), "does not name its range"),
        (part(Content_Range="bytes 8-20/x"), "does not name its range"),
        (part(Content_Range="bytes 8-20/*"), "does not name its range"),
        (part(total=17), "sends another range"),
        (part(total=5_000_000), "has 5000000 bytes instead of"),
        (part(total=2 * 10**12), "has 2000000000000 bytes instead of"),
        (part(ETag='"other"'), "was replaced during the read"),
        (part(ETag=""), "was replaced during the read"),
        (part(Content_Encoding="gzip"), "compresses ranges"),
        (one_byte, "sends another range"),
        (status(412), "was replaced during the read"),
        (status(416), "ends before the requested bytes"),
        (status(401), "may not read it"),
        (status(418), "answers 418"),
        (status(404), "no such file"),
        (redirect("file:///etc/passwd"), "not followed"),
        (redirect("ftp://127.0.0.1/x"), "not followed"),
        (redirect(""), "not followed"),
        (redirect("http://[::1"), "not followed"),
        (redirect(WEIGHTS), "not followed"),
    ],
)
def test_a_server_that_lies_or_leads_astray_is_refused(site, fault, message):
    site.faults.extend([None, *[fault] * 30])  # the second request is for the header
    name = f"{site.url}{WEIGHTS}"
    # config.json comes first: two requests of its own, one for what the first left.
    site.faults.extendleft([None, None])
    with within(5), pytest.raises((CheckpointError, HubError), match=message) as caught:
        open_checkpoint(name)
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.safetensors", b"", "it is empty"),
        ("x.safetensors", b"abc", "this file has 3 bytes"),
        (
            "x.safetensors",  # before its header is fetched
            (10**12).to_bytes(8, "little") + bytes(100),
            "claims 1000000000000 bytes",
        ),
        ("model.onnx", None, "ONNX"),
        ("model.pkl", None, "bare pickle"),
    ],
)
def test_what_is_no_checkpoint_under_an_address(site, name, content, message):
    if content is not None:
        site.files[f"/m/{name}"] = content
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(f"{site.url}/m/{name}")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (dripping, "does not answer, 2 times"),
        (interim, "does not answer, 2 times"),
        (slow_body, "too slowly, 2 times"),
    ],
)
def test_a_server_that_keeps_one_waiting_is_given_up(site, impatient, fault, message):
    checkpoint = open_checkpoint(f"{site.url}{WEIGHTS}")
    site.faults.extend([fault] * 1000)
    with within(20), pytest.raises(HubError, match=message):
        checkpoint.read([Part(query(0))])


def test_the_slowest_rate_lets_a_modem_through_and_no_drip():
    """14 bytes a second are given up within a minute, 16 kB a second never."""
    usual = patience.Patience()
    seconds = usual.silence + transfers.CHUNK / usual.slowest
    assert transfers.CHUNK / 16_000 < seconds < 60


def test_a_dated_file_without_tag_that_changes_half_way_is_refused(site):
    site.tags = dict.fromkeys(site.files)
    dated = part(Last_Modified="Mon, 01 Jan 2024 00:00:00 GMT")
    later = part(Last_Modified="Tue, 02 Jan 2024 00:00:00 GMT")
    site.faults.extend([dated] * 5 + [later] * 5)
    checkpoint = open_checkpoint(f"{site.url}{WEIGHTS}")
    checkpoint.read([Part(query(0))])
    with pytest.raises(CheckpointError, match="was replaced during the read"):
        checkpoint.read([Part(query(1))])


@pytest.mark.parametrize("seed", [1, None])
def test_content_that_nothing_vouches_for_is_read_twice_where_it_decides(site, seed):
    """Other weights under the same header, or a file of another size."""
    site.tags = dict.fromkeys(site.files)
    checkpoint = open_checkpoint(f"{site.url}{WEIGHTS}")
    assert_bert(checkpoint, query(0), query(1))
    site.files[WEIGHTS] = bert_folder(seed)["model.safetensors"] if seed else bytes(100_000_000)
    with pytest.raises(CheckpointError, match="replaced during the read"):
        checkpoint.read([Part(query(2))])


def test_a_file_longer_than_its_header_describes_is_refused(site):
    site.files[WEIGHTS] += bytes(1)
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, its header describes \d+"):
        open_checkpoint(f"{site.url}{WEIGHTS}")


@pytest.mark.parametrize(
    "address", ["http://[::1", "https://[", "http://a:b/x", "http://", "https://a:99999/"]
)
def test_what_is_no_address(address):
    with pytest.raises((CheckpointError, HubError)) as caught:
        open_checkpoint(address)
    assert "\n" not in str(caught.value)


# Redirects.


def test_redirects_are_followed(site):
    site.files["/far/model.safetensors"] = site.files[WEIGHTS]
    site.faults.extend([None, None, *[redirect("/far/model.safetensors", 307), None] * 5])
    assert_bert(open_checkpoint(f"{site.url}{WEIGHTS}"), query(0))
    assert any(request.path.startswith("/far/") for request in site.log)


# What is cached.


def test_a_replaced_file_is_not_taken_for_the_old_one(site):
    address = f"{site.url}{WEIGHTS}"
    checkpoint = open_checkpoint(address)
    assert_bert(checkpoint, query(0))
    site.files[WEIGHTS] = bert_folder(1)["model.safetensors"]
    with pytest.raises(CheckpointError, match="was replaced during"):
        checkpoint.read([Part(query(1))])
    assert_bert(open_checkpoint(address), query(0), query(1), seed=1)


def test_offline_everything_comes_from_the_cache_or_is_missed_by_name(site, monkeypatch, tmp_path):
    address = f"{site.url}/m"
    table = wqk.scan(address)
    site.log.clear()
    for arguments in ({"local_files_only": True}, {}):
        if not arguments:
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert wqk.scan(wqk.open(address, **arguments)).frame.equals(table.frame)
        checkpoint = open_checkpoint(address, **arguments)
        with pytest.raises(HubError, match=r"offline, and bytes .* are not in the cache"):
            checkpoint.read([Part("embeddings.word_embeddings.weight")])
        with pytest.raises(HubError, match="fetching is disabled"):
            open_checkpoint(f"{site.url}/other", **arguments)
    for damage in ("{}", "[1]", '["a", "b"]', "7", '[-1, "b"]'):
        for path in tmp_path.glob("cache/notes/*"):
            path.write_text(damage)
        with pytest.raises((HubError, CheckpointError)):
            open_checkpoint(address)
    assert site.log == []


def cached_ranges(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("ranges/*/*"))


def test_a_damaged_cache_heals(site, tmp_path):
    address = f"{site.url}{WEIGHTS}"
    table = wqk.scan(address)
    for number, path in enumerate(cached_ranges(tmp_path / "cache")):
        content = bytearray(path.read_bytes())
        if number % 3 == 0:
            content[len(content) // 2] ^= 1
        elif number % 3 == 1:
            content = content[:-1]
        else:
            path.unlink()
            continue
        path.write_bytes(content)
    assert wqk.scan(address).frame.equals(table.frame)
    site.log.clear()
    assert wqk.scan(address).frame.equals(table.frame)
    assert site.bytes_sent == 16


def test_a_cache_that_vanishes_or_cannot_be_written(site, tmp_path, monkeypatch):
    table = wqk.scan(f"{site.url}{WEIGHTS}")
    checkpoint = open_checkpoint(f"{site.url}{WEIGHTS}")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert wqk.scan(checkpoint).frame.equals(table.frame)
    monkeypatch.setenv("WQK_CACHE_LIMIT", "0")
    monkeypatch.setenv("WQK_CACHE", str(tmp_path / "none"))
    assert wqk.scan(f"{site.url}{WEIGHTS}").frame.equals(table.frame)
    assert not (tmp_path / "none").exists()


def test_without_a_cache_nothing_stays_in_memory(site, monkeypatch):
    monkeypatch.setenv("WQK_CACHE_LIMIT", "0")
    checkpoint = open_checkpoint(f"{site.url}{WEIGHTS}")
    source = next(iter(checkpoint._file_of.values())).source
    before = len(source._spans)
    checkpoint.prefetch([Part(query(0)), Part(query(1))])
    assert len(source._spans) == before + 2
    assert_bert(checkpoint, query(0), query(1))
    assert len(source._spans) == before


def test_the_cache_keeps_its_limit(tmp_path):
    cache = RangeCache(tmp_path, limit=10_000)
    assert all(cache.save(f"file {n}", 0, bytes(1000)) for n in range(9))
    assert not cache.save("more", 0, bytes(1000))  # of this process's own it gives up none
    (tmp_path / "ranges" / "x").mkdir()
    abandoned = tmp_path / "ranges" / "x" / ".0-8.abcd"
    abandoned.write_bytes(bytes(10))
    os.utime(abandoned, (0, 0))
    for path in sorted(tmp_path.glob("ranges/*/0-1000"))[:4]:
        os.utime(path, (1, 1))
    later = RangeCache(tmp_path, limit=10_000)
    assert all(later.save(f"new {n}", 0, bytes(1000)) for n in range(4))
    assert sum(path.stat().st_size for path in tmp_path.glob("ranges/*/*")) <= 10_000
    assert not abandoned.exists()


def test_ranges_of_another_file_or_place_are_not_believed(tmp_path):
    cache = RangeCache(tmp_path)
    cache.save("one", 0, b"0123456789")
    assert bytes(cache.load("one", 0, 10)) == b"0123456789"
    (path,) = cached_ranges(tmp_path)
    path.rename(path.with_name("5-15"))
    assert cache.ranges("one") == [(5, 15)]
    assert cache.load("one", 5, 15) is None
    assert cache.ranges("one") == []


@pytest.mark.parametrize("seed", range(20))
def test_spans_give_the_bytes_whatever_is_asked_in_whatever_order(
    site, seed, monkeypatch, tmp_path
):
    """Random ranges, small requests, a cache with ranges that overlap, several readers."""
    monkeypatch.setattr(remote_file, "LARGEST_REQUEST", 3000)
    dice = np.random.default_rng(seed)
    content = dice.bytes(50_000)
    path = "/m/r.safetensors"
    site.files[path] = content
    cache = (
        RangeCache(tmp_path / "nowhere", limit=0)
        if seed % 2
        else RangeCache(Path(os.environ["WQK_CACHE"]))
    )
    for _ in range(5):
        start = int(dice.integers(0, 40_000))
        cache.save("r", start, content[start : start + int(dice.integers(1, 5000))])
    location = web_location(site.url + path)
    file = RemoteFile("r", location, transfers=Transfers(), cache=cache, size=50_000, content="r")
    for _ in range(30):
        start, stop = sorted(int(n) for n in dice.integers(0, 50_000, 2))
        if dice.random() < 0.5:
            file.want([(start, stop + 1), (stop // 2, stop // 2 + 10)])
        if dice.random() < 0.2:
            file.forget([(start, stop)])
        buffer = bytearray(stop - start)
        file.read_into(start, memoryview(buffer))
        assert buffer == content[start:stop]
    spans = file._spans
    assert all(a.start < b.start and a.stop < b.stop for a, b in pairwise(spans))


def test_coalescing_wastes_little():
    dice = np.random.default_rng(0)
    for _ in range(200):
        edges = np.cumsum(dice.integers(1, 100_000, 40))
        ranges = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        joined = coalesce(ranges)
        total = sum(b - a for a, b in ranges)
        assert total <= sum(b - a for a, b in joined) <= 1.02 * total
        pieces = split(joined)
        assert sum(b - a for a, b in pieces) == sum(b - a for a, b in joined)
    assert coalesce([(0, 10), (10, 20), (5, 30)]) == [(0, 30)]


# A server that others wrote.


@pytest.fixture
def nginx(tmp_path):
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if not program:
        pytest.skip("needs nginx (Debian: apt-get install nginx-light)")
    root = tmp_path / "www"
    root.mkdir()
    with serving() as taken:
        port = int(taken.url.rpartition(":")[2])
    configuration = tmp_path / "nginx.conf"
    configuration.write_text(
        ("user root;\n" if os.geteuid() == 0 else "")  # which may read the test's folders
        + f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;\n"
        + "events {}\n"
        + "http { gzip on; gzip_types *; access_log "
        + f"{tmp_path}/access.log;\n"
        + "".join(
            f"{kind}_temp_path {tmp_path}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        + f"server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n"
    )
    process = subprocess.Popen(
        [program, "-c", str(configuration), "-e", f"{tmp_path}/error.log"],
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 0.1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}", root, tmp_path / "access.log"
    finally:
        process.terminate()
        process.wait(10)


def test_nginx(nginx, limits):
    url, root, log = nginx
    for name, content in sharded_folder().items():
        (root / name).write_bytes(content)
    checkpoint = open_checkpoint(url)
    table = wqk.scan(checkpoint)
    sizes = query_key_bytes(bert_weights())
    headers = sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in root.glob("*.safetensors")
    )
    small = sum(path.stat().st_size for path in root.glob("*.json"))
    assert sizes < checkpoint.bytes_fetched <= 1.02 * sizes + headers + small
    second = open_checkpoint(url)
    assert wqk.scan(second).frame.equals(table.frame)
    assert second.bytes_fetched == 8 * 5
    tensors = {k: v for p in root.glob("*.safetensors") for k, v in load(p.read_bytes()).items()}
    for name, array in zip(tensors, second.read([Part(n) for n in tensors]), strict=True):
        np.testing.assert_array_equal(array, tensors[name])
    assert log.exists()
