from __future__ import annotations

import numpy as np

from tdserve.messages.changed_blocks import (
    MAX_BLOCK_BYTES,
    clear_changed,
    count_blocks,
    count_changed_bytes,
    iter_changed,
    pack_changed,
)
from tdserve.v1 import control_pb2


def test_list_when_some_blocks_have_changed_then_these_are_found() -> None:
    changed = np.zeros(11, np.bool_)
    changed[[0, 8, 10]] = True
    nbytes = 10 * MAX_BLOCK_BYTES + 3
    files = control_pb2.FileSizes(
        paths=[b"a", b"b", b"empty"], nbytes=[nbytes, 5, 0], changed=[pack_changed(changed), b"", b""]
    )
    some, unknown, empty = iter_changed(files)
    assert some.numbers.tolist() == [0, 8, 10]
    assert [some.compute_size(number) for number in (0, 10)] == [MAX_BLOCK_BYTES, 3]
    assert unknown.numbers.tolist() == [0]
    assert empty.numbers.tolist() == []
    assert count_changed_bytes(files) == 3 * MAX_BLOCK_BYTES + 5


def test_list_when_cleared_then_nothing_has_changed() -> None:
    files = control_pb2.FileSizes(paths=[b"a", b"b"], nbytes=[MAX_BLOCK_BYTES * 9, 5], changed=[b"", b"\1"])
    cleared = clear_changed(files)
    assert [file.numbers.tolist() for file in iter_changed(cleared)] == [[], []]
    assert (cleared.paths, cleared.nbytes) == (files.paths, files.nbytes)


def test_count_when_a_file_ends_within_a_block_then_that_one_counts() -> None:
    assert [count_blocks(nbytes) for nbytes in (0, 1, MAX_BLOCK_BYTES, MAX_BLOCK_BYTES + 1)] == [0, 1, 1, 2]
