from __future__ import annotations

from typing import Any

import pytest

from tdserve.client.given_up import SILENT_S, GivenUp
from tdserve.v1 import control_pb2

REQUEST = 7
ACCEPTED = control_pb2.ServerMessage(request=REQUEST, accepted=control_pb2.Accepted())
DONE = control_pb2.ServerMessage(request=REQUEST, done=control_pb2.Done())
FORMED = control_pb2.ServerMessage(request=REQUEST, group_formed=control_pb2.GroupFormed())
REFUSED = control_pb2.ServerMessage(request=REQUEST, failure=control_pb2.Failure())

SAMPLE = {"sample": control_pb2.SampleRequest()}
LEASE = {"sample": control_pb2.SampleRequest(is_lease=True)}
WRITE = {"write": control_pb2.WriteRequest()}
JOIN = {"join_group": control_pb2.JoinGroup()}


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize(
    ("body", "message", "ends"),
    [
        (SAMPLE, DONE, False),
        (SAMPLE, REFUSED, False),
        (LEASE, DONE, True),
        (LEASE, REFUSED, False),
        (WRITE, DONE, False),
        (JOIN, FORMED, True),
        (JOIN, REFUSED, False),
    ],
)
def test_answer_when_it_comes_late_then_the_session_ends_only_if_somebody_must_take_what_it_brings(
    is_local: bool, body: dict[str, Any], message: control_pb2.ServerMessage, ends: bool
) -> None:
    given_up = GivenUp()
    assert not given_up.ends_session(message, is_local=is_local)
    given_up.add(REQUEST, body)
    other = control_pb2.ServerMessage(request=REQUEST + 1, done=control_pb2.Done())
    assert not given_up.ends_session(other, is_local=is_local)
    assert given_up.ends_session(message, is_local=is_local) is ends
    assert not given_up.ends_session(message, is_local=is_local)  # it was the last that comes


def test_content_when_it_is_granted_late_then_the_session_ends_unless_the_client_moves_it_itself() -> None:
    given_up = GivenUp()
    given_up.add(REQUEST, LEASE)
    assert not given_up.ends_session(ACCEPTED, is_local=True)
    assert given_up.ends_session(DONE, is_local=True)  # it had leased rows after all
    given_up.add(REQUEST, SAMPLE)
    assert given_up.ends_session(ACCEPTED, is_local=False)


def test_silence_when_an_answer_is_owed_for_long_then_told_until_it_comes() -> None:
    now_s = [100.0]
    given_up = GivenUp(lambda: now_s[0])
    given_up.add(REQUEST, WRITE)
    assert not given_up.is_silent
    now_s[0] += SILENT_S + 1.0
    assert given_up.is_silent
    given_up.ends_session(REFUSED, is_local=False)
    assert not given_up.is_silent
