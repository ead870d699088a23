from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import PeerLostError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.fanout import SERVER, Placement
from tdserve.rules.weights import VersionRecord, Versions
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.weights import relays as relays_module
from tdserve.server.weights.relays import MAX_LINE_S, MIN_RELAYED_BYTES, Relays
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World, outbox

SPEC = capture(TensorDict({"w": torch.zeros(MIN_RELAYED_BYTES // 4)}, [])).spec
SMALL = capture(TensorDict({"w": torch.zeros(4)}, [])).spec
WITH_VALUES = capture(TensorDict({"w": torch.zeros(MIN_RELAYED_BYTES // 4), "v": "text"}, [])).spec

RIGHT, WRONG = b"12345678", b"87654321"


class Trees:
    """One weights store whose server sends a version to one puller at a time."""

    def __init__(self, world: World) -> None:
        self.traffic = Traffic(AdmissionBudget(1 << 30))
        self.relays = Relays(self.traffic)
        record = StoreRecord(name="w", kind="weights", uid="u", fingerprint=SPEC.fingerprint)
        self.store = OpenedStore(record, SPEC, Path("nowhere"), versions=Versions())
        self.store.get_versions().fanout = 1
        self.made = RIGHT
        self.may_make = asyncio.Event()
        self.may_make.set()
        self.sessions = [world.session(number) for number in range(6)]

    async def make_checksums(self) -> bytes:
        """Computes the checksums of what is sent, once it may."""
        await self.may_make.wait()
        return self.made

    def publish(self, *, nbytes: int = SPEC.nbytes) -> VersionRecord:
        """Publishes the next version."""
        versions = self.store.get_versions()
        versions.commit(versions.begin(fingerprint=SPEC.fingerprint), 0.0, nbytes=nbytes)
        self.relays.announce(self.store)
        assert versions.newest is not None
        return versions.newest

    async def place(
        self, number: int, *failed: int, timeout_s: float = 20.0, was_connected: bool = True, dtype: int = 0
    ) -> Placement:
        """Returns the source from which a session gets the newest version."""
        version = self.store.get_versions().newest
        assert version is not None
        hops = [control_pb2.FailedHop(hop=hop, was_connected=was_connected) for hop in failed]
        asked = control_pb2.LatestRequest(relays=True, failed=hops, dtype=dtype)  # type: ignore[arg-type]
        session = self.sessions[number]
        placed = await self.relays.place(
            session, self.store, version, SPEC, asked, Deadline.after(timeout_s), self.make_checksums
        )
        assert placed is not None
        return placed

    def report(self, number: int, **said: int) -> None:
        """Delivers a report of a session's client."""
        self.relays.on_report(self.sessions[number], control_pb2.RelayReport(**said))

    async def root(self) -> Placement:
        """Gives the first session a whole version from the server, which it keeps; publishes one if there is none."""
        if self.store.get_versions().newest is None:
            self.publish()
        placed = await self.place(1)
        assert (placed.relay, placed.keeps) == (SERVER, True)
        with self.relays.track_sending(self.store, placed):
            self.report(1, holds=placed.hop)
        return placed

    async def taken(self, number: int, hop: int, checksums: bytes = RIGHT, *, timeout_s: float = 20.0) -> None:
        """Reports that a session has received its version."""
        asked = control_pb2.TakenRequest(hop=hop, checksums=checksums, timeout_s=timeout_s)
        await self.relays.check_taken(self.sessions[number], 9, asked)


async def receive(session: ClientSession) -> control_pb2.ServerMessage:
    """Returns the next message of a session."""
    box = outbox(session)
    await asyncio.wait_for(box.next(), 20.0)
    return box.messages.pop(0)


@pytest.fixture
def trees(world: World) -> Trees:
    """A store with version 1."""
    return Trees(world)


@pytest.mark.parametrize(("spec", "relays"), [(SMALL, True), (WITH_VALUES, True), (SPEC, False)])
def test_place_when_it_cannot_be_passed_on_then_from_the_server_and_no_more(
    trees: Trees, run: Loop, spec: Spec, relays: bool
) -> None:
    async def scenario() -> None:
        asked = control_pb2.LatestRequest(relays=relays)
        version = trees.publish()
        found = await trees.relays.place(
            trees.sessions[1],
            trees.store,
            version,
            spec,
            asked,
            Deadline.after(0),
            trees.make_checksums,
        )
        assert found is None

    run(scenario())


def test_place_when_a_relay_keeps_it_then_both_are_introduced_and_their_rendezvous_passed_on(
    trees: Trees, run: Loop
) -> None:
    async def scenario() -> None:
        root = await trees.root()
        placed = await trees.place(2)
        assert (placed.relay, placed.kept) == (1, root.hop)
        order = (await receive(trees.sessions[1])).relay_order.pass_on
        assert (order.hop, order.kept) == (placed.hop, root.hop)
        entry = control_pb2.Rendezvous(hop=placed.hop, key="0", value=b"address")
        for sender, receiver in ((1, 2), (2, 1)):
            trees.relays.hand_on(trees.sessions[sender], entry)
            assert (await receive(trees.sessions[receiver])).rendezvous == entry
        trees.relays.hand_on(trees.sessions[3], entry)  # who is no end of it says nothing
        trees.relays.hand_on(trees.sessions[1], control_pb2.Rendezvous(hop=77))
        await asyncio.sleep(0)
        assert [outbox(session).messages for session in trees.sessions] == [[]] * 6

    run(scenario())


def test_place_when_all_are_busy_then_waits_until_one_has_room(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        await trees.root()
        first = await trees.place(2)
        waiting = asyncio.create_task(trees.place(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        trees.report(1, ended=first.hop)
        assert (await asyncio.wait_for(waiting, MAX_LINE_S / 2)).relay == 1

    run(scenario())


def test_place_when_one_waits_for_another_content_then_others_are_not_behind_it(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        await trees.root()
        await trees.place(2)  # the only relay is busy, as long as this test lasts
        other = await trees.place(4, dtype=1)
        waiting = [asyncio.create_task(trees.place(number, dtype=dtype)) for number, dtype in ((3, 0), (5, 1))]
        for _ in range(3):
            await asyncio.sleep(0)
        trees.report(4, holds=other.hop)
        assert (await waiting[1]).relay == 4
        assert not waiting[0].done()
        waiting[0].cancel()

    run(scenario())


def test_place_when_it_waits_too_long_then_from_the_server_all_the_same(
    trees: Trees, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "MAX_LINE_S", 0.02)

    async def scenario() -> None:
        await trees.root()
        await trees.place(2)
        for timeout_s in (0.0, 20.0):
            placed = await trees.place(3, timeout_s=timeout_s)
            assert (placed.relay, placed.keeps) == (SERVER, False)

    run(scenario())


def test_place_when_it_is_cancelled_in_line_then_its_place_goes_to_the_next(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        await trees.root()
        first = await trees.place(2)
        waiting = [asyncio.create_task(trees.place(number)) for number in (3, 4)]
        for _ in range(3):
            await asyncio.sleep(0)
        trees.report(1, ended=first.hop)
        await asyncio.sleep(0)
        waiting[0].cancel()  # in the moment in which it got it
        assert (await asyncio.wait_for(waiting[1], MAX_LINE_S / 2)).relay == 1

    run(scenario())


def test_end_when_a_relay_ends_then_its_puller_gets_the_loss_at_once(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        await trees.root()
        placed = await trees.place(2)
        trees.relays.on_session_ended(1)
        assert (await receive(trees.sessions[2])).relay_order.lost == placed.hop
        assert (await trees.place(2, placed.hop)).relay == SERVER
        trees.relays.on_session_ended(1)  # known no longer

    run(scenario())


def test_sending_when_it_fails_then_the_puller_has_nothing_to_pass_on(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        trees.publish()
        placed = await trees.place(1)
        with pytest.raises(PeerLostError), trees.relays.track_sending(trees.store, placed):
            raise PeerLostError(peer="it", reason="gone")
        with trees.relays.track_sending(trees.store, None):
            pass
        assert (await trees.place(2)).relay == SERVER

    run(scenario())


def test_published_when_a_version_is_old_then_relays_need_not_keep_it(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        root = await trees.root()
        placed = await trees.place(2)
        assert (await receive(trees.sessions[1])).relay_order.HasField("pass_on")
        trees.publish()
        await trees.taken(2, placed.hop)
        assert (await receive(trees.sessions[1])).relay_order.forget == root.hop
        assert (await trees.place(3)).relay == SERVER

    run(scenario())


def test_rest_when_nothing_moves_for_a_while_then_no_client_keeps_a_version(
    trees: Trees, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "REST_S", 0.01)

    async def scenario() -> None:
        root = await trees.root()
        assert (await receive(trees.sessions[1])).relay_order.forget == root.hop

    run(scenario())


def test_forget_deleted_when_nothing_is_under_way_then_all_of_the_store_is_forgotten(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        root = await trees.root()
        placed = await trees.place(2)
        trees.store.waiters.delete("w")
        trees.relays.forget_deleted(trees.store)
        assert len(trees.relays) == 1  # one client still takes it from another
        trees.report(2, ended=placed.hop)
        trees.relays.on_session_ended(1)
        trees.relays.forget_deleted(trees.store)
        assert len(trees.relays) == 0
        trees.report(1, ended=root.hop)

    run(scenario())


def test_report_when_it_is_of_no_hop_then_nothing_happens(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        trees.publish()
        trees.report(1, holds=77)
        trees.relays.on_report(trees.sessions[1], control_pb2.RelayReport())
        placed = await trees.place(1)
        trees.report(2, ended=placed.hop)
        trees.report(2, holds=placed.hop)
        trees.report(1, ended=placed.hop)
        assert (await trees.place(2)).relay == SERVER

    run(scenario())
