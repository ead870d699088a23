from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, SelectionError, StoreNotFoundError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.mutations.row_write_hold import RowWriteHold, is_free, wait_for_others
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.journal import Journal
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import create, extend, path, rows, sample, writing
from tests.unit.server.world import Loop, World

PARTIAL = 2 + (1 << 44)
"""Generation of a row that was written once as a whole, and then once in part."""


@pytest.fixture
def replay(world: World, run: Loop) -> OpenedStore:
    """A table with four whole rows and two that have only ``a``, oldest first."""
    made = create(world, run, sampler=Fifo())
    extend(world, run, made, rows(10, 4))
    extend(world, run, made, rows(20, 2).select("a"), request=2, keys=[path("a")])
    return made


def counted(store: OpenedStore) -> list[int]:
    """Returns the generations of a table as if its first commit had made them 2; row 0 was committed once."""
    values = store.get_generation_values()
    return list(np.where(values > 0, values - values[0] + 2, 0).tolist())


def journal(store: OpenedStore, td: Any, index: Any, *keys: tuple[str, ...]) -> Journal:
    """Returns the journal of a write that is on record."""
    return Journal(bytes(16), 7, control_pb2.Done(version=1), writing(store, td, index, *keys), "")


def held_of(run: Loop, store: OpenedStore, journal: Journal) -> RowWriteHold:
    """Returns the rows that it writes, held."""
    written = journal.selection.compute_row_set(store.spec.batch_size)
    return hold(run, store, written, [tuple(key.parts) for key in journal.asked.keys])


def hold(run: Loop, store: OpenedStore, rows: RowSet, keys: Sequence[tuple[str, ...]] = ()) -> RowWriteHold:
    """Holds these rows."""
    held = RowWriteHold(store, rows, keys)
    run(held.hold())
    run(held.hide())
    return held


def test_held_when_rows_of_a_replay_then_not_sampled_until_released(
    world: World, run: Loop, replay: OpenedStore
) -> None:
    held = held_of(run, replay, journal(replay, rows(0, 2), [1, 2]))
    assert counted(replay) == [2, 3, 3, 2, 2, 2, 0, 0, 0]
    assert sample(world, run, replay, 2)["a"] == [10, 13]
    run(held.let_go(is_written=True))
    assert counted(replay) == [2, PARTIAL, PARTIAL, 2, 2, 2, 0, 0, 0]
    assert sample(world, run, replay, 4)["a"] == [10, 11, 12, 13]


def test_held_when_nothing_was_written_then_rows_are_what_they_were_before(
    world: World, run: Loop, replay: OpenedStore
) -> None:
    held = held_of(run, replay, journal(replay, rows(0, 2), [1, 2]))
    replay.get_table().state.remove(np.array([2]))
    run(held.let_go(is_written=False, is_untouched=True))
    assert counted(replay)[:2] == [2, 2]
    assert counted(replay)[2] % 2 == 1  # it has left
    assert sample(world, run, replay, 3)["a"] == [10, 11, 13]


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
    plain = replay.get_table().samples.draw_sample(num_whole, rng=None)  # type: ignore[arg-type] # Fifo needs none
    assert plain is not None
    assert replay.get_table().samples.draw_sample(num_whole + 1, rng=None) is None  # type: ignore[arg-type]


def test_held_when_a_crash_has_cut_the_write_short_then_the_same_rows_again(
    world: World, run: Loop, replay: OpenedStore
) -> None:
    written = journal(replay, rows(0, 2), [1, 2])
    world.db.put("pending", b"apply:" + replay.record.uid.encode(), written.to_bytes())
    replay.get_generation_values()[1] |= 1  # killed after the first
    world.reopen()
    again = world.stores.get("r")
    assert again.get_table().info()["num_held"] == 1
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
    store = run(world.create("x", td))
    held = held_of(run, store, journal(store, td[:1], [1]))
    assert store.get_generation_values().tolist() == [0, 1, 0, 1]
    held.end()  # nobody writes them any more, and they stay as they are
    again = held_of(run, store, journal(store, td[:1], [1]))
    assert store.get_generation_values().tolist() == [0, 1, 0, 1]
    run(again.let_go(is_written=True))
    assert store.get_generation_values().tolist() == [0, 2, 0, 2]


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A tensordict store of three rows."""
    return run(world.create("x", TensorDict({"a": torch.zeros(3)}, [3])))


def row(*numbers: int) -> RowSet:
    """Returns row numbers."""
    return RowSet.from_rows(np.array(numbers, np.int64))


def test_let_go_when_another_write_goes_on_then_the_store_as_a_whole_is_not_readable_yet(
    run: Loop, store: OpenedStore
) -> None:
    first, second = hold(run, store, row(0)), hold(run, store, row(2))
    assert store.get_generation_values().tolist() == [1, 0, 1, 1]
    run(first.let_go(is_written=True))
    assert store.get_generation_values().tolist() == [2, 0, 1, 3]
    assert store.content_version == 1
    run(second.let_go(is_written=True))
    assert store.get_generation_values().tolist() == [2, 0, 2, 4]
    assert store.content_version == 2


def test_let_go_when_some_rows_are_lost_then_they_and_the_store_stay_odd(run: Loop, store: OpenedStore) -> None:
    hold(run, store, row(1)).end()
    store.lost.overwrites.append(Overwrite("u", "lock", 1, row(1), ()))
    run(hold(run, store, row(0, 1), [("a",)]).let_go(is_written=True))
    assert [number % 2 for number in store.get_generation_values().tolist()] == [0, 1, 0, 1]


def test_is_free_when_asked_then_by_rows(store: OpenedStore) -> None:
    held = RowWriteHold(store, row(1, 2), [])
    assert is_free(store, row(0))
    assert not is_free(store, row(0, 2))
    held.end()
    assert is_free(store, row(2))


def test_wait_for_others_when_they_end_then_goes_on_and_else_deadline(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        session = world.session()
        held = RowWriteHold(store, row(1), [])
        await wait_for_others(session, store, row(0, 2), Deadline.after(0))
        with pytest.raises(DeadlineExceededError, match="another write to rows of 'x'"):
            await wait_for_others(session, store, row(1), Deadline.after(0.01))
        waiting = asyncio.create_task(wait_for_others(session, store, row(1), Deadline.after(20.0)))
        await asyncio.sleep(0)
        await held.let_go(is_written=True)
        store.waiters.wake()
        await waiting

    run(scenario())


@pytest.mark.parametrize("way", ["delete", "end"])
def test_wait_for_others_when_the_store_or_the_session_ends_then_no_more(
    world: World, run: Loop, store: OpenedStore, way: str
) -> None:
    async def scenario() -> BaseException | None:
        session = world.session()
        RowWriteHold(store, row(1), [])
        waiting = asyncio.create_task(wait_for_others(session, store, row(1), Deadline.after(20.0)))
        await asyncio.sleep(0)
        if way == "delete":
            await world.stores.delete(store)
        else:
            await session.finish(20.0)
        await asyncio.wait({waiting})
        return None if waiting.cancelled() else waiting.exception()

    error = run(scenario())
    assert isinstance(error, StoreNotFoundError) if way == "delete" else error is None
