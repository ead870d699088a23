from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from tdserve.base.errors import ConnectError, DeadlineExceededError, PeerLostError
from tdserve.client.relays import relay_hop as hops
from tdserve.client.relays.kept_version import KeptVersion
from tdserve.client.relays.relay_hop import CONTENT_TAG, PULLER_RANK, RELAY_RANK, RelayHop, pass_on, receive
from tdserve.transport.loopback import LoopbackChannel
from tests.gloo_secret import SECRET
from tests.unit.client.relays.test_kept import LAYOUT

NUM_MESSAGES = len(LAYOUT.messages)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeout so long that no end gives up by itself on a busy machine: each ends only when the test ends it."""
    monkeypatch.setattr(hops, "STALL_S", 60.0)
    monkeypatch.setattr(hops, "CONNECT_S", 60.0)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Two threads: one for either end."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends lose their patience soon."""
    monkeypatch.setattr(hops, "STALL_S", 0.05)
    monkeypatch.setattr(hops, "CONNECT_S", 0.2)


def content() -> torch.Tensor:
    """Bytes of a version."""
    return torch.arange(LAYOUT.nbytes, dtype=torch.int64).to(torch.uint8)


def pair() -> tuple[RelayHop, RelayHop]:
    """Both ends of a hop, whose entries arrive at the other one."""
    ends: dict[int, RelayHop] = {}

    def make(rank: int) -> RelayHop:
        def publish(number: int, key: str, value: bytes) -> None:
            ends[1 - rank].feed(key, value)

        return RelayHop(5, rank, secret=SECRET, publish=publish, make_host=lambda: "127.0.0.1")

    ends[RELAY_RANK], ends[PULLER_RANK] = make(RELAY_RANK), make(PULLER_RANK)
    return ends[RELAY_RANK], ends[PULLER_RANK]


def test_hop_when_both_ends_connect_then_a_version_goes_over_it_and_is_confirmed(threads: ThreadPoolExecutor) -> None:
    with ExitStack() as stack:
        relay, puller = pair()
        for end in (relay, puller):
            stack.callback(end.close)
        one, other = threads.submit(relay.connect), threads.submit(puller.connect)
        channels = one.result(20.0), other.result(20.0)
        kept = KeptVersion(LAYOUT, content())
        kept.add_arrived(NUM_MESSAGES)
        passing = threads.submit(pass_on, channels[0], kept)
        found = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
        arrived: list[int] = []
        receive(channels[1], LAYOUT, found, on_arrived=arrived.append)
        passing.result(20.0)
        assert sum(arrived) == NUM_MESSAGES
        for message in LAYOUT.messages:
            part = slice(message.offset, message.offset + message.nbytes)
            assert torch.equal(found[part], content()[part])


@pytest.mark.usefixtures("short")
def test_connect_when_the_other_end_does_not_then_error_in_time() -> None:
    relay, puller = pair()
    with pytest.raises(ConnectError):
        puller.connect()
    for end in (relay, puller):
        end.close()


def test_cancel_when_the_pair_is_being_formed_then_waiting_calls_get_peer_lost(threads: ThreadPoolExecutor) -> None:
    relay, puller = pair()
    forming = threads.submit(puller.connect)
    puller.cancel(PeerLostError(peer="it", reason="gone"))
    with pytest.raises((PeerLostError, ConnectError)):
        forming.result(20.0)
    with pytest.raises(PeerLostError, match="gone"):
        puller.connect()
    relay.close()


def test_pass_on_when_the_version_still_comes_then_waits_for_each_message(threads: ThreadPoolExecutor) -> None:
    ends = LoopbackChannel.make_pair()
    kept = KeptVersion(LAYOUT, content())
    passing = threads.submit(pass_on, ends[0], kept)
    found = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    taking = threads.submit(receive, ends[1], LAYOUT, found, on_arrived=lambda count: None)
    for _ in range(NUM_MESSAGES):
        assert not passing.done()
        kept.add_arrived(1)
    taking.result(20.0)
    passing.result(20.0)


@pytest.mark.usefixtures("short")
def test_pass_on_when_nothing_comes_or_it_is_not_taken_then_error_in_time() -> None:
    kept = KeptVersion(LAYOUT, content())
    with pytest.raises(PeerLostError):
        pass_on(LoopbackChannel.make_pair()[0], kept)
    kept.add_arrived(NUM_MESSAGES)
    with pytest.raises(DeadlineExceededError):
        pass_on(LoopbackChannel.make_pair()[0], kept)
    channel, other = LoopbackChannel.make_pair()
    works = [other.recv(torch.empty(message.nbytes, dtype=torch.uint8), CONTENT_TAG) for message in LAYOUT.messages]
    with pytest.raises(DeadlineExceededError):  # all was taken, and nobody says so
        pass_on(channel, kept)
    assert len(works) == NUM_MESSAGES


@pytest.mark.usefixtures("short")
def test_take_when_nothing_comes_then_error_in_time() -> None:
    with pytest.raises(DeadlineExceededError):
        receive(
            LoopbackChannel.make_pair()[1],
            LAYOUT,
            torch.empty(LAYOUT.nbytes, dtype=torch.uint8),
            on_arrived=lambda count: None,
        )
