"""A client or data worker that is killed or stopped in the middle of a transfer disturbs no other client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tdserve
from tests.integration.forked_clients import ForkedClients
from tests.integration.programs import NUM_ROWS, numbers_in, row, rows
from tests.processes import START_TIMEOUT_S, num_fds, num_threads, wait_for

pytestmark = pytest.mark.integration

BEFORE, LOST, AFTER = 1, 2, 3
"""The content before the fault, the content that the dying client wrote, and the content that another client wrote
later."""

WRITES = ("extend", "send", "publish", "init_remote")
READS = ("sample", "from_remote_init", "latest")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server with several data workers, so that a dead worker's clients go on at once. A stopped client is given up
    after 4 s."""
    settings: dict[str, Any] = {"num_workers": 3, "transfer_timeout_s": 4.0}
    with tdserve.Server(tmp_path_factory.mktemp("faults"), port=0, **settings) as started:
        pid = started.pid
        yield started
        assert started.is_alive
        assert started.pid == pid


@pytest.fixture(scope="module")
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that survives every test; all workers are ready."""
    with server.client(transport="gloo", timeout_s=60.0) as connected:
        wait_for_workers(connected)
        yield connected


def wait_for_workers(client: tdserve.Client) -> None:
    """Waits until all data workers are ready."""
    wait_for(
        lambda: all(worker["is_ready"] for worker in client.stats()["workers"]),
        "the start of all data workers",
        timeout_s=START_TIMEOUT_S,
    )


def prepare(client: tdserve.Client, kind: str, name: str) -> None:
    """Creates the store for a write of this kind, with its first content."""
    if kind in ("extend", "sample"):
        client.create_replay(name, like=row(), capacity=3 * NUM_ROWS).extend(rows(BEFORE))
    elif kind in ("publish", "latest"):
        client.publish(name, rows(BEFORE))
    elif kind != "init_remote":
        client.init_remote(rows(BEFORE), name)


def found_in(client: tdserve.Client, kind: str, name: str) -> set[int]:
    """Returns the numbers in a store, none if it does not exist. Fails if a row is torn."""
    if name not in client:
        return set()
    if kind == "extend":
        return set(numbers_in(client.replay(name)[:]))
    if kind == "publish":
        weights = client.latest(name)
        assert weights is not None
        return set(numbers_in(weights.data))
    return set(numbers_in(client.from_remote_init(name)))


def write_again(client: tdserve.Client, kind: str, name: str) -> Any:
    """Makes the same kind of write by a living client."""
    if kind == "extend":
        return client.replay(name).extend(rows(AFTER))
    if kind == "publish":
        return client.publish(name, rows(AFTER))
    return getattr(client, kind)(rows(AFTER), name)


def restarts(client: tdserve.Client) -> int:
    """Returns how often a data worker of the server has died."""
    return sum(worker["num_restarts"] for worker in client.stats()["workers"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
def test_write_when_its_client_is_killed_in_the_middle_then_nothing_of_it_is_seen(
    server: tdserve.Server, client: tdserve.Client, forked_clients: ForkedClients, kind: str
) -> None:
    name = f"killed-{kind}"
    prepare(client, kind, name)
    died_before = restarts(client)
    with forked_clients.start("move", server.address, kind, name, LOST, at=3) as writer:
        assert writer.line() == "connected"
        writer.wait_killed()
    wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of the killed client's session")
    assert found_in(client, kind, name) == (set() if kind == "init_remote" else {BEFORE})
    again = write_again(client, kind, name)
    if kind == "extend":  # the rows that the dead client had begun to fill
        assert again.tolist() == list(range(NUM_ROWS, 2 * NUM_ROWS))
        assert client.replay(name).info()["reserved_rows"] == 0
    assert found_in(client, kind, name) == ({BEFORE, AFTER} if kind == "extend" else {AFTER})
    assert restarts(client) == died_before


def test_publish_when_its_client_is_killed_in_the_middle_of_the_first_then_not_even_the_name_is_left(
    server: tdserve.Server, client: tdserve.Client, forked_clients: ForkedClients
) -> None:
    with forked_clients.start("move", server.address, "publish", "new", LOST, at=3) as writer:
        assert writer.line() == "connected"
        writer.wait_killed()
    wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of the killed client's session")
    assert "new" not in client
    assert not (Path(server.config.root) / "stores" / "new").exists()
    assert client.publish("new", rows(AFTER)) == 1


@pytest.mark.slow
def test_writes_when_their_clients_stand_still_in_the_middle_then_others_go_on_and_they_are_stored_once(
    server: tdserve.Server, client: tdserve.Client, forked_clients: ForkedClients
) -> None:
    stop = {"at": 3, "signal_number": int(signal.SIGSTOP)}
    with ExitStack() as running:
        writers = {}
        for kind in WRITES:
            prepare(client, kind, f"stopped-{kind}")
            writer = forked_clients.start("move", server.address, kind, f"stopped-{kind}", LOST, **stop)
            writers[kind] = running.enter_context(writer)
        for kind, writer in writers.items():
            writer.wait_stopped()
            assert found_in(client, kind, f"stopped-{kind}") == (set() if kind == "init_remote" else {BEFORE})
        wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of the stopped clients' sessions")
        for kind in WRITES:
            if kind != "init_remote":
                write_again(client, kind, f"stopped-{kind}")
        for writer in writers.values():
            writer.signal(signal.SIGCONT)
        for writer in writers.values():
            assert writer.line() == "connected"
            said = writer.line()
            assert said.split()[0] == "done", said
    found = numbers_in(client.replay("stopped-extend")[:])
    assert {number: found.count(number) for number in found} == dict.fromkeys((BEFORE, LOST, AFTER), NUM_ROWS)
    for kind in WRITES[1:]:
        assert found_in(client, kind, f"stopped-{kind}") == {LOST}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
def test_write_when_its_data_worker_is_killed_in_the_middle_then_its_retry_stores_it_once(
    server: tdserve.Server, client: tdserve.Client, forked_clients: ForkedClients, kind: str
) -> None:
    name = f"worker-{kind}"
    prepare(client, kind, name)
    wait_for_spare_worker(client)
    with forked_clients.start("move", server.address, kind, name, LOST, at=3, at_worker=True) as writer:
        assert writer.line() == "connected"
        said = writer.line()
        assert said.split()[0] == "done", said
    if kind == "extend":
        assert numbers_in(client.replay(name)[:]) == [BEFORE] * NUM_ROWS + [LOST] * NUM_ROWS
    else:
        assert found_in(client, kind, name) == {LOST}


@pytest.mark.slow
@pytest.mark.parametrize("kind", READS)
def test_read_when_its_data_worker_is_killed_in_the_middle_then_its_retry_brings_it(
    server: tdserve.Server, client: tdserve.Client, forked_clients: ForkedClients, kind: str
) -> None:
    name = f"worker-{kind}"
    prepare(client, kind, name)
    wait_for_spare_worker(client)
    with forked_clients.start("move", server.address, kind, name, at=3, at_worker=True) as reader:
        assert reader.line() == "connected"
        assert reader.line() == f"done [{BEFORE}]"


def wait_for_spare_worker(client: tdserve.Client) -> None:
    """Waits until a data worker has no session: the next client gets one of those."""
    mine = client.stats()["session"]

    def look() -> bool:
        stats = client.stats()
        taken = {session["worker"] for session in stats["sessions"]}
        is_alone = [session["session"] for session in stats["sessions"]] == [mine]
        return is_alone and any(worker["is_ready"] and worker["worker"] not in taken for worker in stats["workers"])

    wait_for(look, "a data worker without clients", timeout_s=START_TIMEOUT_S)


@pytest.mark.slow
def test_calls_when_all_data_workers_die_then_they_wait_for_the_next_ones(client: tdserve.Client) -> None:
    prepare(client, "extend", "all-die")
    wait_for_workers(client)
    for worker in client.stats()["workers"]:
        os.kill(worker["pid"], signal.SIGKILL)
    assert client.replay("all-die").extend(rows(AFTER)).tolist() == list(range(NUM_ROWS, 2 * NUM_ROWS))
    assert found_in(client, "extend", "all-die") == {BEFORE, AFTER}


@pytest.mark.slow
def test_clients_when_some_are_killed_or_stopped_while_streaming_then_the_others_finish(
    server: tdserve.Server, client: tdserve.Client, forked_clients: ForkedClients
) -> None:
    replay = client.create_replay("streams", like=row(), capacity=512)
    num_writes = 12
    programs = []
    for writer in range(1, 9):
        fate = {}
        if writer <= 3:
            fate = {"at": 3 * writer}
        elif writer == 4:
            fate = {"at": 5, "signal_number": int(signal.SIGSTOP)}
        programs.append(forked_clients.start("stream", server.address, "streams", writer, num_writes, **fate))
    try:
        said = {writer: programs[writer - 1].rest() for writer in (1, 2, 3, 5, 6, 7, 8)}
        programs[3].wait_stopped()
        wait_for(lambda: replay.info()["reserved_rows"] == 0, "the end of every unfinished write")
        found = numbers_in(replay[:])
    finally:
        for program in programs:
            program.__exit__(None, None, None)
    stored = [int(line.split()[1]) for lines in said.values() for line in lines if line.startswith("stored")]
    assert [lines[-1] for writer, lines in said.items() if writer > 4] == ["end"] * 4
    assert len(stored) >= 4 * num_writes
    counts = {number: found.count(number) for number in found}
    assert set(counts.values()) == {2}, "every write is there once, with both its rows"
    assert set(stored) <= counts.keys()
    unsaid = {number // 1000 for number in counts.keys() - set(stored)}
    assert unsaid <= {1, 2, 3, 4}, "only who was killed or stopped may not have heard of its last write"


@pytest.mark.full
def test_clients_when_fifty_come_and_go_then_nothing_of_them_stays(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    client.create_replay("guests", like=row(), capacity=64)
    wait_for_workers(client)
    pids = [server.pid, *(worker["pid"] for worker in client.stats()["workers"])]

    def visit() -> None:
        with server.client(transport="gloo") as guest:
            guest.replay("guests").extend(rows(BEFORE, 1))
            guest.replay("guests").sample(1)

    def used() -> list[tuple[int, int]]:
        wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of every session but one")
        return [(num_fds(pid), num_threads(pid)) for pid in pids]

    for _ in range(4):
        visit()
    at_first = used()
    for _ in range(50):
        visit()

    def is_as_before() -> bool:
        return all(now[0] <= then[0] + 2 and now[1] <= then[1] + 2 for now, then in zip(used(), at_first, strict=True))

    wait_for(is_as_before, f"the return to {at_first} descriptors and threads")
