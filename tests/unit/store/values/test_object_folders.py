"""Moving non-tensor values to a folder without free pages; a crash at any step loses none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError, CorruptDataError
from tdserve.store.rows.generations import FILE_NAME, Generations
from tdserve.store.values import object_folders
from tdserve.store.values.objects import ObjectColumn, Objects
from tests.unit.store.short_files import no_page_can_be_written

UID = "0123456789abcdef" * 2
PATH = ("v",)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with eight megabytes of free pages."""
    Generations.create(tmp_path / FILE_NAME, uid=UID, num_rows=1).close()
    fill(tmp_path / "objects")
    return tmp_path


def fill(folder: Path) -> None:
    """Large values, then small ones in their place."""
    with Objects(folder, writable=True) as objects:
        objects.put_many([ObjectColumn(PATH, range(100), [bytes(80_000)])])
        objects.put_many([ObjectColumn(PATH, range(100), [b"%d" % row for row in range(100)])])


def epoch_of(store: Path) -> int:
    """Returns the epoch that a reader sees."""
    return Generations.open(store / FILE_NAME, uid=UID).objects_epoch


def values_of(store: Path) -> list[bytes | None]:
    """What a reader finds in the folder that counts."""
    with Objects(object_folders.get_folder(store, epoch_of(store))) as objects:
        ((_, values),) = objects.get_many([(PATH, range(100))])
        return list(values)


EXPECTED = [b"%d" % row for row in range(100)]


def test_compact_when_many_pages_are_free_then_values_move_to_a_small_file(store: Path) -> None:
    before = (store / "objects/data.mdb").stat().st_size
    given_back = object_folders.compact(store, UID)
    assert given_back > 7_000_000
    assert (store / "objects.1/data.mdb").stat().st_size == before - given_back
    assert not (store / "objects").exists()
    assert epoch_of(store) == 1
    assert values_of(store) == EXPECTED
    assert object_folders.compact(store, UID) == 0
    fill(store / "objects.1")
    assert object_folders.compact(store, UID) > 7_000_000
    assert epoch_of(store) == 2
    assert values_of(store) == EXPECTED


def test_compact_when_few_pages_are_free_then_nothing_moves(tmp_path: Path) -> None:
    Generations.create(tmp_path / FILE_NAME, uid=UID, num_rows=1).close()
    assert object_folders.compact(tmp_path, UID) == 0
    for left_over in ("objects.1", "objects.7"):
        (tmp_path / left_over).mkdir()
    with Objects(tmp_path / "objects", writable=True) as objects:
        objects.put_many([ObjectColumn(PATH, range(100), [bytes(80_000)])])
        objects.put_many([ObjectColumn(PATH, range(20), [b""])])
    assert object_folders.compact(tmp_path, UID) == 0
    assert epoch_of(tmp_path) == 0
    assert [path.name for path in tmp_path.glob("objects*")] == ["objects"]


def test_compact_when_only_small_folders_are_left_over_then_they_are_removed(tmp_path: Path) -> None:
    Generations.create(tmp_path / FILE_NAME, uid=UID, num_rows=1).close()
    for folder in ("objects", "objects.1"):
        (tmp_path / folder).mkdir()
    assert object_folders.compact(tmp_path, UID) == 0
    assert [path.name for path in tmp_path.glob("objects*")] == ["objects"]


def test_compact_when_killed_inside_the_copy_then_the_next_one_starts_over(store: Path) -> None:
    (store / "objects.1").mkdir()
    (store / "objects.1/data.mdb").write_bytes(b"half a copy")
    assert values_of(store) == EXPECTED
    assert object_folders.compact(store, UID) > 0
    assert values_of(store) == EXPECTED


def test_compact_when_killed_before_the_number_is_raised_then_the_copy_is_made_again(store: Path) -> None:
    with Objects(store / "objects", writable=True) as objects:
        objects.copy(store / "objects.1")
        objects.put_many([ObjectColumn(PATH, [0], [b"newer"])])
    assert object_folders.compact(store, UID) > 0
    assert values_of(store) == [b"newer", *EXPECTED[1:]]


def test_compact_when_killed_before_the_old_folder_is_gone_then_the_next_one_removes_it(store: Path) -> None:
    shutil.copytree(store / "objects", store / "kept")
    object_folders.compact(store, UID)
    (store / "kept").rename(store / "objects")
    assert values_of(store) == EXPECTED
    assert object_folders.compact(store, UID) == 0
    assert not (store / "objects").exists()
    assert values_of(store) == EXPECTED


def test_compact_when_there_is_no_room_for_the_copy_then_values_stay_and_no_copy_does(store: Path) -> None:
    with no_page_can_be_written(), pytest.raises(CapacityError):
        object_folders.compact(store, UID)
    assert not (store / "objects.1").exists()
    assert values_of(store) == EXPECTED


def test_compact_when_a_reader_has_the_old_folder_open_then_it_reads_on(store: Path) -> None:
    with Objects(store / "objects") as reader:
        object_folders.compact(store, UID)
        assert reader.get_many([(PATH, [7])]) == [(True, [b"7"])]
        with Objects(store / "objects.1", writable=True) as objects:
            objects.put_many([ObjectColumn(PATH, [7], [b"new"])])
        assert reader.get_many([(PATH, [7])]) == [(True, [b"7"])]


def test_compact_when_it_is_another_store_then_nothing_is_changed(store: Path) -> None:
    with pytest.raises(CorruptDataError):
        object_folders.compact(store, "f" * 32)
    assert values_of(store) == EXPECTED
