from __future__ import annotations

from typing import Any

import pytest

from tdserve.client.session.requests.abandoned_requests import SILENT_S, AbandonedRequests, Brings
from tdserve.v1 import control_pb2

REQUEST = 7
ACCEPTED = control_pb2.ServerMessage(request=REQUEST, accepted=control_pb2.Accepted())
PERMIT = control_pb2.ServerMessage(request=REQUEST, accepted=control_pb2.Accepted(uid="u"))
DONE = control_pb2.ServerMessage(request=REQUEST, done=control_pb2.Done())
FORMED = control_pb2.ServerMessage(request=REQUEST, group_formed=control_pb2.GroupFormed())
REFUSED = control_pb2.ServerMessage(request=REQUEST, failure=control_pb2.Failure())

SAMPLE = {"sample": control_pb2.SampleRequest()}
LEASE = {"sample": control_pb2.SampleRequest(is_lease=True)}
WRITE = {"write": control_pb2.WriteRequest()}
JOIN = {"join_group": control_pb2.JoinGroup()}


@pytest.mark.parametrize(
    ("body", "message", "brings"),
    [
        (SAMPLE, DONE, Brings.NOTHING),
        (SAMPLE, REFUSED, Brings.NOTHING),
        (LEASE, DONE, Brings.NOTHING),  # its cancellation gives the rows back
        (WRITE, DONE, Brings.NOTHING),
        (JOIN, FORMED, Brings.PLACE),
        (JOIN, REFUSED, Brings.NOTHING),
    ],
)
def test_answer_when_it_comes_late_then_what_it_brings_is_reported_once(
    body: dict[str, Any], message: control_pb2.ServerMessage, brings: Brings
) -> None:
    given_up = AbandonedRequests()
    assert given_up.look(message) is Brings.NOTHING
    given_up.add(REQUEST, body)
    other = control_pb2.ServerMessage(request=REQUEST + 1, done=control_pb2.Done())
    assert given_up.look(other) is Brings.NOTHING
    assert given_up.look(message) is brings
    assert given_up.look(message) is Brings.NOTHING  # it was the last that comes


def test_content_when_it_is_granted_late_then_it_comes_unless_the_client_moves_it_itself() -> None:
    now_s = [100.0]
    given_up = AbandonedRequests(lambda: now_s[0])
    given_up.add(REQUEST, LEASE)
    assert given_up.look(PERMIT) is Brings.NOTHING
    assert given_up.look(ACCEPTED) is Brings.CONTENT
    now_s[0] += SILENT_S + 1.0
    assert not given_up.is_silent  # there is no other answer


def test_silence_when_an_answer_is_owed_for_long_then_is_silent_until_it_comes() -> None:
    now_s = [100.0]
    given_up = AbandonedRequests(lambda: now_s[0])
    given_up.add(REQUEST, WRITE)
    assert not given_up.is_silent
    now_s[0] += SILENT_S + 1.0
    assert given_up.is_silent
    given_up.look(REFUSED)
    assert not given_up.is_silent
