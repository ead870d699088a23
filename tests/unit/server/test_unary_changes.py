from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError, ServerBusyError, StoreNotFoundError
from tdserve.server.idempotency import MAX_ANSWERS_PER_CLIENT, CommittedAnswers
from tdserve.server.sessions.clients import Clients
from tdserve.server.unary_changes import Record, UnaryChanges
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World

CLIENT = bytes(range(16))

Response = control_pb2.CreateStoreResponse


def name(request: int, **fields: Any) -> control_pb2.RequestId:
    """A request of one client."""
    return control_pb2.RequestId(**{"client_id": CLIENT, "request": request, **fields})


class Change:
    """A change that counts how often it was made; it waits for ``may_end`` first."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_begun = self.num_made = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, record: Record) -> Response:
        self.num_begun += 1
        await self.may_end.wait()
        answer = Response(created=True, description=control_pb2.StoreDescription(uid=str(self.num_made)))
        with record(answer.SerializeToString()) as txn:
            txn.put("states", b"made", b"%d" % (self.num_made + 1))
        self.num_made += 1
        return answer

    def changes(self) -> UnaryChanges:
        """What carries it out; as after a start of the server."""
        answers = CommittedAnswers(self._world.db)
        return UnaryChanges(self._world.db, answers, Clients(600.0, answers.forget_client))


Scenario = Callable[[Change, UnaryChanges], Coroutine[Any, Any, None]]


def play(world: World, run: Loop, scenario: Scenario) -> Change:
    """Runs a scenario; the change, to look at."""

    async def whole() -> Change:
        change = Change(world)
        await scenario(change, change.changes())
        return change

    return run(whole())


def test_run_when_a_request_comes_again_then_its_first_answer_also_after_a_restart(world: World, run: Loop) -> None:
    async def scenario(change: Change, changes: UnaryChanges) -> None:
        first = await changes.run(name(1), change, Response())
        assert await changes.run(name(1), change, Response()) == first
        assert await change.changes().run(name(1), change, Response()) == first
        assert await changes.run(name(2), change, Response()) != first

    assert play(world, run, scenario).num_made == 2
    assert world.db.get("states", b"made") == b"2"


def test_run_when_a_request_comes_again_while_it_is_carried_out_then_both_wait_for_one_and_neither_ends_it(
    world: World, run: Loop
) -> None:
    async def scenario(change: Change, changes: UnaryChanges) -> None:
        change.may_end.clear()
        first, again = (asyncio.ensure_future(changes.run(name(1), change, Response())) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        change.may_end.set()
        assert (await again).created

    change = play(world, run, scenario)
    assert (change.num_begun, change.num_made) == (1, 1)


def test_run_when_a_change_fails_then_a_retry_tries_again(world: World, run: Loop) -> None:
    async def fail(record: Record) -> Response:
        raise StoreNotFoundError(name="x")

    async def scenario(change: Change, changes: UnaryChanges) -> None:
        with pytest.raises(StoreNotFoundError):
            await changes.run(name(1), fail, Response())
        assert (await changes.run(name(1), change, Response())).created

    assert play(world, run, scenario).num_made == 1


def test_run_when_a_client_says_what_has_come_then_those_answers_go(world: World, run: Loop) -> None:
    async def scenario(change: Change, changes: UnaryChanges) -> None:
        await changes.run(name(1), change, Response())
        await changes.run(name(2, answered=control_pb2.Answered(below=3, but_for=[2])), change, Response())

    play(world, run, scenario)
    assert [key[-1] for key, _ in world.db.scan("requests", CLIENT)] == [2]


def test_run_when_too_many_answers_pile_up_then_refused_and_none_lost(world: World, run: Loop) -> None:
    async def scenario(change: Change, changes: UnaryChanges) -> None:
        for request in range(1, MAX_ANSWERS_PER_CLIENT + 1):
            await changes.run(name(request), change, Response())
        with pytest.raises(ServerBusyError):
            await changes.run(name(MAX_ANSWERS_PER_CLIENT + 1), change, Response())
        assert (await changes.run(name(1), change, Response())).description.uid == "0"

    assert play(world, run, scenario).num_made == MAX_ANSWERS_PER_CLIENT


def test_run_when_it_has_no_number_then_carried_out_each_time_and_nothing_kept(world: World, run: Loop) -> None:
    async def scenario(change: Change, changes: UnaryChanges) -> None:
        for _ in range(2):
            await changes.run(control_pb2.RequestId(), change, Response())

    assert play(world, run, scenario).num_made == 2
    assert world.db.scan("requests") == []


def test_run_when_the_client_id_is_none_then_refused(world: World, run: Loop) -> None:
    async def scenario(change: Change, changes: UnaryChanges) -> None:
        with pytest.raises(InvalidRequestError, match="client_id"):
            await changes.run(name(1, client_id=b"short"), change, Response())

    assert play(world, run, scenario).num_begun == 0
