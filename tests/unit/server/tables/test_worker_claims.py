"""Claims of a data worker, as control follows them; the worker's end of the claim file is here."""

from __future__ import annotations

import pytest

from tdserve.messages.row_numbers import decode_rows
from tdserve.rules.replay.allocation.claim_pacing import FIRST_CLAIM_EXTENDS, MIN_EXTENDS
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.processes.claim_writers import LocalWriter, WorkerWriter
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.tables.claiming import Claiming
from tdserve.store.rows.claim_file import ClaimedRows, ClaimFile
from tdserve.v1 import control_pb2
from tests.unit.server.claimant import live, num_reserved, plan, restarted, wish
from tests.unit.server.replaying import create
from tests.unit.server.world import Loop, World

ONE, OTHER = bytes(16 * [1]), bytes(16 * [2])


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """An empty ring of 32 rows, sampled oldest first."""
    return create(world, run, 32, sampler=Fifo())


@pytest.fixture
def broken() -> list[str]:
    """Has an item when the worker was to be ended."""
    return []


@pytest.fixture
def holder(broken: list[str]) -> ClaimHolder:
    return ClaimHolder(WorkerWriter("worker-0-abc"), lambda: broken.append("worker"))


@pytest.fixture
def session(world: World, holder: ClaimHolder) -> ClientSession:
    """A session of a client on the network."""
    world.worker.claim_holder = holder
    return world.session()


def offer(claiming: Claiming, session: ClientSession, store: OpenedStore) -> control_pb2.Claim:
    """Returns the claim that the worker gets after some extends."""
    holder = session.movers.writes.claim_holder
    assert holder is not None
    for _ in range(FIRST_CLAIM_EXTENDS - 1):
        assert not claiming.is_due(session, holder, store)
    assert claiming.is_due(session, holder, store)
    claim = claiming.grant(holder, store, wish(store))
    assert claim is not None
    return claim


@pytest.fixture
def file(world: World, claiming: Claiming, session: ClientSession, store: OpenedStore) -> ClaimFile:
    """The claim file of the worker."""
    return ClaimFile.open(world.root.path / offer(claiming, session, store).path)


def extend(file: ClaimFile, client_id: bytes, request: int, num_rows: int) -> None:
    """Claims rows and records them as filled."""
    assert file.claim(num_rows) is not None
    file.write(ClaimedRows(client_id, request, num_rows))


def find_indices(world: World, client_id: bytes, request: int) -> list[int]:
    """Returns the row numbers in the answer that is kept for a retry."""
    answer = world.answers.find_answer(client_id, request)
    assert answer is not None
    found: list[int] = decode_rows(control_pb2.Done.FromString(answer).indices).tolist()
    return found


def test_catch_up_when_extends_of_several_clients_are_found_then_each_has_its_answer(
    world: World, store: OpenedStore, file: ClaimFile
) -> None:
    extend(file, ONE, 5, 2)
    extend(file, OTHER, 5, 1)
    extend(file, ONE, 6, 3)
    assert live(store) == list(range(6))
    assert find_indices(world, ONE, 5) == [0, 1]
    assert find_indices(world, OTHER, 5) == [2]
    assert find_indices(world, ONE, 6) == [3, 4, 5]
    (counted,) = world.traffic.list_stats()
    nbytes = 6 * store.spec.with_rows(1).nbytes
    assert (counted.transport, counted.transfers_in, counted.bytes_in) == ("gloo", 1, nbytes)


def test_catch_up_when_a_retry_was_faster_then_the_rows_are_free_and_the_others_are_stored(
    world: World, store: OpenedStore, file: ClaimFile
) -> None:
    with world.answers.begin_transaction(ONE, 5, b"the answer to its retry"):
        pass
    with world.answers.begin_transaction(OTHER, 1, b"another"):
        pass
    world.answers.forget(OTHER, control_pb2.Answered(below=2))
    extend(file, ONE, 4, 1)
    extend(file, ONE, 5, 2)
    extend(file, ONE, 6, 1)
    extend(file, OTHER, 1, 1)
    assert live(store) == [0, 3]
    assert num_reserved(store) == 0
    assert world.answers.find_answer(ONE, 5) == b"the answer to its retry"
    assert find_indices(world, ONE, 6) == [3]
    assert plan(store, 3).rows.tolist() == [1, 2, 4], "rows that were given up come first"


def test_catch_up_when_the_server_was_restarted_then_stored_with_its_answers(
    world: World, store: OpenedStore, file: ClaimFile
) -> None:
    extend(file, ONE, 5, 2)
    extend(file, OTHER, 9, 1)
    assert file.claim(2) is not None
    again = restarted(world, store.name)
    assert live(again) == [0, 1, 2]
    assert num_reserved(again) == 0, "no worker of an earlier run lives"
    assert find_indices(world, OTHER, 9) == [2]


def test_worker_when_it_is_lost_then_what_it_has_recorded_is_stored_and_the_rest_is_free(
    claiming: Claiming, store: OpenedStore, holder: ClaimHolder, file: ClaimFile
) -> None:
    extend(file, ONE, 5, 2)
    assert file.claim(2) is not None
    assert num_reserved(store) == 2
    claiming.on_worker_lost(holder)
    assert (live(store), num_reserved(store), holder.claims) == ([0, 1], 0, {})


def test_offer_when_another_worker_takes_the_place_of_one_that_was_lost_then_it_is_the_sole_writer(
    world: World, claiming: Claiming, store: OpenedStore, session: ClientSession, holder: ClaimHolder, file: ClaimFile
) -> None:
    claiming.on_worker_lost(holder)
    world.worker.claim_holder = ClaimHolder(WorkerWriter("worker-0-def"), lambda: None)
    offer(claiming, world.session(), store)
    (claim,) = world.worker.claim_holder.claims.values()
    assert not claim.is_block


def test_session_when_it_ends_then_the_worker_keeps_its_claim_for_the_others(
    claiming: Claiming, session: ClientSession, file: ClaimFile
) -> None:
    claiming.on_session_ended(session)
    assert not file.is_over


def test_claimed_when_the_worker_abandons_then_over(claiming: Claiming, store: OpenedStore, file: ClaimFile) -> None:
    assert file.claim(1) is not None
    said = control_pb2.Claimed(uid=store.record.uid, num=1, abandons=True)
    claiming.on_claimed(control_pb2.Claimed(uid="another", num=1, abandons=True), None)
    claiming.on_claimed(said, ClaimHolder(LocalWriter("lock", ONE), lambda: None))
    assert not file.is_over, "neither of these is its claim"
    claiming.on_claimed(said, None)
    assert (file.is_over, num_reserved(store)) == (True, 0)


def test_record_when_it_makes_no_sense_then_the_worker_is_ended(
    store: OpenedStore, file: ClaimFile, broken: list[str]
) -> None:
    assert file.claim(1) is not None
    file.write(ClaimedRows(ONE, 1, 33))
    store.catch_up()
    assert broken == ["worker"]


def test_offer_when_the_worker_has_rows_left_then_none_and_when_too_few_the_next(
    claiming: Claiming, session: ClientSession, holder: ClaimHolder, store: OpenedStore, file: ClaimFile
) -> None:
    assert not claiming.is_due(session, holder, store)
    assert claiming.grant(holder, store, wish(store)) is None
    for request in range(MIN_EXTENDS):
        extend(file, ONE, request, 1)
    store.catch_up()
    claiming.end_used_up(session, store, 1)
    assert file.is_over
    assert claiming.is_due(session, holder, store), "it was of use"
    assert claiming.grant(holder, store, wish(store)) is not None
