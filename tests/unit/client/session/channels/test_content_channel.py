from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from tdserve.base.errors import ClosedError, ConnectError, DeadlineExceededError, PeerLostError, TransferAbortedError
from tdserve.client.session.channels import content_channel
from tdserve.client.session.channels.content_channel import (
    BROKEN_WITHIN_S,
    MAX_BROKEN,
    MAX_KEPT_BYTES,
    ContentChannel,
    ContentChannels,
)
from tdserve.transport.channel import Channel, Work
from tdserve.transport.loopback import LoopbackChannel
from tdserve.transport.rendezvous import KVStore
from tdserve.v1 import control_pb2
from tests.processes import wait_for

TIMEOUT_S = 20.0


class Handshake:
    """A handshake that lasts until the test lets it end."""

    def __init__(self) -> None:
        self.may_end = Event()
        self.num_begun = 0
        self.channel, self.other = LoopbackChannel.make_pair()

    def __call__(self, kv_store: KVStore) -> Channel:
        self.num_begun += 1
        assert self.may_end.wait(TIMEOUT_S)
        return self.channel


def add_remedy(error: ConnectError) -> ConnectError:
    """What callers are told when it cannot be formed."""
    return ConnectError(address="the server", reason=f"nothing goes, since {error.fields['reason']}")


def test_expect_when_it_takes_too_long_then_error_and_the_next_call_finds_it_formed() -> None:
    handshake = Handshake()
    content = ContentChannel(handshake, peer="the server", on_unformed=add_remedy)
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
    def refused(kv_store: KVStore) -> Channel:
        raise ConnectError(address="there", reason="refused")

    content = ContentChannel(refused, peer="the server", on_unformed=add_remedy)
    for ask in (content.expect, content.get):
        with pytest.raises(ConnectError, match="nothing goes, since refused"):
            ask(TIMEOUT_S)


def test_lose_when_the_session_is_over_then_what_is_formed_is_closed_and_nothing_begins() -> None:
    handshake = Handshake()
    handshake.may_end.set()
    content = ContentChannel(handshake, peer="the server", on_unformed=add_remedy)
    content.get(TIMEOUT_S)
    content.lose(ClosedError(what="the session"))
    untouched = ContentChannel(handshake, peer="the server", on_unformed=add_remedy)
    untouched.lose(ClosedError(what="the session"))
    with pytest.raises(ClosedError):
        untouched.get(TIMEOUT_S)
    assert handshake.num_begun == 1


class Makers:
    """Makes loopback channels; ``others`` are their other ends by number."""

    def __init__(self) -> None:
        self.others: dict[int, LoopbackChannel] = {}
        self.published: list[control_pb2.Rendezvous] = []
        self.now_s = 100.0
        self.channels = ContentChannels(
            self._make,
            self.published.append,
            peer="the server",
            on_unformed=add_remedy,
            make_error=lambda reason: ConnectError(address="the server", reason=reason),
            clock=lambda: self.now_s,
        )

    def _make(self, number: int, kv_store: KVStore) -> Channel:
        kv_store.set("mine", b"address")
        assert kv_store.get_within("theirs", TIMEOUT_S) == f"of {number}".encode()
        made, self.others[number] = LoopbackChannel.make_pair()
        return made

    def open(self) -> Channel:
        """The current channel, formed."""
        for number in range(10):  # entries of others than the current are nothing to it
            self.channels.feed(control_pb2.Rendezvous(key="theirs", value=f"of {number}".encode(), channel=number))
        return self.channels.current.get(TIMEOUT_S)


@pytest.fixture
def makers() -> Iterator[Makers]:
    """Whose channels are closed in the end."""
    made = Makers()
    yield made
    made.channels.lose(ClosedError(what="the session"))


def test_replace_when_one_is_lost_then_it_is_closed_once_and_the_next_is_formed(makers: Makers) -> None:
    first, content = makers.open(), makers.channels.current
    assert makers.channels.replace(0, "a wait took too long")
    assert not makers.channels.replace(0, "found late")
    with pytest.raises(PeerLostError):
        first.send(torch.zeros(1, dtype=torch.uint8), 1)
    with pytest.raises(TransferAbortedError, match="channel 0 was replaced by another: it was lost"):
        makers.channels.find(0)
    assert makers.channels.find(1) is makers.channels.current is not content
    assert makers.open() is not first
    assert [entry.channel for entry in makers.published] == [0, 1]


