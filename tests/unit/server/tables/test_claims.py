"""Claims as the server follows them; the client's end is its file and what it sends."""

from __future__ import annotations

import asyncio

import pytest

from tdserve.client.local.writes import Places, fill_rows
from tdserve.deadline import Deadline
from tdserve.errors import CapacityError
from tdserve.replay.limiter import MinSize
from tdserve.replay.order import Fifo
from tdserve.row_numbers import encode_rows
from tdserve.server.entry import Entry
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.tables import claims
from tdserve.server.tables.claims import Claiming
from tdserve.spec.capture import capture
from tdserve.store.claims import ClaimFile
from tdserve.v1 import control_pb2
from tests.unit.server.local_peer import LocalPeer, mapped
from tests.unit.server.replaying import create, in_line, rows
from tests.unit.server.world import Loop, World

WINDOW = 8


@pytest.fixture
def entry(world: World, run: Loop) -> Entry:
    """An empty ring of 32 rows, sampled oldest first."""
    return create(world, run, 32, sampler=Fifo())


@pytest.fixture
def claiming(world: World) -> Claiming:
    return Claiming(world.stores, world.answers, traffic=world.traffic)


class Claimant:
    """A client that was let claim rows."""

    def __init__(self, claiming: Claiming, peer: LocalPeer, entry: Entry, root: World) -> None:
        asked = control_pb2.ExtendRequest(store=entry.name, num_rows=1, wished_claim=WINDOW)
        claim = claiming.offer(peer.session, entry, asked)
        assert claim is not None
        self.claim_num = claim.num
        self.first_row = claim.first_row
        self.file = ClaimFile.open(root.root.path / claim.path)
        self._entry = entry

    def claim(self, num_rows: int) -> int:
        """Takes rows; returns the first."""
        first = self.file.claim(num_rows)
        assert first is not None
        return self.first_row + first

    def said(self, *, abandons: bool = False) -> control_pb2.Claimed:
        """What the client sends."""
        return control_pb2.Claimed(uid=self._entry.record.uid, num=self.claim_num, abandons=abandons)

    def extend(self, request: int, start: int, num_rows: int = 3) -> bool:
        """A whole extend; returns whether the server is to be told."""
        begin = self.claim(num_rows)
        self._entry.generation_values()[begin : begin + num_rows] |= 1
        fill_rows(mapped(self._entry), Places(begin), [capture(rows(start, num_rows))])
        return self.file.write(request, num_rows)


async def settled(entry: Entry) -> None:
    """Returns when nobody can fill rows any more."""
    deadline = Deadline.after(20.0)
    while entry.replay_table().info()["num_reserved"]:
        assert not deadline.expired
        await entry.changed.wait_for(
            lambda: True if not entry.replay_table().info()["num_reserved"] else None, deadline, lambda: "the proof"
        )


def live(entry: Entry) -> list[int]:
    """The rows that may be read."""
    return [int(row) for row in entry.replay_table().live_rows()]


