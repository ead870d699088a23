"""Open handles of deleted shared stores. Other stores now have their names."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.cluster.servers.lost_parts import CREATION_S
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_ROWS = 40


class Case(NamedTuple):
    """A kind of store: how it is made, shared or not, and opened; what it is called, and calls of its handle."""

    make: Callable[[tdserve.ClusterClient, str, bool], Any]
    open: Callable[[tdserve.ClusterClient, str], Any]
    words: str
    calls: list[Callable[[Any], Any]]


def rows(value: float, num_rows: int = NUM_ROWS) -> TensorDict:
    return TensorDict({"obs": torch.full((num_rows, 4), value), "id": torch.arange(num_rows)}, [num_rows])


def share(is_shared: bool, **options: Any) -> dict[str, Any]:
    """Options of a store that all servers share."""
    return {"shards": "all", **options} if is_shared else {}


def make_table(client: tdserve.ClusterClient, name: str, is_shared: bool) -> None:
    client.create_replay(name, rows(0.0)[0], 100, **share(is_shared, shard_by="id")).extend(rows(7.0))


def make_queue(client: tdserve.ClusterClient, name: str, is_shared: bool) -> None:
    client.create_queue(name, rows(0.0)[0], 100, **share(is_shared, shard_by="id")).extend(rows(7.0))


def make_keyed(client: tdserve.ClusterClient, name: str, is_shared: bool) -> None:
    client.create_kv(name, **share(is_shared)).update({f"k{number}": number for number in range(20)})


def make_dataset(client: tdserve.ClusterClient, name: str, is_shared: bool) -> None:
    client.memmap(rows(7.0), name, **share(is_shared))


CASES = {
    "table": Case(
        make_table,
        lambda client, name: client.replay(name),
        "a replay store",
        [
            lambda table: table.sample(8),
            lambda table: table[:],
            len,
            lambda table: table.extend(rows(0.0, 4)),
            lambda table: next(table.batches(4)),
        ],
    ),
    "queue": Case(
        make_queue,
        lambda client, name: client.queue(name),
        "a queue",
        [
            lambda queue: queue.take(4, ack=False),
            len,
            lambda queue: queue.extend(rows(0.0, 4)),
            lambda queue: queue.close(),
        ],
    ),
    "keyed": Case(
        make_keyed,
        lambda client, name: client.kv(name),
        "a keyed store",
        [
            lambda entries: entries["k1"],
            lambda entries: entries.get([f"k{number}" for number in range(20)]),
            lambda entries: entries.put("k1", 0),
            lambda entries: entries.update({f"k{number}": 0 for number in range(20)}),
            len,
            lambda entries: list(entries.keys()),
            lambda entries: entries.pop("k1"),
        ],
    ),
    "dataset": Case(
        make_dataset,
        lambda client, name: client[name],
        "a tensordict store",
        [
            lambda store: store[0],
            lambda store: store[:],
            lambda store: store[NUM_ROWS - 1],
            lambda store: store["obs"],
            lambda store: store.set_at_("obs", torch.zeros(4), 3),
            lambda store: next(store.batches(4)),
        ],
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each kind of store."""
    return CASES[request.param]


def describe(client: tdserve.ClusterClient, name: str) -> tuple[Any, ...]:
    """What a write would change."""
    found = client.describe(name)
    return found.uid, found.version, found.num_rows, found.inserts, found.num_leased, found.is_closed


@pytest.mark.parametrize("is_opened", [True, False], ids=["used", "unused"])
def test_shared_handle_when_a_store_of_one_server_has_its_name_then_every_call_names_it_and_changes_nothing(
    user: tdserve.ClusterClient, client: tdserve.ClusterClient, name: str, case: Case, is_opened: bool
) -> None:
    case.make(client, name, True)
    handle = case.open(user, name)
    if is_opened:
        len(handle)
        case.calls[0](handle)
    client.delete(name)
    case.make(client, name, False)
    before = describe(client, name)
    begun_s = time.monotonic()
    for number, call in enumerate(case.calls):
        with pytest.raises(tdserve.WrongStateError, match=f"needs a shared .* is {case.words} of a single server"):
            pytest.fail(f"call {number} returned {call(handle)!r}")
    assert time.monotonic() - begun_s < len(case.calls) * CREATION_S
    assert describe(client, name) == before
    assert len(case.open(user, name)) == before[2]


def test_shared_handle_when_a_shared_store_of_another_kind_has_its_name_then_every_call_names_that(
    user: tdserve.ClusterClient, client: tdserve.ClusterClient, name: str, case: Case
) -> None:
    other = CASES["keyed" if case is not CASES["keyed"] else "table"]
    case.make(client, name, True)
    used, unused = case.open(user, name), case.open(user, name)
    len(used)
    client.delete(name)
    other.make(client, name, True)
    for handle in (used, unused):
        for number, call in enumerate(case.calls):
            with pytest.raises(tdserve.WrongStateError, match=other.words):
                pytest.fail(f"call {number} returned {call(handle)!r}")
    assert len(other.open(client, name)) == (20 if other is CASES["keyed"] else NUM_ROWS)


@pytest.mark.parametrize(("kind", "other_kind"), [("table", "queue"), ("queue", "table")])
def test_shared_table_when_a_shared_one_of_the_other_kind_has_its_name_then_every_call_names_that_and_changes_nothing(
    user: tdserve.ClusterClient, client: tdserve.ClusterClient, name: str, kind: str, other_kind: str
) -> None:
    case, other = CASES[kind], CASES[other_kind]
    case.make(client, name, True)
    used, unused = case.open(user, name), case.open(user, name)
    case.calls[0](used)
    client.delete(name)
    other.make(client, name, True)
    before = describe(client, name)
    more: list[Callable[[Any], Any]] = [lambda table: table.info(), lambda table: table.clear()]
    for handle in (used, unused):
        for number, call in enumerate([*case.calls, *more]):
            with pytest.raises(tdserve.WrongStateError, match=other.words):
                pytest.fail(f"call {number} returned {call(handle)!r}")
    assert describe(client, name) == before


def test_part_when_it_is_missing_then_its_error_names_no_store_that_is_the_one_it_belongs_to(
    client: tdserve.ClusterClient, name: str
) -> None:
    make_table(client, name, True)
    names = client.members.get(0).catalog.missing_names
    assert name not in (names.find_near(f"{name}#9") or ())  # others of these servers may be near
    assert names.find_near(f"{name}#0") is None


def test_batches_when_their_shared_table_was_deleted_then_they_go_on_once_it_is_made_anew(
    client: tdserve.ClusterClient, name: str
) -> None:
    make_table(client, name, True)
    with client.replay(name).batches(4, timeout_s=20.0) as batches:
        next(batches)
        client.delete(name)
        with pytest.raises(tdserve.StoreNotFoundError) as caught:
            list(batches)
        assert f"but '{name}'" not in str(caught.value)
        make_table(client, name, True)
        wait_for(lambda: has_batch(batches), "a batch of the new table")


def has_batch(batches: Any) -> bool:
    """Takes a batch; returns False if the table was not there when it was asked for."""
    with suppress(tdserve.StoreNotFoundError):
        return len(next(batches)) == 4
    return False
