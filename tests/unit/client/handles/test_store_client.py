from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import KeyNotFoundError, LockedError, StoreNotFoundError, StructureChangedError
from tdserve.client.handles.store_client import StoreClient
from tests.sameness import difference
from tests.unit.client.three_rows import local


def test_refresh_when_others_have_changed_the_structure_then_known(
    client: tdserve.Client, handle: tdserve.StoreHandle
) -> None:
    assert not handle.refresh()
    client[handle.name]["z"] = torch.ones(3)
    assert ("z",) not in dict(handle.spec.tensors)
    assert handle.refresh()
    assert ("z",) in dict(handle.spec.tensors)
    client.delete(handle.name)
    with pytest.raises(StoreNotFoundError):
        handle.refresh()


def test_handle_when_the_structure_has_changed_then_its_next_access_is_of_the_new_one(
    client: tdserve.Client, handle: tdserve.StoreHandle
) -> None:
    def changed() -> Any:
        """A handle that has not noticed."""
        other = client[handle.name]
        other[0]  # its own mappings must not mislead it
        number = len(handle.keys())
        handle[f"z{number}"] = torch.ones(3)
        return other

    td = changed()[:]
    assert set(td.keys()) == set(handle.keys())
    assert changed()["z3"].tolist() == [1.0] * 3
    other = changed()
    other[1] = other[0]
    other = changed()
    other.set_at_("z5", 2.0, 1)
    assert handle["z5"].tolist() == [1.0, 2.0, 1.0]
    other = changed()
    other.update_({"z6": torch.zeros(3)})
    assert "z6" in other
    other = changed()
    handle.rename_key_("a", "b")
    with pytest.raises(KeyNotFoundError):
        other["a"]
    assert other.get("a", None) is None
    with pytest.raises(KeyNotFoundError):
        other.set_("a", torch.zeros(3, 2))
    assert pickle.loads(pickle.dumps(other)).keys() == handle.keys()


def test_handle_when_another_store_has_its_name_then_reads_are_of_that_and_a_write_is_refused_once(
    client: tdserve.Client, handle: tdserve.StoreHandle
) -> None:
    def make_anew(key: str) -> None:
        client.delete(handle.name)
        client.init_remote(TensorDict({key: torch.ones(3)}, [3]), handle.name)

    reads: list[Callable[[str], Any]] = [handle.__getitem__, handle.get, lambda key: handle.select(key)[key]]
    for number, read in enumerate(reads):
        make_anew(f"z{number}")
        for _ in range(2):
            assert read(f"z{number}").tolist() == [1.0] * 3
    make_anew("x")
    with pytest.raises(KeyNotFoundError):
        handle.set_("x", torch.zeros(3))
    assert handle["x"].tolist() == [1.0] * 3


CHANGING: dict[str, Callable[[Any], object]] = {
    "setitem": lambda td: td.__setitem__("z", torch.ones(3)),
    "setitem of an existing one": lambda td: td.__setitem__("a", torch.ones(3, 2)),
    "set of an existing one": lambda td: td.set("a", torch.ones(3, 2)),
    "update": lambda td: td.update({"a": torch.ones(3, 2)}),
    "pop": lambda td: td.pop("a"),
    "del": lambda td: td.__delitem__("a"),
    "rename": lambda td: td.rename_key_("a", "b"),
    "nested": lambda td: td.set(("n", "z"), torch.ones(3)),
    "create_nested": lambda td: td.create_nested("z"),
}

IN_PLACE: dict[str, Callable[[Any], object]] = {
    "set_": lambda td: td.set_("a", torch.ones(3, 2)),
    "set in place": lambda td: td.set("a", torch.ones(3, 2), inplace=True),
    "set_at_": lambda td: td.set_at_("a", torch.ones(2), 1),
    "update_": lambda td: td.update_({"a": torch.ones(3, 2)}),
    "setitem of rows": lambda td: td.__setitem__(0, TensorDict({"a": torch.ones(2)}, [])),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGING.values(), ids=CHANGING.keys())
def test_lock_when_keys_change_then_refused_for_everybody_as_by_tensordict(
    client: tdserve.Client, handle: tdserve.StoreHandle, change: Callable[[Any], object]
) -> None:
    other = client[handle.name]
    assert handle.lock_() is handle
    assert other.is_locked
    with pytest.raises(RuntimeError, match="set_"):
        change(local().lock_())
    for each in (handle, other):
        with pytest.raises(LockedError, match=r"is locked as a whole: .*unlock_"):
            change(each)
    assert difference(local().lock_(), client.from_remote_init(handle.name)) is None
    other.unlock_()
    assert not handle.is_locked
    change(handle)


