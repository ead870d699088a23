from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, SelectionError, StoreNotFoundError
from tdserve.messages.row_numbers import PIECE_ROWS, RUN_PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.order import Fifo
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.without_replacement import WithoutReplacement
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.journal import Journal
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.server.row_write_hold import RowWriteHold, holding, is_free, wait_for_others
from tdserve.v1 import control_pb2
from tests.unit.rules.replay.tables import write
from tests.unit.server.replaying import create, extend, path, rows, sample, writing
from tests.unit.server.world import Loop, World

PARTIAL = 2 + (1 << 44)
"""Generation of a row that was written once, and then once in part."""


@pytest.fixture
def replay(world: World, run: Loop) -> OpenedStore:
    """Four whole rows and two that have ``a`` alone, oldest first."""
    made = create(world, run, sampler=Fifo())
    extend(world, run, made, rows(10, 4))
    extend(world, run, made, rows(20, 2).select("a"), request=2, keys=[path("a")])
    return made


def counted(entry: OpenedStore) -> list[int]:
    """The generations of a table as if its first commit made them 2; row 0 was committed once."""
    values = entry.generation_values()
    return list(np.where(values > 0, values - values[0] + 2, 0).tolist())


def journal(entry: OpenedStore, td: Any, index: Any, *keys: tuple[str, ...]) -> Journal:
    """Of a write that is on record."""
    return Journal(bytes(16), 7, control_pb2.Done(version=1), writing(entry, td, index, *keys), "")


def held_of(run: Loop, entry: OpenedStore, journal: Journal) -> RowWriteHold:
    """The rows that it writes, held."""
    written = journal.selection.row_set(entry.spec.batch_size)
    return hold(run, entry, written, [tuple(key.parts) for key in journal.asked.keys])


def hold(run: Loop, entry: OpenedStore, rows: RowSet, keys: Sequence[tuple[str, ...]] = ()) -> RowWriteHold:
    """These rows, held."""
    held = RowWriteHold(entry, rows, keys)
    run(held.hold())
    return held


def test_held_when_rows_of_a_replay_then_nobody_gets_them_until_let_go(
    world: World, run: Loop, replay: OpenedStore
) -> None:
    held = held_of(run, replay, journal(replay, rows(0, 2), [1, 2]))
    assert counted(replay) == [2, 3, 3, 2, 2, 2, 0, 0, 0]
    assert sample(world, run, replay, 2)["a"] == [10, 13]
    run(held.let_go(is_written=True))
    assert counted(replay) == [2, PARTIAL, PARTIAL, 2, 2, 2, 0, 0, 0]
    assert sample(world, run, replay, 4)["a"] == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("keys", "is_written", "num_whole"),
    [
        ([("g",)], True, 4),
        ([("n",)], True, 4),
        ([("g",), ("n", "w")], True, 6),
        ([("g",), ("n", "w")], False, 4),
        ([], True, 6),
    ],
)
def test_let_go_when_leaves_were_written_then_the_rows_have_them(
    run: Loop, replay: OpenedStore, keys: list[tuple[str, ...]], is_written: bool, num_whole: int
) -> None:
    held = held_of(run, replay, journal(replay, rows(0, 2), [4, 5], *keys))
    run(held.let_go(is_written=is_written))
    plain = replay.replay_table().plan_sample(num_whole, rng=None)  # type: ignore[arg-type] # Fifo needs none
    assert plain is not None
    assert replay.replay_table().plan_sample(num_whole + 1, rng=None) is None  # type: ignore[arg-type]


def test_held_when_a_crash_has_cut_the_write_short_then_the_same_rows_again(
    world: World, run: Loop, replay: OpenedStore
) -> None:
    written = journal(replay, rows(0, 2), [1, 2])
    world.db.put("pending", b"apply:" + replay.record.uid.encode(), written.to_bytes())
    replay.generation_values()[1] |= 1  # killed after the first
    world.reopen()
    again = world.stores.get("r")
    assert again.replay_table().info()["num_held"] == 1
    held = held_of(run, again, written)
    assert counted(again)[:4] == [2, 3, 3, 2]
    run(held.let_go(is_written=True))
    assert counted(again)[:4] == [2, PARTIAL, PARTIAL, 2]
    assert sample(world, run, again, 4)["a"] == [10, 11, 12, 13]


