from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.control.parts import PART_BYTES, cut
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.sessions.incoming_parts import IncomingParts
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
        assert incoming.add(first, part) is None
        assert incoming.add(second, part) is None
    assert first.held_nbytes == second.held_nbytes == len(parts) * PART_BYTES
    assert incoming.add(first, last) == MESSAGE
    assert (first.held_nbytes, second.held_nbytes) == (0, len(parts) * PART_BYTES)


def test_add_when_the_message_is_none_then_the_session_ends(world: World, incoming: IncomingParts) -> None:
    session = world.session()
    assert incoming.add(session, control_pb2.MessagePart(content=b"\xff" * 9, is_last=True)) is None
    assert session.ended.is_set()


@pytest.mark.parametrize("is_last", [False, True])
def test_add_when_the_whole_is_a_part_itself_then_the_session_ends(
    world: World, incoming: IncomingParts, *, is_last: bool
) -> None:
    session, inner = world.session(), control_pb2.MessagePart(content=MESSAGE.SerializeToString(), is_last=is_last)
    nested = control_pb2.ClientMessage(request=7, part=inner)
    assert incoming.add(session, control_pb2.MessagePart(content=nested.SerializeToString(), is_last=True)) is None
    assert session.ended.is_set()
    assert session.held_nbytes == 0


def test_forget_when_a_session_ends_in_the_middle_then_nothing_of_it_is_left(
    world: World, run: Loop, incoming: IncomingParts, tmp_path: Path
) -> None:
    session = world.session()
    incoming.add(session, control_pb2.MessagePart(content=bytes(100), is_ahead=True))
    incoming.add(session, next(cut(MESSAGE)))
    assert len(list((tmp_path / "requests").iterdir())) == 1
    run(incoming.forget(session))
    assert session.held_nbytes == 0
    assert list((tmp_path / "requests").iterdir()) == []
    assert incoming.take_lists(session) is None
