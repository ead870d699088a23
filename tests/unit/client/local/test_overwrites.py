from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tdserve.base.errors import ConnectError
from tdserve.client.local.overwrites import Overwrites
from tdserve.v1 import control_pb2

TIMEOUT_S = 20.0


def make_request(request: int) -> control_pb2.ClientMessage:
    """Returns the request of an overwrite."""
    return control_pb2.ClientMessage(request=request, write=control_pb2.WriteRequest())


def let_do(request: int) -> control_pb2.ServerMessage:
    """Returns the permit of the server."""
    return control_pb2.ServerMessage(request=request, accepted=control_pb2.Accepted())


def done(request: int) -> control_pb2.ServerMessage:
    """Returns the answer that ends it."""
    return control_pb2.ServerMessage(request=request, done=control_pb2.Done())


def refuse_none(request: int) -> None:
    """Fails the test: there is nothing to refuse."""
    pytest.fail(f"{request} is refused")


def test_end_when_nothing_is_under_way_then_at_once_and_none_begins_any_more() -> None:
    overwrites = Overwrites("here")
    overwrites.begin(make_request(1))
    overwrites.on_message(let_do(1))
    overwrites.on_message(done(1))
    overwrites.end(lambda request: pytest.fail(f"{request} is over"), refuse_none, TIMEOUT_S)
    with pytest.raises(ConnectError, match="closed by this client"):
        overwrites.begin(make_request(2))
    overwrites.begin(control_pb2.ClientMessage(request=3, extend=control_pb2.ExtendRequest()))


def test_end_when_some_are_under_way_then_all_are_given_up_and_the_last_answer_ends_it() -> None:
    overwrites = Overwrites("here")
    given_up: list[int] = []

    def answer(request: int) -> None:
        given_up.append(request)
        assert overwrites.admit(let_do(request))
        overwrites.on_message(let_do(request))
        if len(given_up) == 2:
            for each in given_up:
                overwrites.on_message(done(each))

    for request in (1, 2):
        overwrites.begin(make_request(request))
    overwrites.end(answer, refuse_none, TIMEOUT_S)
    assert given_up == [1, 2]


def test_end_when_no_answer_comes_then_waits_so_long_or_until_the_session_is_lost() -> None:
    overwrites = Overwrites("here")
    overwrites.begin(make_request(1))
    assert overwrites.admit(let_do(1))
    overwrites.end(lambda request: None, refuse_none, 0.0)
    with ThreadPoolExecutor(1) as threads:
        overwrites.end(lambda request: threads.submit(overwrites.lose).result(), refuse_none, TIMEOUT_S)


def test_end_when_there_is_no_permit_yet_then_refused_once_and_a_later_permit_is_not_handled() -> None:
    overwrites = Overwrites("here")
    refused: list[int] = []
    for request in (1, 2):
        overwrites.begin(make_request(request))
    assert overwrites.admit(let_do(2))
    for _ in range(2):
        overwrites.end(lambda request: None, refused.append, 0.0)
    assert refused == [1]
    assert not overwrites.admit(let_do(1))
    assert overwrites.admit(done(1))
    assert overwrites.admit(let_do(3))  # something else than an overwrite


def test_is_copying_when_a_permit_is_handled_then_until_it_was() -> None:
    overwrites = Overwrites("here")
    overwrites.begin(make_request(1))
    assert not overwrites.is_copying
    overwrites.admit(let_do(1))
    overwrites.on_message(done(2))  # looked at meanwhile
    assert overwrites.is_copying
    overwrites.on_message(let_do(1))
    assert not overwrites.is_copying
