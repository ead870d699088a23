"""Writes of very many rows are held, hidden, shown and released a few rows at a time, with turns of the event loop in
between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import SelectionError
from tdserve.messages.row_numbers import PIECE_ROWS, RUN_PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings
from tdserve.server.mutations.row_write_hold import RowWriteHold, hold_rows, wait_for_others
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2
from tests.unit.rules.replay.tables import write
from tests.unit.server.world import Loop, World


def test_held_when_there_are_very_many_rows_then_others_have_their_turn_between(world: World, run: Loop) -> None:
    num_rows = 5 * RUN_PIECE_ROWS
    store = run(world.create("many", TensorDict({"a": torch.zeros(num_rows, dtype=torch.uint8)}, [num_rows])))
    values = store.get_generation_values()

    async def scenario() -> list[tuple[int, int]]:
        held = RowWriteHold(store, RowSet.run(0, num_rows), ())
        holding = asyncio.create_task(held.hide())
        found = []
        while not holding.done():
            await asyncio.sleep(0)
            found.append((int(values[-1]) & 1, int(np.count_nonzero(values[:-1] & 1))))
        await held.let_go(is_written=True)
        return found

    found = run(scenario())
    assert all(is_odd for is_odd, _ in found)  # the store as a whole from the first moment on
    assert [num_odd for _, num_odd in found[:5]] == [number * RUN_PIECE_ROWS for number in range(1, 6)]
    assert (values[:-1] == values[0]).all()
    assert not values[0] & 1
    assert not values[-1] & 1


MANY_ROWS = 3 * PIECE_ROWS
"""Rows of a table; they are held and released in three turns each."""


def hidden(run: Loop, store: OpenedStore, rows: RowSet) -> RowWriteHold:
    """Returns a hold of these rows, which are half written."""
    held = RowWriteHold(store, rows, ())
    run(held.hold())
    run(held.hide())
    return held


@pytest.fixture
def many(world: World, run: Loop) -> OpenedStore:
    """A full table of very many rows."""
    made = run(world.create_replay("many", TensorDict({"a": torch.tensor(0)}, []), MANY_ROWS))
    write(made.get_table(), MANY_ROWS)
    return made


async def until(is_so: Callable[[], bool], task: asyncio.Task[None]) -> None:
    """Lets the event loop run until a condition holds."""
    while not is_so():
        assert not task.done()
        await asyncio.sleep(0)


def test_holding_when_a_table_has_very_many_rows_then_others_have_their_turn_between_and_get_none_of_them(
    run: Loop, many: OpenedStore
) -> None:
    table, values, everything = many.get_table(), many.get_generation_values(), np.arange(MANY_ROWS)
    seen: list[str] = []

    def note(what: str) -> None:
        num_odd, num_sampled = int((values[:-1] & 1).sum()), int(table.selectors.contains(everything).sum())
        seen.append(f"{what}: {num_odd} odd, {table.ring.num_held} held, {num_sampled} sampled")

    async def overwrite() -> None:
        async with hold_rows(many, RowSet.run(0, MANY_ROWS), ()) as held:
            note("on record")
        note("hidden")
        await held.let_go(is_written=True, then=lambda: note("shown"))

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        while not task.done():
            note("a turn")
            assert bool(many.writes) == (len(seen) > 1), "nobody else may write them"
            await asyncio.sleep(0)
        note("over")

    run(scenario())
    many_, one, two = MANY_ROWS, PIECE_ROWS, 2 * PIECE_ROWS
    assert seen == [
        f"a turn: 0 odd, 0 held, {many_} sampled",
        f"a turn: 0 odd, {one} held, {two} sampled",
        f"a turn: 0 odd, {two} held, {one} sampled",
        f"on record: 0 odd, {many_} held, 0 sampled",
        f"a turn: {one} odd, {many_} held, 0 sampled",
        f"a turn: {two} odd, {many_} held, 0 sampled",
        f"hidden: {many_} odd, {many_} held, 0 sampled",
        f"a turn: {two} odd, {many_} held, 0 sampled",
        f"a turn: {one} odd, {many_} held, 0 sampled",
        f"shown: 0 odd, {many_} held, 0 sampled",
        f"a turn: 0 odd, {two} held, {one} sampled",
        f"a turn: 0 odd, {one} held, {two} sampled",
        f"over: 0 odd, 0 held, {many_} sampled",
    ]
    assert not many.writes


@pytest.mark.parametrize("leaving", [[100], [MANY_ROWS - 1], [100, MANY_ROWS - 1]])
def test_holding_when_rows_leave_before_all_are_held_then_refused_and_the_others_are_as_before(
    run: Loop, many: OpenedStore, leaving: list[int]
) -> None:
    table, everything = many.get_table(), np.arange(MANY_ROWS)

    async def overwrite() -> None:
        async with hold_rows(many, RowSet.run(0, MANY_ROWS), ()):
            raise AssertionError("it is on record")

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        await until(lambda: not table.selectors.contains(everything).all(), task)
        table.state.remove(np.array(leaving))
        with pytest.raises(SelectionError):
            await task

    run(scenario())
    assert np.flatnonzero(~table.selectors.contains(everything)).tolist() == leaving
    assert (len(table), table.ring.num_held, many.writes) == (MANY_ROWS - len(leaving), 0, [])
    assert (table.ring.num_holes, table.ring.num_reserved) == (len(leaving), 0)
    assert (many.get_generation_values()[:-1] & 1).sum() == len(leaving)


def test_let_go_when_rows_leave_before_they_are_in_a_sample_again_then_each_row_is_there_once(
    run: Loop, many: OpenedStore
) -> None:
    table, everything = many.get_table(), np.arange(MANY_ROWS)

    async def scenario() -> None:
        async with hold_rows(many, RowSet.run(0, MANY_ROWS), ()) as held:
            pass
        is_even = []
        task = asyncio.create_task(held.let_go(is_written=True, then=lambda: is_even.append(True)))
        await until(lambda: bool(is_even), task)
        write(table, 5)
        table.state.remove(np.array([MANY_ROWS - 1]))
        write(table, 1)
        table.state.remove(np.array([2, MANY_ROWS - 2]))
        assert table.ring.num_reserved == 2  # the last two, until nobody writes them any more
        await task

    run(scenario())
    assert np.flatnonzero(~table.selectors.contains(everything)).tolist() == [2, MANY_ROWS - 2, MANY_ROWS - 1]
    assert (len(table), table.ring.num_holes, table.ring.num_reserved) == (MANY_ROWS - 3, 3, 0)


def test_holding_when_some_rows_were_lost_before_then_they_are_there_again_with_the_others(
    run: Loop, many: OpenedStore
) -> None:
    table, values = many.get_table(), many.get_generation_values()
    hidden(run, many, RowSet.run(3, 5)).end()  # nobody has written them to the end

    async def overwrite() -> None:
        async with hold_rows(many, RowSet.run(2, 6), ()) as held:
            assert (values[:8] & 1).tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
        assert (values[:8] & 1).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
        await held.let_go(is_written=True)

    run(overwrite())
    assert not (values[:8] & 1).any()
    assert table.selectors.contains(np.arange(8)).all()
    assert table.ring.num_held == 0


def test_holding_when_it_fails_and_rows_were_lost_before_then_they_are_lost_still(run: Loop, many: OpenedStore) -> None:
    table, values = many.get_table(), many.get_generation_values()
    hidden(run, many, RowSet.run(3, 5)).end()

    async def overwrite() -> None:
        async with hold_rows(many, RowSet.run(2, 6), ()):
            raise SelectionError(selection="5", reason="no")

    with pytest.raises(SelectionError):
        run(overwrite())
    assert (values[:8] & 1).tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert np.flatnonzero(~table.selectors.contains(np.arange(8))).tolist() == [3, 4]
    assert table.ring.num_held == 2


def test_holding_when_the_table_is_extended_meanwhile_then_the_held_rows_stay(run: Loop, many: OpenedStore) -> None:
    table, everything, num_rows = many.get_table(), np.arange(MANY_ROWS), 2 * PIECE_ROWS
    is_shown: list[bool] = []

    async def overwrite() -> None:
        async with hold_rows(many, RowSet.run(0, num_rows), ()) as held:
            pass
        await held.let_go(is_written=True, then=lambda: is_shown.append(True))

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        await until(lambda: table.ring.num_held == num_rows, task)
        names = table.ring.get_row_ids(everything)
        while not is_shown:
            write(table, 5)  # the oldest rows are held
            await asyncio.sleep(0)
        assert (table.ring.get_row_ids(everything) == names)[:num_rows].all()
        assert not (table.ring.get_row_ids(everything) == names)[num_rows : num_rows + 5].any()
        await task

    run(scenario())
    assert table.selectors.contains(everything).all()


def test_drop_when_rows_will_never_be_whole_then_they_stay_reserved_until_that_is_on_record(
    run: Loop, many: OpenedStore
) -> None:
    table, held = many.get_table(), hidden(run, many, RowSet.run(0, MANY_ROWS - 1))
    found: list[tuple[int, int]] = []

    async def scenario() -> None:
        task = asyncio.create_task(held.drop(lambda: found.append((len(table), table.ring.num_holes))))
        await until(lambda: len(table) < MANY_ROWS, task)
        assert len(table) > 1  # others have their turn
        await task

    run(scenario())
    assert found == [(1, 0)]
    assert (len(table), table.ring.num_holes, many.writes) == (1, MANY_ROWS - 1, [])


def test_holding_when_it_fails_then_calls_that_wait_for_the_rows_go_on(
    world: World, run: Loop, many: OpenedStore
) -> None:
    table, row_set = many.get_table(), RowSet.run(0, MANY_ROWS)

    async def overwrite() -> None:
        async with hold_rows(many, row_set, ()):
            pass

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        await until(lambda: not table.selectors.contains(np.arange(MANY_ROWS)).all(), task)
        waiting = asyncio.create_task(wait_for_others(world.session(), many, row_set, Deadline.after(None)))
        table.state.remove(np.array([7]))
        with pytest.raises(SelectionError):
            await task
        await waiting

    run(scenario())


def test_sample_when_rows_are_held_for_a_write_then_waits_for_them_and_is_not_refused(world: World, run: Loop) -> None:
    sampler = Settings(sampler=WithoutReplacement()).to_json()
    like = TensorDict({"a": torch.tensor(0)}, [])
    kind = control_pb2.STORE_KIND_REPLAY
    store = run(world.create("once", like, kind=kind, capacity=MANY_ROWS, settings=sampler))
    table, rng = store.get_table(), np.random.default_rng(0)
    write(table, MANY_ROWS)

    async def scenario() -> None:
        held = RowWriteHold(store, RowSet.run(0, MANY_ROWS), ())
        task = asyncio.create_task(held.hold())
        await until(lambda: not table.selectors.contains(np.arange(MANY_ROWS)).all(), task)
        assert table.samples.draw_sample(MANY_ROWS, rng=rng) is None
        await task
        await held.give_back()

    run(scenario())
    assert table.samples.draw_sample(MANY_ROWS, rng=rng) is not None
