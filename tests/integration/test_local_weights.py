"""Versions that local clients map and publish: nothing changes under a reader, and nobody sees half a version."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import NUM_ROWS, numbers_in, rows
from tests.integration.self_signals import BEHIND
from tests.processes import wait_for

pytestmark = pytest.mark.integration

BEFORE, LOST, AFTER = 1, 2, 3

KEEP = 2
"""Versions that stay readable by default."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("weights"), port=0) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport="shm", timeout_s=20.0) as made:
        yield made


def files_of(server: tdserve.Server, name: str) -> list[str]:
    """Names of the files of a store's versions."""
    folder = Path(server.config.root) / "stores" / name / "versions"
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".json")


def check_newest(client: tdserve.Client, name: str, version: int, number: int) -> None:
    """The newest version: copied, mapped, and copied into existing tensors."""
    into = rows(0)
    for found in (client.latest(name), client.latest(name, copy=False), client.latest(name, out=into)):
        assert found is not None
        assert found.version == version
        assert numbers_in(found.data) == [number] * NUM_ROWS
    assert numbers_in(into) == [number] * NUM_ROWS


@pytest.mark.slow
def test_latest_when_mapped_then_it_stays_as_it_is_however_many_are_published_after_it(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    with server.client(transport="gloo") as other:
        for number in range(1, 4):
            client.publish("mapped", rows(number))
        first, second = client.latest("mapped", copy=False), client.latest("mapped", copy=False)
        assert first is not None
        assert second is not None
        kept = first.data["body"]
        del first
        gc.collect()
        for number in range(4, 4 + KEEP + 5):
            (client if number % 2 else other).publish("mapped", rows(number))
            check_newest(client, "mapped", number, number)
            check_newest(other, "mapped", number, number)
            assert numbers_in(second.data) == [3] * NUM_ROWS
            assert bool((kept == 3).all())
        second.data["body"][0] = -1.0  # its own copy of the page
        assert bool((kept == 3).all())
        del second, kept
        gc.collect()
        for number in range(4 + KEEP + 5, 4 + 2 * KEEP + 10):
            client.publish("mapped", rows(number))
        check_newest(other, "mapped", number, number)
    assert len(files_of(server, "mapped")) <= 2 * KEEP + 1, files_of(server, "mapped")


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 2, BEHIND])
def test_publish_when_its_client_is_killed_in_the_middle_then_the_version_before_stays(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, at: int
) -> None:
    name = f"killed-{at}"
    for _ in range(KEEP + 3):  # the killed one fills a file that was a version before
        version = client.publish(name, rows(BEFORE))
    with forked_clients.start("write", server.address, "publish", name, LOST, at=at) as publisher:
        assert publisher.line() == "connected shm"
        publisher.wait_killed()
    check_newest(client, name, version, BEFORE)
    wait_for(lambda: client.stats()["num_sessions"] == 1, "the end of the publisher's session")
    wait_for(lambda: not any(file.endswith(".part") for file in files_of(server, name)), "the end of its file")
    for _ in range(KEEP + 3):
        newest = client.publish(name, rows(AFTER))
        assert newest > version
        check_newest(client, name, newest, AFTER)
    with forked_clients.start("write", server.address, "publish", f"new-{at}", LOST, at=at) as publisher:
        assert publisher.line() == "connected shm"
        publisher.wait_killed()
    assert client.latest(f"new-{at}", newer_than=0, timeout_s=0) is None
    assert f"new-{at}" not in client
    folder = Path(server.config.root) / "stores" / f"new-{at}"
    wait_for(lambda: not folder.exists(), "the end of what was to become the first version")
    assert client.publish(f"new-{at}", rows(AFTER)) == 1
    check_newest(client, f"new-{at}", 1, AFTER)


def test_publish_when_the_first_client_stands_still_then_another_shows_the_store_and_neither_is_lost(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client
) -> None:
    stop = {"at": 1, "signal_number": int(signal.SIGSTOP)}
    with forked_clients.start("write", server.address, "publish", "first", LOST, **stop) as publisher:
        publisher.wait_stopped()
        assert "first" not in client
        assert client.publish("first", rows(AFTER)) == 1
        check_newest(client, "first", 1, AFTER)
        publisher.signal(signal.SIGCONT)
        assert publisher.line() == "connected shm"
        assert publisher.line() == "done 2"  # whole later, and so newer
    assert [each.version for each in client.versions("first")] == [1, 2]
    check_newest(client, "first", 2, LOST)


def test_publish_when_its_client_stands_still_in_the_middle_then_others_go_on(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client
) -> None:
    assert client.publish("still", rows(BEFORE)) == 1
    stop = {"at": 1, "signal_number": int(signal.SIGSTOP)}
    with forked_clients.start("write", server.address, "publish", "still", LOST, **stop) as publisher:
        publisher.wait_stopped()
        check_newest(client, "still", 1, BEFORE)
        for version in range(2, 2 + KEEP + 3):
            assert client.publish("still", rows(version)) == version
            check_newest(client, "still", version, version)
        publisher.signal(signal.SIGCONT)
        assert publisher.line() == "connected shm"
        assert publisher.line() == f"done {version + 1}"  # whole later, and so newer
    check_newest(client, "still", version + 1, LOST)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, True])
def test_publish_when_the_server_is_killed_while_its_client_stands_still_then_no_others_version_is_touched(
    forked_clients: ForkedClients, tmp_path: Path, is_first: bool
) -> None:
    stop = {"at": 1, "signal_number": int(signal.SIGSTOP)}
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        address = crashing.server.address
        if not is_first:
            assert client.publish("w", rows(BEFORE)) == 1
        with forked_clients.start("write", address, "publish", "w", LOST, **stop) as first:
            first.wait_stopped()
            crashing.restart()
            if is_first:
                assert "w" not in client
            else:
                check_newest(client, "w", 1, BEFORE)
            with forked_clients.start("write", address, "publish", "w", AFTER, **stop) as second:
                second.wait_stopped()
                first.signal(signal.SIGCONT)
                assert first.line() == "connected shm"
                done = first.line()
                assert done.startswith("done"), done  # again, over another session
                check_newest(client, "w", int(done.split()[1]), LOST)
                second.signal(signal.SIGCONT)
                assert second.line() == "connected shm"
                done_too = second.line()
                assert done_too.startswith("done"), done_too
        versions = {int(done.split()[1]): LOST, int(done_too.split()[1]): AFTER}
        assert len(versions) == 2
        check_newest(client, "w", max(versions), versions[max(versions)])


@pytest.mark.slow
def test_latest_when_ten_processes_map_a_version_then_the_memory_is_there_once(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client
) -> None:
    nbytes, num_readers = 64 << 20, 10
    parts = {f"layer{number}": torch.full((nbytes // 64,), number, dtype=torch.float32) for number in range(16)}
    client.publish("large", TensorDict(parts, []))
    readers = [forked_clients.start("map_version", server.address, "large") for _ in range(num_readers)]
    for reader in readers:
        assert reader.line() == "sum " + " ".join(str(number * nbytes // 64) for number in range(16))
    shares = []
    for reader in readers:
        reader.signal(signal.SIGUSR1)
        shares.append(int(reader.line().split()[1]))
    for reader in readers:
        reader.kill()
    assert max(shares) > 0
    assert sum(shares) < 1.2 * nbytes
