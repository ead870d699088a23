from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from tdserve.base import failpoints
from tdserve.base.errors import InvalidRequestError, RemoteProtocolError, SelectionError, TDServeError, WrongStateError
from tdserve.base.ids import make_client_id
from tdserve.messages.row_numbers import TREE_PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.limiter import MinSize, Queue
from tdserve.rules.replay.plans import Departure
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table_state import TableState
from tdserve.server.dispatch.requests import Requests
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.departure_records import save_departure
from tdserve.v1 import control_pb2
from tests.errors import raises
from tests.unit.server.replaying import create, extend, extending, numbers, rows, sample
from tests.unit.server.world import Loop, World, outbox, turns_during


class _KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """Eight rows in order, of which six are there; priorities are one."""
    made = create(world, run, sampler=Prioritized())
    extend(world, run, made, rows(10, 6))
    return made


def change(world: World, run: Loop, request: int, session: int = 1, **kind: Any) -> control_pb2.Done:
    """The answer to a change."""
    asked = control_pb2.ChangeRequest(store="r", **kind)
    return run(world.changes.change(world.session(session), request, asked))


def priorities(rows: bytes, values: Any, generations: Any = None) -> control_pb2.Priorities:
    """New priorities of rows."""
    made = control_pb2.Priorities(rows=rows, priorities=np.array(values, "<f4").tobytes())
    if generations is not None:
        made.generations = np.array(generations, "<i8").astype("<u4").tobytes()
    return made


def leased(*rows: int, consumer: str = "") -> control_pb2.Leased:
    """Rows of a lease."""
    return control_pb2.Leased(rows=numbers(*rows), consumer=consumer)


def test_priorities_when_set_then_they_count_and_overwritten_rows_are_skipped(
    world: World, run: Loop, store: OpenedStore
) -> None:
    done = change(world, run, 1, priorities=priorities(numbers(0, 3, 5), [2.0, 3.0, 0.5]))
    assert (done.num_rows, done.num_skipped) == (3, 0)
    table = store.get_table()
    assert table.columns.priority[:6].tolist() == [2.0, 1.0, 1.0, 3.0, 1.0, 0.5]
    committed = store.get_generation_values()[:2].tolist()
    extend(world, run, store, rows(20, 3), request=2)
    done = change(world, run, 3, priorities=priorities(numbers(0, 1), 7.0, committed))
    assert (done.num_rows, done.num_skipped) == (1, 1)
    assert table.columns.priority[:2].tolist() == [3.0, 7.0]


@pytest.mark.parametrize(
    "asked",
    [
        priorities(numbers(0, 6), 1.0),
        priorities(numbers(0, 8), 1.0),
        priorities(numbers(0, -1), 1.0),
        priorities(numbers(0, 1), [1.0, float("nan")]),
        priorities(numbers(0, 1), [1.0, -1.0]),
        priorities(numbers(0, 1, 2), [1.0, 2.0]),
        priorities(numbers(0, 1, 2), 1.0, [2, 2]),
        control_pb2.Priorities(rows=b"short", priorities=bytes(4)),
        control_pb2.Priorities(rows=numbers(0)),
    ],
)
def test_priorities_when_they_cannot_be_then_typed_error_and_unchanged(
    world: World, run: Loop, store: OpenedStore, asked: control_pb2.Priorities
) -> None:
    with pytest.raises((SelectionError, InvalidRequestError, RemoteProtocolError)):
        change(world, run, 1, priorities=asked)
    assert store.get_table().columns.priority.tolist() == [1.0] * 6 + [0.0] * 2


def test_delete_when_retried_then_answered_from_the_record(
    world: World, run: Loop, store: OpenedStore, requests: Requests
) -> None:
    asked = control_pb2.ChangeRequest(store="r", delete=control_pb2.Rows(data=numbers(1, 4)))
    message = control_pb2.ClientMessage(request=7, change=asked)
    first = world.session(1)
    run(requests.serve(first, message))
    again = world.session_of(first.hello, 2)
    run(requests.serve(again, message))
    counts = control_pb2.TableCounts(rows=4, inserts=6)
    assert outbox(first).done() == outbox(again).done() == control_pb2.Done(num_rows=2, counts=counts)
    assert store.get_table().state.list_live_rows().tolist() == [0, 2, 3, 5]
    run(requests.serve(world.session(3), message))  # the same number of another client
    assert len(store.get_table()) == 4


