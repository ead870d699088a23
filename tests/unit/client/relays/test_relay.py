from __future__ import annotations

import threading
import time

import pytest
import torch

from tdserve.base.errors import ClosedError, PeerLostError
from tdserve.client.relays import relay_hop as hops
from tdserve.client.relays.relay_hop import receive
from tdserve.v1 import control_pb2
from tests.gloo_secret import SECRET
from tests.unit.client.relays.relaying import LAYOUT, POOL, Office, content, office


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeout so long that no end gives up by itself on a busy machine: each ends only when the test ends it."""
    monkeypatch.setattr(hops, "STALL_S", 60.0)
    monkeypatch.setattr(hops, "CONNECT_S", 60.0)


def threads() -> list[str]:
    """Names of threads of relays."""
    return [each.name for each in threading.enumerate() if each.name.startswith("tdserve-relay")]


def take(between: Office, hop: int) -> torch.Tensor:
    """The second client's end of a hop: what comes over it."""
    opened = between.ends[1].open_hop(hop, SECRET)
    found = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    try:
        receive(opened.connect(), LAYOUT, found, on_arrived=lambda count: None)
    finally:
        between.ends[1].close_hop(opened)
    return found


def test_pass_on_when_control_asks_then_the_version_goes_to_the_other_and_its_end_is_reported() -> None:
    with office() as between:
        between.keep(3)
        assert between.wait_report(0, "holds").holds == 3
        between.introduce(4, kept=3)
        assert torch.equal(take(between, 4), content())
        assert between.wait_report(0, "ended").ended == 4
        assert between.ends[0].num_kept == 1


def test_pass_on_when_nothing_is_kept_then_only_the_end_is_reported() -> None:
    with office() as between:
        between.introduce(4, kept=3)
        assert between.wait_report(0, "ended").ended == 4
        assert threads() == []


def test_pass_on_when_it_is_dropped_meanwhile_then_the_other_loses_it() -> None:
    with office() as between:
        kept = between.ends[0].keep(3, LAYOUT, POOL)
        kept.add_arrived(1)
        between.introduce(4, kept=3)
        between.ends[0].on_order(control_pb2.RelayOrder(forget=3))
        began = time.monotonic()
        with pytest.raises(PeerLostError):
            take(between, 4)
        assert time.monotonic() - began < 20.0
        assert between.ends[0].num_kept == 0


def test_feed_when_entries_are_here_before_the_hop_then_they_count() -> None:
    with office() as between:
        between.keep(3)
        between.introduce(4, kept=3)  # its entries come before the other end knows of the hop
        between.ends[1].feed(control_pb2.Rendezvous(hop=9, key="other", value=b"x"))
        assert torch.equal(take(between, 4), content())


def test_lost_when_reported_before_or_after_the_hop_is_open_then_it_ends_at_once() -> None:
    with office() as between:
        puller = between.ends[1]
        puller.on_order(control_pb2.RelayOrder(lost=4))
        with pytest.raises(PeerLostError, match="session has ended"):
            puller.open_hop(4, SECRET)
        hop = puller.open_hop(5, SECRET)
        puller.on_order(control_pb2.RelayOrder(lost=5))
        with pytest.raises(PeerLostError, match="session has ended"):
            hop.connect()


def test_close_when_a_version_is_being_passed_on_then_its_thread_ends() -> None:
    with office() as between:
        between.ends[0].keep(3, LAYOUT, POOL).add_arrived(1)
        between.introduce(4, kept=3)
        channel = between.ends[1].open_hop(4, SECRET).connect()
        first = torch.empty(LAYOUT.messages[0].nbytes, dtype=torch.uint8)
        channel.recv(first, hops.CONTENT_TAG).wait(20.0)  # it waits for the second message by now
        assert threads() == ["tdserve-relay-4"]
        between.ends[0].close()
        assert threads() == []
        with pytest.raises(ClosedError):
            between.ends[0].open_hop(5, SECRET)
        between.introduce(6, kept=3)
        assert between.ends[0].num_kept == 0