def test_find_when_the_number_is_a_later_one_then_those_before_are_lost(makers: Makers) -> None:
    first = makers.channels.current
    assert makers.channels.find(3).number == 3
    with pytest.raises(TransferAbortedError, match="the server has lost it"):
        first.get(TIMEOUT_S)
    with pytest.raises(TransferAbortedError):
        makers.channels.find(2)


def test_replace_when_it_was_never_formed_then_waiting_calls_get_a_retryable_error(makers: Makers) -> None:
    content = makers.channels.current
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(content.get, TIMEOUT_S)
        wait_for(lambda: makers.published, "the rendezvous")
        assert makers.channels.replace(0, "nobody takes its content", waits=False)
        with pytest.raises(TransferAbortedError, match="nobody takes"):
            waiting.result(TIMEOUT_S)
    with pytest.raises(TransferAbortedError, match="nobody takes"):
        content.expect(TIMEOUT_S)
    assert not makers.channels.is_worn_out


def test_worn_out_when_many_break_in_short_time_then_for_a_while(makers: Makers) -> None:
    for number in range(MAX_BROKEN):
        assert not makers.channels.is_worn_out
        makers.open()
        makers.channels.replace(number, "broken")
    assert makers.channels.is_worn_out
    makers.now_s += BROKEN_WITHIN_S
    assert not makers.channels.is_worn_out


def test_get_when_it_takes_the_place_of_another_then_late_for_a_call_and_there_for_the_next(makers: Makers) -> None:
    makers.channels.replace(0, "broken")
    with pytest.raises(DeadlineExceededError):
        makers.channels.current.get(0.01)
    assert makers.open() is makers.channels.current.get(0.0)


class NoWork:
    """Stands for a send that nobody waits for."""

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("waited for")


class KeptWorks:
    """Which sends are kept, by their requests: an object that nobody refers to is gone."""

    def __init__(self) -> None:
        self._works: dict[int, weakref.ref[Work]] = {}

    def note(self, request: int, work: Work) -> Work:
        self._works[request] = weakref.ref(work)
        return work

    def make(self, request: int) -> Work:
        return self.note(request, NoWork())

    @property
    def requests(self) -> list[int]:
        return [request for request, work in self._works.items() if work() is not None]


def test_kept_sends_when_a_later_request_was_taken_then_let_go(makers: Makers) -> None:
    makers.open()
    content, kept = makers.channels.current, KeptWorks()
    content.keep(7, [kept.make(7)], 1)
    content.keep(9, [kept.make(9)], 1)
    content.let_go_before(7)  # sent before the first was refused: it may have been taken before
    assert kept.requests == [7, 9]
    content.let_go_before(8)
    assert kept.requests == [9]
    makers.channels.replace(0, "broken")
    assert kept.requests == []


def test_reap_when_too_much_is_kept_then_waits_until_the_server_has_taken_the_oldest(makers: Makers) -> None:
    channel, content, kept = makers.open(), makers.channels.current, KeptWorks()
    content.keep(1, [kept.note(1, channel.send(torch.ones(1, dtype=torch.uint8), 1))], MAX_KEPT_BYTES)
    content.reap()
    assert kept.requests == [1]
    content.keep(2, [kept.make(2)], 1)
    with ThreadPoolExecutor(1) as thread:
        reaping = thread.submit(content.reap)
        makers.others[0].recv(torch.zeros(1, dtype=torch.uint8), 1).wait(TIMEOUT_S)
        reaping.result(TIMEOUT_S)
    assert kept.requests == [2]


def test_reap_when_the_server_takes_nothing_then_the_channel_is_lost(
    makers: Makers, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, content = makers.open(), makers.channels.current
    content.keep(1, [channel.send(torch.ones(1, dtype=torch.uint8), 1)], MAX_KEPT_BYTES + 1)
    monkeypatch.setattr(content_channel, "KEPT_TIMEOUT_S", 0.01)
    with pytest.raises(TransferAbortedError, match="of refused writes"):
        content.reap()