def test_delete_when_rows_have_generations_then_only_those_that_still_have_them(
    world: World, run: Loop, store: OpenedStore
) -> None:
    seen = store.get_generation_values()[[0, 1, 3, 1]].astype("<u4").tobytes()
    extend(world, run, store, rows(20, 3), request=2)  # two free places, then that of row 0
    generations = control_pb2.RowColumn(data=seen)
    for request, num_rows in ((3, 2), (4, 0)):
        named = control_pb2.Rows(data=numbers(0, 1, 3, 1))
        done = change(world, run, request, delete=named, delete_generations=generations)
        assert done.num_rows == num_rows
        assert store.get_table().state.list_live_rows().tolist() == [0, 2, 4, 5, 6, 7]
    with raises(InvalidRequestError, argument="generation"):
        change(world, run, 5, delete=control_pb2.Rows(data=numbers(0, 2, 4)), delete_generations=generations)


def test_acknowledge_when_retried_after_a_restart_then_answered_from_the_record(world: World, run: Loop) -> None:
    made = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), is_queue=True)
    extend(world, run, made, rows(10, 4))
    session = world.session(5)
    sample(world, run, made, 3, session, is_lease=True)
    asked = control_pb2.ChangeRequest(store="r", acknowledge=leased(0, 2))
    done = run(world.changes.change(session, 9, asked))
    assert done.num_rows == 2
    world.reopen()
    assert world.answers.find_answer(session.client_id, 9) == done.SerializeToString()
    assert sample(world, run, world.stores.get("r"), 2, is_lease=True)["a"] == [11, 13]


