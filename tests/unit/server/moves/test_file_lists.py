from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES
from tdserve.rules.replay.settings import Settings
from tdserve.server.catalog.seals import Seal
from tdserve.server.moves.file_lists import FileLists
from tdserve.server.moves.leaving_stores import LeavingStores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.durability.watermark import SyncedStore, Watermark, sync_store
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import extend, write
from tests.unit.server.weights.publishes import publish
from tests.unit.server.world import Loop, World

SEAL = Seal(3, f"{7:032x}")
WIDTH = 700_001
WIDE = b"rows/wide.memmap"
SUMS = b"synced.memmap"

Blocks = dict[tuple[bytes, int], bytes]


def make_rows(first: int, num_rows: int) -> TensorDict:
    count = torch.arange(first, first + num_rows)
    return TensorDict({"n": count, "wide": count[:, None].expand(-1, WIDTH).to(torch.uint8)}, [num_rows])


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    kind, settings = control_pb2.STORE_KIND_REPLAY, Settings().to_json()
    return run(world.create("r", make_rows(0, 1)[0], kind=kind, capacity=8, settings=settings))


@pytest.fixture
def leaving(world: World) -> LeavingStores:
    return world.services.moves.leaving


def read_blocks(store: OpenedStore, files: control_pb2.FileSizes) -> Blocks:
    """Reads all blocks of all files."""
    found = {}
    for path, nbytes in zip(files.paths, files.nbytes, strict=True):
        content = (store.folder / path.decode()).read_bytes()
        for offset in range(0, nbytes, MAX_BLOCK_BYTES):
            found[path, offset // MAX_BLOCK_BYTES] = content[offset : offset + MAX_BLOCK_BYTES]
    return found


def list_changed(files: control_pb2.FileSizes) -> Iterator[tuple[bytes, int]]:
    """Yields the blocks that may have changed, by the server's answer."""
    for path, nbytes, changed in zip(files.paths, files.nbytes, files.changed, strict=True):
        bits = np.unpackbits(np.frombuffer(changed, np.uint8), bitorder="little")
        for number in range(-(-nbytes // MAX_BLOCK_BYTES)):
            if not changed or bits[number]:
                yield path, number


def check_complete(store: OpenedStore, before: Blocks, files: control_pb2.FileSizes) -> list[int]:
    """Checks that no block outside the listed ones has changed; returns the listed ones of the wide leaf."""
    changed, now = set(list_changed(files)), read_blocks(store, files)
    assert all(block in changed or before[block] == content for block, content in now.items())
    return sorted(number for path, number in changed if path == WIDE)


def test_list_when_rows_come_or_are_overwritten_then_their_blocks_may_have_changed(
    world: World, run: Loop, store: OpenedStore, leaving: LeavingStores
) -> None:
    extend(world, run, store, make_rows(1, 3))
    files = run(leaving.list_files(store, SEAL))
    before = read_blocks(store, files)
    assert len(set(list_changed(files))) == len(before)  # of the first list, all

    extend(world, run, store, make_rows(11, 2), request=2)  # rows 3 and 4: bytes 2,100,003 to 3,500,005
    files = run(leaving.list_files(store, SEAL))
    assert check_complete(store, before, files) == [2, 3]

    before = read_blocks(store, files)
    write(world, run, store, make_rows(21, 1).select("wide"), slice(0, 1), ("wide",))
    files = run(leaving.list_files(store, SEAL))
    assert check_complete(store, before, files) == [0]
    assert check_complete(store, read_blocks(store, files), run(leaving.list_files(store, SEAL))) == []


def test_list_when_it_is_of_another_move_or_session_then_all_may_have_changed(
    run: Loop, store: OpenedStore, leaving: LeavingStores
) -> None:
    for by in (SEAL, Seal(SEAL.session, f"{8:032x}"), Seal(4, SEAL.operation)):
        files = run(leaving.list_files(store, by))
        assert set(list_changed(files)) == set(read_blocks(store, files))
    leaving.on_session_ended(4)
    files = run(leaving.list_files(store, Seal(4, SEAL.operation)))
    assert set(list_changed(files)) == set(read_blocks(store, files))


def test_list_when_a_row_is_being_written_then_it_has_changed_both_times(
    run: Loop, store: OpenedStore, leaving: LeavingStores
) -> None:
    assert store.get_table().ring.reserve(1) is not None
    run(leaving.list_files(store, SEAL))
    assert [number for path, number in list_changed(run(leaving.list_files(store, SEAL))) if path == WIDE] == [0]


def test_list_when_versions_stay_then_their_files_have_not_changed(world: World, run: Loop) -> None:
    publish(world, run, 1)
    store, leaving = world.stores.get("w"), world.services.moves.leaving
    before = read_blocks(store, run(leaving.list_files(store, SEAL)))
    publish(world, run, 2)
    files = run(leaving.list_files(store, SEAL))
    changed = {path for path, _ in list_changed(files)}
    assert b"versions/2.safetensors" in changed
    assert b"versions/1.safetensors" in files.paths
    assert b"versions/1.safetensors" not in changed
    assert read_blocks(store, files)[b"versions/1.safetensors", 0] == before[b"versions/1.safetensors", 0]


def describe(store: OpenedStore) -> SyncedStore:
    """Returns what a sync knows of a store."""
    uid, structure = store.record.uid, store.record.structure
    return SyncedStore.from_spec(store.spec, uid=uid, folder=str(store.folder), structure=structure)


def sync(store: OpenedStore) -> None:
    """Syncs a store."""
    sync_store(describe(store))


def test_list_when_rows_were_synced_then_their_checksums_are_in_it_and_a_store_at_rest_does_not_wait_for_them(
    world: World, run: Loop, store: OpenedStore
) -> None:
    lists = FileLists()
    extend(world, run, store, make_rows(1, 2))
    assert SUMS not in run(lists.list_files(store, SEAL)).paths  # there was no sync
    sync(store)
    assert (SUMS, 0) in set(list_changed(run(lists.list_files(store, SEAL))))
    extend(world, run, store, make_rows(3, 1), request=2)
    sync(store)
    assert (SUMS, 0) in set(list_changed(run(lists.list_files(store, SEAL))))
    for files in (run(lists.list_files(store, SEAL, is_at_rest=True)), *lists.begin_compare([store], SEAL)()):
        assert SUMS in files.paths
        assert (SUMS, 0) not in set(list_changed(files))
    (files,) = lists.begin_compare([store], Seal(4, SEAL.operation))()
    assert (SUMS, 0) in set(list_changed(files))  # that reader has none yet


def test_list_when_the_checksums_are_of_another_structure_then_they_are_left_out(
    world: World, run: Loop, store: OpenedStore
) -> None:
    extend(world, run, store, make_rows(1, 2))
    described = describe(store)
    Watermark.open(replace(described, leaves=described.leaves[:-1]), makes=True)
    assert (store.folder / SUMS.decode()).exists()
    assert SUMS not in run(FileLists().list_files(store, SEAL)).paths
