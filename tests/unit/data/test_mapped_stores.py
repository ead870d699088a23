from __future__ import annotations

import shutil
from pathlib import Path as FilePath

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    LocalProtocolError,
    StoreNotFoundError,
    TransferAbortedError,
)
from tdserve.data.mapped_stores import OpenStores
from tdserve.messages.layout import Layout
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.v1 import worker_pb2
from tests.unit.worker.peer import UID, StoredTensorDict


def opened(store: StoredTensorDict, *, writes_values: bool = True) -> OpenStores:
    """A cache that knows the structure."""
    made = OpenStores(writes_values=writes_values)
    made.learn(store.ref.fingerprint, store.ref.spec)
    return made


def test_get_when_opened_then_mapped_once_and_shared_with_the_files(store: StoredTensorDict) -> None:
    stores = opened(store)
    found = stores.get(store.ref)
    assert stores.get(store.ref) is found
    found.leaves[("small",)][2] = 77
    assert store.leaves[("small",)][2] == 77
    assert found.generations.values.tolist() == [2] * 7


def test_leaves_of_when_a_layout_is_given_then_in_its_order(store: StoredTensorDict) -> None:
    found = opened(store).get(store.ref)
    layout = Layout.from_spec(store.spec)
    assert [leaf.nbytes for leaf in found.get_leaves(layout)] == [slot.nbytes for slot in layout.slots]


def test_tables_of_when_a_layout_is_given_then_rows_of_bytes_in_its_order_made_once(store: StoredTensorDict) -> None:
    found = opened(store).get(store.ref)
    layout = Layout.from_spec(store.spec)
    tables = found.get_tables(layout)
    assert [table.shape for table in tables] == [(6, slot.row_nbytes) for slot in layout.slots]
    assert [table.ctypes.data for table in tables] == [leaf.data_ptr() for leaf in found.get_leaves(layout)]
    assert all(first is second for first, second in zip(tables, found.get_tables(layout), strict=True))


@pytest.mark.parametrize(("shape", "row_nbytes"), [([6], 12), ([], 12), ([0], 0)])
def test_row_nbytes_when_asked_then_of_all_tensors_of_one_row(
    tmp_path: FilePath, shape: list[int], row_nbytes: int
) -> None:
    td = TensorDict({"a": torch.zeros(shape), "b": torch.zeros(shape, dtype=torch.int64)}, shape)
    stored = StoredTensorDict(tmp_path / "store", td)
    assert opened(stored).get(stored.ref).row_nbytes == row_nbytes


def test_find_when_mapped_then_that_and_else_none(store: StoredTensorDict) -> None:
    stores = opened(store)
    assert stores.find(UID) is None
    found = stores.get(store.ref)
    assert stores.find(UID) is found
    stores.drop(UID)
    assert stores.find(UID) is None


def test_granted_when_control_allowed_reads_then_until_it_is_deleted(store: StoredTensorDict) -> None:
    stores = opened(store)
    found = stores.get(store.ref)
    assert stores.find_readable("store") is None
    stores.remember_readable(found)
    assert stores.find_readable("store") is found
    store.generations.mark_deleted()
    assert stores.find_readable("store") is None


def test_granted_when_dropped_then_none(store: StoredTensorDict) -> None:
    stores = opened(store)
    stores.remember_readable(stores.get(store.ref))
    stores.drop(UID)
    assert stores.find_readable("store") is None


def test_granted_when_another_has_the_name_now_then_that_one(store: StoredTensorDict, tmp_path: FilePath) -> None:
    stores = opened(store)
    first = stores.get(store.ref)
    stores.remember_readable(first)
    second = StoredTensorDict(tmp_path / "later" / "store", TensorDict({"small": torch.arange(6)}, [6]), uid=UID[::-1])
    stores.learn(second.ref.fingerprint, second.ref.spec)
    stores.remember_readable(stores.get(second.ref))
    stores.drop(UID)  # told late
    found = stores.find_readable("store")
    assert found is not None
    assert found.uid == UID[::-1]


def test_get_when_the_structure_was_never_sent_then_error(store: StoredTensorDict) -> None:
    with pytest.raises(LocalProtocolError):
        OpenStores(writes_values=True).get(store.ref)


