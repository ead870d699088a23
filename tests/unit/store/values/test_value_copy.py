"""The copy of a store's values that a loss of power leads back to."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tdserve.store.values.object_folders import get_folder
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.store.values.value_copy import ValueCopy

ROWS = np.arange(3)
LEAVES = ((("a",), 1), (("b",), 2))


def _put(folder: Path, value: bytes, *, path: str = "a", num: int = 3) -> None:
    with Objects(folder, writable=True) as objects:
        objects.put_many([ObjectColumn((path,), np.arange(num), [value + b"%d" % row for row in range(num)])])


def _sums(copy: ValueCopy) -> list[int]:
    sums = np.zeros(3, np.uint64)
    copy.add_sums(sums, ROWS, LEAVES)
    return [int(each) for each in sums]


def test_copy_when_values_came_since_then_has_them_only_once_it_is_refreshed(tmp_path: Path) -> None:
    copy = ValueCopy(tmp_path)
    assert _sums(copy) == [0, 0, 0]
    _put(get_folder(tmp_path, 0), b"old")
    copy.refresh(0)
    old = _sums(copy)
    assert len(set(old)) == 3
    _put(get_folder(tmp_path, 0), b"new")
    assert _sums(copy) == old
    copy.refresh(0)
    assert not set(_sums(copy)) & set(old)


def test_copy_when_nothing_was_committed_since_then_stays(tmp_path: Path) -> None:
    copy = ValueCopy(tmp_path)
    _put(get_folder(tmp_path, 0), b"old")
    copy.refresh(0)
    before = (copy.folder / "data.mdb").stat().st_ino
    copy.refresh(0)
    assert (copy.folder / "data.mdb").stat().st_ino == before


def test_sums_when_a_row_has_several_values_or_all_share_one_then_count_each(tmp_path: Path) -> None:
    copy = ValueCopy(tmp_path)
    folder = get_folder(tmp_path, 0)
    _put(folder, b"x", path="b", num=6)
    copy.refresh(0)
    several = _sums(copy)
    with Objects(folder, writable=True) as objects:
        objects.put_many([ObjectColumn(("a",), None, [b"shared"])])
    copy.refresh(0)
    shared = [(after - before) % (1 << 64) for after, before in zip(_sums(copy), several, strict=True)]
    assert len(set(several)) == 3
    assert len(set(shared)) == 1
    assert shared[0]


def test_restore_when_the_values_are_of_several_moments_then_the_copy_takes_their_place(tmp_path: Path) -> None:
    copy = ValueCopy(tmp_path)
    _put(get_folder(tmp_path, 0), b"old")
    copy.refresh(0)
    old = _sums(copy)
    (get_folder(tmp_path, 0) / "data.mdb").write_bytes(b"damaged" * 5000)
    (tmp_path / "objects.1").mkdir()
    copy.restore()
    with Objects(get_folder(tmp_path, 0)) as objects:
        (found,) = objects.get_many([(("a",), ROWS)])
    assert list(found.values) == [b"old0", b"old1", b"old2"]
    assert not (tmp_path / "objects.1").exists()
    copy.refresh(0)  # its commits are counted anew: it must not take the one before for this one
    assert _sums(copy) == old


def test_restore_when_there_is_no_copy_then_there_are_no_values(tmp_path: Path) -> None:
    _put(get_folder(tmp_path, 0), b"old")
    ValueCopy(tmp_path).restore()
    assert not get_folder(tmp_path, 0).exists()