def test_held_when_a_row_is_gone_then_refused_and_nothing_changes(run: Loop, replay: OpenedStore) -> None:
    with pytest.raises(SelectionError):
        held_of(run, replay, journal(replay, rows(0, 2), [1, 6]))
    assert not replay.writes
    assert counted(replay) == [2, 2, 2, 2, 2, 2, 0, 0, 0]


def test_held_when_rows_of_a_tensordict_then_they_and_the_stores_own_number(world: World, run: Loop) -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    entry = run(world.create("x", td))
    held = held_of(run, entry, journal(entry, td[:1], [1]))
    assert entry.generation_values().tolist() == [0, 1, 0, 1]
    held.end()  # nobody writes them any more, and they stay as they are
    again = held_of(run, entry, journal(entry, td[:1], [1]))
    assert entry.generation_values().tolist() == [0, 1, 0, 1]
    run(again.let_go(is_written=True))
    assert entry.generation_values().tolist() == [0, 2, 0, 2]


@pytest.fixture
def entry(world: World, run: Loop) -> OpenedStore:
    """A tensordict store of three rows."""
    return run(world.create("x", TensorDict({"a": torch.zeros(3)}, [3])))


def row(*numbers: int) -> RowSet:
    """Row numbers."""
    return RowSet.of(np.array(numbers, np.int64))


def test_let_go_when_another_write_goes_on_then_the_store_as_a_whole_is_not_readable_yet(
    run: Loop, entry: OpenedStore
) -> None:
    first, second = hold(run, entry, row(0)), hold(run, entry, row(2))
    assert entry.generation_values().tolist() == [1, 0, 1, 1]
    run(first.let_go(is_written=True))
    assert entry.generation_values().tolist() == [2, 0, 1, 3]
    assert entry.content_version == 1
    run(second.let_go(is_written=True))
    assert entry.generation_values().tolist() == [2, 0, 2, 4]
    assert entry.content_version == 2


def test_let_go_when_some_rows_are_lost_then_they_and_the_store_stay_odd(run: Loop, entry: OpenedStore) -> None:
    hold(run, entry, row(1)).end()
    entry.lost.overwrites.append(Overwrite("u", "lock", 1, row(1), ()))
    run(hold(run, entry, row(0, 1), [("a",)]).let_go(is_written=True))
    assert [number % 2 for number in entry.generation_values().tolist()] == [0, 1, 0, 1]


def test_is_free_when_asked_then_by_rows(entry: OpenedStore) -> None:
    held = RowWriteHold(entry, row(1, 2), [])
    assert is_free(entry, row(0))
    assert not is_free(entry, row(0, 2))
    held.end()
    assert is_free(entry, row(2))


def test_wait_for_others_when_they_end_then_goes_on_and_else_deadline(
    world: World, run: Loop, entry: OpenedStore
) -> None:
    async def scenario() -> None:
        session = world.session()
        held = RowWriteHold(entry, row(1), [])
        await wait_for_others(session, entry, row(0, 2), Deadline.after(0))
        with pytest.raises(DeadlineExceededError, match="another write to rows of 'x'"):
            await wait_for_others(session, entry, row(1), Deadline.after(0.01))
        waiting = asyncio.create_task(wait_for_others(session, entry, row(1), Deadline.after(20.0)))
        await asyncio.sleep(0)
        await held.let_go(is_written=True)
        entry.changed.wake()
        await waiting

    run(scenario())


