from __future__ import annotations

import itertools
from typing import Any

import pytest

from tdserve.base.errors import WrongStateError
from tdserve.rules.session import TRANSITIONS, SessionEvent, SessionProtocol, SessionState, tag_of, why_not_nccl

_WAYS: dict[SessionState, list[SessionEvent]] = {
    SessionState.CONNECTING: [],
    SessionState.OPEN: [SessionEvent.OPENED],
    SessionState.DRAINING: [SessionEvent.OPENED, SessionEvent.DRAIN],
    SessionState.CLOSED: [SessionEvent.OPENED, SessionEvent.LOST],
}

_LEGAL = {
    ("connecting", "opened", "open"),
    ("connecting", "lost", "closed"),
    ("open", "drain", "draining"),
    ("open", "lost", "closed"),
    ("draining", "drained", "closed"),
    ("draining", "lost", "closed"),
}


def _in(state: SessionState) -> SessionProtocol:
    session = SessionProtocol(7)
    for event in _WAYS[state]:
        session.on(event)
    assert session.state is state
    return session


@pytest.mark.parametrize("request_number", [0, 1, 2**31 - 3, 2**31 - 2, 2**31 - 1, 2**31, 2**40 + 3, 2**64 - 2])
def test_tag_when_of_any_request_then_a_positive_int32_that_its_neighbour_has_not(request_number: int) -> None:
    tag = tag_of(request_number)
    assert 1 <= tag <= 2**31 - 1  # 0 is the channel's own
    assert tag_of(request_number + 1) != tag


def test_tag_when_requests_are_few_then_each_has_its_own() -> None:
    assert [tag_of(request) for request in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SessionState, SessionEvent)))
def test_event_when_in_any_state_then_as_the_book_says(state: SessionState, event: SessionEvent) -> None:
    session = _in(state)
    following = {then for before, what, then in _LEGAL if (before, what) == (state.value, event.value)}
    if following:
        assert {session.on(event).value} == following
        return
    with pytest.raises(WrongStateError) as caught:
        session.on(event)
    assert (caught.value.state, session.state) == (state.value, state)
    assert "session 7" in caught.value.event


def test_transitions_when_counted_then_every_state_has_its_row() -> None:
    assert list(TRANSITIONS) == list(SessionState)


@pytest.mark.parametrize("state", [SessionState.CONNECTING, SessionState.DRAINING, SessionState.CLOSED])
def test_begin_when_not_open_then_refused(state: SessionState) -> None:
    session = _in(state)
    with pytest.raises(WrongStateError, match="request 3"):
        session.begin(3)
    assert not session.requests


def test_begin_when_the_number_is_under_way_then_refused() -> None:
    session = _in(SessionState.OPEN)
    session.begin(3)
    with pytest.raises(WrongStateError):
        session.begin(3)
    assert session.requests == {3}


def test_draining_when_requests_are_under_way_then_closes_after_the_last() -> None:
    session = _in(SessionState.OPEN)
    session.begin(1)
    session.begin(2)
    assert not session.end(1)
    session.on(SessionEvent.DRAIN)
    with pytest.raises(WrongStateError):
        session.on(SessionEvent.DRAINED)
    assert session.end(2)
    assert session.on(SessionEvent.DRAINED) is SessionState.CLOSED


def test_end_when_the_session_was_lost_then_still_counted() -> None:
    session = _in(SessionState.OPEN)
    session.begin(1)
    session.on(SessionEvent.LOST)
    assert not session.end(1)
    assert not session.requests
    with pytest.raises(WrongStateError):
        session.end(1)


def test_repr_when_shown_then_state_and_requests() -> None:
    session = _in(SessionState.OPEN)
    session.begin(1)
    assert repr(session) == "<SessionProtocol 7 open, 1 requests>"


@pytest.mark.parametrize(
    ("asked", "ends", "reason"),
    [
        ("auto", {"client_gpu": "a", "worker_gpu": "b"}, ""),
        ("nccl", {"client_gpu": "a", "worker_gpu": "b"}, ""),
        ("nccl", {"client_gpu": "a", "worker_gpu": "b", "is_one_machine": True}, ""),
        ("auto", {"client_gpu": "a", "worker_gpu": "b", "is_one_machine": True}, "one machine"),
        ("nccl", {"client_gpu": "a", "worker_gpu": "a"}, "both ends use one GPU, a"),
        ("auto", {"client_gpu": "a", "worker_gpu": "a", "is_one_machine": True}, "both ends use one GPU, a"),
        ("auto", {"client_gpu": "", "worker_gpu": "b"}, "the client has no GPU"),
        ("nccl", {"client_gpu": "a", "worker_gpu": ""}, "--device"),
        ("nccl", {"client_gpu": "a", "worker_gpu": "", "why_no_gpu": "there is no cuda:3"}, "there is no cuda:3"),
        ("gloo", {"client_gpu": "a", "worker_gpu": "b"}, "'gloo' was asked for"),
        ("shm", {"client_gpu": "a", "worker_gpu": "b"}, "'shm' was asked for"),
    ],
)
def test_nccl_when_the_ends_are_compared_then_used_or_told_why_not(
    asked: str, ends: dict[str, Any], reason: str
) -> None:
    told = why_not_nccl(asked, **ends)
    assert bool(told) == bool(reason)
    assert reason in told
