from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import DeadlineExceededError
from tdserve.messages.row_numbers import PIECE_ROWS, decode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.plans import PLAIN_ARRIVAL
from tdserve.rules.replay.row_indexes.row_order import NO_SEQUENCE, to_last_sequence
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.reserving import RowsInParts
from tdserve.server.tables.rule_keys import name_group_column
from tdserve.v1 import control_pb2
from tests.unit.rules.replay.tables import write
from tests.unit.server.world import Loop, World, content_of, turns_during

NUM_ROWS = 2 * PIECE_ROWS + 5
"""Of one extend: three parts."""

CAPACITY = 3 * PIECE_ROWS


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A ring with room for one such extend, and not for two."""
    return run(world.create_replay("r", TensorDict({"a": torch.tensor(0, dtype=torch.uint8)}, []), CAPACITY))


def extend(
    world: World, store: OpenedStore, num_rows: int, *, request: int = 1, timeout_s: float = 30.0
) -> Coroutine[Any, Any, control_pb2.Done]:
    """An extend by so many rows, by a client of its own."""
    rows = TensorDict({"a": torch.full((num_rows,), request, dtype=torch.uint8)}, [num_rows])
    content = content_of(rows, store.spec.fingerprint)
    asked = control_pb2.ExtendRequest(store=store.name, num_rows=num_rows, content=content, timeout_s=timeout_s)
    return world.extends.extend(world.session(request), request, asked)


async def until(is_so: Callable[[], bool], work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begins some work, and returns between two of its turns, once a condition holds."""
    task = asyncio.ensure_future(work)
    while not is_so():
        assert not task.done()
        await asyncio.sleep(0)
    return task


def is_half_shown(table: Table) -> bool:
    """Whether some of the rows of a long extend can be seen, and some cannot."""
    return 0 < table.state.num_coming < NUM_ROWS


async def leave(task: asyncio.Task[Any]) -> None:
    """Leaves the state as when the process is killed between two turns."""
    task.cancel()
    await asyncio.wait({task})


def test_extend_when_there_are_very_many_rows_then_others_are_served_in_between(
    world: World, run: Loop, store: OpenedStore
) -> None:
    assert run(turns_during(extend(world, store, NUM_ROWS))) > 6
    table = store.get_table()
    assert table.state.list_live_rows().tolist() == list(range(NUM_ROWS))
    assert (np.diff(table.columns.sequence[:NUM_ROWS]) > 0).all()
    assert (table.totals.inserts, table.ring.num_reserved, table.state.num_coming) == (NUM_ROWS, 0, 0)


