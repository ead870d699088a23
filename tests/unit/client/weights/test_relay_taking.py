from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError, PeerLostError
from tdserve.client.content.leaves import Leaves, make_leaves
from tdserve.client.content.received import Received
from tdserve.client.relays import relay_hop as hops
from tdserve.client.relays.kept_version import compute_checksums
from tdserve.client.weights.relay_taking import HopFailedError, Receiving, receive_kept, take_relayed
from tdserve.structure.captures.capture import capture
from tdserve.transport.loopback import LoopbackChannel
from tdserve.transport.sources_sinks import FlatBuffer
from tdserve.transport.stream import start_send
from tdserve.v1 import control_pb2
from tests.gloo_secret import SECRET
from tests.unit.client.relays.relaying import LAYOUT, POOL, SPEC, TD, Office, content, office

Verify = Callable[[control_pb2.TakenRequest], None]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeout so long that no end gives up by itself on a busy machine: each ends only when the test ends it."""
    monkeypatch.setattr(hops, "STALL_S", 60.0)
    monkeypatch.setattr(hops, "CONNECT_S", 60.0)


def out() -> tuple[TensorDict, Leaves]:
    """A destination of the user's."""
    td = TensorDict({"b": torch.zeros(700_000, dtype=torch.int64), "a": torch.zeros(1)}, [])
    return td, make_leaves(capture(td, is_destination=True), LAYOUT)


def accept(asked: control_pb2.TakenRequest) -> None:
    """What control does when all is right."""
    assert asked.checksums == compute_checksums(LAYOUT, content(), SPEC)


def take_version(
    between: Office,
    verify: Verify = accept,
    *,
    keeps: bool = False,
    into: Leaves | None = None,
    hop: int = 4,
    client: int = 1,
) -> Received:
    """A client, the second one, gets a version over a hop."""
    accepted = control_pb2.Accepted(hop=hop, hop_secret=SECRET, is_relayed=True, keeps=keeps)
    relays = between.ends[client]
    return take_relayed(relays, accepted, verify, Receiving(LAYOUT, SPEC, POOL, 20.0, into))


def check(received: Received) -> None:
    """Checks that all leaves are as published."""
    leaves = received.get_leaves()
    assert all(torch.equal(leaves[path,], TD[path]) for path in ("a", "b"))
    assert received.version == 0


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("is_filled", [True, False])
def test_take_when_another_client_has_it_then_it_is_the_callers_own(keeps: bool, is_filled: bool) -> None:
    with office() as between:
        between.keep(3)
        between.introduce(4, kept=3)
        td, into = out()
        received = take_version(between, keeps=keeps, into=into if is_filled else None)
        check(received)
        assert torch.equal(td["b"], TD["b"]) == is_filled
        assert between.ends[1].num_kept == keeps
        assert [each.WhichOneof("report") for each in between.reports[1]] == ["holds"] * keeps


def test_take_when_it_is_kept_then_changes_of_the_caller_are_not_passed_on() -> None:
    with office() as between:
        between.keep(3)
        between.introduce(4, kept=3)
        received = take_version(between, keeps=True)
        received.get_leaves()["b",].fill_(-1)
        between.introduce(5, kept=4, client=1)
        check(take_version(between, hop=5, client=0))


def test_take_when_the_checksums_are_wrong_then_nothing_of_it_is_shown_or_kept() -> None:
    def refuse(asked: control_pb2.TakenRequest) -> None:
        assert asked.checksums != compute_checksums(LAYOUT, content(), SPEC)
        raise CorruptDataError(path="it", expected="a", actual="b")

    with office() as between:
        wrong = content()
        wrong[100] += 1
        between.keep(3, wrong)
        between.introduce(4, kept=3)
        td, into = out()
        with pytest.raises(HopFailedError) as caught:
            take_version(between, refuse, keeps=True, into=into)
        assert (caught.value.failed.hop, caught.value.failed.was_connected) == (4, True)
        assert td["b"].eq(0).all()
        assert between.ends[1].num_kept == 0
        assert between.reports[1][-1].ended == 4


def test_take_when_the_relay_has_nothing_then_the_hop_has_failed_unconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hops, "CONNECT_S", 0.2)
    with office() as between:
        with pytest.raises(HopFailedError) as caught:
            take_version(between)
        assert not caught.value.failed.was_connected
        assert between.reports[1][-1].ended == 4


def test_take_when_the_time_is_up_then_the_hop_has_failed_though_it_still_comes() -> None:
    with office() as between:
        between.keep(3)
        between.introduce(4, kept=3)
        accepted = control_pb2.Accepted(hop=4, is_relayed=True)
        with pytest.raises(HopFailedError):
            take_relayed(between.ends[1], accepted, accept, Receiving(LAYOUT, SPEC, POOL, 0.0, None))


@pytest.mark.parametrize("is_filled", [True, False])
def test_receive_kept_when_the_server_sends_then_it_is_kept_and_control_learns_of_it(is_filled: bool) -> None:
    server, channel = LoopbackChannel.make_pair()
    with office() as between:
        works = start_send(server, 7, LAYOUT.messages, FlatBuffer(content()), POOL)
        td, into = out()
        given = into if is_filled else None
        received = receive_kept(between.ends[0], 3, channel, 7, Receiving(LAYOUT, SPEC, POOL, 20.0, given))
        check(received)
        server.wait_all(works, 20.0)
        assert torch.equal(td["b"], TD["b"]) == is_filled
        assert between.wait_report(0, "holds").holds == 3


def test_receive_kept_when_it_breaks_off_then_nothing_is_kept() -> None:
    server, channel = LoopbackChannel.make_pair()
    with office() as between:
        server.close()
        with pytest.raises(PeerLostError):
            receive_kept(between.ends[0], 3, channel, 7, Receiving(LAYOUT, SPEC, POOL, 20.0, None))
        assert between.ends[0].num_kept == 0
