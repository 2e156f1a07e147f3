"""Side files: what they keep of a form, how small they are, and what a hostile one does."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import small

import wqk
from wqk.errors import OutputError, TableError
from wqk.tables.details import (
    IMAGE_SIDE,
    BlockDetails,
    Details,
    LayerKey,
    block_details,
    read_details,
)

CHANGES = [
    {"format": "another"},
    {"version": 2},
    {"gamma": "two"},
    {"blocks": 7},
    {"blocks": [7]},
    {"blocks": [{}]},
    {"layer": "0"},
    {"layer": True},
    {"revision": 7},
    {"norm_unit": []},
]

ENCODER = wqk.demo_model("encoder")
PLACE = LayerKey("a/b", None, None, "encoder", "self", 0, "qk", 0)


def stacked_heads(heads: int, key_heads: int, d: int, rank: int, seed: int = 0) -> wqk.BilinearForm:
    dice = np.random.default_rng(seed)
    query = dice.standard_normal((key_heads, heads // key_heads, d, rank))
    return wqk.BilinearForm(query, dice.standard_normal((key_heads, 1, d, rank)))


def saved(details: Details, folder: Path) -> Details:
    details.write(folder / "details.npz")
    return read_details(folder / "details.npz")


def kept(form: wqk.BilinearForm, folder: Path) -> tuple[BlockDetails, BlockDetails]:
    """Details of a form, as computed and as read from their file."""
    block = block_details(PLACE, form)
    (after,) = saved(Details((block,)), folder).blocks
    return block, after


def test_details_of_a_layer_are_those_of_the_dense_matrix():
    table = wqk.scan(ENCODER, gamma=1.5, details=True)
    for layer, block in enumerate(table.details.blocks):
        attention = wqk.open(ENCODER)[layer]
        scored = wqk.directionality(attention.form, gamma=1.5)
        assert table.layers.frame["directionality"][layer] == pytest.approx(scored, abs=1e-6)
        dense = attention.form.dense()
        rows, columns = np.linalg.norm(dense, axis=1), np.linalg.norm(dense, axis=0)
        np.testing.assert_allclose(block.row_norms, rows, rtol=1e-4)
        np.testing.assert_allclose(block.column_norms, columns, rtol=1e-4)
        for norms, outlying in ((rows, block.outlying_rows), (columns, block.outlying_columns)):
            threshold = norms.mean() + 1.5 * norms.std(ddof=1)
            assert outlying.tolist() == np.flatnonzero(norms > threshold).tolist()
        unit = np.quantile(np.abs(dense), 0.995)
        np.testing.assert_allclose(block.image_unit, unit, rtol=1e-4)
        expected = np.clip(dense, -unit, unit)
        np.testing.assert_allclose(block.image * unit / 127, expected, atol=0.51 * unit / 127)
        heads = [attention[h].dense() for h in range(4)]
        for a, head in enumerate(heads):
            for b, other_head in enumerate(heads):
                overlap = (
                    np.trace(head @ other_head) / np.linalg.norm(head) / np.linalg.norm(other_head)
                )
                assert abs(block.coupling[a, b] - overlap) < 1e-5
        assert block.key == replace(PLACE, checkpoint=str(ENCODER), layer=layer)


def test_a_side_file_keeps_what_a_screen_shows(tmp_path):
    details = wqk.scan(ENCODER, details=True).details
    loaded = saved(details, tmp_path)
    assert (loaded.gamma, repr(loaded)) == (2.0, "Details(4 layers)")
    for before, after in zip(details.blocks, loaded.blocks, strict=True):
        assert after.key == before.key
        assert after.image_unit == before.image_unit
        for name in ("image", "outlying_rows", "outlying_columns"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        for name in ("row_norms", "column_norms"):
            np.testing.assert_allclose(getattr(after, name), getattr(before, name), rtol=1e-3)
        np.testing.assert_allclose(after.coupling, before.coupling, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_of_any_size_fit_into_half_precision(scale, tmp_path):
    block, after = kept(stacked_heads(2, 1, 20, 3) * scale, tmp_path)
    np.testing.assert_allclose(after.row_norms, block.row_norms, rtol=1e-3)


def test_a_form_that_is_zero(tmp_path):
    _, after = kept(stacked_heads(2, 2, 6, 2) * 0.0, tmp_path)
    assert not after.image.any()
    assert not after.row_norms.any()
    assert np.isnan(after.coupling).all()


def test_two_widths_have_no_coupling(tmp_path):
    dice = np.random.default_rng(0)
    form = wqk.BilinearForm(dice.standard_normal((2, 1, 9, 3)), dice.standard_normal((2, 1, 7, 3)))
    _, after = kept(form, tmp_path)
    assert after.coupling is None
    assert after.image.shape == (9, 7)


llama = partial(small.llama, layers=1, head_width=4, width=16, sides="qkvo", norms=True)


@pytest.mark.parametrize(
    ("options", "distances"),
    [({}, [0]), ({"circuit": "ov"}, [0]), ({"fold_norm": True}, [0]), ({"distances": [7, 9]}, [7])],
)
def test_other_forms_are_looked_at_as_they_are_scored(options, distances):
    (block,) = wqk.scan(llama(), **options, details=True).details.blocks
    frame = wqk.scan(llama(), **{**options, "distances": distances}).frame
    layer = frame.row(0, named=True)
    np.testing.assert_allclose(np.linalg.norm(block.row_norms), layer["norm"], rtol=1e-4)
    symmetries = frame["symmetry"][1:].to_numpy()
    np.testing.assert_allclose(np.diag(block.coupling), symmetries, atol=1e-5)
    assert {k: layer[k] for k in vars(block.key)} == vars(block.key)


def test_details_come_from_the_one_pass_that_scores(monkeypatch):
    checkpoint = wqk.open_checkpoint(ENCODER)
    read, parts = type(checkpoint).read, []

    def count(self, requested):
        parts.extend(requested)
        return read(self, requested)

    monkeypatch.setattr(type(checkpoint), "read", count)
    assert len(wqk.scan(checkpoint, details=True).details.blocks) == 4
    assert len(parts) == len(set(parts))
    assert wqk.scan(checkpoint).details is None


def test_a_layer_of_the_largest_models_takes_little(tmp_path):
    # Width 16,384 and 128 heads; a layer's details are as large whatever its entries are.
    dice = np.random.default_rng(0)
    norms = dice.random(16384).astype(np.float32) + 1
    image = np.clip(dice.standard_normal((IMAGE_SIDE, IMAGE_SIDE)) * 45, -127, 127).astype(np.int8)
    coupling = dice.random((128, 128)).astype(np.float32)
    outlying = np.arange(400, dtype=np.int32)
    block = BlockDetails(PLACE, norms, norms[::-1], outlying, outlying, image, 1.0, coupling)
    Details((block,)).write(tmp_path / "large.npz")
    assert (tmp_path / "large.npz").stat().st_size < 150_000


def test_joined_details_keep_all_layers():
    tables = [
        wqk.scan(ENCODER, gamma=3.0, details=True),
        wqk.scan(wqk.demo_model("decoder"), details=True),
    ]
    of_encoder, of_decoder = (table.details for table in tables)
    joined = wqk.join(tables).details
    assert joined.blocks == of_encoder.blocks + of_decoder.blocks
    assert joined.gamma == 3.0


# Files that are something else


def file_of(**changes: Any) -> bytes:
    """A side file with one block, with parts left out (None) or put in their place."""
    block = block_details(PLACE, stacked_heads(2, 1, 8, 2))
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {
        "row_norms": np.ones(8, np.float16),
        "column_norms": np.ones(8, np.float16),
        "outlying_rows": np.array([3], np.int32),
        "outlying_columns": np.array([], np.int32),
        "image": block.image,
        "coupling": np.eye(2, dtype=np.float16),
    }
    entry = {**vars(PLACE), "norm_unit": 1.0, "image_unit": 1.0}
    entry |= {k: changes.pop(k) for k in list(changes) if k in entry}
    contents = {"format": "wqk details", "version": 1, "gamma": 2.0, "blocks": [entry]}
    contents |= {k: changes.pop(k) for k in list(changes) if k in contents}
    arrays = {f"0/{k}": v for k, v in (arrays | changes).items() if v is not None}
    text = np.frombuffer(json.dumps(contents).encode(), np.uint8)
    np.savez(buffer, contents=text, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "changes",
    [
        *CHANGES,
        {"gamma": None},
        {"checkpoint": None},
        {"row_norms": None},
        {"row_norms": np.ones(8)},
        {"row_norms": np.ones((8, 8), np.float16)},
        {"row_norms": np.ones(0, np.float16)},
        {"outlying_rows": np.array([8], np.int32)},
        {"outlying_rows": np.array([-1], np.int32)},
        {"outlying_rows": np.array([1.0])},
        {"image": np.zeros((257, 8), np.int8)},
        {"image": np.zeros((8, 8), np.uint8)},
        {"coupling": np.ones((2, 3), np.float16)},
        {"coupling": np.array(["a"])},
        {"coupling": np.array([{}], dtype=object)},
    ],
    ids=str,
)
def test_a_file_with_something_wrong_in_it(changes, tmp_path):
    path = tmp_path / "details.npz"
    path.write_bytes(file_of(**changes))
    with pytest.raises(TableError, match="holds no details of a scan"):
        read_details(path)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.mkdir, (Path("was-executed"),))


def archived(contents: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("contents.npy", contents)
    return buffer.getvalue()


def test_files_of_other_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("details.npz").write_bytes(file_of())  # is a sound one
    assert read_details("details.npz").blocks[0].outlying_rows.tolist() == [3]
    pickled, array = pickle.dumps(Payload()), io.BytesIO()
    np.save(array, np.ones(3))
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999,), }\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    for content in (b"", pickled, archived(pickled), array.getvalue(), archived(huge)):
        Path("details.npz").write_bytes(content)
        with pytest.raises(TableError, match="holds no details of a scan"):
            read_details("details.npz")
    assert not Path("was-executed").exists()
    for path, message in ((Path("absent.npz"), "no such file"), (Path(), "holds no details")):
        with pytest.raises(TableError, match=message):
            read_details(path)


SOUND = file_of()


@given(data=st.data())
def test_damaged_files_end_in_one_kind_of_error(data, tmp_path_factory):
    content = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(len(content) // 2, len(content)))]
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content)
    with contextlib.suppress(TableError):
        read_details(path)


def test_only_npz_is_written(tmp_path):
    with pytest.raises(OutputError, match=r"written as \.npz"):
        Details(()).write(tmp_path / "details.zip")
    assert not list(tmp_path.iterdir())