def test_extend_when_it_is_cut_short_after_hundreds_of_parts_then_all_their_rows_are_free(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableState, "step_rows", 64)
    table = store.get_table()

    async def cut_short() -> None:
        await leave(await until(lambda: table.ring.num_reserved > NUM_ROWS // 2, extend(world, store, NUM_ROWS)))

    run(cut_short())
    assert table.ring.num_reserved == 0
    rows = decode_rows(run(extend(world, store, NUM_ROWS, request=2)).indices)
    assert sorted(rows.tolist()) == table.state.list_live_rows().tolist()
    assert len(table) == NUM_ROWS


def test_begin_when_another_writer_reserves_in_parts_then_only_after_its_end(store: OpenedStore) -> None:
    table = store.get_table()
    first, second = RowsInParts(table, 100), RowsInParts(table, 50)
    assert first.begin() is first
    assert second.begin() is None
    assert table.arrivals.reserve(1) is None
    first.end()
    assert second.begin() is second


def test_reserve_next_when_it_is_aborted_then_the_rows_are_free_but_the_turn_goes_on(
    run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableState, "step_rows", 64)
    table = store.get_table()
    rows = RowsInParts(table, 100)
    assert rows.begin() is not None
    lengths = []
    while rows.num_missing:
        part = rows.reserve_next()
        assert part is not None
        lengths.append(len(part))
    assert lengths == [64, 36]
    run(rows.join_newest())
    assert len(run(rows.join())) == table.ring.num_reserved == 100
    rows.abort()
    assert (table.ring.num_reserved, table.arrivals.reserve(1)) == (0, None)


def test_extend_when_it_goes_round_then_the_oldest_rows_leave(world: World, run: Loop, store: OpenedStore) -> None:
    run(extend(world, store, NUM_ROWS))
    done = run(extend(world, store, NUM_ROWS, request=2))
    rows = decode_rows(done.indices)
    assert rows.tolist() == [row % CAPACITY for row in range(NUM_ROWS, 2 * NUM_ROWS)]
    table = store.get_table()
    assert len(table) == CAPACITY
    assert (done.counts.rows, done.counts.inserts) == (CAPACITY, 2 * NUM_ROWS)
    oldest = np.argsort(table.columns.sequence[: table.ring.capacity], kind="stable")
    assert oldest[-NUM_ROWS:].tolist() == rows.tolist()


def test_extend_when_it_is_cut_short_while_it_is_shown_then_all_rows_are_there_and_a_retry_is_answered(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()
    session = world.session(7)
    td = TensorDict({"a": torch.ones(NUM_ROWS, dtype=torch.uint8)}, [NUM_ROWS])
    content = content_of(td, store.spec.fingerprint)
    asked = control_pb2.ExtendRequest(store="r", num_rows=NUM_ROWS, content=content, timeout_s=30.0)

    async def cut_short() -> None:
        await leave(await until(lambda: is_half_shown(table), world.extends.extend(session, 7, asked)))

    run(cut_short())
    world.reopen()
    restored = world.stores.get("r").get_table()
    assert restored.state.list_live_rows().tolist() == list(range(NUM_ROWS))
    assert restored.totals.inserts == NUM_ROWS
    assert world.answers.find_answer(session.client_id, 7) is not None
    world.reopen()  # what completed it is on record no more
    assert world.db.scan("pending", b"long-commit-") == []
    assert len(world.stores.get("r").get_table()) == NUM_ROWS


def test_extend_when_it_is_cut_short_before_its_record_then_no_row_is_there(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()

    async def cut_short() -> None:
        task = await until(lambda: bool(table.columns.sequence[0]), extend(world, store, NUM_ROWS))
        assert not table.state.num_coming
        await leave(task)

    run(cut_short())
    world.reopen()
    restored = world.stores.get("r").get_table()
    assert (len(restored), restored.totals.inserts) == (0, 0)
    run(extend(world, world.stores.get("r"), NUM_ROWS))
    assert len(world.stores.get("r").get_table()) == NUM_ROWS


def test_extend_when_another_comes_while_it_is_shown_then_both_are_there_and_no_number_is_given_twice(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()

    async def both() -> None:
        task = await until(lambda: is_half_shown(table), extend(world, store, NUM_ROWS))
        write(table, 3)
        assert is_half_shown(table)
        assert store.get_table_state()["inserts"] == NUM_ROWS + 3
        await task

    run(both())
    assert (len(table), table.totals.inserts) == (NUM_ROWS + 3, NUM_ROWS + 3)
    assert len(np.unique(table.columns.sequence[table.state.list_live_rows()])) == NUM_ROWS + 3


def test_extend_when_others_come_while_it_gets_its_rows_then_they_wait_for_it(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()

    async def all_three() -> list[control_pb2.Done]:
        first = await until(lambda: table.ring.num_reserved > 0, extend(world, store, NUM_ROWS))
        assert table.arrivals.reserve(1) is None
        assert table.arrivals.count_claimable(8) == 0
        others = [extend(world, store, num_rows, request=num) for num, num_rows in ((2, 3), (3, NUM_ROWS))]
        return list(await asyncio.gather(first, *others))

    done = run(all_three())
    rows = np.concatenate([decode_rows(each.indices) for each in done])
    assert len(table) == CAPACITY
    assert len(rows) == 2 * NUM_ROWS + 3
    assert (table.totals.inserts, table.ring.num_reserved) == (2 * NUM_ROWS + 3, 0)


def test_extend_when_rows_are_held_too_long_then_it_gives_back_what_it_had(
    world: World, run: Loop, store: OpenedStore
) -> None:
    run(extend(world, store, NUM_ROWS))
    run(extend(world, store, NUM_ROWS, request=2))
    table = store.get_table()

    async def too_late() -> None:
        task = await until(
            lambda: table.ring.num_reserved > 0, extend(world, store, NUM_ROWS, request=3, timeout_s=0.3)
        )
        table.state.hold(table.state.list_live_rows())
        with pytest.raises(DeadlineExceededError):
            await task

    run(too_late())
    assert (table.ring.num_reserved, table.ring.num_holes) == (0, PIECE_ROWS)
    table.state.let_go(table.ring.select_held(RowSet.run(0, CAPACITY)).rows)
    run(extend(world, store, NUM_ROWS, request=4))
    assert len(table) == CAPACITY


def test_extend_when_the_store_is_deleted_meanwhile_then_refused_or_forgotten(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()

    async def deleted() -> None:
        task = await until(lambda: is_half_shown(table), extend(world, store, NUM_ROWS))
        await world.stores.delete(store)
        await task

    run(deleted())
    world.reopen()
    assert "r" not in world.stores.catalog
    assert world.db.scan("pending", b"long-commit-") == []


def test_extend_when_a_group_is_asked_for_while_it_waits_then_its_rows_have_it_and_no_others_do(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()

    async def scenario() -> None:
        async with store.write_lock:  # as whoever asks for the group
            task = await until(lambda: "waiters:1" in repr(store.write_lock), extend(world, store, NUM_ROWS, request=3))
            store.group_keys.append(("a",))
        await task

    run(scenario())
    assert (table.columns.get_array(name_group_column(("a",)), np.int64)[:NUM_ROWS] == 3).all()
    assert not PLAIN_ARRIVAL.groups


def test_extend_when_it_is_over_then_nothing_of_it_stays(world: World, run: Loop, store: OpenedStore) -> None:
    run(extend(world, store, NUM_ROWS))
    assert store.get_table().ring.num_reserved == 0


def test_state_when_rows_have_arrived_and_are_not_on_record_then_it_lists_them(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()

    async def scenario() -> None:
        task = await until(lambda: bool(table.columns.sequence[0]), extend(world, store, NUM_ROWS))
        assert table.state.get_state()["arriving"] == [(NO_SEQUENCE, to_last_sequence(PIECE_ROWS))]
        await task

    run(scenario())
    assert "arriving" not in table.state.get_state()
