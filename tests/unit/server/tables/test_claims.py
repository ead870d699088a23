"""Claims as the server follows them. The client's side is a claim file and its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tdserve.base import failpoints
from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError, TransferAbortedError
from tdserve.messages.row_numbers import decode_rows, encode_rows
from tdserve.rules.replay.limiter import MinSize
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.kinds.table_kind import LONG_ROWS
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.tables import table_claims
from tdserve.server.tables.claiming import Claiming
from tdserve.server.tables.rule_keys import RuleKeys
from tdserve.store.rows.claim_file import FOLDER
from tdserve.v1 import control_pb2
from tests.unit.server.claimant import WINDOW, Claimant, live, num_reserved, plan, restarted, wish
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.replaying import create, extending, in_line, rows
from tests.unit.server.world import Loop, World


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """An empty ring of 32 rows, sampled oldest first."""
    return create(world, run, 32, sampler=Fifo())


@pytest.fixture
def peer(world: World, run: Loop) -> Iterator[LocalPeer]:
    """A client on the server's machine."""
    made = LocalPeer(world)
    run(made.__aenter__())
    yield made
    run(made.__aexit__(None, None, None))


@pytest.fixture
def writer(claiming: Claiming, peer: LocalPeer, store: OpenedStore, world: World) -> Claimant:
    """The same client, which may claim rows."""
    return Claimant(claiming, peer, store, world)


async def settled(store: OpenedStore) -> None:
    """Waits until no row can be filled any more."""
    deadline = Deadline.after(20.0)
    while num_reserved(store):
        assert not deadline.expired
        await store.waiters.wait_for(lambda: None if num_reserved(store) else True, deadline, lambda: "the proof")


def test_offer_when_a_local_writer_wishes_then_so_many_rows_and_on_record(
    world: World, store: OpenedStore, peer: LocalPeer, writer: Claimant
) -> None:
    (record,) = ClaimRecord.load(world.db, store.record.uid)
    assert (record.first_row, record.num_allowed, record.lock_name) == (0, WINDOW, peer.lock_name)
    assert writer.file.claim(WINDOW + 1) is None


def test_offer_when_the_client_asks_for_rows_again_then_its_claim_is_over_and_it_gets_another(
    world: World, store: OpenedStore, claiming: Claiming, peer: LocalPeer, writer: Claimant
) -> None:
    writer.extend(1, 10)
    claiming.end_used_up(peer.session, store, 1)
    again = Claimant(claiming, peer, store, world)
    assert (writer.file.is_over, again.first_row) == (True, 3)
    again.claim(1)
    claiming.end_used_up(peer.session, store, 1)
    assert claiming.offer(peer.session, store, wish(store)) is None, "it is still filling a row"


def test_offer_when_the_client_cannot_write_here_then_none(
    world: World, run: Loop, store: OpenedStore, claiming: Claiming
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world, is_read_only=True) as reader:
            assert claiming.offer(reader.session, store, wish(store)) is None

    run(scenario())
    assert claiming.offer(world.session(), store, wish(store)) is None, "over a network"


def test_offer_when_there_are_fewer_rows_than_it_has_just_written_then_none(
    store: OpenedStore, claiming: Claiming, peer: LocalPeer
) -> None:
    assert claiming.offer(peer.session, store, wish(store, num_rows=4, num_wished=3)) is None


def test_offer_when_rows_are_grouped_or_the_table_is_closed_then_none(
    store: OpenedStore, claiming: Claiming, peer: LocalPeer
) -> None:
    store.group_keys.append(("g",))
    assert claiming.offer(peer.session, store, wish(store)) is None
    store.group_keys.clear()
    store.get_table().close()
    assert claiming.offer(peer.session, store, wish(store)) is None


