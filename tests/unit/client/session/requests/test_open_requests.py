from __future__ import annotations

import pytest

from tdserve.base.errors import ConnectError, PeerLostError
from tdserve.client.session.requests.open_requests import HELLO_REQUEST, OpenRequests
from tdserve.client.session.requests.pending import Answer, Pending
from tdserve.v1 import control_pb2

LOSS = PeerLostError(peer="the server", reason="a test")
DONE = control_pb2.ServerMessage(request=4, done=control_pb2.Done())
PERMIT = control_pb2.ServerMessage(request=4, accepted=control_pb2.Accepted())


def make_pending(answers: list[Answer] | None = None) -> Pending:
    """A request that has been sent."""
    return Pending(None if answers is None else answers.append, on_silence=lambda: None)


def test_forget_when_the_answer_has_come_then_what_was_spooled_is_freed_at_once() -> None:
    requests, pending, freed = OpenRequests(make_pending()), make_pending(), list[bool]()
    requests.add(4, pending, lambda: freed.append(True))
    pending.put(DONE)
    requests.on_handled(DONE)
    assert freed == []
    requests.forget(4)
    assert freed == [True]
    requests.forget(4)
    assert freed == [True]


def test_forget_when_no_answer_has_come_then_what_was_spooled_is_freed_with_the_answer() -> None:
    requests, freed = OpenRequests(make_pending()), list[bool]()
    requests.add(4, make_pending(), lambda: freed.append(True))
    requests.forget(4)
    requests.on_handled(PERMIT)
    assert freed == []
    requests.on_handled(DONE)
    assert freed == [True]


def test_end_when_requests_are_under_way_then_all_get_the_first_error_and_no_more_are_added() -> None:
    greeted, answers = list[Answer](), list[Answer]()
    requests = OpenRequests(make_pending(greeted))
    requests.add(4, make_pending(answers), None)
    assert requests.find(HELLO_REQUEST) is not None
    assert requests.end(LOSS)
    assert not requests.end(ConnectError(address="", reason="a later one"))
    assert (requests.loss, requests.is_over.is_set()) == (LOSS, True)
    assert (greeted, answers) == ([LOSS], [LOSS])
    assert requests.find(4) is None
    with pytest.raises(PeerLostError):
        requests.add(5, make_pending(), None)


@pytest.mark.parametrize("is_over", [False, True])
def test_withdraw_when_a_send_fails_then_true_unless_the_request_has_ended_with_the_session(is_over: bool) -> None:
    requests, pending = OpenRequests(make_pending()), make_pending()
    requests.add(4, pending, None)
    if is_over:
        requests.end(LOSS)
    assert requests.withdraw(4, pending) is not is_over
