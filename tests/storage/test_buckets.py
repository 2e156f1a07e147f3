"""Folders of a bucket, of a small server that lists objects as S3 does, and has their ranges."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

import pytest
from tests.checkpoints.serving import Handler, Site, serving

import wqk
from wqk.errors import CheckpointError
from wqk.storage.buckets import BucketFolder, matching_folders

DECODER = wqk.demo_model("decoder")
NAMES = ["alpha", "beta-1", "beta-2", "run/checkpoint-2", "run/checkpoint-10", "run/logs"]


class Bucket(Site):
    """Objects below ``/bucket``, listed with and without a delimiter."""

    def respond(self, handler: Handler) -> None:
        question = parse_qs(urlsplit(handler.path).query)
        if "list-type" not in question:
            super().respond(handler)
            return
        (prefix,) = question.get("prefix", [""])
        names = [path.removeprefix("/bucket/") for path in self.files]
        names = sorted(name for name in names if name.startswith(prefix))
        folders, content = set(), ""
        for name in names:
            below, separator, _ = name[len(prefix) :].partition("/")
            if "delimiter" in question and separator:
                folders.add(f"{prefix}{below}/")
                continue
            size, tag = self.size(f"/bucket/{name}"), self.tag(f"/bucket/{name}")
            content += (
                f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(str(tag))}</ETag></Contents>"
            )
        for folder in sorted(folders):
            content += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        listing = f"<ListBucketResult><Name>bucket</Name>{content}</ListBucketResult>"
        handler.answer(200, {"Content-Type": "application/xml"}, listing.encode())


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A model under each of `NAMES`."""
    with serving(Bucket) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "WQK_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        for name in NAMES:
            for file in DECODER.iterdir():
                server.files[f"/bucket/{name}/{file.name}"] = file.read_bytes()
        yield server


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["alpha", "beta-1", "beta-2", "run"]),
        ("beta-*", ["beta-1", "beta-2"]),
        ("*a", ["alpha"]),
        ("run/*-2", ["run/checkpoint-2"]),
        ("run/logs", ["run/logs"]),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_a_pattern_names_folders(pattern: str, names: list[str]) -> None:
    assert matching_folders(f"s3://bucket/{pattern}") == [f"s3://bucket/{name}" for name in names]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://bucket/gamma*", "no folder there matches 'gamma\\*'"),
        ("s3://bucket/Beta*", "no folder there matches"),
        ("s3://bucket/beta-[12]", "contains only \\*, got '\\['; use \\*, or list"),
        ("s3://bucket/*/checkpoint-2", "only the last part of an address may contain"),
        ("s3://buck*", "only the last part of an address may contain"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_a_pattern_that_names_none_is_refused(address: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        matching_folders(address)


def test_a_folder_is_listed_once_and_has_its_files(bucket: Bucket) -> None:
    folder = BucketFolder("s3://bucket/run")
    assert folder.folders == ["checkpoint-10", "checkpoint-2", "logs"]
    assert folder.objects == {}
    assert {path.rpartition("/")[2] for path in folder.deep} == {f.name for f in DECODER.iterdir()}
    assert len(folder.deep) == 3 * len(list(DECODER.iterdir()))
    sizes = {file.name: file.stat().st_size for file in DECODER.iterdir()}
    of_model = BucketFolder("s3://bucket/alpha").objects
    assert {name: entry.size for name, entry in of_model.items()} == sizes
    assert len(bucket.log) == 3  # two of the run, with and without a delimiter


def test_models_of_a_bucket_are_scored_as_those_of_a_folder(bucket: Bucket, tmp_path: Path) -> None:
    expected = wqk.scan(DECODER, heads=False).frame["symmetry"].to_list()
    with ThreadPoolExecutor(1) as threads:
        table = wqk.survey(["s3://bucket/beta-*"], out=tmp_path / "out", executor=threads)
    assert not table.metadata["failed"]
    for name in ("beta-1", "beta-2"):
        rows = table.layers.frame.filter(checkpoint=f"s3://bucket/{name}")
        assert rows["symmetry"].to_list() == expected
    bucket.log.clear()
    assert wqk.scan("s3://bucket/beta-1", heads=False).frame["symmetry"].to_list() == expected
    assert all("list-type=2" in request.path for request in bucket.log)


@pytest.mark.usefixtures("bucket")
def test_the_last_step_of_a_run_is_taken() -> None:
    assert wqk.open("s3://bucket/run").name == "s3://bucket/run/checkpoint-10"
