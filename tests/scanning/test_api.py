"""Scans from Python: keywords, lists, threads, extreme weights and damaged files."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests import small
from tests.limits import failing
from threadpoolctl import threadpool_info, threadpool_limits

import wqk
from wqk._console import plain
from wqk._machine import all_blas_threads, one_blas_thread
from wqk.errors import CheckpointError, MissingPackage, TableError
from wqk.forms.scores import looks_random
from wqk.tables.rendering import overview, short_names

ENCODER, DECODER = (wqk.demo_model(name) for name in ("encoder", "decoder"))


def test_how_a_checkpoint_is_opened_is_said_to_open_alone():
    from wqk.storage.references import HubOptions

    with pytest.raises(TypeError, match=r"^open\(\) got an unexpected keyword argument"):
        wqk.open(ENCODER, nonsense=1)
    for verb in (wqk.scan, wqk.explain, wqk.verify, wqk.show, wqk.diff, wqk.kin, wqk.match_tokens):
        taken = set(inspect.signature(verb).parameters)
        assert not taken & {*HubOptions.__annotations__, "family", "heads_per_layer", "key_heads"}
    model = wqk.open(ENCODER, token=None, cache_dir=None, local_files_only=True)
    assert wqk.open(model) is model
    assert len(wqk.scan(model, heads=False)) == 4
    with pytest.raises(wqk.errors.CheckpointError, match="is already open; pass revision= to wqk"):
        wqk.open(model, revision="main")


def test_a_list_of_checkpoints_is_one_table():
    table = wqk.scan([ENCODER, str(DECODER)], heads=False, details=True)
    tables = [wqk.scan(ref, heads=False, details=True) for ref in (ENCODER, DECODER)]
    assert_frame_equal(table.frame, wqk.join(tables).frame)
    assert_frame_equal(table.frame, tables[0].join(tables[1]).frame)
    assert len(table.details.blocks) == 8
    assert set(table.metadata["left_out"]) == {str(ENCODER), str(DECODER)}
    for refused in ([], ()):
        with pytest.raises(wqk.errors.CheckpointError, match="empty list"):
            wqk.scan(refused)
    with pytest.raises(TableError, match="at least one table"):
        wqk.join([])


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.fixture
def two_blas_threads():
    with threadpool_limits(2, "blas"):
        yield


def test_a_wrong_reference_in_a_list_names_the_survey_which_goes_on(tmp_path):
    wrong = tmp_path / "README.md"
    wrong.write_text("# Models")
    with pytest.raises(CheckpointError, match=r"README\.md.*; wqk\.survey\(refs, out=folder\)"):
        wqk.scan([ENCODER, wrong], heads=False)
    with ThreadPoolExecutor() as threads:
        table = wqk.survey([ENCODER, wrong], out=tmp_path / "out", heads=False, executor=threads)
    assert [line["checkpoint"] for line in table.metadata["failed"]] == [str(wrong)]
    assert len(table) == 4
    # One reference, or a wrong argument, is no matter of a survey.
    for ref, layers in ((wrong, None), ([wrong], None), ([ENCODER, DECODER], [99])):
        with pytest.raises(CheckpointError) as caught:
            wqk.scan(ref, layers=layers, heads=False)
        assert "survey" not in str(caught.value)


@pytest.mark.usefixtures("two_blas_threads")
def test_small_blocks_share_one_blas_thread_each_and_a_large_one_waits():
    seen, meeting = {}, threading.Barrier(2, timeout=10)

    def small(name):
        with one_blas_thread():
            meeting.wait()
            seen[name] = blas_threads()
            meeting.wait()

    before = blas_threads()
    assert before == {2}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(small, ["one", "two"]))
        assert seen == {"one": {1}, "two": {1}}
        assert blas_threads() == before
        with one_blas_thread():
            waiting = pool.submit(large)
            time.sleep(0.05)
            assert not waiting.done()
        assert waiting.result() == before
        assert pool.submit(limited).result() == {1}  # as any thread may from now on


def large():
    with all_blas_threads():
        return blas_threads()


def limited():
    with threadpool_limits(1, "blas"):
        return blas_threads()


@pytest.mark.usefixtures("two_blas_threads")
def test_scans_in_threads_are_the_same_and_leave_blas_as_it_was(monkeypatch):
    before, alone = blas_threads(), wqk.scan(DECODER).frame
    with ThreadPoolExecutor(8) as pool:
        frames = [table.frame for table in pool.map(wqk.scan, [DECODER] * 16)]
    assert all(frame.equals(alone) for frame in frames)
    assert blas_threads() == before
    # Small and large blocks at a time, the latter alone with every thread.
    monkeypatch.setattr("wqk.scanning.scan.SPARE_MEMORY", 0)
    with ThreadPoolExecutor(4) as pool:
        frames = [table.frame for table in pool.map(wqk.scan, [DECODER] * 4)]
    assert all(frame.equals(frames[0]) for frame in frames)
    assert_frame_equal(frames[0], alone, rel_tol=1e-5, abs_tol=1e-6)
    assert blas_threads() == before


def positive(scale: float = 1.0, dtype: type = np.float32, layer: int = 0) -> dict[str, np.ndarray]:
    """Weights without a configuration, of sizes around this one."""
    weights = np.random.default_rng(0).uniform(0.5, 1, (2, 16, 16)).astype(np.float32)
    made = (weights * np.float32(scale)).astype(dtype)
    return {f"layers.{layer}.self_attn.{s}_proj.weight": w for s, w in zip("qk", made, strict=True)}


opened = partial(wqk.open, heads_per_layer=4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-38, 4e37, 1e38, 3e38])
def test_finite_weights_of_any_size_have_their_norm(scale):
    table = wqk.scan(opened(positive(scale)), details=True)
    exact = wqk.scan(opened(positive(scale, np.float64)))
    for column in ("norm", "symmetry", "directionality_excess"):
        np.testing.assert_allclose(table.frame[column], exact.frame[column], rtol=1e-4, atol=1e-6)
    assert (table.frame["norm"] > 0).all()
    (block,) = table.details.blocks
    assert np.isfinite(block.row_norms).all()
    assert np.abs(block.image).max() == 127


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_weights_of_any_size_are_seen_to_be_untrained(scale):
    drawn = np.random.default_rng(0).standard_normal((2, 32, 64)).astype(np.float32)
    drawn *= np.float32(scale)
    uneven = drawn * np.linspace(0.3, 2, 64, dtype=np.float32)
    assert looks_random([*drawn.reshape(2, 2, 16, 64)], 0.02, 64)
    assert not looks_random([*uneven.reshape(2, 2, 16, 64)], 0.02, 64)


def test_key_heads_can_be_given_wherever_heads_can():
    rng = np.random.default_rng(0)
    fused = {"layers.0.attn.qkv.weight": rng.standard_normal((16 + 2 * 4, 16))}
    heads = {"heads_per_layer": 4, "key_heads": 1}
    model = wqk.open(fused, **heads)
    moved = wqk.open({name: weight + 1 for name, weight in fused.items()}, **heads)
    assert set(wqk.diff(model, moved).frame["key_heads"]) == {1}
    assert wqk.show(model, 0, coupling=True).values
    with pytest.raises(wqk.WqkError, match="key heads are only for one that does not"):
        wqk.scan(wqk.open(wqk.demo_model("encoder"), key_heads=2))


def test_tensors_larger_than_memory_are_refused(monkeypatch, tmp_path):
    from safetensors.numpy import save_file

    from wqk.checkpoints.files import RowFile

    save_file(positive(), tmp_path / "model.safetensors")
    monkeypatch.setattr(RowFile, "read", failing(MemoryError("Unable to allocate 1.00 TiB")))
    with pytest.raises(wqk.WqkError, match=r"_proj.weight', of shape .* does not fit in memory"):
        wqk.scan(opened(tmp_path))


def test_weights_that_are_not_finite_are_named_with_their_number():
    tensors = positive()
    tensors["layers.0.self_attn.k_proj.weight"][3, :2] = np.nan
    with pytest.raises(wqk.errors.NonFiniteWeights) as raised:
        wqk.scan(opened(tensors))
    assert raised.value.count == 2
    assert raised.value.tensor == "layers.0.self_attn.k_proj.weight"
    assert str(raised.value).startswith(f"{raised.value.checkpoint}: ")


class _Runs:
    """An object whose pickle would run a program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


