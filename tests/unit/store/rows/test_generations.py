"""Generation files: shared, checked, marked."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tdserve.base.errors import ClosedError, CorruptDataError, LocalProtocolError
from tdserve.store.rows.generations import HEADER_BYTES, Generations, is_marked_deleted, is_of

UID = "0123456789abcdef" * 2


def test_generations_when_written_then_every_mapping_shows_it(tmp_path: Path) -> None:
    writer = Generations.create(tmp_path / "g", uid=UID, num_rows=1000)
    reader = Generations.open(tmp_path / "g", uid=UID)
    assert reader.values.dtype == np.int64
    assert not reader.values.any()
    writer.values[:] = np.arange(1000)
    assert np.array_equal(reader.values, np.arange(1000))
    assert (tmp_path / "g").stat().st_size == HEADER_BYTES + 8000
    assert (tmp_path / "g").stat().st_blocks * 512 >= HEADER_BYTES + 8000


def test_generations_when_marked_deleted_then_existing_mappings_see_it(tmp_path: Path) -> None:
    writer = Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    reader = Generations.open(tmp_path / "g", uid=UID)
    assert not reader.is_deleted
    assert not is_marked_deleted(reader.path)
    writer.mark_deleted()
    assert is_marked_deleted(reader.path)
    os.unlink(tmp_path / "g")
    assert reader.is_deleted
    assert not is_marked_deleted(reader.path)
    assert not reader.values.any()


def test_generations_when_opened_for_reading_then_cannot_be_written(tmp_path: Path) -> None:
    Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    reader = Generations.open(tmp_path / "g", uid=UID)
    with pytest.raises(ValueError, match="read-only"):
        reader.values[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.mark_deleted()


def test_generations_when_closed_then_views_stay_and_new_ones_are_refused(tmp_path: Path) -> None:
    writer = Generations.create(tmp_path / "g", uid=UID, num_rows=3)
    view = writer.values
    writer.close()
    view[1] = 5
    assert Generations.open(tmp_path / "g", uid=UID).values.tolist() == [0, 5, 0]
    with pytest.raises(ClosedError):
        _ = writer.values
    with pytest.raises(ClosedError):
        _ = writer.is_deleted


def test_generations_when_objects_moved_then_every_mapping_shows_where_to(tmp_path: Path) -> None:
    writer = Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    reader = Generations.open(tmp_path / "g", uid=UID)
    assert reader.objects_epoch == 0
    writer.move_objects(3)
    assert reader.objects_epoch == 3
    assert Generations.open(tmp_path / "g", uid=UID).objects_epoch == 3
    assert not reader.is_deleted
    assert not reader.values.any()


@pytest.mark.parametrize("nbytes", [0, 50, HEADER_BYTES, HEADER_BYTES + 8, HEADER_BYTES + 17, HEADER_BYTES + 24])
def test_generations_when_file_has_another_size_then_are_corrupt(tmp_path: Path, nbytes: int) -> None:
    Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    os.truncate(tmp_path / "g", nbytes)
    with pytest.raises(CorruptDataError, match="bytes"):
        Generations.open(tmp_path / "g", uid=UID)


def test_generations_when_of_another_store_then_are_corrupt(tmp_path: Path) -> None:
    Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    with pytest.raises(CorruptDataError, match=UID):
        Generations.open(tmp_path / "g", uid="f" * 32)
    (tmp_path / "h").write_bytes(bytes(HEADER_BYTES + 16))
    with pytest.raises(CorruptDataError, match="magic"):
        Generations.open(tmp_path / "h", uid=UID)
    with pytest.raises(CorruptDataError):
        Generations.open(tmp_path / "none", uid=UID)


def test_generations_when_file_exists_then_create_leaves_it(tmp_path: Path) -> None:
    Generations.create(tmp_path / "g", uid=UID, num_rows=2).values[0] = 9
    with pytest.raises(CorruptDataError):
        Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    assert Generations.open(tmp_path / "g", uid=UID).values[0] == 9


def test_generations_when_uid_is_malformed_then_is_our_bug(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError):
        Generations.create(tmp_path / "g", uid="short", num_rows=2)


def test_generations_when_store_has_no_rows_then_are_empty(tmp_path: Path) -> None:
    Generations.create(tmp_path / "g", uid=UID, num_rows=0)
    assert Generations.open(tmp_path / "g", uid=UID).values.shape == (0,)


def test_is_of_when_asked_then_by_incarnation_also_where_the_file_is_damaged(tmp_path: Path) -> None:
    Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    assert is_of(tmp_path / "g", uid=UID)
    assert not is_of(tmp_path / "g", uid="f" * 32)
    assert not is_of(tmp_path / "none", uid=UID)
    os.truncate(tmp_path / "g", 100)
    assert is_of(tmp_path / "g", uid=UID)
    os.truncate(tmp_path / "g", 8)
    assert not is_of(tmp_path / "g", uid=UID)


def test_generations_when_the_structure_moved_then_every_mapping_shows_its_number(tmp_path: Path) -> None:
    writer = Generations.create(tmp_path / "g", uid=UID, num_rows=2)
    reader = Generations.open(tmp_path / "g", uid=UID)
    assert reader.structure == 0
    for number in (-1, 7):
        writer.move_structure(number)
        assert reader.structure == Generations.open(tmp_path / "g", uid=UID).structure == number
    assert (reader.objects_epoch, reader.is_deleted, reader.values.tolist()) == (0, False, [0, 0])
    reader.close()
    with pytest.raises(ClosedError):
        _ = reader.structure
