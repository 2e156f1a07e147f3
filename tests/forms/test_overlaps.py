"""‖wᵀ r‖² by tiles: against double precision, and where tiles cancel."""

from __future__ import annotations

import numpy as np
import pytest

from wqk import BilinearForm
from wqk.forms import chaining, overlaps

WIDTH, RANK = 50, 8


def stack(seed: int, groups: int, sharing: int) -> BilinearForm:
    """Random forms on a stream with large dimensions, the query shared within each group."""
    dice = np.random.default_rng(seed)
    scales = np.exp(dice.normal(size=(WIDTH, 1)))
    query = scales * dice.standard_normal((groups, 1, WIDTH, RANK))
    key = dice.standard_normal((groups, sharing, WIDTH, RANK))
    return BilinearForm(query.astype(np.float32), key.astype(np.float32))


def in_double_precision(writer: BilinearForm, reader: BilinearForm) -> np.ndarray:
    """Scores of all pairs, from whole matrices."""
    writing, reading = dense(writer), dense(reader)
    norms = np.outer(np.linalg.norm(writing, axis=(-2, -1)), np.linalg.norm(reading, axis=(-2, -1)))
    products = np.linalg.norm(writing[:, None].mT @ reading, axis=(-2, -1))
    return np.asarray(products / norms)


def dense(form: BilinearForm) -> np.ndarray:
    """All matrices of a stack of forms in float64."""
    matrices = form.query.astype(np.float64) @ form.key.astype(np.float64).mT
    return matrices.reshape(-1, WIDTH, WIDTH)


@pytest.mark.parametrize("tile", [7, 50, 128])
@pytest.mark.parametrize("threads", [1, 3])
def test_tiles_and_cores_give_the_same(tile: int, threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlaps, "TILE", tile)
    writing = [stack(0, 4, 1), stack(1, 3, 1), stack(2, 2, 1)]
    reading = [stack(3, 4, 1), stack(4, 2, 3), stack(5, 1, 2), stack(6, 1, 3), stack(7, 2, 2)]
    fixed = np.arange(WIDTH) < 2
    writers = [chaining.end(form, fixed) for form in writing]
    readers = [chaining.end(form, fixed) for form in reading]
    spans = [(1, 3), (0, 1), (0, 2), (0, 2), (0, 3)]  # of writers that each reader meets
    places = []
    for reader, span in enumerate(spans):
        places.extend((writer, reader) for writer in range(*span))
    compositions = {}
    for pays in (True, False):
        monkeypatch.setattr(overlaps, "tiles_pay", lambda *_, pays=pays: pays)
        compositions[pays] = chaining.chain_all(writers, readers, places, threads)
    for (i, j), tiled, direct in zip(places, compositions[True], compositions[False], strict=True):
        np.testing.assert_allclose(
            direct.score, in_double_precision(writing[i], reading[j]), rtol=1e-6
        )
        np.testing.assert_allclose(tiled.score, direct.score, rtol=2e-6)
        np.testing.assert_allclose(tiled.z, direct.z, atol=2e-3)
        assert np.array_equal(tiled.mean, direct.mean)


def test_a_reader_that_nothing_feeds_is_left_out():
    narrow = BilinearForm(np.eye(3, 2, dtype=np.float32), np.eye(3, 2, dtype=np.float32))
    ends = [chaining.end(form) for form in (stack(0, 2, 1), narrow)]
    (composition,) = chaining.chain_all(ends[:1], ends, [(0, 0)], 1)
    assert np.array_equal(composition.score, chaining.chain(ends[0], ends[0]).score)


def test_a_score_that_cancels_is_left_to_its_core():
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((WIDTH, WIDTH)))
    forms = [
        BilinearForm(basis[:, [n]].astype(np.float32), basis[:, [9]].astype(np.float32))
        for n in range(2)
    ]
    writer, reader = map(chaining.end, forms)
    tiled = overlaps.by_tiles([writer], [reader], [(0, 1)], 1)
    direct = chaining.chain(writer, reader).score
    assert abs(tiled.item()) > 100 * direct.item() ** 2
    assert np.array_equal(chaining.chain(writer, reader, tiled).score, direct)


def test_the_cheaper_way_is_taken():
    def ends(width: int, rank: int, heads: int) -> list[chaining.End]:
        dice = np.random.default_rng(0)
        factors = dice.standard_normal((2, heads, 1, width, rank), np.float32)
        return [chaining.end(BilinearForm(*factors))]

    single_pair = [(0, 0)]
    assert overlaps.tiles_pay(ends(64, 16, 80), ends(64, 16, 80), single_pair)
    assert not overlaps.tiles_pay(ends(64, 4, 80), ends(64, 4, 80), single_pair)  # 2 R² < D
    assert not overlaps.tiles_pay(
        ends(64, 16, 1), ends(64, 16, 1), single_pair
    )  # too few to make any for
    assert not overlaps.tiles_pay(ends(64, 16, 80), ends(64, 16, 80), [])
