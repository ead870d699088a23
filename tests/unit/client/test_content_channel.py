from __future__ import annotations

from threading import Event

import pytest

from tdserve.client.content_channel import ContentChannel
from tdserve.errors import ClosedError, ConnectError, DeadlineExceededError
from tdserve.transport.channel import Channel
from tdserve.transport.loopback import LoopbackChannel

TIMEOUT_S = 20.0


class Handshake:
    """One that lasts until it may end."""

    def __init__(self) -> None:
        self.may_end = Event()
        self.num_begun = 0
        self.channel, self.other = LoopbackChannel.pair()

    def __call__(self) -> Channel:
        self.num_begun += 1
        assert self.may_end.wait(TIMEOUT_S)
        return self.channel


def told(error: ConnectError) -> ConnectError:
    """What callers are told when it cannot be formed."""
    return ConnectError(address="the server", reason=f"nothing goes, since {error.fields['reason']}")


def test_expect_when_it_takes_too_long_then_error_and_the_next_call_finds_it_formed() -> None:
    handshake = Handshake()
    content = ContentChannel(handshake, peer="the server", on_unformed=told)
    with pytest.raises(DeadlineExceededError, match="a channel to the server"):
        content.expect(0.01)
    assert not content.is_open
    handshake.may_end.set()
    content.expect(TIMEOUT_S)
    assert content.get(TIMEOUT_S) is handshake.channel
    assert content.is_open
    content.expect(0.0)
    assert handshake.num_begun == 1


def test_get_when_it_cannot_be_formed_then_why() -> None:
    def refused() -> Channel:
        raise ConnectError(address="there", reason="refused")

    content = ContentChannel(refused, peer="the server", on_unformed=told)
    for ask in (content.expect, content.get):
        with pytest.raises(ConnectError, match="nothing goes, since refused"):
            ask(TIMEOUT_S)


def test_lose_when_the_session_is_over_then_what_is_formed_is_closed_and_nothing_begins() -> None:
    handshake = Handshake()
    handshake.may_end.set()
    content = ContentChannel(handshake, peer="the server", on_unformed=told)
    content.get(TIMEOUT_S)
    content.lose(ClosedError(what="the session"))
    untouched = ContentChannel(handshake, peer="the server", on_unformed=told)
    untouched.lose(ClosedError(what="the session"))
    with pytest.raises(ClosedError):
        untouched.get(TIMEOUT_S)
    assert handshake.num_begun == 1
