"""Scans of whole checkpoints: published values, planted forms, statuses, and memory."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tests import small
from tests.stand_in import Module

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.scanning.scan import Progress

# Per-layer symmetries of BERT-base, from the published result files.
BERT_BASE = [.539, .611, -.093, .579, .504, .574, .481, .609, .516, .429, .377, .389]  # fmt: skip


def test_bert_base_has_its_published_symmetries(shared: Path) -> None:
    table = wqk.scan(shared / "checkpoints" / "bert-base-uncased")
    layers = table.layers.frame
    np.testing.assert_allclose(layers["symmetry"], BERT_BASE, atol=0.005)
    with (shared / "reference" / "published_scores.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "bert-base-uncased"]
    published = [float(row["symmetry"]) for row in rows]
    np.testing.assert_allclose(layers["symmetry"], published, atol=0.005)
    # The weights at hand were tuned a little further: one layer differs by more than 0.04.
    directionality = [float(row["directionality"]) for row in rows]
    off = np.abs(layers["directionality_excess"].to_numpy() - directionality)
    assert off.max() < 0.08
    assert np.sort(off)[-2] < 0.04
    summary = table.summary().filter(over="layers")
    assert summary["symmetry_median"].item() == pytest.approx(0.51, abs=0.005)
    assert table.heads.frame.height == 12 * 12


def test_bert_tiny_has_its_published_median(shared: Path) -> None:
    table = wqk.scan(shared / "checkpoints" / "bert-tiny-sst2", heads=False)
    assert table.layers.frame["symmetry"].median() == pytest.approx(0.76, abs=0.01)


def sides(model: StateDict, layer: int = 0) -> list[np.ndarray]:
    """The weights of queries and of keys, (H, R, D) each; changing them changes the model."""
    at = f"model.layers.{layer}.self_attn"
    heads = model.config["num_attention_heads"]
    return [model._arrays[f"{at}.{s}_proj.weight"].reshape(heads, -1, 24) for s in "qk"]


def test_rows_equal_dense_scores_of_every_head_and_layer() -> None:
    model = small.llama(heads=3, key_heads=3, head_width=8)
    frame = wqk.scan(model).frame
    for layer in range(2):
        matrices = np.einsum("hrd,hre->hde", *sides(model, layer))
        for head in (None, 0, 1, 2):
            matrix = matrices.sum(0) if head is None else matrices[head]
            is_head = pl.col("head").is_null() if head is None else pl.col("head") == head
            row = frame.filter(pl.col("layer") == layer, is_head).row(0, named=True)
            norm = np.linalg.norm(matrix)
            assert row["symmetry"] == pytest.approx(np.sum(matrix * matrix.T) / norm**2, abs=1e-12)
            assert row["norm"] == pytest.approx(norm)
            null = np.sum(np.diag(matrix) ** 2) / norm**2
            assert row["symmetry_null"] == pytest.approx(null, abs=1e-12)
        row = frame.filter(pl.col("layer") == layer, pl.col("head").is_null()).row(0, named=True)
        total = np.linalg.norm(matrices.sum(0)) ** 2
        within = sum(np.sum(m * m.T) for m in matrices) / total
        assert row["symmetry_within_heads"] == pytest.approx(within, abs=1e-12)
        assert row["symmetry_within_heads"] + row["symmetry_between_heads"] == pytest.approx(
            row["symmetry"]
        )


def test_planted_heads_have_their_known_scores() -> None:
    model = small.llama(layers=1, key_heads=4)
    query, key = sides(model)
    turn = np.kron(np.eye(3), [[0, 1], [-1, 0]])
    key[0] = query[0]  # symmetric
    key[1] = turn @ query[1]  # skew-symmetric
    query[3], key[3] = key[2], query[2]  # each other's transpose
    frame = wqk.scan(model).heads.frame
    np.testing.assert_allclose(frame["symmetry"][:2], [1, -1], atol=1e-12)
    assert wqk.coupling(wqk.open(model)[0].heads)[2, 3] == pytest.approx(1)
    assert frame["directionality"][2] == pytest.approx(-frame["directionality"][3])


def test_a_zero_layer_is_degenerate_and_said_so() -> None:
    model = small.llama(layers=1, key_heads=4)
    sides(model)[1][:] = 0
    table = wqk.scan(model)
    assert set(table.frame["status"]) == {"degenerate"}
    assert table.frame["symmetry"].is_nan().all()
    assert table.summary()["symmetry_median"].to_list() == [None, None]


def test_progress_is_reported_for_every_block() -> None:
    seen: list[Progress] = []
    wqk.scan(wqk.demo_model("encoder"), on_progress=seen.append)
    assert [done.blocks_done for done in seen] == [1, 2, 3, 4]
    weights = 4 * 2 * 128 * 128 * 2
    assert weights <= seen[-1].bytes_read <= weights * 1.05


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    peaks = []
    code = (
        "import sys, wqk\nwqk.scan(sys.argv[1])\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    for layers in (4, 24):
        folder = tmp_path / str(layers)
        model = small.llama(layers=layers, heads=16, key_heads=16, head_width=64, width=1024)
        small.save_model(folder, model)
        kilobytes = subprocess.check_output([sys.executable, "-c", code, str(folder)], text=True)
        peaks.append(int(kilobytes) / 1024)
    # Twenty more layers are 168 MB of weights; none of them may stay.
    assert peaks[1] - peaks[0] < 30


@pytest.mark.parametrize("distances", [(0,), (0, 3)])
def test_a_device_changes_only_the_rounding(distances: tuple[int, ...], shared: Path) -> None:
    pytest.importorskip("torch")
    folder = shared / "checkpoints" / "stories260k"
    frame = wqk.scan(folder, distances=distances).frame
    frame_of_device = wqk.scan(folder, distances=distances, device="cpu").frame
    assert_frame_equal(frame, frame_of_device, abs_tol=1e-6, rel_tol=1e-5)


def test_products_on_a_device_are_whole_and_the_setting_stays() -> None:
    torch = pytest.importorskip("torch")
    settings = torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):  # since PyTorch 2.9
        name, rounded, exact = "fp32_precision", "tf32", "ieee"
    else:
        name, rounded, exact = "allow_tf32", True, False
    before = getattr(settings, name)
    during: list[object] = []
    setattr(settings, name, rounded)
    try:
        wqk.scan(
            wqk.demo_model("encoder"),
            device="cpu",
            on_progress=lambda _: during.append(getattr(settings, name)),
        )
        assert getattr(settings, name) == rounded
    finally:
        setattr(settings, name, before)
    assert during == [exact] * 4


def test_a_device_that_is_not_there_is_named() -> None:
    pytest.importorskip("torch")
    with pytest.raises(wqk.errors.MissingPackage, match="'nowhere': PyTorch cannot use it"):
        wqk.scan(wqk.demo_model("encoder"), device="nowhere")


def test_sides_of_unequal_widths_have_every_score_but_symmetry() -> None:
    random = np.random.default_rng(0)
    at = "layers.0.cross_attn"
    query, key = random.standard_normal((16, 16)), random.standard_normal((16, 8))
    tensors = {f"{at}.q_proj.weight": query, f"{at}.k_proj.weight": key}
    frame = wqk.scan(wqk.open(tensors, heads_per_layer=4)).frame
    assert frame["symmetry"].null_count() == len(frame) == 5
    assert set(zip(frame["d_query"], frame["d_key"], strict=True)) == {(16, 8)}
    dense = [query[4 * h : 4 * h + 4].T @ key[4 * h : 4 * h + 4] for h in range(4)]
    for form, row in zip([sum(dense), *dense], frame.iter_rows(named=True), strict=True):
        assert row["norm"] == pytest.approx(np.linalg.norm(form))
        assert row["directionality"] == pytest.approx(wqk.directionality(form))
    turned = {
        name: weight.reshape(4, 4, -1)[::-1].reshape(16, -1) for name, weight in tensors.items()
    }
    config = {"num_attention_heads": 4}
    (block,) = wqk.same(Module(tensors, config), Module(turned, config)).blocks
    (mismatch,) = block.mismatches
    assert (mismatch.verdict, mismatch.heads) == ("same heads in another order", (3, 2, 1, 0))