def end_process(failpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the process end, as far as the test goes, at a failpoint."""

    def reached(name: str) -> None:
        if name == failpoint:
            raise _KilledError

    monkeypatch.setattr(failpoints, "on_reach", reached)


@pytest.mark.parametrize("failpoint", ["catalog.written", "change.recorded", "change.applied"])
@pytest.mark.parametrize(
    "kind", [{"delete": control_pb2.Rows(data=numbers(1, 2))}, {"clear": True}], ids=["delete", "clear"]
)
def test_change_when_killed_then_its_rows_are_there_without_an_answer_or_have_left_and_a_retry_gets_the_answer(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch, failpoint: str, kind: dict[str, Any]
) -> None:
    session, asked = world.session(5), control_pb2.ChangeRequest(store="r", **kind)
    with monkeypatch.context() as patched:
        end_process(failpoint, patched)
        with pytest.raises(_KilledError):
            run(world.changes.change(session, 4, asked))
    for _ in range(2):
        world.reopen()
        table = world.stores.get("r").get_table()
        answer = world.answers.find_answer(session.client_id, 4)
        if failpoint == "catalog.written":
            assert answer is None
            assert len(table) == 6
            continue
        left = [] if "clear" in kind else [0, 3, 4, 5]
        assert table.state.list_live_rows().tolist() == left
        assert control_pb2.Done.FromString(answer or b"") == control_pb2.Done(
            num_rows=6 - len(left), counts=control_pb2.TableCounts(rows=len(left), inserts=6)
        )


@pytest.mark.parametrize("failpoint", ["change.recorded", "change.applied"])
@pytest.mark.parametrize("consumer", ["", "a"])
def test_acknowledge_when_killed_then_the_rows_do_not_come_back_and_a_retry_gets_the_answer(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch, failpoint: str, consumer: str
) -> None:
    session = world.session(5)
    sample(world, run, store, 4, session, is_lease=True, consumer=consumer)
    held = np.flatnonzero(store.get_table().selectors.leases.is_leased(np.arange(6)))
    asked = control_pb2.ChangeRequest(store="r", acknowledge=leased(*held[:3].tolist(), consumer=consumer))
    with monkeypatch.context() as patched:
        end_process(failpoint, patched)
        with pytest.raises(_KilledError):
            run(world.changes.change(session, 9, asked))
    world.reopen()
    again = world.stores.get("r")
    done = control_pb2.Done.FromString(world.answers.find_answer(session.client_id, 9) or b"")
    num_left = 6 if consumer else 3
    assert (done.num_rows, done.counts.rows, len(again.get_table())) == (3, num_left, num_left)
    drawn = sample(world, run, again, 3, is_lease=True, consumer=consumer)["index"]
    assert sorted(drawn) == sorted(set(range(6)) - set(held[:3].tolist()))


def test_restore_when_rows_have_left_before_then_those_that_came_in_their_place_stay(
    world: World, run: Loop, store: OpenedStore
) -> None:
    change(world, run, 2, clear=True)
    extend(world, run, store, rows(20, 8), request=3)
    with world.db.begin_transaction() as txn:  # as if its deletion had not been committed before a crash
        save_departure(store.record.uid, Departure(RowSet.run(0, 6), 6, newest=6), txn)
    world.reopen()
    assert len(world.stores.get("r").get_table()) == 8


def test_give_back_when_a_session_is_not_done_then_others_have_the_rows(
    world: World, run: Loop, store: OpenedStore
) -> None:
    sample(world, run, store, 6, world.session(1), is_lease=True)
    assert change(world, run, 2, give_back=leased(3, 1)).num_rows == 2
    assert sorted(sample(world, run, store, 2, world.session(2), is_lease=True)["index"]) == [1, 3]


def test_give_back_when_a_seal_comes_in_between_then_its_answer_has_all_rows(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableState, "step_rows", 1)
    session, leases = world.session(1), store.get_table().selectors.leases
    sample(world, run, store, 6, session, is_lease=True)

    async def scenario() -> control_pb2.Done:
        asked = control_pb2.ChangeRequest(store="r", give_back=leased(*range(6)))
        changing = asyncio.create_task(world.changes.change(session, 2, asked))
        while leases.num_leased == 6:  # noqa: ASYNC110 (it has begun in a turn or two)
            await asyncio.sleep(0)
        assert leases.num_leased
        store.waiters.begin_seal("r")
        return await changing

    assert run(scenario()).num_rows == 6
    assert world.answers.find_answer(session.client_id, 2) is not None


def test_lease_when_its_table_is_deleted_then_the_session_keeps_nothing_of_it(world: World, run: Loop) -> None:
    session = world.session()

    def lease_and_delete() -> weakref.ref[object]:
        store = create(world, run)
        extend(world, run, store, rows(10, 6))
        sample(world, run, store, 2, session, is_lease=True)
        run(world.stores.delete(store))
        return weakref.ref(store.get_table())

    async def wait_until_gone(table: weakref.ref[object]) -> None:
        while table() is not None:
            gc.collect()
            await asyncio.sleep(0)

    run(asyncio.wait_for(wait_until_gone(lease_and_delete()), 30.0))
    assert not session.ended.is_set()


@pytest.mark.parametrize(
    "asked", [leased(0, 5), leased(-1), leased(-3), leased(8), leased(2**50), leased(0, consumer="a")]
)
def test_acknowledge_when_the_session_does_not_hold_all_then_typed_error_and_unchanged(
    world: World, run: Loop, store: OpenedStore, asked: control_pb2.Leased
) -> None:
    sample(world, run, store, 6, world.session(1), is_lease=True)
    run(world.changes.change(world.session(1), 2, control_pb2.ChangeRequest(store="r", give_back=leased(5))))
    with pytest.raises((WrongStateError, SelectionError)):
        change(world, run, 3, 1, acknowledge=asked)
    assert store.get_table().state.list_live_rows().tolist() == [0, 1, 2, 3, 4, 5]
    assert store.get_table().info()["num_leased"] == 5


def test_clear_when_done_then_empty_and_the_limiter_begins_anew_also_after_a_restart(
    world: World, run: Loop, store: OpenedStore
) -> None:
    assert change(world, run, 2, clear=True).num_rows == 6
    for _ in range(2):
        counts = world.stores.get("r").get_table().counts
        assert (counts.num_rows, counts.inserts, counts.samples) == (0, 0, 0)
        world.reopen()
    assert extend(world, run, world.stores.get("r"), rows(30, 2), request=3) == [0, 1]


def test_limiter_when_replaced_then_it_rules_also_after_a_restart(world: World, run: Loop, store: OpenedStore) -> None:
    change(world, run, 2, limiter=Settings(limiter=MinSize(7)).to_json())
    for _ in range(2):
        assert world.stores.get("r").get_table().settings == Settings(sampler=Prioritized(), limiter=MinSize(7))
        world.reopen()
    with pytest.raises(InvalidRequestError):
        change(world, run, 3, limiter=Settings(limiter=MinSize(9)).to_json())
    assert world.stores.get("r").get_table().settings.limiter == MinSize(7)


def test_sampler_when_a_parameter_changes_then_it_rules_also_after_a_restart(
    world: World, run: Loop, store: OpenedStore
) -> None:
    change(world, run, 2, sampler=Settings(sampler=Prioritized(beta=0.9), limiter=MinSize(7)).to_json())
    for _ in range(2):
        settings = world.stores.get("r").get_table().settings
        assert settings == Settings(sampler=Prioritized(beta=0.9))  # the limiter is not asked for
        world.reopen()
    with raises(InvalidRequestError, argument="alpha"):
        change(world, run, 4, sampler=Settings(sampler=Prioritized(alpha=0.1)).to_json())
    assert world.stores.get("r").get_table().settings.sampler == Prioritized(beta=0.9)


def test_sampler_when_a_retry_comes_after_another_change_then_it_changes_nothing(
    world: World, run: Loop, store: OpenedStore, requests: Requests
) -> None:
    first = world.session(1)

    def ask(session: Any, number: int, beta: float) -> None:
        asked = control_pb2.ChangeRequest(store="r", sampler=Settings(sampler=Prioritized(beta=beta)).to_json())
        run(requests.serve(session, control_pb2.ClientMessage(request=number, change=asked)))

    ask(first, 2, 0.5)
    ask(first, 3, 1.0)
    ask(world.session_of(first.hello, 2), 2, 0.5)
    assert world.stores.get("r").get_table().settings.sampler == Prioritized(beta=1.0)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ({}, RemoteProtocolError),
        ({"delete": control_pb2.Rows(data=numbers(0, 7))}, SelectionError),
        ({"delete": control_pb2.Rows(data=numbers(0, -1))}, SelectionError),
        ({"delete": control_pb2.Rows(data=np.array([-1, 0, 2**50], "<i8").tobytes())}, TDServeError),
        ({"delete": control_pb2.Rows(data=b"1")}, RemoteProtocolError),
        ({"limiter": "{"}, InvalidRequestError),
    ],
)
def test_change_when_it_cannot_be_then_typed_error_and_nothing_is_on_record(
    world: World, run: Loop, store: OpenedStore, kind: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        change(world, run, 2, **kind)
    assert store.get_table().state.list_live_rows().tolist() == [0, 1, 2, 3, 4, 5]
    assert not store.write_lock.locked()


def test_change_when_of_another_kind_of_store_then_refused(world: World, run: Loop) -> None:
    run(world.create("r", rows(0)))
    with pytest.raises(WrongStateError, match="tensordict store"):
        change(world, run, 1, clear=True)


def test_priorities_when_they_are_very_many_then_others_have_their_turns_and_the_last_of_a_row_counts(
    world: World, run: Loop
) -> None:
    made = create(world, run, sampler=Prioritized())
    extend(world, run, made, rows(10, 6))
    values = np.arange(4 * TREE_PIECE_ROWS) + 1.0
    named = numbers(*(np.arange(len(values)) % 6).tolist())
    asked = control_pb2.ChangeRequest(store="r", priorities=priorities(named, values))
    assert run(turns_during(world.changes.change(world.session(), 1, asked))) > 8
    table = made.get_table()
    assert sorted(table.columns.priority[:6].tolist()) == values[-6:].tolist()
    asked.priorities.priorities = np.full(len(values), np.nan, "<f4").tobytes()
    with pytest.raises(InvalidRequestError):
        run(world.changes.change(world.session(), 2, asked))
    assert sorted(table.columns.priority[:6].tolist()) == values[-6:].tolist()


def test_clear_when_it_is_asked_again_over_another_session_then_only_the_first_takes_rows(
    world: World, run: Loop, store: OpenedStore
) -> None:
    hello = control_pb2.Hello(client_id=make_client_id(), transport="gloo")
    asked = control_pb2.ChangeRequest(store="r", clear=True)
    answers: list[control_pb2.Done] = []

    async def scenario() -> None:
        async with store.write_lock:  # both attempts are under way before the first one takes rows
            attempts = [
                asyncio.ensure_future(world.changes.change(world.session_of(hello, number), 7, asked))
                for number in (1, 2)
            ]
            await asyncio.sleep(0)
        answers.append(await attempts[0])
        extending_again = world.extends.extend(world.session(3), 1, extending(store, rows(50, 2)))
        answers.append(await attempts[1])
        await extending_again

    run(scenario())
    assert answers[0] == answers[1]
    assert answers[0].num_rows == 6
    assert len(store.get_table()) == 2