@pytest.mark.parametrize("way", ["delete", "end"])
def test_wait_for_others_when_the_store_or_the_session_ends_then_no_more(
    world: World, run: Loop, entry: OpenedStore, way: str
) -> None:
    async def scenario() -> BaseException | None:
        session = world.session()
        RowWriteHold(entry, row(1), [])
        waiting = asyncio.create_task(wait_for_others(session, entry, row(1), Deadline.after(20.0)))
        await asyncio.sleep(0)
        if way == "delete":
            await world.stores.delete(entry)
        else:
            await session.finish(20.0)
        await asyncio.wait({waiting})
        return None if waiting.cancelled() else waiting.exception()

    error = run(scenario())
    assert isinstance(error, StoreNotFoundError) if way == "delete" else error is None


def test_held_when_there_are_very_many_rows_then_others_have_their_turn_between(world: World, run: Loop) -> None:
    num_rows = 5 * RUN_PIECE_ROWS
    entry = run(world.create("many", TensorDict({"a": torch.zeros(num_rows, dtype=torch.uint8)}, [num_rows])))
    values = entry.generation_values()

    async def scenario() -> list[tuple[int, int]]:
        held = RowWriteHold(entry, RowSet.run(0, num_rows), ())
        holding = asyncio.create_task(held.hold())
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
"""Of a table: they are suspended and resumed in three turns at least."""


@pytest.fixture
def many(world: World, run: Loop) -> OpenedStore:
    """A full table of very many rows."""
    made = run(world.create_replay("many", TensorDict({"a": torch.tensor(0)}, []), MANY_ROWS))
    write(made.replay_table(), MANY_ROWS)
    return made


async def until(is_so: Callable[[], bool], task: asyncio.Task[None]) -> None:
    """Gives others their turns until something is so."""
    while not is_so():
        assert not task.done()
        await asyncio.sleep(0)


def test_holding_when_a_table_has_very_many_rows_then_all_are_held_and_let_go_in_one_turn_each(
    run: Loop, many: OpenedStore
) -> None:
    table, values, everything = many.replay_table(), many.generation_values(), np.arange(MANY_ROWS)
    seen: list[str] = []

    def note(what: str) -> None:
        num_odd, num_sampled = int((values[:-1] & 1).sum()), int(table.selectors.contains(everything).sum())
        seen.append(f"{what}: {num_odd} odd, {num_sampled} sampled")

    async def overwrite() -> None:
        async with holding(many, RowSet.run(0, MANY_ROWS), ()) as held:
            note("on record")
        note("held")
        await held.let_go(is_written=True, then=lambda: note("let go"))

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        await until(lambda: not table.selectors.contains(everything).all(), task)
        note("begun")
        await until(lambda: "let go" in seen[-1], task)
        assert many.writes  # nobody else may write them yet
        await task
        note("over")

    run(scenario())
    assert seen == [
        f"begun: 0 odd, {MANY_ROWS - PIECE_ROWS} sampled",
        "on record: 0 odd, 0 sampled",
        f"held: {MANY_ROWS} odd, 0 sampled",
        "let go: 0 odd, 0 sampled",
        f"over: 0 odd, {MANY_ROWS} sampled",
    ]
    assert not many.writes


def test_holding_when_rows_leave_before_they_are_held_then_the_others_are_as_before(
    run: Loop, many: OpenedStore
) -> None:
    table, everything = many.replay_table(), np.arange(MANY_ROWS)

    async def overwrite() -> None:
        async with holding(many, RowSet.run(0, MANY_ROWS), ()) as held:
            table.check_live(held.numbers)

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        await until(lambda: not table.selectors.contains(everything).all(), task)
        write(table, 5)  # in place of rows that were suspended already
        table.remove(np.array([MANY_ROWS - 1, 100]))
        with pytest.raises(SelectionError):
            await task

    run(scenario())
    assert np.flatnonzero(~table.selectors.contains(everything)).tolist() == [100, MANY_ROWS - 1]
    assert (len(table), table.ring.num_held, many.writes) == (MANY_ROWS - 2, 0, [])


