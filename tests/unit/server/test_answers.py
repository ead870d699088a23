from __future__ import annotations

import pytest

from tdserve.errors import RemoteProtocolError
from tdserve.server.answers import MAX_ANSWERS_PER_CLIENT, Answers
from tests.unit.server.world import World

CLIENT = bytes(range(16))
OTHER = bytes(16)


def record(world: World, answers: Answers, request: int, answer: bytes = b"done") -> None:
    """A commit of its own."""
    with answers.transaction(CLIENT, request, answer) as txn:
        txn.put("states", b"key", answer)


def test_seen_when_recorded_then_the_answer_also_after_a_restart(world: World) -> None:
    record(world, world.answers, 2**40, b"answer")
    for answers in (world.answers, Answers(world.db)):
        assert answers.seen(CLIENT, 2**40) == b"answer"
        assert answers.seen(CLIENT, 2**40 + 1) is None
        assert answers.seen(OTHER, 2**40) is None


def test_transaction_when_it_fails_then_neither_change_nor_answer(world: World) -> None:
    def commit() -> None:
        with world.answers.transaction(CLIENT, 1, b"answer") as txn:
            txn.put("states", b"key", b"value")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        commit()
    assert world.db.get("states", b"key") is None
    for answers in (world.answers, Answers(world.db)):
        assert answers.seen(CLIENT, 1) is None


def test_answers_when_there_are_too_many_then_the_oldest_go_from_disk_too(world: World) -> None:
    for request in range(1, MAX_ANSWERS_PER_CLIENT + 3):
        record(world, world.answers, request)
    assert len(world.db.scan("requests", CLIENT)) <= MAX_ANSWERS_PER_CLIENT + 1
    for answers in (world.answers, Answers(world.db)):
        with pytest.raises(RemoteProtocolError):
            answers.seen(CLIENT, 2)
        assert answers.seen(CLIENT, 3) == b"done"


def test_forget_before_when_the_client_says_so_then_gone_from_disk(world: World) -> None:
    for request in (1, 2, 3):
        record(world, world.answers, request)
    world.answers.forget_before(CLIENT, 3)
    assert len(world.db.scan("requests", CLIENT)) == 1
    assert Answers(world.db).seen(CLIENT, 3) == b"done"


def test_forget_client_when_it_is_gone_then_nothing_of_it_stays(world: World) -> None:
    for request in (1, 2):
        record(world, world.answers, request)
    assert world.answers.clients() == {CLIENT}
    world.answers.forget_client(CLIENT)
    assert world.answers.clients() == set()
    assert world.db.scan("requests") == []