@pytest.mark.slow
@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_lock_when_written_in_place_then_let_through_as_by_tensordict(
    client: tdserve.Client, handle: tdserve.StoreHandle, write: Callable[[Any], object]
) -> None:
    other, td = client[handle.name], local().lock_()
    handle.lock_()
    write(td)
    write(other)
    assert difference(td, handle.to_tensordict()) is None


def test_lock_when_used_as_context_then_undone_at_its_end(handle: tdserve.StoreHandle) -> None:
    with handle.lock_() as locked:
        assert locked.is_locked
    assert not handle.is_locked
    handle.lock_()
    with handle.unlock_():
        handle["z"] = torch.ones(3)
    assert handle.is_locked


def test_init_remote_when_the_tensordict_is_locked_then_the_store_is(client: tdserve.Client, name: str) -> None:
    client.init_remote(local().lock_(), name)
    with pytest.raises(LockedError):
        client[name]["z"] = torch.ones(3)
    client.send(local(), name)
    assert client[name].unlock_().set("z", torch.ones(3))["z"].tolist() == [1.0] * 3


@pytest.fixture
def store(client: tdserve.Client, handle: tdserve.StoreHandle) -> StoreClient:
    """The client of the handle's store, which knows its structure of now."""
    return StoreClient(client, client.describe(handle.name))


def test_retry_when_the_structure_has_changed_then_once_more_with_the_new_one(
    store: StoreClient, handle: tdserve.StoreHandle
) -> None:
    handle["z"] = torch.ones(3)
    tried: list[bool] = []

    def access() -> int:
        tried.append(store.has(("z",)))
        store.spec.find(("z",), store=store.name)
        return len(tried)

    deadline = store.make_deadline(None)
    assert store.retry(access, deadline) == 2
    assert tried == [False, True]
    handle.del_("z")
    with pytest.raises(KeyNotFoundError):
        store.retry(lambda: store.read_at(("z",), ..., deadline), deadline)


def test_retry_of_a_write_when_another_store_has_its_name_then_not_repeated(
    client: tdserve.Client, store: StoreClient
) -> None:
    client.delete(store.name)
    client.init_remote(TensorDict({"z": torch.ones(3)}, [3]), store.name)
    tried: list[str] = []

    def access() -> None:
        tried.append(store.uid)
        store.spec.find(("z",), store=store.name)

    with pytest.raises(KeyNotFoundError):
        store.retry(access, store.make_deadline(None), is_write=True)
    assert len(tried) == 1
    store.retry(access, store.make_deadline(None), is_write=True)  # it is known by now


def test_set_locked_when_it_is_so_already_then_returns_false(store: StoreClient) -> None:
    wanted = (True, True, False, False)
    found = [store.set_locked(is_locked, store.make_deadline(None)) for is_locked in wanted]
    assert found == [True, False, True, False]


def test_store_client_when_pickled_then_reads_and_writes_over_a_client_of_its_process(store: StoreClient) -> None:
    other = pickle.loads(pickle.dumps(store))
    other.write_rows(1, torch.full((2,), 7.0), at=("a",), deadline=other.make_deadline(None))
    found = store.read(slice(1, 2), [("a",)], deadline=store.make_deadline(None))
    assert found["a"].tolist() == [[7.0, 7.0]]
    assert other.client.recipe == store.client.recipe
    assert other.client is not store.client


def test_retry_of_a_write_when_it_is_refused_though_nothing_changes_then_the_error_at_once(store: StoreClient) -> None:
    attempts = []

    def write() -> None:
        attempts.append(store.spec)
        raise StructureChangedError(store=store.name, key="", expected="another structure", actual="this one")

    deadline = Deadline.after(20.0)
    with pytest.raises(StructureChangedError):
        store.retry_write(write, deadline)
    assert len(attempts) < 5
    assert not deadline.expired


def test_retry_of_a_write_when_keys_have_come_and_gone_meanwhile_then_repeated(
    client: tdserve.Client, store: StoreClient
) -> None:
    attempts = []

    def write() -> int:
        attempts.append(store.spec)
        if len(attempts) < 6:
            client[store.name]["z"] = torch.ones(3)
            client[store.name].del_("z")
            raise StructureChangedError(store=store.name, key="", expected="the structure of now", actual="another")
        return len(attempts)

    assert store.retry_write(write, Deadline.after(20.0)) == 6