def test_offer_when_the_disk_refuses_the_file_of_each_claim_then_one_line_in_the_log(
    store: OpenedStore, claiming: Claiming, peer: LocalPeer, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = store.folder / FOLDER
    in_the_way.write_bytes(b"")
    for _ in range(20):
        assert claiming.offer(peer.session, store, wish(store)) is None
    (line,) = [each.getMessage() for each in caplog.records if "cannot be claimed" in each.getMessage()]
    assert line.startswith(f"rows of store {store.name!r} cannot be claimed: ")
    in_the_way.unlink()
    assert claiming.offer(peer.session, store, wish(store)) is not None


def test_catch_up_when_rows_were_filled_then_readers_see_them_and_more_may_be_claimed(
    world: World, store: OpenedStore, peer: LocalPeer, writer: Claimant
) -> None:
    must_notify = writer.extend(1, 10)
    assert not must_notify
    assert live(store) == [0, 1, 2]
    must_notify = writer.extend(2, 20)
    assert not must_notify
    must_notify = writer.extend(3, 30)
    assert must_notify, "the third extend has passed the row from which on each record is reported"
    assert live(store) == list(range(9))
    assert store.get_table().info()["inserts"] == 9
    assert world.answers.find_answer(peer.session.client_id, 3) is not None, (
        "no answer is kept of the extend that was written last"
    )
    (counted,) = world.traffic.list_stats()
    assert (counted.transport, counted.transfers_in, counted.bytes_in) == ("shm", 2, 0), (
        "records were taken at other than two moments"
    )


def test_catch_up_when_rows_are_being_filled_then_reserved_and_stored_after_the_clients_report(
    store: OpenedStore, writer: Claimant
) -> None:
    writer.extend(1, 10)
    writer.claim(3)
    assert (live(store), num_reserved(store)) == ([0, 1, 2], 3)
    writer.write(2, 3)
    writer.tell()
    assert store.table is not None
    assert len(store.table) == 6


def test_catch_up_when_half_of_the_window_is_written_then_the_client_reports(writer: Claimant) -> None:
    assert not writer.extend(1, 0, WINDOW // 2 - 1)
    assert writer.extend(2, 0, 1)


def test_wait_when_a_call_waits_for_rows_then_the_client_reports_each_write(
    world: World, run: Loop, claiming: Claiming, peer: LocalPeer
) -> None:
    store = create(world, run, 32, limiter=MinSize(4))
    writer = Claimant(claiming, peer, store, world)
    assert not writer.extend(1, 10, 1)

    async def scenario() -> None:
        asked = control_pb2.SampleRequest(store=store.name, num_rows=1, timeout_s=20)
        waits = asyncio.create_task(world.samples.sample(world.session(), 1, asked))
        await in_line(store)
        assert writer.extend(2, 20, 3)
        writer.tell()
        assert (await waits) is not None

    run(scenario())
    live(store)
    assert not writer.extend(3, 30, 1), "nobody waits any more"


def test_take_back_when_rows_are_being_filled_then_the_writer_reports_them_and_the_claim_ends(
    store: OpenedStore, writer: Claimant
) -> None:
    writer.claim(3)
    store.get_table().state.take_back_claims()
    assert store.get_table().claims, "its writer may fill what it has claimed"
    assert writer.write(1, 3), "nobody else looks for its record: a checkpoint only waits for the end of the claim"
    writer.tell()
    assert not store.get_table().claims
    assert live(store) == [0, 1, 2]


def test_extend_when_another_writes_then_the_claim_is_over(world: World, store: OpenedStore, writer: Claimant) -> None:
    writer.extend(1, 10)
    assert plan(store, 2).rows.tolist() == [3, 4]
    assert writer.file.is_over
    assert writer.file.claim(1) is None
    assert ClaimRecord.load(world.db, store.record.uid) == []


def test_offer_when_the_claim_before_is_over_then_another_one_to_which_the_old_one_does_no_harm(
    world: World, store: OpenedStore, claiming: Claiming, peer: LocalPeer, writer: Claimant
) -> None:
    writer.extend(1, 10)
    store.get_table().arrivals.commit(plan(store, 2))
    again = Claimant(claiming, peer, store, world)
    assert again.first_row == 5
    again.claim(2)
    writer.tell(abandons=True)
    assert not again.file.is_over


def test_abandon_when_the_client_fills_nothing_then_its_rows_are_the_next_ones(
    store: OpenedStore, writer: Claimant
) -> None:
    writer.extend(1, 10)
    writer.claim(2)
    writer.tell(abandons=True)
    assert num_reserved(store) == 0
    reservation = plan(store, 2)
    assert encode_rows(reservation.rows) == reservation.encoded
    assert reservation.rows.tolist() == [3, 4]


def test_catch_up_when_many_other_answers_came_meanwhile_then_all_that_was_filled_is_stored(
    world: World, store: OpenedStore, peer: LocalPeer, writer: Claimant
) -> None:
    for request in (1, 2, 3):
        writer.extend(request, 10 * request, 2)
    for request in range(4, 1_000):
        with world.answers.begin_transaction(peer.session.client_id, request, b""):
            pass
    world.answers.forget(peer.session.client_id, control_pb2.Answered(below=1_000))
    assert live(store) == list(range(6))
    assert not peer.session.ended.is_set()


def test_catch_up_when_a_writer_goes_on_then_one_answer_of_the_claim_is_kept(
    world: World, store: OpenedStore, peer: LocalPeer, writer: Claimant
) -> None:
    client_id = peer.session.client_id
    for request in range(1, 9):
        writer.extend(request, 10 * request, 2)
        assert len(live(store)) == 2 * request
        assert decode_rows(last_answer(world, client_id, request).indices).tolist() == [
            2 * request - 2,
            2 * request - 1,
        ]
        assert world.answers.find_answer(client_id, request - 1) is None
    assert len(world.db.scan("requests", client_id)) == 1


def last_answer(world: World, client_id: bytes, request: int) -> control_pb2.Done:
    """Returns the answer that a retry of an extend would get."""
    answer = world.answers.find_answer(client_id, request)
    assert answer is not None
    return control_pb2.Done.FromString(answer)


def test_extend_when_filled_rows_cannot_be_committed_then_refused_until_they_are_and_its_retry_stores_nothing_twice(
    world: World, run: Loop, store: OpenedStore, peer: LocalPeer, writer: Claimant, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.extend(1, 10)
    with monkeypatch.context() as patched:
        patched.setattr(table_claims, "commit_rows", full)
        store.catch_up()
        with pytest.raises(TransferAbortedError):  # it has not failed: its rows come as soon as there is room
            run(world.extends.extend(peer.session, 1, extending(store, rows(10, 3))))
        with pytest.raises(CapacityError):
            run(world.extends.extend(peer.session, 2, extending(store, rows(20, 3))))
    store.catch_up()
    assert decode_rows(last_answer(world, peer.session.client_id, 1).indices).tolist() == [0, 1, 2]
    world.answers.forget(peer.session.client_id, control_pb2.Answered(below=2))
    assert live(store) == [0, 1, 2]
    assert store.get_table().info()["inserts"] == 3


def full(*_: object, **__: object) -> None:
    """Makes commits fail as if the catalog were full."""
    raise CapacityError(what="the catalog", asked=1, free=0)


def test_session_when_it_ends_in_the_middle_then_its_rows_wait_for_the_proof_and_what_was_filled_by_then_counts(
    run: Loop, store: OpenedStore, claiming: Claiming, peer: LocalPeer, writer: Claimant
) -> None:
    writer.extend(1, 10)
    writer.claim(3)

    async def leave_and_fill() -> None:
        await peer.leave()
        claiming.on_session_ended(peer.session)
        assert (live(store), num_reserved(store)) == ([0, 1, 2], 3)
        writer.write(2, 3)
        peer.let_go()
        await settled(store)

    run(leave_and_fill())
    assert live(store) == list(range(6))
    assert not writer.file.path.exists()


def test_restore_when_the_server_starts_again_then_what_was_filled_is_stored_and_the_rest_waits(
    world: World, run: Loop, store: OpenedStore, peer: LocalPeer, writer: Claimant
) -> None:
    writer.extend(1, 10)
    live(store)
    writer.extend(2, 20)
    writer.extend(3, 30, 1)
    writer.claim(2)

    async def restart() -> None:
        again = restarted(world, store.name)
        assert (live(again), num_reserved(again)) == (list(range(7)), 2)
        assert again.get_table().info()["inserts"] == 7
        assert writer.file.is_over
        peer.let_go()
        await settled(again)

    run(restart())
    assert ClaimRecord.load(world.db, store.record.uid) == []


def test_restore_when_the_file_is_gone_then_nothing_is_stored_and_the_rows_are_free_with_the_proof(
    world: World, run: Loop, store: OpenedStore, peer: LocalPeer, writer: Claimant
) -> None:
    writer.extend(1, 10)
    writer.file.unlink()

    async def restart() -> None:
        again = restarted(world, store.name)
        assert (live(again), num_reserved(again)) == ([], WINDOW)
        peer.let_go()
        await settled(again)

    run(restart())
    assert ClaimRecord.load(world.db, store.record.uid) == []


def test_catch_up_when_the_file_contradicts_itself_then_the_session_ends_and_nothing_is_stored(
    store: OpenedStore, peer: LocalPeer, writer: Claimant
) -> None:
    writer.claim(1)
    writer.write(1, 1000)
    assert live(store) == []
    assert peer.session.ended.is_set()


def test_catch_up_when_the_catalog_is_full_then_tried_again_at_the_next_look(
    store: OpenedStore, peer: LocalPeer, writer: Claimant, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.extend(1, 10, 2)
    writer.extend(2, 20, 2)
    with monkeypatch.context() as patched:
        patched.setattr(table_claims, "commit_rows", full)
        assert live(store) == []
        assert not peer.session.ended.is_set()
    writer.extend(3, 30, 2)
    assert live(store) == list(range(6))


def test_abandon_when_the_catalog_is_full_then_what_was_filled_is_stored_once_there_is_room(
    store: OpenedStore, writer: Claimant, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.extend(1, 10)
    writer.claim(2)
    with monkeypatch.context() as patched:
        patched.setattr(table_claims, "commit_rows", full)
        writer.tell(abandons=True)
        assert num_reserved(store) == 3
    assert live(store) == [0, 1, 2]
    assert num_reserved(store) == 0


def test_offer_when_the_catalog_has_no_room_for_its_record_then_none_and_no_file_stays(
    world: World, claiming: Claiming, store: OpenedStore, peer: LocalPeer
) -> None:
    failpoints.arm("catalog.written=ENOSPC")
    try:
        assert claiming.offer(peer.session, store, wish(store)) is None
    finally:
        failpoints.arm("")
    assert ClaimRecord.load(world.db, store.record.uid) == []
    assert list((store.folder / FOLDER).iterdir()) == []
    assert claiming.offer(peer.session, store, wish(store)) is not None


def test_offer_when_groups_are_just_being_learnt_then_no_claim_outlives_that(
    world: World, run: Loop, claiming: Claiming, peer: LocalPeer
) -> None:
    store = create(world, run, LONG_ROWS, sampler=Fifo())  # so long that the column is made in a thread

    async def scenario() -> None:
        learning = asyncio.ensure_future(RuleKeys().learn_group(store, ("g",), world.session()))
        while not learning.done():
            if not store.get_table().claims:
                claiming.offer(peer.session, store, wish(store))
            await asyncio.sleep(0)
        await learning

    run(scenario())
    assert ("g",) in store.known_groups
    assert store.get_table().claims == []
    assert claiming.offer(peer.session, store, wish(store)) is None
