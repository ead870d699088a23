"""tdserve/store/values/pinned_values.py: copies are of one moment, and a damaged page is named instead of followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.store.values.pinned_values import PinnedValues
from tests.damaged_pages import damage_free_pages, damage_tables

NUM_ROWS = 100
PATH = ("v",)


def put_all(objects: Objects, value: bytes) -> None:
    objects.put_many([ObjectColumn(PATH, range(NUM_ROWS), [value])])


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[Objects]:
    """Values whose file has free pages."""
    with Objects(tmp_path / "old", writable=True, max_bytes=1 << 26) as made:
        put_all(made, bytes(20_000))
        put_all(made, b"first")
        yield made


def read(folder: Path) -> list[bytes | None]:
    with Objects(folder) as objects:
        ((_, column),) = objects.get_many([(PATH, range(NUM_ROWS))])
    return list(column)


def test_copy_when_values_were_written_since_then_has_those_before_and_no_free_pages(
    objects: Objects, tmp_path: Path
) -> None:
    with PinnedValues(tmp_path / "old") as pinned:
        for number in range(20):
            put_all(objects, b"later %d" % number)
        assert pinned.copy(tmp_path / "new") == (tmp_path / "new/data.mdb").stat().st_size < 50_000
        with pytest.raises(CorruptDataError):
            pinned.copy(tmp_path / "new")
    assert read(tmp_path / "new") == [b"first"] * NUM_ROWS
    assert read(tmp_path / "old") == [b"later 19"] * NUM_ROWS


def test_count_unused_bytes_when_values_were_replaced_then_counts_what_a_copy_saves(
    objects: Objects, tmp_path: Path
) -> None:
    file_nbytes = (tmp_path / "old/data.mdb").stat().st_size
    with PinnedValues(tmp_path / "old") as pinned:
        copied_nbytes = pinned.copy(tmp_path / "new")
        assert file_nbytes - copied_nbytes == pytest.approx(pinned.count_unused_bytes(), rel=0.1)
    with PinnedValues(tmp_path / "new") as pinned:
        assert pinned.count_unused_bytes() < 20_000


@pytest.mark.parametrize("damage", [damage_free_pages, damage_tables])
def test_copy_when_a_page_is_damaged_then_refused_and_the_process_goes_on(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with Objects(tmp_path / "old", writable=True, max_bytes=1 << 26) as made:
        put_all(made, bytes(20_000))
        put_all(made, b"first")
    damage(tmp_path / "old/data.mdb")
    with PinnedValues(tmp_path / "old") as pinned:
        assert pinned.count_unused_bytes() >= 0
        with pytest.raises(CorruptDataError, match=r"page \d+ .*`tdserve check`"):
            pinned.copy(tmp_path / "new")
    assert not (tmp_path / "new").exists()