def test_get_when_of_another_incarnation_then_damage_is_reported(store: StoredTensorDict) -> None:
    store.ref.uid = UID[::-1]
    with pytest.raises(CorruptDataError):
        opened(store).get(store.ref)


def test_drop_when_the_store_was_deleted_then_opened_anew(store: StoredTensorDict) -> None:
    stores = opened(store)
    first = stores.get(store.ref)
    stores.drop(UID)
    stores.drop(UID)
    assert stores.get(store.ref) is not first


def test_objects_when_nothing_was_written_then_none_for_readers(store: StoredTensorDict) -> None:
    found = opened(store, writes_values=False).get(store.ref)
    assert found.open_objects(writable=False) is None


def put(objects: Objects | None, value: bytes) -> None:
    """Writes one value for all rows."""
    assert objects is not None
    objects.put_many([ObjectColumn(("n", "v"), None, [value])])


def get(objects: Objects | None) -> bytes | None:
    """What all rows read."""
    assert objects is not None
    ((_, (value,)),) = objects.get_many([(("n", "v"), [0])])
    return value


def test_objects_when_they_have_moved_then_are_read_where_they_are_now(store: StoredTensorDict) -> None:
    old, new = FilePath(store.ref.folder) / "objects", FilePath(store.ref.folder) / "objects.1"
    with Objects(old, writable=True) as objects:
        put(objects, b"old")
        found = opened(store, writes_values=False).get(store.ref)
        assert get(found.open_objects(writable=False)) == b"old"
        assert found.open_objects(writable=False) is found.open_objects(writable=False)
        objects.copy(new)
    with Objects(new, writable=True) as moved:
        put(moved, b"new")
        assert get(found.open_objects(writable=False)) == b"old"
        store.generations.move_objects(1)
        shutil.rmtree(old)
        assert get(found.open_objects(writable=False)) == b"new"


def test_objects_when_the_store_was_deleted_then_those_of_the_next_one_are_not_taken_for_its_own(
    store: StoredTensorDict,
) -> None:
    found = opened(store, writes_values=False).get(store.ref)
    store.generations.mark_deleted()
    with Objects(FilePath(store.ref.folder) / "objects", writable=True) as next_ones:
        put(next_ones, b"of the next store")
        with pytest.raises(StoreNotFoundError):
            found.open_objects(writable=False)


def test_objects_when_the_store_was_deleted_then_the_writer_makes_no_folder_anew(store: StoredTensorDict) -> None:
    found = opened(store).get(store.ref)
    store.generations.mark_deleted()
    shutil.rmtree(store.ref.folder)
    with pytest.raises(StoreNotFoundError):
        found.open_writable_objects()
    assert not FilePath(store.ref.folder).exists()


def test_objects_when_the_store_has_a_limit_of_its_own_then_the_writer_keeps_it(store: StoredTensorDict) -> None:
    store.ref.max_object_bytes = 1 << 20
    writer = opened(store).get(store.ref).open_writable_objects()
    with pytest.raises(CapacityError, match=str(1 << 20)):
        put(writer, bytes(2 << 20))


def test_objects_when_the_store_is_closed_then_running_reads_end_in_peace(store: StoredTensorDict) -> None:
    stores = opened(store)
    objects = stores.get(store.ref).open_writable_objects()
    put(objects, b"x")
    stores.close()
    assert get(objects) == b"x"
    assert stores.find(UID) is None


@pytest.mark.parametrize("is_deleted", [True, False])
def test_shared_numbers_when_their_file_is_gone_then_a_retry_finds_out_about_a_deletion_and_else_damage(
    store: StoredTensorDict, is_deleted: bool
) -> None:
    mapped = opened(store).get(store.ref)
    if is_deleted:
        store.generations.mark_deleted()
    store.generations.path.unlink()
    with pytest.raises(TransferAbortedError if is_deleted else CorruptDataError):
        _ = mapped.writable_shared


