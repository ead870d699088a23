"""A local writer that is killed, or stands still, between the grant of its rows and their commit harms nobody."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tdserve
from tests.integration.crashing import Crashing
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import NUM_ROWS, numbers_in, row, rows
from tests.integration.self_signals import BEHIND
from tests.processes import wait_for

pytestmark = pytest.mark.integration

BEFORE, LOST, AFTER = 1, 2, 3
"""The content before the fault, the content of the client that had the fault, and what another client wrote later."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("writers"), port=0) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, BEHIND])
def test_extend_when_its_client_is_killed_in_the_middle_then_nothing_is_seen_and_its_rows_are_free(
    forked_clients: ForkedClients, server: tdserve.Server, at: int
) -> None:
    with server.client(transport="shm") as client:
        replay = client.create_replay(f"killed-{at}", row(), 2 * NUM_ROWS)
        replay.extend(rows(BEFORE))
        with forked_clients.start("write", server.address, "extend", replay.name, LOST, at=at) as writer:
            assert writer.line() == "connected shm"
            writer.wait_killed()
        wait_for(lambda: replay.info()["reserved_rows"] == 0, "the proof that the writer is gone")
        assert numbers_in(replay[:]) == [BEFORE] * NUM_ROWS
        assert replay.extend(rows(AFTER)).tolist() == list(range(NUM_ROWS, 2 * NUM_ROWS))
        assert numbers_in(replay[:]) == [BEFORE] * NUM_ROWS + [AFTER] * NUM_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, BEHIND])
def test_extend_when_its_client_stands_still_in_the_middle_then_others_go_on_and_it_is_stored_once_later(
    forked_clients: ForkedClients, server: tdserve.Server, at: int
) -> None:
    with server.client(transport="shm") as client, server.client(transport="gloo") as other:
        replay = client.create_replay(f"stopped-{at}", row(), 3 * NUM_ROWS)
        replay.extend(rows(BEFORE))
        with forked_clients.start(
            "write", server.address, "extend", replay.name, LOST, at=at, signal_number=signal.SIGSTOP
        ) as writer:
            writer.wait_stopped()
            assert replay.info()["reserved_rows"] == NUM_ROWS
            assert numbers_in(replay[:]) == [BEFORE] * NUM_ROWS
            taken = range(NUM_ROWS, 2 * NUM_ROWS)
            for table in (replay, other.replay(replay.name)):
                for _ in range(3):  # round the ring
                    assert not set(table.extend(rows(AFTER)).tolist()) & set(taken)
                assert numbers_in(table[:]) == [AFTER] * 2 * NUM_ROWS
                assert set(numbers_in(table.sample(50))) == {AFTER}
            writer.signal(signal.SIGCONT)
            assert writer.line() == "connected shm"
            assert writer.line() == f"done {list(taken)}"
        assert sorted(numbers_in(replay[:])) == [LOST] * NUM_ROWS + [AFTER] * 2 * NUM_ROWS
        assert replay.info()["reserved_rows"] == 0


@pytest.mark.slow
def test_extend_when_its_session_ends_while_it_stands_still_then_its_rows_wait_for_it(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="shm", timeout_s=60.0) as client:
        replay = client.create_replay("r", row(), 3 * NUM_ROWS)
        replay.extend(rows(BEFORE))
        with (
            forked_clients.start(
                "write", crashing.server.address, "extend", "r", LOST, at=1, signal_number=signal.SIGSTOP
            ) as writer,
            forked_clients.start(
                "write", crashing.server.address, "extend", "r", LOST, at=1, signal_number=signal.SIGSTOP
            ) as killed,
        ):
            writer.wait_stopped()
            killed.wait_stopped()
            crashing.restart()
            assert replay.info()["reserved_rows"] == 2 * NUM_ROWS
            assert numbers_in(replay[:]) == [BEFORE] * NUM_ROWS
            for number in (AFTER, AFTER + 1):
                assert replay.extend(rows(number)).tolist() == list(range(NUM_ROWS))
                assert numbers_in(replay[:]) == [number] * NUM_ROWS
            killed.signal(signal.SIGKILL)
            wait_for(lambda: replay.info()["reserved_rows"] == NUM_ROWS, "the proof that one is gone")
            free = replay.extend(rows(AFTER, 2 * NUM_ROWS)).tolist()
            assert numbers_in(replay[:]) == [AFTER] * 2 * NUM_ROWS
            writer.signal(signal.SIGCONT)
            assert writer.line() == "connected shm"
            assert writer.line().startswith("done")  # again, over another session
        wait_for(lambda: replay.info()["reserved_rows"] == 0, "the end of the writer's first session")
        found = numbers_in(replay[:])
        assert found.count(LOST) == NUM_ROWS
        assert len(set(free)) == 2 * NUM_ROWS
        replay.extend(rows(AFTER, 3 * NUM_ROWS))
        assert numbers_in(replay[:]) == [AFTER] * 3 * NUM_ROWS
