from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tdserve.base import failpoints
from tdserve.base.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    KeyNotFoundError,
    StepForgottenError,
    WrongStateError,
)
from tdserve.rules.replay.draws.kept_draw import KeptDraw
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import (
    content,
    create,
    extend,
    extending,
    in_line,
    numbers,
    path,
    rows,
    sample,
    sampling,
)
from tests.unit.server.world import Loop, World


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A full ring of eight rows."""
    made = create(world, run)
    extend(world, run, made, rows(10, 8))
    return made


def share(rank: int, step: int = 0, world_size: int = 2, **fields: Any) -> control_pb2.RankShare:
    """Returns which share is asked for."""
    return control_pb2.RankShare(rank=rank, world_size=world_size, step=step, **fields)


def read(world: World, run: Loop, store: OpenedStore, num_rows: int, of: control_pb2.RankShare) -> list[int]:
    """Returns the rows of a share, by what they count."""
    found: list[int] = sample(world, run, store, num_rows, share=of)["a"]
    return found


def change(world: World, run: Loop, request: int, **body: Any) -> None:
    """Changes the table."""
    run(world.changes.change(world.session(), request, control_pb2.ChangeRequest(store="r", **body)))


def test_sample_when_ranks_ask_then_different_rows_and_the_same_again(
    world: World, run: Loop, store: OpenedStore
) -> None:
    first, second = (read(world, run, store, 4, share(rank)) for rank in (0, 1))
    assert sorted(first + second) == list(range(10, 18))
    assert read(world, run, store, 4, share(0)) == first
    assert store.get_table().counts.samples == 8


def test_sample_when_the_server_was_restarted_then_the_same_rows(world: World, run: Loop, store: OpenedStore) -> None:
    balanced = share(0, 3, balance=path("a"))
    before = [read(world, run, store, 2, each) for each in (share(0), share(1), balanced)]
    world.reopen()
    again = world.stores.get("r")
    assert [read(world, run, again, 2, each) for each in (share(0), share(1), balanced)] == before
    assert again.get_table().counts.samples == 8


def test_sample_when_balanced_then_the_sums_are_near_each_other(world: World, run: Loop, store: OpenedStore) -> None:
    shares = [read(world, run, store, 4, share(rank, balance=path("a"))) for rank in (0, 1)]
    assert [sum(each) for each in shares] == [54, 54]
    assert sorted(shares[0] + shares[1]) == list(range(10, 18))


def test_sample_when_ranks_wait_then_all_get_the_draw_of_the_first(world: World, run: Loop) -> None:
    store = create(world, run)

    async def scenario() -> list[list[int]]:
        waiting = [
            asyncio.create_task(
                world.samples.sample(world.session(rank), 1, sampling(2, share=share(rank), timeout_s=5.0))
            )
            for rank in (0, 1)
        ]
        await in_line(store, 2)
        await world.extends.extend(world.session(7), 1, extending(store, rows(10, 4)))
        return [content(store, await each)["a"] for each in waiting]

    first, second = run(scenario())
    assert sorted(first + second) == [10, 11, 12, 13]


def test_sample_when_a_rank_waits_for_two_steps_then_another_is_not_behind_its_second(world: World, run: Loop) -> None:
    store = create(world, run, max_times_sampled=1)

    def ask(rank: int, step: int) -> asyncio.Task[control_pb2.Done | None]:
        asked = sampling(2, share=share(rank, step), timeout_s=5.0)
        return asyncio.create_task(world.samples.sample(world.session(rank), 1, asked))

    async def scenario() -> list[list[int]]:
        early = [ask(0, 0), ask(0, 1)]  # as a rank does that prefetches
        await in_line(store, 2)
        early.append(ask(1, 0))
        await in_line(store, 3)
        await world.extends.extend(world.session(7), 1, extending(store, rows(10, 4)))
        first, second = [content(store, await early[number])["a"] for number in (0, 2)]
        assert not early[1].done(), "the share of step 0 came with its draw, not when step 1 had waited enough"
        late = ask(1, 0)
        again = content(store, await late)["a"]
        assert not early[1].done()
        await world.extends.extend(world.session(7), 2, extending(store, rows(14, 4)))
        await early[1]
        return [first, second, again]

    first, second, again = run(scenario())
    assert sorted(first + second) == [10, 11, 12, 13]
    assert again == second


def test_sample_when_there_are_too_few_then_names_what_is_missing(world: World, run: Loop, store: OpenedStore) -> None:
    change(world, run, 2, delete=control_pb2.Rows(data=numbers(0)))
    with pytest.raises(DeadlineExceededError, match="a sample of 8 rows"):
        read(world, run, store, 4, share(0))
    assert read(world, run, store, 2, share(0)), "the step may still be drawn"


@pytest.mark.parametrize(
    ("num_rows", "of", "fields", "error"),
    [
        (4, share(2), {}, InvalidRequestError),
        (4, share(0, world_size=0), {}, InvalidRequestError),
        (0, share(0), {}, InvalidRequestError),
        (2, share(0), {"num_batches": 2}, InvalidRequestError),
        (2, share(0), {"is_lease": True}, InvalidRequestError),
        (2, share(0, balance=path("none")), {}, KeyNotFoundError),
        (5, share(0), {}, InvalidRequestError),
    ],
)
def test_sample_when_impossible_then_refused_and_nothing_is_drawn(
    world: World, run: Loop, store: OpenedStore, num_rows: int, of: Any, fields: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        sample(world, run, store, num_rows, share=of, **fields)
    assert store.get_table().counts.samples == 0
    assert len(store.get_table().draws) == 0


def test_sample_when_of_a_consumer_then_it_gets_no_row_twice(world: World, run: Loop, store: OpenedStore) -> None:
    def shares(step: int, store: OpenedStore) -> list[int]:
        found = [sample(world, run, store, 2, share=share(rank, step), consumer="c")["a"] for rank in (0, 1)]
        return [*found[0], *found[1]]

    first = shares(0, store)
    world.reopen()
    again = world.stores.get("r")
    assert shares(0, again) == first
    assert sorted(first + shares(1, again)) == list(range(10, 18))
    with pytest.raises(DeadlineExceededError, match="consumer 'c' has not had"):
        shares(2, again)
    assert len(read(world, run, again, 4, share(0, 3))) == 4, "others still do"


def test_sample_when_rows_are_deleted_or_draws_forgotten_then_errors(
    world: World, run: Loop, store: OpenedStore
) -> None:
    read(world, run, store, 4, share(0))
    change(world, run, 2, delete=control_pb2.Rows(data=numbers(*range(8))))
    with pytest.raises(WrongStateError, match="4 of its 4 rows of table 'r' are deleted"):
        read(world, run, store, 4, share(0))
    extend(world, run, store, rows(20, 8), request=3)
    change(world, run, 4, clear=True)
    with pytest.raises(StepForgottenError):
        read(world, run, store, 4, share(0))
    change(world, run, 5, forget_draws=True)
    extend(world, run, store, rows(30, 8), request=6)
    world.reopen()
    again = world.stores.get("r")
    assert set(read(world, run, again, 4, share(0))) <= set(range(30, 38))


def test_sample_when_the_draw_cannot_be_recorded_then_undone(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise CapacityError(what="the catalog", asked=1, free=0)

    with monkeypatch.context() as patched:
        patched.setattr("tdserve.store.database.catalog_room.CatalogRoom.take", fail)
        with pytest.raises(CapacityError):
            read(world, run, store, 4, share(0))
    assert store.get_table().counts.samples == 0
    assert len(read(world, run, store, 4, share(0))) == 4


def test_sample_when_its_deal_cannot_be_recorded_then_dealt_again(world: World, run: Loop, store: OpenedStore) -> None:
    balanced = [share(rank, balance=path("a")) for rank in (0, 1)]
    failpoints.arm("catalog.written:2=ENOSPC")  # behind the record of the draw
    try:
        with pytest.raises(CapacityError):
            read(world, run, store, 4, balanced[0])
    finally:
        failpoints.arm("")
    assert [len(read(world, run, store, 4, each)) for each in balanced] == [4, 4]
    ((_, record),) = world.db.scan("draws")
    assert KeptDraw.from_bytes(record).shares is not None


def test_delete_when_draws_are_on_record_then_the_records_go_too(world: World, run: Loop, store: OpenedStore) -> None:
    read(world, run, store, 4, share(0))
    assert world.db.count_records("draws") == 1
    run(world.creation.delete("r"))
    assert world.db.count_records("draws") == 0