def test_let_go_when_rows_leave_before_they_are_in_a_sample_again_then_each_row_is_there_once(
    run: Loop, many: OpenedStore
) -> None:
    table, everything = many.replay_table(), np.arange(MANY_ROWS)

    async def scenario() -> None:
        async with holding(many, RowSet.run(0, MANY_ROWS), ()) as held:
            pass
        is_even = []
        task = asyncio.create_task(held.let_go(is_written=True, then=lambda: is_even.append(True)))
        await until(lambda: bool(is_even), task)
        write(table, 5)
        table.remove(np.array([MANY_ROWS - 1]))
        write(table, 1)
        table.remove(np.array([2, MANY_ROWS - 2]))
        await task

    run(scenario())
    assert np.flatnonzero(~table.selectors.contains(everything)).tolist() == [2, MANY_ROWS - 2]
    assert len(table) == MANY_ROWS - 2


def test_holding_when_some_rows_were_lost_before_then_they_are_there_again_with_the_others(
    run: Loop, many: OpenedStore
) -> None:
    table, values = many.replay_table(), many.generation_values()
    hold(run, many, RowSet.run(3, 5)).end()  # nobody has written them to the end

    async def overwrite() -> None:
        async with holding(many, RowSet.run(2, 6), ()) as held:
            table.check_live(held.numbers)
        assert (values[:8] & 1).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
        await held.let_go(is_written=True)

    run(overwrite())
    assert not (values[:8] & 1).any()
    assert table.selectors.contains(np.arange(8)).all()
    assert table.ring.num_held == 0


def test_holding_when_a_row_comes_anew_after_it_was_suspended_then_no_sample_has_it_while_it_is_held(
    run: Loop, many: OpenedStore
) -> None:
    table, everything = many.replay_table(), np.arange(MANY_ROWS)

    async def overwrite() -> None:
        async with holding(many, RowSet.run(0, MANY_ROWS), ()) as held:
            table.check_live(held.numbers)
        assert not table.selectors.contains(everything).any()
        await held.let_go(is_written=True)

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        await until(lambda: not table.selectors.contains(everything).all(), task)
        assert table.num_suspended == MANY_ROWS
        write(table, 5)
        await task

    run(scenario())
    assert table.selectors.contains(everything).all()
    assert table.num_suspended == 0


def test_holding_when_it_fails_then_whoever_waits_for_the_rows_goes_on(
    world: World, run: Loop, many: OpenedStore
) -> None:
    table, row_set = many.replay_table(), RowSet.run(0, MANY_ROWS)

    async def overwrite() -> None:
        async with holding(many, row_set, ()) as held:
            table.check_live(held.numbers)

    async def scenario() -> None:
        task = asyncio.create_task(overwrite())
        await until(lambda: not table.selectors.contains(np.arange(MANY_ROWS)).all(), task)
        waiting = asyncio.create_task(wait_for_others(world.session(), many, row_set, Deadline.after(None)))
        table.remove(np.array([7]))
        with pytest.raises(SelectionError):
            await task
        await waiting

    run(scenario())


def test_sample_when_rows_are_suspended_then_waits_for_them_and_is_not_refused(world: World, run: Loop) -> None:
    sampler = Settings(sampler=WithoutReplacement()).to_json()
    like = TensorDict({"a": torch.tensor(0)}, [])
    kind = control_pb2.STORE_KIND_REPLAY
    entry = run(world.create("once", like, kind=kind, capacity=MANY_ROWS, settings=sampler))
    table, rng = entry.replay_table(), np.random.default_rng(0)
    write(table, MANY_ROWS)

    async def scenario() -> None:
        held = RowWriteHold(entry, RowSet.run(0, MANY_ROWS), ())
        task = asyncio.create_task(held.suspend())
        await until(lambda: not table.selectors.contains(np.arange(MANY_ROWS)).all(), task)
        assert table.plan_sample(MANY_ROWS, rng=rng) is None
        await task
        await held.resume()

    run(scenario())
    assert table.plan_sample(MANY_ROWS, rng=rng) is not None
