from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import CapacityError, CorruptDataError, LocalProtocolError
from tdserve.store.rows.row_columns import FOLDER, open_column
from tests.unit.store.conftest import SMALL_DISK_BYTES

INT64 = np.dtype("<i8")


def test_column_when_first_opened_then_of_zeros_and_its_space_is_reserved(tmp_path: Path) -> None:
    column = open_column(tmp_path, "priority", np.dtype("<f8"), (1 << 18,))
    assert (column.shape, column.dtype.name, int(column.sum())) == ((1 << 18,), "float64", 0)
    found = (tmp_path / FOLDER / "priority.memmap").stat()
    assert found.st_size == 1 << 21
    assert found.st_blocks * 512 >= 1 << 21


@pytest.mark.parametrize(("dtype", "shape"), [("<i8", (5,)), ("<u8", (5, 2)), ("?", (5,)), ("<f8", (1,))])
def test_column_when_opened_again_then_as_it_was_left(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    written = open_column(tmp_path, "group-0f", np.dtype(dtype), shape)
    written[-1] = 1
    del written
    found = open_column(tmp_path, "group-0f", np.dtype(dtype), shape)
    expected: Any = np.zeros(shape, dtype)
    expected[-1] = 1
    assert found.tolist() == expected.tolist()


def test_columns_when_opened_twice_then_both_see_what_is_written_and_no_descriptor_stays(tmp_path: Path) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    one, other = (open_column(tmp_path, "x", INT64, (3,)) for _ in range(2))
    one[1] = 7
    assert other.tolist() == [0, 7, 0]
    assert len(os.listdir("/proc/self/fd")) <= num_fds


@pytest.mark.parametrize("num_rows", [4, 2])
def test_column_when_the_file_has_another_size_then_corrupt_and_untouched(tmp_path: Path, num_rows: int) -> None:
    open_column(tmp_path, "x", INT64, (3,))[:] = 5
    with pytest.raises(CorruptDataError, match=rf"expected {num_rows * 8} bytes, found 24 bytes"):
        open_column(tmp_path, "x", INT64, (num_rows,))
    assert open_column(tmp_path, "x", INT64, (3,)).tolist() == [5, 5, 5]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a.b", ".", "a b"])
def test_column_when_its_name_is_no_plain_file_name_then_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LocalProtocolError):
        open_column(tmp_path, name, INT64, (3,))
    assert os.listdir(tmp_path) == []


def test_column_when_it_has_no_element_then_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError):
        open_column(tmp_path, "x", INT64, (3, 0))


def test_column_when_its_place_is_a_link_then_not_followed(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "elsewhere").write_bytes(bytes(24))
    (tmp_path / FOLDER / "x.memmap").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptDataError):
        open_column(tmp_path, "x", INT64, (3,))
    assert (tmp_path / "elsewhere").read_bytes() == bytes(24)


def test_column_when_the_disk_is_full_then_error_and_no_file_stays(small_disk: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        open_column(small_disk, "x", INT64, (SMALL_DISK_BYTES,))
    assert caught.value.asked == 8 * SMALL_DISK_BYTES
    assert os.listdir(small_disk / FOLDER) == []
    assert len(open_column(small_disk, "x", INT64, (1000,))) == 1000
