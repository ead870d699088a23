from __future__ import annotations

import pytest

from tdserve.errors import CorruptDataError, LocalProtocolError
from tdserve.layout import Layout
from tdserve.worker.opened import OpenStores
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
