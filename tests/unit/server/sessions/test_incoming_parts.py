from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.control.parts import PART_BYTES, cut
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.sessions.incoming_parts import MAX_INCOMPLETE, IncomingParts
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World

MESSAGE = control_pb2.ClientMessage(request=7, read=control_pb2.ReadRequest(fingerprint=bytes(3 * PART_BYTES)))


@pytest.fixture
def incoming(tmp_path: Path) -> IncomingParts:
    """Parts of sessions that have sent nothing yet."""
    folder = tmp_path / "requests"
    folder.mkdir()
    return IncomingParts(folder, AdmissionBudget(1 << 30))


def test_add_when_two_sessions_send_parts_then_each_has_its_message_and_its_memory_counted(
    world: World, incoming: IncomingParts
) -> None:
    first, second = world.session(1), world.session(2)
    *parts, last = cut(MESSAGE)
    for part in parts:
        assert incoming.add(first, 7, part) is None
        assert incoming.add(second, 7, part) is None
    assert first.held_nbytes == second.held_nbytes == len(parts) * PART_BYTES
    assert incoming.add(first, 7, last) == MESSAGE
    assert (first.held_nbytes, second.held_nbytes) == (0, len(parts) * PART_BYTES)


def test_add_when_parts_of_two_requests_mix_then_each_has_its_message_and_its_lists(
    world: World, run: Loop, incoming: IncomingParts
) -> None:
    session, other = world.session(), control_pb2.ClientMessage(request=8, read=MESSAGE.read)
    ahead = control_pb2.MessagePart(content=bytes(100), is_ahead=True)
    assert incoming.add(session, 7, ahead) is None
    (*parts, last), (*other_parts, other_last) = cut(MESSAGE), cut(other)
    for part, other_part in zip(parts, other_parts, strict=True):
        assert incoming.add(session, 7, part) is incoming.add(session, 8, other_part) is None
    assert incoming.add(session, 8, other_last) == other
    assert incoming.take_lists(session, 8) is None
    assert incoming.add(session, 7, last) == MESSAGE
    lists = incoming.take_lists(session, 7)
    assert lists is not None
    assert lists.nbytes == 100
    assert session.held_nbytes == 0
    run(lists.remove())


@pytest.mark.parametrize("is_ahead", [False, True])
def test_add_when_a_session_begins_too_many_messages_then_it_ends_and_nothing_of_them_is_left(
    world: World, run: Loop, incoming: IncomingParts, tmp_path: Path, *, is_ahead: bool
) -> None:
    session, part = world.session(), control_pb2.MessagePart(content=bytes(100), is_ahead=is_ahead)
    for request in range(MAX_INCOMPLETE):
        incoming.add(session, request, part)
    assert not session.ended.is_set()
    incoming.add(session, MAX_INCOMPLETE, part)
    assert session.ended.is_set()
    run(incoming.forget(session))
    assert session.held_nbytes == 0
    assert list((tmp_path / "requests").iterdir()) == []


def test_add_when_many_messages_follow_one_another_then_the_session_goes_on(
    world: World, run: Loop, incoming: IncomingParts
) -> None:
    session = world.session()
    for request in range(3 * MAX_INCOMPLETE):
        incoming.add(session, request, control_pb2.MessagePart(content=bytes(100), is_ahead=True))
        *parts, last = cut(MESSAGE)
        for part in parts:
            incoming.add(session, request, part)
        assert incoming.add(session, request, last) == MESSAGE
        lists = incoming.take_lists(session, request)
        assert lists is not None
        run(lists.remove())
    assert not session.ended.is_set()


def test_add_when_the_message_is_none_then_the_session_ends(world: World, incoming: IncomingParts) -> None:
    session = world.session()
    assert incoming.add(session, 7, control_pb2.MessagePart(content=b"\xff" * 9, is_last=True)) is None
    assert session.ended.is_set()


@pytest.mark.parametrize("is_last", [False, True])
def test_add_when_the_whole_is_a_part_itself_then_the_session_ends(
    world: World, incoming: IncomingParts, *, is_last: bool
) -> None:
    session, inner = world.session(), control_pb2.MessagePart(content=MESSAGE.SerializeToString(), is_last=is_last)
    nested = control_pb2.ClientMessage(request=7, part=inner)
    assert incoming.add(session, 7, control_pb2.MessagePart(content=nested.SerializeToString(), is_last=True)) is None
    assert session.ended.is_set()
    assert session.held_nbytes == 0


def test_forget_when_a_session_ends_in_the_middle_then_nothing_of_it_is_left(
    world: World, run: Loop, incoming: IncomingParts, tmp_path: Path
) -> None:
    session = world.session()
    incoming.add(session, 7, control_pb2.MessagePart(content=bytes(100), is_ahead=True))
    incoming.add(session, 7, next(cut(MESSAGE)))
    assert len(list((tmp_path / "requests").iterdir())) == 1
    run(incoming.forget(session))
    assert session.held_nbytes == 0
    assert list((tmp_path / "requests").iterdir()) == []
    assert incoming.take_lists(session, 7) is None
