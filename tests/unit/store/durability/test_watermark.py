"""Which rows of a store count after a loss of power."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.store.durability.watermark import FILE_NAME, SyncedStore, begin_copy, find_whole, has_record, sync_store
from tdserve.store.rows import leaf_folders
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.rows.mapping import open_leaves
from tdserve.store.rows.row_columns import open_column
from tdserve.structure.captures.capture import capture

UID = "0123456789abcdef" * 2
COPY_UID = "fedcba9876543210" * 2
NUM_ROWS = 10


class Store:
    """A store of two leaves whose rows are written as control and a worker do it."""

    def __init__(self, folder: Path) -> None:
        content = {"x": torch.zeros(NUM_ROWS, 3000), "flag": torch.zeros(NUM_ROWS, dtype=torch.uint8)}
        spec = capture(TensorDict(content, [NUM_ROWS]), store="s").spec
        leaf_folders.create(folder, spec)
        self.folder = folder
        self.generations = Generations.create(folder / GENERATION_FILE, uid=UID, num_rows=NUM_ROWS + 1)
        self.leaves = open_leaves(folder, spec, writable=True)
        self.synced = SyncedStore.from_spec(spec, uid=UID, folder=str(folder), structure=0)

    def write(self, row: int, value: int) -> None:
        """Writes a whole row."""
        self.generations.values[row] |= 1
        for leaf in self.leaves.values():
            leaf[row] = value
        self.generations.values[row] += 1

    def whole(self) -> list[int]:
        """Rows that are as they were at the last sync, of those that were ever written."""
        is_whole, generations = find_whole(self.synced)
        return [int(row) for row in np.flatnonzero(is_whole & (generations[:-1] > 0))]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_sync_when_keys_are_being_added_then_their_folder_which_may_go_is_left_alone(store: Store) -> None:
    made = store.folder / "altering-1" / "rows"
    made.mkdir(parents=True)
    (made / "meta.json").symlink_to("gone")
    store.write(0, 1)
    assert sync_store(store.synced) == 1


def test_rows_when_synced_and_left_alone_then_whole_whatever_their_generations(store: Store) -> None:
    for row in range(4):
        store.write(row, row + 1)
    assert sync_store(store.synced) == 4
    store.generations.values[:] = 77
    assert store.whole() == [0, 1, 2, 3]


def test_rows_when_written_since_the_sync_then_not_whole_though_their_generation_did_not_reach_the_disk(
    store: Store,
) -> None:
    for row in range(4):
        store.write(row, row + 1)
    sync_store(store.synced)
    before = store.generations.values.copy()
    store.write(2, 9)
    store.leaves[("x",)][3, 1500:] = 7  # half written
    store.generations.values[:] = before
    assert store.whole() == [0, 1]


def test_rows_when_nothing_but_their_generation_reached_the_disk_then_are_what_they_were(store: Store) -> None:
    store.write(0, 1)
    sync_store(store.synced)
    store.generations.values[0] += 2
    assert store.whole() == [0]
    assert find_whole(store.synced)[1][0] == 2


def test_rows_when_never_written_and_no_zeros_any_more_then_not_whole(store: Store) -> None:
    sync_store(store.synced)
    store.leaves[("x",)][5, 7] = 1
    assert np.flatnonzero(~find_whole(store.synced)[0]).tolist() == [5]


def test_rows_when_given_up_before_the_sync_then_are_not_there_afterwards(store: Store) -> None:
    store.write(0, 1)
    sync_store(store.synced)
    store.generations.values[0] += 1
    assert sync_store(store.synced) == 1
    store.generations.values[0] += 1
    assert store.whole() == []


def test_rows_when_what_is_known_of_them_was_not_written_back_then_not_whole(store: Store) -> None:
    sequence = open_column(store.folder, "sequence", np.dtype(np.int64), (NUM_ROWS,))
    sequence[:3] = [1, 2, 3]
    for row in range(3):
        store.write(row, row + 1)
    sync_store(store.synced)
    sequence[1] = 99
    assert store.whole() == [0, 2]


def test_record_when_a_column_comes_later_then_is_carried_over_with_its_damage(store: Store) -> None:
    open_column(store.folder, "sequence", np.dtype(np.int64), (NUM_ROWS,))[:3] = [1, 2, 3]
    for row in range(3):
        store.write(row, row + 1)
    sync_store(store.synced)
    store.leaves[("x",)][1, 7] = 77  # damaged
    written = open_column(store.folder, "written", np.dtype(np.uint64), (NUM_ROWS, 1))
    written[:] = 3
    store.write(2, 9)
    written[2] = 1
    assert has_record(store.synced)
    assert store.whole() == [0]  # as far as is known before the next sync
    assert sync_store(store.synced) == 1
    assert store.whole() == [0, 2]
    written[0] = 1
    assert store.whole() == [2]
    assert sync_store(store.synced) == 0


def test_sync_when_nothing_changed_then_nothing_is_noted(store: Store) -> None:
    store.write(0, 1)
    assert sync_store(store.synced) == 1
    before = (store.folder / FILE_NAME).read_bytes()
    assert sync_store(store.synced) == 0
    assert (store.folder / FILE_NAME).read_bytes() == before


def test_sync_when_half_of_what_it_noted_reached_the_disk_then_rows_of_both_halves_are_whole(store: Store) -> None:
    """A loss of power in the middle of a sync."""
    for row in range(4):
        store.write(row, 1)
    sync_store(store.synced)
    before = (store.folder / FILE_NAME).read_bytes()
    store.write(1, 2)
    store.write(3, 2)
    sync_store(store.synced)
    after = bytearray((store.folder / FILE_NAME).read_bytes())
    entry = slice(4096 + 3 * 16, 4096 + 4 * 16)
    after[entry] = before[entry]
    (store.folder / FILE_NAME).write_bytes(after)
    assert store.whole() == [0, 1, 2]


def test_sync_when_the_store_has_another_structure_or_is_deleted_then_leaves_it(store: Store) -> None:
    store.write(0, 1)
    store.generations.move_structure(1)
    with pytest.raises(CorruptDataError, match="structure 0, found structure 1"):  # whoever waits is told nothing yet
        sync_store(store.synced)
    store.generations.move_structure(0)
    store.generations.mark_deleted()
    assert sync_store(store.synced) == 0
    assert not (store.folder / FILE_NAME).exists()


def test_find_when_the_record_is_missing_or_of_another_store_then_corrupt_data(store: Store) -> None:
    with pytest.raises(CorruptDataError, match="a record of its rows"):
        find_whole(store.synced)
    sync_store(store.synced)
    content = bytearray((store.folder / FILE_NAME).read_bytes())
    content[8] ^= 1
    (store.folder / FILE_NAME).write_bytes(content)
    with pytest.raises(CorruptDataError, match="a record of its rows"):
        find_whole(store.synced)


def test_find_when_a_file_is_gone_or_short_then_the_error_names_it(store: Store) -> None:
    sync_store(store.synced)
    with open(store.folder / "rows/x.memmap", "r+b") as file:
        file.truncate(100)
    with pytest.raises(CorruptDataError, match=r"x\.memmap"):
        find_whole(store.synced)


def test_store_when_sent_as_json_then_is_the_same(store: Store) -> None:
    assert SyncedStore.from_json(json.loads(json.dumps(asdict(store.synced)))) == store.synced


def raise_generations(generations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns generations of a copy."""
    return generations + 100