def test_offer_when_a_local_writer_wishes_then_so_many_rows_and_on_record(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            (record,) = ClaimRecord.load(world.db, entry.record.uid)
            assert (record.first_row, record.num_allowed, record.lock_name) == (0, WINDOW, peer.lock_name)
            assert writer.file.claim(WINDOW + 1) is None
            asked = control_pb2.ExtendRequest(num_rows=1, wished_claim=WINDOW)
            assert claiming.offer(peer.session, entry, asked) is None, "a table has one claim"

    run(scenario())


def test_offer_when_rows_are_not_for_it_to_claim_then_none(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        asked = control_pb2.ExtendRequest(num_rows=4, wished_claim=WINDOW)
        async with LocalPeer(world, is_read_only=True) as reader:
            assert claiming.offer(reader.session, entry, asked) is None
        assert claiming.offer(world.session(), entry, asked) is None
        async with LocalPeer(world, 2) as peer:
            asked.wished_claim = 3
            assert claiming.offer(peer.session, entry, asked) is None, "less than it has just written"
            asked.wished_claim = WINDOW
            entry.group_keys.append(("g",))
            assert claiming.offer(peer.session, entry, asked) is None
            entry.group_keys.clear()
            entry.replay_table().close()
            assert claiming.offer(peer.session, entry, asked) is None

    run(scenario())


def test_catch_up_when_rows_were_filled_then_whoever_looks_sees_them_and_more_may_be_claimed(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            assert not writer.extend(1, 10)
            assert live(entry) == [0, 1, 2]
            assert not writer.extend(2, 20)
            assert writer.extend(3, 30), "more than it was let claim at first, and half of that ahead"
            assert live(entry) == list(range(9))
            assert entry.replay_table().info()["inserts"] == 9
            assert world.answers.seen(peer.session.client_id, 3) is not None, "of what was written last"
            (counted,) = world.traffic.stats()
            assert (counted.transport, counted.transfers_in, counted.bytes_in) == ("shm", 2, 0), "looked for twice"

    run(scenario())


def test_catch_up_when_rows_are_being_filled_then_reserved_and_stored_when_the_client_says(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10)
            writer.claim(3)
            assert (live(entry), entry.replay_table().info()["num_reserved"]) == ([0, 1, 2], 3)
            writer.file.write(2, 3)
            claiming.on_claimed(peer.session, writer.said())
            assert entry.table is not None
            assert len(entry.table) == 6

    run(scenario())


def test_catch_up_when_it_is_half_way_to_the_end_then_the_client_tells(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            assert not writer.extend(1, 0, WINDOW // 2 - 1)
            assert writer.extend(2, 0, 1)

    run(scenario())


def test_wait_when_somebody_waits_for_rows_then_the_client_tells_of_each(
    world: World, run: Loop, claiming: Claiming
) -> None:
    entry = create(world, run, 32, limiter=MinSize(4))

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            assert not writer.extend(1, 10, 1)
            waits = asyncio.create_task(
                world.samples.sample(world.session(), 1, control_pb2.SampleRequest(store="r", num_rows=1, timeout_s=20))
            )
            await in_line(entry)
            assert writer.extend(2, 20, 3)
            claiming.on_claimed(peer.session, writer.said())
            assert (await waits) is not None
            live(entry)
            assert not writer.extend(3, 30, 1), "nobody waits any more"

    run(scenario())


def test_extend_when_another_writes_then_the_claim_is_over_and_may_be_wished_for_again(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10)
            reservation = entry.replay_table().plan_extend(2)
            assert reservation is not None
            assert reservation.rows.tolist() == [3, 4]
            assert writer.file.is_over
            assert ClaimRecord.load(world.db, entry.record.uid) == []
            entry.replay_table().abort(reservation)
            reservation = entry.replay_table().plan_extend(2)  # holes come first
            assert reservation is not None
            entry.replay_table().commit(reservation)
            again = Claimant(claiming, peer, entry, world)
            assert again.first_row == 5
            again.claim(2)
            claiming.on_claimed(peer.session, writer.said(abandons=True))
            assert not again.file.is_over, "who still has the old one does the new one no harm"
            assert writer.file.claim(1) is None

    run(scenario())


def test_abandon_when_the_client_fills_nothing_then_its_rows_are_the_next_ones(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10)
            writer.claim(2)
            claiming.on_claimed(peer.session, writer.said(abandons=True))
            assert entry.replay_table().info()["num_reserved"] == 0
            reservation = entry.replay_table().plan_extend(2)
            assert reservation is not None
            assert encode_rows(reservation.rows) == reservation.encoded
            assert reservation.rows.tolist() == [3, 4]

    run(scenario())


def test_catch_up_when_a_request_was_stored_by_its_second_try_then_not_once_more(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10)
            with world.answers.transaction(peer.session.client_id, 2, b""):
                pass
            writer.extend(2, 20)
            assert live(entry) == [0, 1, 2]
            assert entry.replay_table().info()["num_holes"] == 3

    run(scenario())


def test_session_when_it_ends_in_the_middle_then_its_rows_wait_for_the_proof_and_what_was_filled_by_then_counts(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10)
            writer.claim(3)
            await peer.leave()
            claiming.on_session_ended(peer.session)
            assert (live(entry), entry.replay_table().info()["num_reserved"]) == ([0, 1, 2], 3)
            writer.file.write(2, 3)
            peer.let_go()
            await settled(entry)
            assert live(entry) == list(range(6))
            assert not writer.file.path.exists()

    run(scenario())


def test_restore_when_the_server_starts_again_then_what_was_filled_is_stored_and_the_rest_waits(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10)
            live(entry)
            writer.extend(2, 20)
            writer.extend(3, 30, 1)
            writer.claim(2)
            world.reopen()
            Claiming(world.stores, world.answers, traffic=world.traffic).restore()
            again = world.stores.get(entry.name)
            assert (live(again), again.replay_table().info()["num_reserved"]) == (list(range(7)), 2)
            assert again.replay_table().info()["inserts"] == 7
            assert writer.file.is_over
            peer.let_go()
            await settled(again)
            assert again.replay_table().info()["num_reserved"] == 0
            assert ClaimRecord.load(world.db, entry.record.uid) == []

    run(scenario())


def test_restore_when_the_file_is_gone_then_nothing_is_stored_and_the_rows_are_free_with_the_proof(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10)
            writer.file.unlink()
            world.reopen()
            Claiming(world.stores, world.answers, traffic=world.traffic).restore()
            again = world.stores.get(entry.name)
            assert (live(again), again.replay_table().info()["num_reserved"]) == ([], WINDOW)
            peer.let_go()
            await settled(again)
            assert ClaimRecord.load(world.db, entry.record.uid) == []

    run(scenario())


def test_catch_up_when_the_file_says_what_cannot_be_then_the_session_ends_and_nothing_is_stored(
    world: World, run: Loop, entry: Entry, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.claim(1)
            writer.file.write(1, 1000)
            assert live(entry) == []
            assert peer.session.ended.is_set()

    run(scenario())


def test_catch_up_when_the_catalog_is_full_then_tried_again_at_the_next_look(
    world: World, run: Loop, entry: Entry, claiming: Claiming, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CapacityError(what="the catalog", asked=1, free=0)

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writer = Claimant(claiming, peer, entry, world)
            writer.extend(1, 10, 2)
            writer.extend(2, 20, 2)
            with monkeypatch.context() as patched:
                patched.setattr(claims, "commit_rows", full)
                assert live(entry) == []
                assert not peer.session.ended.is_set()
            writer.extend(3, 30, 2)
            assert live(entry) == list(range(6))

    run(scenario())
