from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.data.opened import OpenStores
from tdserve.errors import CorruptDataError, LocalProtocolError
from tdserve.layout import Layout
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
    layout = Layout.of(store.spec)
    assert [leaf.nbytes for leaf in found.leaves_of(layout)] == [slot.nbytes for slot in layout.slots]


def test_tables_of_when_a_layout_is_given_then_rows_of_bytes_in_its_order_made_once(store: StoredTensorDict) -> None:
    found = opened(store).get(store.ref)
    layout = Layout.of(store.spec)
    tables = found.tables_of(layout)
    assert [table.shape for table in tables] == [(6, slot.row_nbytes) for slot in layout.slots]
    assert [table.ctypes.data for table in tables] == [leaf.data_ptr() for leaf in found.leaves_of(layout)]
    assert all(first is second for first, second in zip(tables, found.tables_of(layout), strict=True))


@pytest.mark.parametrize(("shape", "row_nbytes"), [([6], 12), ([], 12), ([0], 0)])
def test_row_nbytes_when_asked_then_of_all_tensors_of_one_row(
    tmp_path: Path, shape: list[int], row_nbytes: int
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


def test_granted_when_control_let_somebody_read_it_then_until_it_is_deleted(store: StoredTensorDict) -> None:
    stores = opened(store)
    found = stores.get(store.ref)
    assert stores.granted("store") is None
    stores.grant(found)
    assert stores.granted("store") is found
    store.generations.mark_deleted()
    assert stores.granted("store") is None


def test_granted_when_dropped_then_none(store: StoredTensorDict) -> None:
    stores = opened(store)
    stores.grant(stores.get(store.ref))
    stores.drop(UID)
    assert stores.granted("store") is None


def test_granted_when_another_has_the_name_now_then_that_one(store: StoredTensorDict, tmp_path: Path) -> None:
    stores = opened(store)
    first = stores.get(store.ref)
    stores.grant(first)
    second = StoredTensorDict(tmp_path / "later" / "store", TensorDict({"small": torch.arange(6)}, [6]), uid=UID[::-1])
    stores.learn(second.ref.fingerprint, second.ref.spec)
    stores.grant(stores.get(second.ref))
    stores.drop(UID)  # told late
    found = stores.granted("store")
    assert found is not None
    assert found.uid == UID[::-1]


def test_get_when_the_structure_was_never_told_then_error(store: StoredTensorDict) -> None:
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
    assert found.objects(writable=False) is None
