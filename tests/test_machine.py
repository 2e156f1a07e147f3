"""Memory of large arrays that is used again."""

from __future__ import annotations

import numpy as np

from wqk._machine import LARGE, empty_array, reused_memory

COUNT = LARGE // 4


def test_memory_is_used_again_only_when_no_view_of_it_is_left() -> None:
    with reused_memory():
        first = empty_array(COUNT, np.float32)
        address = first.ctypes.data
        view = first[: COUNT // 2].reshape(2, -1).T
        view[...] = 1
        del first
        second = empty_array(COUNT, np.float32)
        second[...] = 2
        assert second.ctypes.data != address
        assert (view == 1).all()
        del view
        third = empty_array(COUNT, np.float32)
        assert third.ctypes.data == address


def test_an_array_outlives_the_reserve() -> None:
    with reused_memory():
        array = empty_array(COUNT, np.float32)
        array[...] = 3
    after = empty_array(COUNT, np.float32)
    after[...] = 4
    assert (array == 3).all()
    assert array.flags.writeable


def test_unused_memory_of_other_sizes_is_not_kept() -> None:
    with reused_memory():
        small = empty_array(COUNT, np.float32)
        del small
        large = empty_array(3 * COUNT, np.float32)
        address = large.ctypes.data
        del large
        assert empty_array(2 * COUNT, np.float32).ctypes.data == address
