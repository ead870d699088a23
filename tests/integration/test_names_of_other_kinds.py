"""Open handles whose stores were deleted, and whose names mean stores of another kind now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

NUM_ROWS = 30

Make = Callable[[tdserve.Client, str], Any]


def rows(value: float) -> TensorDict:
    return TensorDict({"obs": torch.full((NUM_ROWS, 4), value)}, [NUM_ROWS])


def make_table(client: tdserve.Client, name: str) -> None:
    """Makes a full table: its rows together have the structure of the tensordict store before it."""
    client.create_replay(name, rows(0.0)[0], NUM_ROWS).extend(rows(7.0))


def make_larger_table(client: tdserve.Client, name: str) -> None:
    client.create_replay(name, rows(0.0)[0], 100).extend(rows(7.0))


def make_queue(client: tdserve.Client, name: str) -> None:
    client.create_queue(name, rows(0.0)[0], 100).extend(rows(7.0))


def make_keyed(client: tdserve.Client, name: str) -> None:
    client.create_kv(name, like=rows(0.0)[0]).put("a", rows(7.0)[0])


def make_weights(client: tdserve.Client, name: str) -> None:
    client.publish(name, rows(7.0))


KINDS = {
    "a replay store .client.replay": make_table,
    "a replay store .client.replay.": make_larger_table,
    "a queue .client.queue": make_queue,
    "a keyed store .client.kv": make_keyed,
    "a weights store .client.latest": make_weights,
}

CALLS: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "batch_size": lambda store: store.batch_size,
    "keys": lambda store: store.keys(),
    "contains": lambda store: "obs" in store,
    "row": lambda store: store[0],
    "leaf": lambda store: store["obs"],
    "everything": lambda store: store.to_tensordict(),
    "batches": lambda store: next(store.batches(4)),
    "new key": lambda store: store.set("new", torch.zeros(NUM_ROWS)),
    "new scalars": lambda store: store.update({"new": torch.zeros(NUM_ROWS, 1), "newer": torch.zeros(NUM_ROWS)}),
    "zeros": lambda store: store.make_memmap("new", (NUM_ROWS,)),
    "item": lambda store: store.__setitem__("obs", torch.zeros(NUM_ROWS, 4)),
    "rows": lambda store: store.__setitem__(slice(3, 5), rows(0.0)[3:5]),
    "update_": lambda store: store.update_(rows(0.0)),
    "zero_": lambda store: store.zero_(),
    "fill_": lambda store: store.fill_("obs", 0.0),
    "set_": lambda store: store.set_("obs", torch.zeros(NUM_ROWS, 4)),
    "set_at_": lambda store: store.set_at_("obs", torch.zeros(4), 3),
    "lock": lambda store: store.lock_(),
    "removal": lambda store: store.del_("obs"),
    "renaming": lambda store: store.rename_key_("obs", "o"),
}


def describe(client: tdserve.Client, name: str) -> tuple[Any, ...]:
    """What a write would change."""
    found = client.describe(name)
    return found.spec, found.version, found.num_rows, found.structure, found.inserts


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("words", KINDS)
def test_tensordict_handle_when_another_kind_has_its_name_then_every_call_names_it_and_changes_nothing(
    client: tdserve.Client, name: str, words: str, call: str
) -> None:
    client.init_remote(rows(1.0), name)
    fresh, noticing = client[name], client[name]
    for handle in (fresh, noticing):
        handle[0]  # what it has mapped must not mislead it
    client.delete(name)
    KINDS[words](client, name)
    before = describe(client, name)
    with pytest.raises(tdserve.WrongStateError):
        noticing.refresh()
    for handle in (fresh, noticing):
        with pytest.raises(tdserve.WrongStateError, match=f"needs a tensordict store .* is {words}"):
            CALLS[call](handle)
    assert describe(client, name) == before
    if before[0].keys() == ["obs"] and "replay" in words:
        assert (client.replay(name)[:]["obs"] == 7.0).all()


def test_table_handle_when_a_tensordict_store_has_its_name_then_every_call_names_it_and_changes_nothing(
    client: tdserve.Client, name: str
) -> None:
    make_table(client, name)
    table = client.replay(name)
    sampled = table.sample(2)
    client.delete(name)
    client.init_remote(rows(1.0), name)
    calls: list[Callable[[], Any]] = [
        lambda: table[0],
        lambda: table[:],
        lambda: table.set_at_("obs", torch.zeros(1, 4), [3]),
        lambda: table.update_if_present(sampled, {"obs": torch.zeros(2, 4)}),
        lambda: table.add_leaves(TensorDict({"obs": torch.zeros(4), "new": torch.zeros(())})),
        lambda: table.extend(rows(0.0)[:1]),
        lambda: table.sample(2),
        lambda: len(table),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(tdserve.WrongStateError, match=r"is a tensordict store \(client\["):
            pytest.fail(f"call {number} returned {call()!r}")
    assert client[name].keys() == ["obs"]
    assert (client[name]["obs"] == 1.0).all()
