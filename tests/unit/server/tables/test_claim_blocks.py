"""Several local writers of one table: each claims rows of a block of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.allocation.promises import MAX_BEHIND_PART, MAX_PROMISED_PART
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.processes.claim_writers import WorkerWriter
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.tables.claiming import NUM_REMEMBERED, Claiming
from tests.unit.server.claimant import WINDOW, Claimant, live, num_reserved, plan, restarted, wish
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.replaying import create
from tests.unit.server.world import Loop, World

CAPACITY = 8 * WINDOW * MAX_PROMISED_PART


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """An empty ring, sampled oldest first."""
    return create(world, run, CAPACITY, sampler=Fifo())


@pytest.fixture
def peers(world: World, run: Loop) -> Iterator[list[LocalPeer]]:
    """Three clients on the server's machine."""
    made = [LocalPeer(world, number) for number in (1, 2, 3)]
    for peer in made:
        run(peer.__aenter__())
    yield made
    for peer in made:
        run(peer.__aexit__(None, None, None))


@pytest.fixture
def writers(claiming: Claiming, peers: list[LocalPeer], store: OpenedStore, world: World) -> list[Claimant]:
    """Two of them, each with a block; the first one's sole claim was taken back when the second came."""
    Claimant(claiming, peers[0], store, world)
    store.get_table().ring.abort(plan(store, 1))
    store.get_table().arrivals.commit(plan(store, 1))  # the row of the second one's first extend
    return [Claimant(claiming, peer, store, world) for peer in peers[1::-1]]


def test_offer_when_there_are_several_writers_then_each_gets_a_block_and_all_go_on(
    store: OpenedStore, writers: list[Claimant]
) -> None:
    assert [writer.first_row for writer in writers] == [1, 1 + WINDOW]
    for start in (10, 20):
        for number, writer in enumerate(writers):
            writer.extend(start + number, start)
    assert live(store) == [0, *range(1, 7), *range(1 + WINDOW, 7 + WINDOW)]
    assert not any(writer.file.is_over for writer in writers)


def test_offer_when_another_became_the_sole_writer_meanwhile_then_their_rows_differ(
    world: World, store: OpenedStore, claiming: Claiming, peers: list[LocalPeer]
) -> None:
    store.get_table().arrivals.commit(plan(store, 1))  # the extend of the first one, which has yet to ask for a claim
    sole = Claimant(claiming, peers[1], store, world)
    sole.extend(1, 10)
    sole.claim(2)
    block = Claimant(claiming, peers[0], store, world)
    assert sole.file.is_over
    assert block.first_row == 6, "behind what the other has claimed"
    block.extend(1, 20)
    assert live(store) == [0, 1, 2, 3, 6, 7, 8]


def test_offer_when_the_same_client_comes_over_another_session_then_its_older_claim_is_over(
    world: World, store: OpenedStore, claiming: Claiming, peers: list[LocalPeer]
) -> None:
    older = Claimant(claiming, peers[0], store, world)
    older.extend(1, 10)
    peers[1].session.hello.client_id = peers[0].session.client_id
    newer = Claimant(claiming, peers[1], store, world)
    assert (older.file.is_over, newer.first_row) == (True, 3)


def test_extend_when_a_third_one_asks_for_rows_then_the_blocks_stay_and_it_gets_the_rows_behind(
    store: OpenedStore, writers: list[Claimant]
) -> None:
    writers[0].extend(1, 10)
    assert plan(store, 2).rows.tolist() == [17, 18]
    writers[0].extend(2, 20)
    writers[1].extend(1, 30)
    assert live(store) == [0, *range(1, 7), *range(9, 12)]


def test_extend_when_the_rows_of_the_blocks_are_needed_then_they_end_and_the_oldest_rows_go(
    store: OpenedStore, writers: list[Claimant]
) -> None:
    writers[0].extend(1, 10)
    reservation = plan(store, CAPACITY - 10)
    assert all(writer.file.is_over for writer in writers)
    assert reservation.rows.tolist() == [*range(4, CAPACITY - 6)]
    store.get_table().arrivals.commit(reservation)
    assert plan(store, 8).rows.tolist() == [*range(CAPACITY - 6, CAPACITY), 0, 1], "no row is lost to the ring"


def test_block_when_the_first_round_ends_then_no_row_goes_while_others_were_never_used(
    store: OpenedStore, writers: list[Claimant]
) -> None:
    table = store.get_table()
    writers[0].extend(1, 10)
    table.arrivals.commit(plan(store, CAPACITY - 1 - 2 * WINDOW))
    assert not writers[0].file.is_over
    reservation = plan(store, 2 * WINDOW - 3)
    assert reservation.evicted.tolist() == []
    assert all(writer.file.is_over for writer in writers)
    table.arrivals.commit(reservation)
    assert len(live(store)) == CAPACITY


def test_block_when_the_ring_goes_round_then_its_rows_stay_live_until_they_are_claimed(
    world: World, store: OpenedStore, claiming: Claiming, peers: list[LocalPeer], writers: list[Claimant]
) -> None:
    table = store.get_table()
    for writer in writers:
        writer.extend(1, 10, WINDOW)
    table.arrivals.commit(plan(store, CAPACITY - 1 - 2 * WINDOW))
    assert len(live(store)) == CAPACITY
    claiming.end_used_up(peers[0].session, store, WINDOW + 1)
    again = Claimant(claiming, peers[0], store, world)
    assert len(live(store)) == CAPACITY
    again.claim(3)
    assert len(live(store)) == CAPACITY - 3