def test_an_absent_checkpoint_and_an_unsafe_one_have_errors_of_their_own(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(wqk.errors.NoCheckpoint) as raised:
            wqk.open(path)
        assert raised.value.checkpoint == str(path)
    torch = pytest.importorskip("torch")
    torch.save({"weight": _Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(wqk.errors.UnsafeCheckpoint, match="contains more than weights"):
        wqk.open(tmp_path)


def test_the_same_checkpoint_has_not_moved():
    table = wqk.diff(ENCODER, ENCODER)
    assert set(table.frame["status"]) == {"unmoved"}
    assert table.frame["moved"].max() == 0.0
    assert table.frame["directionality"].null_count() == len(table)
    assert not table.frame.select(pl.col(pl.Float64).is_nan().any()).row(0).count(True)
    assert "nan" not in repr(table)


def test_a_difference_is_a_table_as_a_scan_is(tmp_path):
    model = opened(positive())
    table = wqk.diff(model, opened(positive(1.5)))
    np.testing.assert_allclose(table.frame["moved"], 1.25, rtol=1e-5)
    np.testing.assert_allclose(table.frame["cosine"], 1.0, rtol=1e-6)
    for ending in (".parquet", ".csv", ".jsonl", ".md", ".tex"):
        table.write(tmp_path / f"t{ending}")
    assert pl.read_parquet(tmp_path / "t.parquet").columns == table.frame.columns
    with pytest.raises(wqk.errors.CheckpointError, match="self-attention, layer 1"):
        wqk.diff(model, opened(positive() | positive(layer=1)))


def test_damaged_parquet_files_do_not_take_the_process_down(tmp_path):
    path, dice = tmp_path / "t.parquet", random.Random(0)
    table = wqk.scan(ENCODER)
    table.write(path)
    content = path.read_bytes()
    assert_frame_equal(pl.read_parquet(path), table.frame)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[dice.randrange(4, len(content) - 8)] ^= dice.randrange(1, 256)
        path.write_bytes(damaged)
        # A byte of the data may change a score unnoticed; any other error fails the test.
        with contextlib.suppress(TableError):
            wqk.read_table(path)


@pytest.mark.parametrize("missing", ["pandas", "pyarrow"])
def test_to_pandas_names_the_package_that_is_missing(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingPackage, match=f"{missing} is not installed") as raised:
        wqk.scan(ENCODER, heads=False).to_pandas()
    assert raised.value.package == missing


def test_other_forms_say_so_wherever_they_are_shown(tmp_path):
    table = wqk.scan(ENCODER, bias=True, gamma=1.5)
    for ending in (".md", ".tex", ".csv"):
        table.write(tmp_path / f"t{ending}")
    caption = "norms not folded in, biases included, gamma 1.5"
    assert caption in (tmp_path / "t.md").read_text()
    assert caption in (tmp_path / "t.tex").read_text()
    assert wqk.read_table(tmp_path / "t.csv").metadata == {
        "gamma": 1.5,
        "folded_norms": False,
        "biases": True,
    }
    assert "biases included · gamma 1.5" in " ".join(repr(table).split())
    values = wqk.ScoreTable(table.frame.with_columns(circuit=pl.lit("ov")), table.metadata)
    assert "circuit ov" in repr(values)
    assert "ignored: biases" in repr(wqk.scan(ENCODER))
    assert "biases" not in repr(table).split("ignored")[-1][:60]


def test_long_paths_stay_on_their_lines(tmp_path):
    folder = tmp_path / "models-of-many-kinds" / "of-language"
    folder.mkdir(parents=True)
    names = ["bert-base-uncased-finetuned-mnli", "gpt2"]
    for name in names:
        shutil.copytree(ENCODER, folder / name)
    table = wqk.scan([folder / name for name in names], heads=False)
    lines = plain(*overview(table, 80), width=80).splitlines()
    assert f"medians over layers, of {folder}" in "".join(lines).replace("of/", "of /")
    assert [line.split()[0] for line in lines if "encoder self" in line] == [
        "bert-base-unca…finetuned-mnli",
        "gpt2",
    ]
    wide = plain(*overview(table, 200), width=200)
    assert str(folder / names[0]) in wide


def test_long_names_stay_distinct_and_on_their_lines(tmp_path: Path) -> None:
    names = [
        f"an-experiment-on-symmetric-starts-seed-{n}-with-a-long-tail-of-words" for n in (1, 2)
    ]
    for name in names:
        shutil.copytree(ENCODER, tmp_path / name)
    table = wqk.scan([*(tmp_path / name for name in names), ENCODER], heads=False)
    lines = plain(*overview(table, 80), width=80).splitlines()
    rows = [line for line in lines if "encoder self" in line]
    assert len({row.split()[0] for row in rows}) == 3
    assert [row.split()[0][:6] for row in rows] == ["…eed-1", "…eed-2", "demo:e"]
    first = lines.index(rows[0])
    assert lines[first : first + 3] == rows  # no name is wrapped


@given(st.lists(st.text("ab/-", max_size=9), min_size=1, max_size=8), st.integers(7, 40))
def test_short_names_are_distinct_wherever_names_are(middles: list[str], longest: int) -> None:
    names = [f"a-beginning-in-common-{middle}-and-a-common-end" for middle in middles]
    _, short = short_names(names, longest)
    assert len(short) == len(names)
    assert len(set(short)) == len(set(names))


def test_a_checkpoint_without_a_step_has_none_in_the_overview(tmp_path):
    step = tmp_path / "checkpoint-7"
    shutil.copytree(ENCODER, step)
    lines = repr(wqk.scan([step, ENCODER], heads=False)).splitlines()
    assert any(" 7 " in line for line in lines)
    assert not any("None" in line for line in lines)


def test_ignored_terms_that_differ_in_a_number_are_one() -> None:
    models = [small.llama(head_width=width, name=f"of width {width}") for width in (4, 16)]
    printed = " ".join(repr(wqk.scan(models)).split())
    assert "; the scale, 0.25 or 0.5 (wqk explain)" in printed
    three = " ".join(repr(wqk.scan([*models, wqk.demo_model("encoder")])).split())
    assert "the scale, 0.1768, 0.25 or 0.5" in three
    assert "rotary positions, which change it at every distance but 0 (2 of 3 checkpoints)" in three
