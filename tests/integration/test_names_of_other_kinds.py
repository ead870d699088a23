"""Open handles whose stores were deleted. Stores of another kind now have their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.processes import START_TIMEOUT_S

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


CAPACITY = 100

NUM_EXTENDS = 50
"""After so many extends by one handle, a local client or a worker may claim rows."""


class Handles(NamedTuple):
    """A handle of a table that was deleted, and what it had read before."""

    table: Any
    rows: Any
    taken: Any


TABLE_CALLS: dict[str, Callable[[Handles], Any]] = {
    "len": lambda old: len(old.table),
    "measure_length": lambda old: old.table.measure_length(),
    "info": lambda old: old.table.info(),
    "extend": lambda old: old.table.extend(rows(0.0)[:2]),
    "extend later": lambda old: old.table.extend(rows(0.0)[:2], return_early=True).result(20.0),
    "extend often": lambda old: [
        future.result(20.0)
        for future in [old.table.extend(rows(0.0)[:1], return_early=True) for _ in range(NUM_EXTENDS)]
    ],
    "extend with ends": lambda old: old.table.extend(rows(0.0)[:2], ends=True),
    "extend too much": lambda old: old.table.extend(torch.cat([rows(0.0)] * 5)),
    "set_at_": lambda old: old.table.set_at_("obs", torch.zeros(1, 4), [3]),
    "set_at_ of read rows": lambda old: old.table.set_at_("obs", torch.zeros(2, 4), old.rows),
    "update_if_present": lambda old: old.table.update_if_present(old.rows, {"obs": torch.zeros(2, 4)}),
    "find_generations": lambda old: old.table.find_generations([0, 1]),
    "find_sequences": lambda old: old.table.find_sequences(torch.arange(2).numpy()),
    "add_leaves": lambda old: old.table.add_leaves(TensorDict({"obs": torch.zeros(4), "new": torch.zeros(())})),
    "row": lambda old: old.table[0],
    "listed rows": lambda old: old.table[[0, 1]],
    "sliced rows": lambda old: old.table[:5],
    "iteration": lambda old: next(iter(old.table)),
    "get_at": lambda old: old.table.get_at("obs", [0, 1]),
    "get_with_generations": lambda old: old.table.get_with_generations([0, 1]),
    "delete": lambda old: old.table.delete([1]),
    "delete of read rows": lambda old: old.table.delete(old.rows),
    "clear": lambda old: old.table.clear(),
    "close": lambda old: old.table.close(),
    "ack of a block": lambda old: old.taken.ack(),
    "renewal of a block": lambda old: old.taken.renew(1.0),
}
"""Calls that handles of both kinds of tables have."""

QUEUE_CALLS: dict[str, Callable[[Handles], Any]] = TABLE_CALLS | {
    "take": lambda old: old.table.take(2),
    "take without a block": lambda old: old.table.take(2, min_rows=1, ack=False),
    "batches": lambda old: next(old.table.batches(2)),
    "ack": lambda old: old.table.ack(old.rows),
    "renew": lambda old: old.table.renew(old.rows, 1.0),
    "set_limiter": lambda old: old.table.set_limiter(tdserve.Queue(50)),
    "set_sampler": lambda old: old.table.set_sampler(tdserve.Fifo()),
}

REPLAY_CALLS: dict[str, Callable[[Handles], Any]] = TABLE_CALLS | {
    "sample": lambda old: old.table.sample(2),
    "sample for a consumer": lambda old: old.table.sample(2, consumer="c"),
    "sample for a rank": lambda old: old.table.sample(2, rank=0, world_size=2),
    "batches": lambda old: next(old.table.batches(2)),
    "batches of a consumer": lambda old: next(old.table.batches(2, consumer="c")),
    "take": lambda old: old.table.take(2, consumer="c"),
    "ack": lambda old: old.table.ack(old.rows, consumer="c"),
    "renew": lambda old: old.table.renew(old.rows, 1.0, consumer="c"),
    "update_priority": lambda old: old.table.update_priority(old.rows, 1.0),
    "get_priorities": lambda old: old.table.get_priorities([0, 1]),
    "forget_draws": lambda old: old.table.forget_draws(),
    "set_limiter": lambda old: old.table.set_limiter(tdserve.MinSize(1)),
    "set_sampler": lambda old: old.table.set_sampler(tdserve.Uniform()),
}


@pytest.fixture(scope="module", params=["gloo", "shm", "grpc"])
def user(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client over each transport, with handles of both stores: access to one of them must give no access to the
    other."""
    with server.client(transport=request.param, timeout_s=START_TIMEOUT_S) as connected:
        connected.timeout_s = 20.0
        yield connected