def test_block_when_control_gets_an_extend_of_its_writer_then_that_of_a_worker_ends(
    world: World, store: OpenedStore, claiming: Claiming, peers: list[LocalPeer], writers: list[Claimant]
) -> None:
    holder = world.worker.claim_holder = ClaimHolder(WorkerWriter("worker-0-abc"), lambda: None)
    session = world.session()
    assert claiming.grant(holder, store, wish(store)) is not None
    (claim,) = holder.claims.values()
    assert claim.is_block
    claiming.end_used_up(peers[0].session, store, 1)
    assert not writers[1].file.is_over, "it waits for a claim before it extends again"
    claiming.end_used_up(session, store, 1)
    assert holder.claims == {}, "it may not have seen its block yet: the next extend would come first"


def test_block_when_others_are_far_ahead_then_it_ends(
    world: World, store: OpenedStore, claiming: Claiming, writers: list[Claimant]
) -> None:
    for _ in range(4):
        store.get_table().arrivals.commit(plan(store, CAPACITY // MAX_BEHIND_PART // 8))
    assert not writers[0].file.is_over
    store.get_table().arrivals.commit(plan(store, CAPACITY // MAX_BEHIND_PART))
    plan(store, 1)
    assert all(writer.file.is_over for writer in writers)


def test_block_when_its_writer_asks_for_the_next_then_what_it_has_not_used_is_next_in_line(
    world: World, store: OpenedStore, claiming: Claiming, peers: list[LocalPeer], writers: list[Claimant]
) -> None:
    writers[0].extend(1, 10)
    claiming.end_used_up(peers[1].session, store, WINDOW + 1)
    assert claiming.offer(peers[1].session, store, wish(store)) is None, "rows in line come first"
    assert writers[0].file.is_over
    assert plan(store, 6).rows.tolist() == [4, 5, 6, 7, 8, 1 + 2 * WINDOW]
    writers[1].extend(1, 20)
    assert live(store) == [0, 1, 2, 3, 9, 10, 11]


def test_block_when_its_writer_dies_then_what_it_has_filled_is_stored_and_the_rest_goes_to_others(
    run: Loop, store: OpenedStore, claiming: Claiming, peers: list[LocalPeer], writers: list[Claimant]
) -> None:
    writers[0].extend(1, 10)
    writers[0].claim(2)

    async def leave() -> None:
        await peers[1].leave()
        claiming.on_session_ended(peers[1].session)

    run(leave())
    assert live(store) == [0, 1, 2, 3]
    assert num_reserved(store) == 2, "its process may still fill them"
    assert plan(store, 3).rows.tolist() == [6, 7, 8]
    writers[1].extend(1, 20)
    assert live(store) == [0, 1, 2, 3, 9, 10, 11]


def test_rows_when_one_is_deleted_then_blocks_end(store: OpenedStore, writers: list[Claimant]) -> None:
    writers[0].extend(1, 10)
    table = store.get_table()
    assert sum(table.departures.depart_in_pieces(table.departures.plan_departure(RowSet.run(0, 2)))) == 2
    assert all(writer.file.is_over for writer in writers)
    assert live(store) == [2, 3]
    assert plan(store, 8).rows.tolist() == [0, 1, *range(4, 10)]


def test_restore_when_the_server_starts_again_then_what_was_filled_is_stored_and_no_row_is_lost_to_the_ring(
    world: World, store: OpenedStore, peers: list[LocalPeer], writers: list[Claimant]
) -> None:
    writers[0].extend(1, 10)
    writers[1].extend(1, 20)
    writers[1].extend(2, 30)
    for peer in peers:
        peer.let_go()
    again = restarted(world, store.name)
    assert live(again) == [0, *range(1, 4), *range(9, 15)]
    assert ClaimRecord.load(world.db, again.record.uid) == []
    assert len(plan(again, CAPACITY)) == CAPACITY


def test_offer_when_one_writer_is_left_then_it_is_the_sole_one_again(
    world: World, store: OpenedStore, claiming: Claiming, peers: list[LocalPeer], writers: list[Claimant]
) -> None:
    writers[1].tell(abandons=True)
    writer = writers[0]
    for number in range(NUM_REMEMBERED):
        writer.extend(100 + number, 1, WINDOW)
        claiming.end_used_up(peers[1].session, store, WINDOW + 1)
        store.get_table().arrivals.commit(plan(store, 1))
        writer = Claimant(claiming, peers[1], store, world)
    store.get_table().arrivals.commit(plan(store, 1))
    assert writer.file.is_over, "a sole writer's claim ends when another writes"


def test_offer_when_the_table_is_small_then_no_block(
    world: World, run: Loop, claiming: Claiming, peers: list[LocalPeer]
) -> None:
    store = create(world, run, 11 * MAX_PROMISED_PART)
    Claimant(claiming, peers[0], store, world)
    store.get_table().arrivals.commit(plan(store, 1))
    sizes = []
    for num_rows, peer in ((1, peers[2]), (1, peers[1]), (2, peers[0])):
        claim = claiming.offer(peer.session, store, wish(store, num_rows=num_rows))
        if claim is not None:
            (record,) = (each for each in ClaimRecord.load(world.db, store.record.uid) if each.num == claim.num)
            sizes.append(record.num_allowed)
    assert sizes == [], "no block of two extends"
