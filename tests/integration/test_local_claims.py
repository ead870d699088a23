"""A local writer that goes on writing takes rows by itself. For everybody else it is as if it had asked for each
row."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.control.local import SOCKET_NAME
from tests import chi_square
from tests.integration.crashing import Crashing, Writer
from tests.integration.forked_clients import Child, ForkedClients
from tests.integration.local_roles import NUM_ROWS, is_claiming, numbers_in, row, rows
from tests.integration.self_signals import BEHIND
from tests.processes import wait_for

pytestmark = pytest.mark.integration

FEW = 6
"""Extends after which a writer claims its rows."""

CAPACITY = 16 * NUM_ROWS
OTHER = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("claims"), port=0) as started:
        yield started


@pytest.fixture(scope="module")
def foreign(server: tdserve.Server) -> set[int]:
    """The local connections that other tests have left to this process."""
    return find_local_connections()


@pytest.fixture(scope="module")
def client(server: tdserve.Server, foreign: set[int]) -> Iterator[tdserve.Client]:
    with server.client(transport="shm", timeout_s=30.0) as connected:
        yield connected


@pytest.fixture(scope="module")
def other(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client elsewhere."""
    with server.client(transport="gloo", timeout_s=30.0) as connected:
        yield connected


@pytest.fixture
def replay(client: tdserve.Client, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A table whose writer claims."""
    name = request.node.name.replace("[", "-").replace("]", "")[:150]
    made = client.create_replay(name, row(), CAPACITY)
    for number in range(FEW):
        made.extend(rows(number))
    assert is_claiming(client, name)
    yield made
    if name in client:
        client.delete(name)


def claimed(child: Child, num_extends: int) -> list[list[int]]:
    """Returns the rows of each extend before the last; all were acknowledged."""
    found = [[int(each) for each in child.line().split()[2:]] for _ in range(1, num_extends)]
    assert child.line() == "claims True"
    return found


def held(*numbers: int) -> list[int]:
    """What a table holds after extends of these."""
    return [number for number in numbers for _ in range(NUM_ROWS)]


@pytest.mark.slow
def test_extend_when_rows_are_claimed_then_they_follow_one_another_round_the_ring_and_all_see_them_at_once(
    replay: Any, other: tdserve.Client
) -> None:
    far = other.replay(replay.name)
    for number in range(FEW, 50):
        first = number * NUM_ROWS % CAPACITY
        assert replay.extend(rows(number)).tolist() == list(range(first, first + NUM_ROWS))
        if number % 5 == 0:
            assert sorted(numbers_in(far[:])) == held(*range(max(number - 15, 0), number + 1))
            assert set(numbers_in(far.sample(200))) <= set(range(max(number - 15, 0), number + 1))
            assert far.info()["inserts"] == (number + 1) * NUM_ROWS
    assert is_claiming(other, replay.name)


def test_extend_when_several_are_under_way_then_each_fills_the_rows_of_its_future(replay: Any) -> None:
    futures = [replay.extend(rows(number, 1 + number % NUM_ROWS), return_early=True) for number in range(100, 180)]
    for number, future in zip(range(172, 180), futures[-8:], strict=True):
        index = future.result(30.0)
        assert numbers_in(replay[index]) == [number] * (1 + number % NUM_ROWS)


@pytest.mark.slow
def test_extend_when_two_write_in_turn_then_nothing_is_lost_and_order_is_kept(
    replay: Any, other: tdserve.Client
) -> None:
    far = other.replay(replay.name)
    expected = [*range(FEW)]
    for number in range(FEW, 200, 3):
        replay.extend(rows(number))
        replay.extend(rows(number + 1))
        far.extend(rows(OTHER + number))
        expected += [number, number + 1, OTHER + number]
        assert sorted(numbers_in(replay[:])) == sorted(held(*expected[-16:]))


@pytest.mark.slow
def test_extend_when_two_handles_of_one_client_write_then_neither_writes_the_others_rows(
    replay: Any, client: tdserve.Client
) -> None:
    second: Any = client.replay(replay.name)
    expected = [*range(FEW)]
    for number in range(FEW, 400, 20):
        for each in range(number, number + 10):
            replay.extend(rows(each))
        for each in range(number + 10, number + 20):
            second.extend(rows(each))
        expected += range(number, number + 20)
        assert sorted(numbers_in(replay[:])) == held(*expected[-16:])


def test_sample_when_it_waits_for_rows_then_a_claimed_extend_wakes_it(
    client: tdserve.Client, other: tdserve.Client
) -> None:
    limiter = tdserve.MinSize(8 * NUM_ROWS)
    replay = client.create_replay("awaited", row(), CAPACITY, limiter=limiter)
    with ThreadPoolExecutor() as pool:
        for number in range(FEW):
            replay.extend(rows(number))
        assert is_claiming(client, replay.name)
        waits = pool.submit(other.replay("awaited").sample, 100, timeout_s=30.0)
        wait_for(lambda: replay.info()["num_waiting"] == 1, "a sample that waits")
        replay.extend(rows(FEW))
        assert not waits.done()
        replay.extend(rows(FEW + 1))
        assert set(numbers_in(waits.result(30.0))) <= set(range(FEW + 2))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["clear", "delete", "close", "set_limiter", "set_at_"])
def test_change_when_rows_are_claimed_then_as_if_each_had_been_asked_for(
    replay: Any, other: tdserve.Client, change: str
) -> None:
    far = other.replay(replay.name)
    replay.extend(rows(FEW))
    number = FEW + 1
    if change == "clear":
        assert far.clear() == number * NUM_ROWS
        left = []
    elif change == "delete":
        assert far.delete(torch.arange(NUM_ROWS)) == NUM_ROWS
        left = held(*range(1, number))
    elif change == "close":
        far.close()
        with pytest.raises(tdserve.WrongStateError, match="closed"):
            replay.extend(rows(number))
        assert numbers_in(replay[:]) == held(*range(number))
        return
    elif change == "set_limiter":
        far.set_limiter(tdserve.SampleToInsertRatio(1.0, min_size=1, error_buffer=8.0))
        with pytest.raises(tdserve.DeadlineExceededError):
            replay.extend(rows(number), timeout_s=0)
        assert numbers_in(replay[:]) == held(*range(number))
        return
    else:
        td = rows(77)
        for key in ("first", "body", "last"):
            far.set_at_(key, td[key], torch.arange(NUM_ROWS))
        left = held(77, *range(1, number))
    for each in range(20):  # claims again
        replay.extend(rows(number + each))
    assert is_claiming(other, replay.name)
    assert sorted(numbers_in(far[:])) == sorted((left + held(*range(number, number + 20)))[-CAPACITY:])


def test_sample_when_groups_are_asked_for_then_claimed_rows_are_in_theirs(replay: Any) -> None:
    for number in range(FEW, 3 * FEW):
        replay.extend(rows(number))
        if number == 2 * FEW:
            assert len(set(numbers_in(replay.sample(NUM_ROWS, group_by="first", group_size=NUM_ROWS)))) == 1
    found = replay.sample(CAPACITY, group_by="first", group_size=NUM_ROWS)["first"].reshape(-1, NUM_ROWS)
    assert (found == found[:, :1]).all()
    assert sorted(found[:, 0].tolist()) == list(range(2, 3 * FEW))


def test_extend_when_the_store_is_deleted_or_made_anew_then_nothing_goes_to_the_old_one(
    replay: Any, client: tdserve.Client
) -> None:
    client.delete(replay.name)
    with pytest.raises(tdserve.StoreNotFoundError):
        replay.extend(rows(FEW))
    anew = client.create_replay(replay.name, row(), CAPACITY)
    replay.extend(rows(OTHER))
    assert numbers_in(anew[:]) == held(OTHER)


def test_extend_when_the_batch_does_not_fit_then_refused_and_the_next_is_stored(replay: Any) -> None:
    with pytest.raises(tdserve.SpecMismatchError):
        replay.extend(TensorDict({"first": torch.zeros(2)}, [2]))
    with pytest.raises(tdserve.InvalidRequestError):
        replay.extend(rows(1), priority=-1.0)
    replay.extend(rows(FEW))
    assert numbers_in(replay[:]) == held(*range(FEW + 1))


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, BEHIND])
def test_extend_when_its_client_is_killed_in_the_middle_of_a_claim_then_nothing_of_it_is_seen(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, at: int
) -> None:
    replay: Any = client.create_replay(f"killed-{at}", row(), CAPACITY)
    with forked_clients.start("claim", server.address, replay.name, FEW, at=at) as writer:
        assert claimed(writer, FEW) == [list(range(each, each + NUM_ROWS)) for each in range(0, 5 * NUM_ROWS, NUM_ROWS)]
        writer.wait_killed()
    wait_for(lambda: replay.info()["reserved_rows"] == 0, "the proof that the writer is gone")
    assert numbers_in(replay[:]) == held(*range(1, FEW))
    taken = [each for _ in range(CAPACITY // NUM_ROWS) for each in replay.extend(rows(OTHER)).tolist()]
    assert sorted(taken) == list(range(CAPACITY)), "no row is lost for good"
    assert numbers_in(replay[:]) == [OTHER] * CAPACITY


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, BEHIND])
def test_extend_when_its_client_stands_still_in_a_claim_then_others_go_on_and_it_is_stored_once_later(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, other: tdserve.Client, at: int
) -> None:
    replay: Any = client.create_replay(f"stopped-{at}", row(), CAPACITY)
    with forked_clients.start("claim", server.address, replay.name, FEW, at=at, signal_number=signal.SIGSTOP) as writer:
        taken = range(5 * NUM_ROWS, 6 * NUM_ROWS)
        claimed(writer, FEW)
        writer.wait_stopped()
        assert replay.info()["reserved_rows"] == NUM_ROWS
        assert numbers_in(replay[:]) == held(*range(1, FEW))
        for table in (replay, other.replay(replay.name)):
            for _ in range(16):  # round the ring
                assert not set(table.extend(rows(OTHER)).tolist()) & set(taken)
            assert numbers_in(table[:]) == [OTHER] * (CAPACITY - NUM_ROWS)
            assert set(numbers_in(table.sample(50))) == {OTHER}
        writer.signal(signal.SIGCONT)
        assert writer.line() == " ".join(map(str, ("wrote", FEW, *taken)))
        assert sorted(numbers_in(replay[:])) == held(FEW) + [OTHER] * (CAPACITY - NUM_ROWS)
        assert replay.info()["reserved_rows"] == 0


@pytest.mark.slow
def test_extends_when_writers_and_server_are_killed_then_all_that_were_acknowledged_are_there(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        tables: list[Any] = [client.create_replay(name, row(), CAPACITY) for name in ("a", "b")]
        address = crashing.server.address
        with (
            forked_clients.start("claim", address, "a", 12) as writer,
            forked_clients.start("claim", address, "b", 12, at=1, signal_number=signal.SIGSTOP) as stopped,
        ):
            claimed(writer, 12)
            assert writer.line().startswith("wrote 12")
            claimed(stopped, 12)
            stopped.wait_stopped()
            crashing.kill()
            writer.kill()
            crashing.start()
            assert [numbers_in(each[:]) for each in tables] == [held(*range(1, 13)), held(*range(1, 12))]
            assert [each.info()["reserved_rows"] for each in tables] == [0, NUM_ROWS], "it may still fill its rows"
            stopped.kill()
        wait_for(lambda: tables[1].info()["reserved_rows"] == 0, "the proof that the stopped writer is gone")
        assert numbers_in(tables[1][:]) == held(*range(1, 12))


@pytest.mark.slow
def test_extend_when_its_writer_stands_still_over_a_restart_then_what_it_fills_later_is_stored_once(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        replay: Any = client.create_replay("r", row(), CAPACITY)
        with forked_clients.start(
            "claim", crashing.server.address, "r", FEW, at=1, signal_number=signal.SIGSTOP
        ) as writer:
            claimed(writer, FEW)
            writer.wait_stopped()
            crashing.restart()
            assert numbers_in(replay[:]) == held(*range(1, FEW))
            writer.signal(signal.SIGCONT)
            assert writer.line().startswith(f"wrote {FEW}")
            wait_for(lambda: replay.info()["reserved_rows"] == 0, "the end of the writer's first session")
            assert numbers_in(replay[:]) == held(*range(1, FEW + 1))


@pytest.mark.slow
def test_extends_when_the_server_is_killed_again_and_again_then_each_is_stored_once(tmp_path: Path) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="shm", timeout_s=60.0) as client:
        replay: Any = client.create_replay("r", row(), 20_000)
        writer = Writer(lambda number: replay.extend(rows(number, 1)))
        for _ in range(3):
            writer.goes_on()
            wait_for(lambda: is_claiming(client, replay.name), "claims")
            crashing.restart()
        writer.goes_on()
        stored = writer.end()
        assert sorted(numbers_in(replay[:])) == stored[-20_000:]


def find_local_connections() -> set[int]:
    """Descriptors of this process's connections to local sockets of servers."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if str(connection.getpeername()).endswith(f"/{SOCKET_NAME}"):
                found.add(fd)
    return found


def cut_connection(fd: int) -> None:
    """Shuts a connection down."""
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_extend_when_its_session_is_lost_before_it_was_reported_then_stored_once(
    client: tdserve.Client, other: tdserve.Client, foreign: set[int]
) -> None:
    replay: Any = client.create_replay("lost", row(), CAPACITY, limiter=tdserve.MinSize(CAPACITY))
    number = 0
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(other.replay("lost").sample, 1, timeout_s=60.0)  # so that the server is told of all
        wait_for(lambda: replay.info()["num_waiting"] == 1, "a sample that waits")
        for _ in range(2):
            while not is_claiming(client, replay.name):
                replay.extend(rows(number, 1))
                number += 1
            (own,) = find_local_connections() - foreign
            cut_connection(own)
            replay.extend(rows(number, 1))
            number += 1
        assert numbers_in(replay[:]) == list(range(number))
        while number < CAPACITY:
            replay.extend(rows(number, 1))
            number += 1
        waits.result(60.0)


@pytest.mark.slow
@pytest.mark.parametrize("num_extends", [FEW, 40], ids=["with room", "full"])
def test_sample_when_the_server_stands_still_then_rows_that_this_client_has_just_extended_are_drawn_as_later(
    tmp_path: Path, num_extends: int
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="shm", timeout_s=30.0) as client:
        replay: Any = client.create_replay("r", row(), CAPACITY)
        for number in range(num_extends):
            replay.extend(rows(number))
        assert is_claiming(client, "r")
        replay.sample(8)  # from the second on, the client draws
        os.kill(crashing.server.pid, signal.SIGSTOP)
        try:
            replay.extend(rows(num_extends))
            replay.extend(rows(num_extends + 1))
            early = replay.sample(20_000)
        finally:
            os.kill(crashing.server.pid, signal.SIGCONT)
        live = range(max(num_extends + 2 - CAPACITY // NUM_ROWS, 0), num_extends + 2)
        assert set(numbers_in(early)) == set(live)
        drawn = np.bincount(early["index"].numpy())
        assert chi_square.statistic(drawn) < chi_square.limit(len(live) * NUM_ROWS)
        replay.info()  # commits them
        generation = torch.zeros(len(drawn), dtype=torch.int64)
        generation[early["index"]] = early["generation"]
        late = replay.sample(2000)
        assert (generation[late["index"]] == late["generation"]).all()