def test_get_when_the_store_has_another_structure_then_mapped_anew_and_the_old_one_stays_whole(
    store: StoredTensorDict,
) -> None:
    stores = opened(store)
    old = stores.get(store.ref)
    stores.remember_readable(old)
    assert stores.find_readable(old.name) is old
    store.generations.move_structure(-1)
    assert not old.is_current
    assert stores.find_readable(old.name) is None
    newer = worker_pb2.StoreRef()
    newer.CopyFrom(store.ref)
    newer.structure = 1
    with pytest.raises(TransferAbortedError, match="structure"):  # its files are being moved
        stores.get(newer)
    store.generations.move_structure(1)
    with pytest.raises(TransferAbortedError, match="altered"):
        old.check_current()
    found = stores.get(newer)
    assert found is not old
    assert found.is_current
    assert stores.get(newer) is found
    with pytest.raises(TransferAbortedError):  # an order that was given before
        stores.get(store.ref)
    assert stores.get(newer) is found
    assert old.leaves["small",].data_ptr() != found.leaves["small",].data_ptr()


def test_get_when_a_file_has_gone_with_its_key_then_to_be_asked_for_again(
    store: StoredTensorDict,
) -> None:
    (FilePath(store.ref.folder) / "rows" / "small.memmap").unlink()
    with pytest.raises(CorruptDataError):
        opened(store).get(store.ref)
    store.generations.move_structure(1)
    with pytest.raises(TransferAbortedError):
        opened(store).get(store.ref)


def test_forget_specs_when_orders_still_wait_then_the_structure_sent_last_is_kept(store: StoredTensorDict) -> None:
    stores = opened(store)
    stores.forget_specs()
    assert stores.get_spec(store.ref.fingerprint) == store.spec
    stores.forget_specs()
    with pytest.raises(LocalProtocolError, match="has not received"):
        stores.get_spec(store.ref.fingerprint)


def make_stores(folder: FilePath, num_stores: int, *, num_leaves: int = 1) -> list[StoredTensorDict]:
    """Makes the files of several stores."""
    td = TensorDict({str(number): torch.zeros(2) for number in range(num_leaves)}, [2])
    return [StoredTensorDict(folder / str(number), td, uid=f"{number:032x}") for number in range(num_stores)]


@pytest.mark.parametrize(("num_leaves", "max_stores", "max_mappings"), [(1, 4, 100), (3, 100, 12)])
def test_get_when_many_are_mapped_then_those_not_used_for_long_are_dropped(
    tmp_path: FilePath, num_leaves: int, max_stores: int, max_mappings: int
) -> None:
    stores = OpenStores(writes_values=False, max_stores=max_stores, max_mappings=max_mappings)
    made = make_stores(tmp_path, 9, num_leaves=num_leaves)
    first = stores.get(made[0].ref, made[0].spec)
    stores.remember_readable(first)
    for each in made[1:5]:
        stores.get(each.ref, each.spec)
        assert stores.find(first.uid) is first  # used again and again
    left = [each for each in made if stores.find(each.ref.uid) is not None]
    assert made[0] in left
    assert len(left) <= 4
    assert stores.find_readable(first.name) is first
    for each in made[1:]:
        stores.get(each.ref, each.spec)
    assert stores.find(first.uid) is None
    assert stores.find_readable(first.name) is None
    assert first.is_current, "who uses it keeps it"
    again = stores.get(made[0].ref, made[0].spec)
    assert again is not first
    assert again.leaves[("0",)].tolist() == [0.0, 0.0]
    stores.remember_readable(first)  # a read that began before it was dropped
    assert stores.find_readable(first.name) is None


def test_get_when_the_maps_of_values_are_too_large_together_then_those_not_used_for_long_are_dropped(
    tmp_path: FilePath,
) -> None:
    td = TensorDict({"x": torch.zeros(2), "text": "value"}, [2])
    made = [StoredTensorDict(tmp_path / str(number), td, uid=f"{number:032x}") for number in range(4)]
    for each in made:
        each.ref.max_object_bytes = 1 << 30
    stores = OpenStores(writes_values=False, max_value_bytes=3 << 30)
    for each in made:
        assert stores.get(each.ref, each.spec).value_address_bytes == 1 << 30
    assert [stores.find(each.ref.uid) is not None for each in made] == [False, False, True, True]


def test_get_when_one_store_has_more_leaves_than_the_limit_then_mapped_alone(tmp_path: FilePath) -> None:
    stores = OpenStores(writes_values=False, max_mappings=4)
    small, large = make_stores(tmp_path / "small", 1)[0], make_stores(tmp_path / "large", 2, num_leaves=5)[1]
    stores.get(small.ref, small.spec)
    assert len(stores.get(large.ref, large.spec).leaves) == 5
    assert stores.find(small.ref.uid) is None
