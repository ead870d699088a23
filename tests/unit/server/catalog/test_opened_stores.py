from __future__ import annotations

import torch
from tensordict import TensorDict

from tdserve.messages.row_sets import RowSet
from tdserve.server.catalog.opened_stores import OpenedStores
from tests.unit.server.world import Loop, World

TD = TensorDict({"a": torch.zeros(4)}, [4])


def open_many(world: World, run: Loop, opened: OpenedStores, names: str) -> None:
    """Makes stores and puts them into a cache; nobody else holds them."""
    for name in names:
        run(world.create(name, TD))
        store = world.stores.opened.pop(name)
        assert store is not None
        opened.put(store)


def test_put_when_there_are_many_then_those_not_used_for_long_are_closed(world: World, run: Loop) -> None:
    opened = OpenedStores(max_stores=4)
    open_many(world, run, opened, "ab")
    for name in "cdefgh":
        assert opened.get("a") is not None  # used again and again
        open_many(world, run, opened, name)
    assert len(opened) <= 4
    assert sorted(opened.list_names())[0] == "a"
    assert opened.get("b") is None
    closed = opened.take_unsynced()
    assert "b" in closed
    assert opened.take_unsynced() == set()
    opened.add_unsynced({"b"})
    assert opened.take_unsynced() == {"b"}
    assert opened.pop("b") is None


def test_put_when_one_that_is_not_used_is_held_by_a_request_then_it_is_found_again(world: World, run: Loop) -> None:
    opened = OpenedStores(max_stores=4)
    open_many(world, run, opened, "a")
    held = opened.get("a")
    open_many(world, run, opened, "bcdefgh")
    assert "a" in opened.take_unsynced()
    assert "a" in opened.list_names(), "its request may be writing"
    assert opened.get("a") is held
    assert opened.pop("a") is held
    assert opened.get("a") is None


def test_put_when_stores_are_of_another_kind_or_in_use_then_they_stay_open(world: World, run: Loop) -> None:
    opened = OpenedStores(max_stores=4)
    written = run(world.create("written", TD))
    written.writes.append(RowSet.run(0, 1))
    for store in (run(world.create_replay("table", TD[0], 4)), run(world.begin("loading", TD, session=1)), written):
        assert world.stores.opened.pop(store.name) is store
        opened.put(store)
    open_many(world, run, opened, "abcdefgh")
    closed = opened.take_unsynced()
    assert {"a", "b"} <= closed <= set("abcdefgh")
    assert len(opened) == 3 + 8 - len(closed)
