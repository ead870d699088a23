from __future__ import annotations

import pytest

from tdserve.base.errors import ServerBusyError, WrongStateError
from tdserve.server.execution.idempotency import MAX_ANSWERS_PER_CLIENT, CommittedAnswers
from tdserve.v1 import control_pb2
from tests.unit.server.world import World

CLIENT = bytes(range(16))
OTHER = bytes(16)


def record(world: World, answers: CommittedAnswers, request: int, answer: bytes = b"done") -> None:
    """A commit of its own."""
    with answers.begin_transaction(CLIENT, request, answer) as txn:
        txn.put("states", b"key", answer)


def test_seen_when_recorded_then_the_answer_also_after_a_restart(world: World) -> None:
    record(world, world.answers, 2**40, b"answer")
    for answers in (world.answers, CommittedAnswers(world.db)):
        assert answers.find_answer(CLIENT, 2**40) == b"answer"
        assert answers.find_answer(CLIENT, 2**40 + 1) is None
        assert answers.find_answer(OTHER, 2**40) is None


def test_transaction_when_it_fails_then_neither_change_nor_answer(world: World) -> None:
    def commit() -> None:
        with world.answers.begin_transaction(CLIENT, 1, b"answer") as txn:
            txn.put("states", b"key", b"value")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        commit()
    assert world.db.get("states", b"key") is None
    for answers in (world.answers, CommittedAnswers(world.db)):
        assert answers.find_answer(CLIENT, 1) is None


def test_transaction_when_answered_before_then_refused_and_nothing_changed(world: World) -> None:
    record(world, world.answers, 1, b"first")
    with pytest.raises(WrongStateError):
        record(world, world.answers, 1, b"second")
    assert world.db.get("states", b"key") == b"first"
    assert CommittedAnswers(world.db).find_answer(CLIENT, 1) == b"first"


def test_transaction_when_instead_of_another_then_only_that_one_goes_and_from_disk_at_once(world: World) -> None:
    record(world, world.answers, 1)
    record(world, world.answers, 2)
    with world.answers.begin_transaction(CLIENT, 3, b"done", instead_of=2):
        pass
    for answers in (world.answers, CommittedAnswers(world.db)):
        assert [answers.find_answer(CLIENT, request) for request in (1, 2, 3)] == [b"done", None, b"done"]


def test_answers_when_a_client_confirms_none_then_all_are_kept_and_new_changes_refused(
    world: World,
) -> None:
    for request in range(1, MAX_ANSWERS_PER_CLIENT):
        record(world, world.answers, request)
    world.answers.check_room(CLIENT)
    record(world, world.answers, MAX_ANSWERS_PER_CLIENT)
    with pytest.raises(ServerBusyError):
        world.answers.check_room(CLIENT)
    world.answers.check_room(OTHER)
    for answers in (world.answers, CommittedAnswers(world.db)):
        assert answers.find_answer(CLIENT, 1) == b"done"
    world.answers.forget(CLIENT, control_pb2.Answered(below=2))
    world.answers.check_room(CLIENT)


def test_forget_when_the_client_confirms_answers_then_gone_from_disk_with_the_next_commit(world: World) -> None:
    for request in (1, 2, 3):
        record(world, world.answers, request)
    world.answers.forget(CLIENT, control_pb2.Answered(below=4, but_for=[2]))
    assert [world.answers.find_answer(CLIENT, request) for request in (1, 2, 3)] == [None, b"done", None]
    with world.answers.begin_transaction(OTHER, 1, b"other"):
        pass
    assert [CommittedAnswers(world.db).find_answer(CLIENT, request) for request in (1, 2, 3)] == [None, b"done", None]


def test_earlier_when_the_client_has_said_that_it_asks_no_more_then_refused(world: World) -> None:
    done = control_pb2.Done(version=7)
    for request in (1, 2):
        record(world, world.answers, request, done.SerializeToString())
    world.answers.forget(CLIENT, control_pb2.Answered(below=4, but_for=[2]))
    for request in (1, 3):
        with pytest.raises(WrongStateError, match=f"^another attempt is not possible while request {request} is over$"):
            world.answers.find_earlier(CLIENT, request)
    assert [world.answers.find_earlier(CLIENT, request) for request in (2, 4)] == [done, None]
    assert world.answers.find_earlier(OTHER, 1) is None


def test_forget_when_the_next_commit_fails_then_gone_from_disk_with_the_one_after_it(world: World) -> None:
    record(world, world.answers, 1)
    world.answers.forget(CLIENT, control_pb2.Answered(below=2))
    with pytest.raises(ZeroDivisionError), world.answers.begin_transaction(CLIENT, 2, b""):
        raise ZeroDivisionError
    assert CommittedAnswers(world.db).find_answer(CLIENT, 1) == b"done"
    record(world, world.answers, 2)
    assert CommittedAnswers(world.db).find_answer(CLIENT, 1) is None


def test_forget_client_when_it_is_gone_then_nothing_of_it_stays(world: World) -> None:
    for request in (1, 2):
        record(world, world.answers, request)
    assert world.answers.list_clients() == {CLIENT}
    world.answers.forget_client(CLIENT)
    assert world.answers.list_clients() == set()
    assert world.db.scan("requests") == []