def test_rows_when_copied_then_compared_with_what_they_were_at_the_last_sync(store: Store) -> None:
    for row in range(4):
        store.write(row, row + 1)
    store.generations.values[3] |= 1  # it is being written
    sync_store(store.synced)
    store.write(2, 9)
    store.leaves["x",][1, 7] = 77  # damaged
    assert has_record(store.synced)
    copied = replace(store.synced, uid=COPY_UID)
    begin_copy(store.folder, source_uid=UID, uid=COPY_UID, rename=raise_generations)
    assert has_record(copied)
    assert not has_record(store.synced)
    values = store.generations.values
    values[:] = np.where(values, raise_generations(values), 0)
    store.generations.begin_copy(COPY_UID)
    assert sync_store(copied) == 1  # the one that was written since
    is_whole, generations = find_whole(copied)
    assert generations.tolist() == [102, 102, 104, 103, *[0] * 7]
    assert np.flatnonzero(is_whole & (generations[:-1] > 0)).tolist() == [0, 2]


@pytest.mark.parametrize("content", [None, b"", b"TDSSYN", bytes(4096)])
def test_copy_when_there_is_no_record_or_none_of_the_source_then_left_alone(
    store: Store, content: bytes | None
) -> None:
    path = store.folder / FILE_NAME
    if content is not None:
        path.write_bytes(content)
    begin_copy(store.folder, source_uid=UID, uid=COPY_UID, rename=raise_generations)
    assert (path.read_bytes() if path.exists() else None) == content


def test_record_when_of_another_structure_or_cut_short_then_there_is_none(store: Store) -> None:
    assert not has_record(store.synced)
    sync_store(store.synced)
    assert has_record(store.synced)
    assert has_record(replace(store.synced, structure=1))  # a lock changes that number too
    assert not has_record(replace(store.synced, leaves=store.synced.leaves[:1]))
    path = store.folder / FILE_NAME
    os.truncate(path, path.stat().st_size - 1)
    assert not has_record(store.synced)
    begin_copy(store.folder, source_uid=UID, uid=COPY_UID, rename=raise_generations)
    assert path.read_bytes()[8:40] == UID.encode()