def make_used(table: Any) -> Any:
    """Writes and reads by a handle until its next call may need no request."""
    for _ in range(NUM_EXTENDS):
        table.extend(rows(7.0)[:1])
    table[[0, 1]]
    if isinstance(table, tdserve.ReplayHandle):
        table.sample(2)
    return table


def describe_table(client: tdserve.Client, name: str) -> tuple[Any, ...]:
    """What a call could change."""
    found = client.describe(name)
    return (
        *(found.spec, found.uid, found.num_rows, found.inserts, found.samples, found.num_leased, found.is_closed),
        *(found.structure, found.settings),
    )


def check_refused(
    client: tdserve.Client, name: str, old: Handles, calls: dict[str, Callable[[Handles], Any]], words: str
) -> None:
    """Checks that each call is refused with these words, and that nothing has changed."""
    before = describe_table(client, name)
    wrong = []
    for what, call in calls.items():
        try:
            wrong.append(f"{what} returned {call(old)!r}")
        except tdserve.WrongStateError as error:
            if words not in str(error):
                wrong.append(f"{what}: {error}")
        except tdserve.TDServeError as error:
            wrong.append(f"{what}: {error!r}")
        assert describe_table(client, name) == before, what
    assert not wrong
    table: Any = client.open_handle(client.describe(name))
    assert (table[:]["obs"] == 7.0).all()


def test_queue_handle_when_a_replay_has_its_name_then_every_call_names_it_and_changes_nothing(
    user: tdserve.Client, name: str
) -> None:
    queue = make_used(user.create_queue(name, rows(0.0)[0], CAPACITY))
    old = Handles(queue, queue.take(2, ack=False), queue.take(2))
    assert isinstance(old.taken.rows, TensorDict)
    user.delete(name)
    make_used(user.create_replay(name, rows(0.0)[0], CAPACITY))
    words = f"a call that needs a queue is not possible while store {name!r} is a replay store (client.replay("
    check_refused(user, name, old, QUEUE_CALLS, words)


def test_replay_handle_when_a_queue_has_its_name_then_every_call_names_it_and_changes_nothing(
    user: tdserve.Client, name: str
) -> None:
    replay = make_used(user.create_replay(name, rows(0.0)[0], CAPACITY))
    old = Handles(replay, replay.sample(2), replay.take(2, consumer="c"))
    assert isinstance(old.taken.rows, TensorDict)
    user.delete(name)
    make_used(user.create_queue(name, rows(0.0)[0], CAPACITY))
    words = f"a call that needs a replay store is not possible while store {name!r} is a queue (client.queue("
    check_refused(user, name, old, REPLAY_CALLS, words)


def test_writer_and_iterator_when_a_replay_has_the_name_of_their_queue_then_error_and_nothing_changes(
    user: tdserve.Client, name: str
) -> None:
    queue = make_used(user.create_queue(name, rows(0.0)[0], CAPACITY))
    batches, writer = queue.batches(2), queue.writer(batch=4)
    next(batches)
    user.delete(name)
    make_table(user, name)
    before = describe_table(user, name)
    with pytest.raises(tdserve.WrongStateError, match=r"needs a queue .* is a replay store"):
        next(batches)
    writer.append(rows(0.0)[0])
    with pytest.raises(tdserve.WriterFailedError, match="is a replay store"):
        writer.flush()
    with suppress(tdserve.WriterFailedError):
        writer.close()
    assert describe_table(user, name) == before


def test_handle_without_rows_when_the_other_kind_of_table_has_its_name_then_that_is_not_made_anew_for_other_rows(
    user: tdserve.Client, name: str
) -> None:
    ragged = TensorDict({"obs": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)}, [2])
    replay = user.create_replay(name, rows(0.0)[0], CAPACITY)
    user.delete(name)
    user.create_queue(name, rows(0.0)[0], CAPACITY)
    before = describe_table(user, name)
    with pytest.raises(tdserve.WrongStateError, match="is a queue"):
        replay.extend(ragged)
    assert describe_table(user, name) == before


def test_create_when_a_queue_has_the_name_then_the_error_calls_it_a_queue(user: tdserve.Client, name: str) -> None:
    user.create_queue(name, rows(0.0)[0], CAPACITY)
    creations: list[Callable[[], Any]] = [
        lambda: user.create_kv(name, exists_ok=True),
        lambda: user.create_replay(name, rows(0.0)[0], CAPACITY, exists_ok=True),
        lambda: user.init_remote(rows(0.0), name, exists_ok=True),
    ]
    for create in creations:
        with pytest.raises((tdserve.StoreExistsError, tdserve.WrongStateError), match="is a queue"):
            create()
