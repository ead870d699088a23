"""Keyed stores whose server, workers and clients are killed: entries are whole or absent, and each change is made
once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tdserve
from tests.integration.crashing import Crashing, Writer
from tests.integration.forked_clients import ForkedClients
from tests.processes import ready_worker, wait_for

pytestmark = pytest.mark.integration

KEYS = [f"key/{number}" for number in range(8)]

NUM_COUNTS = 40
"""Counts of each client."""

NUM_ENTRIES = 60


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """One server for all tests of this file; each test uses stores of its own."""
    with Crashing(tmp_path_factory.mktemp("keyed")) as made:
        yield made


@pytest.fixture(params=["gloo", "shm"])
def client(request: pytest.FixtureRequest, crashing: Crashing) -> Iterator[tdserve.Client]:
    """A client over each transport."""
    with crashing.server.client(transport=request.param, timeout_s=60.0) as made:
        yield made


def kill_worker(crashing: Crashing) -> None:
    """Kills the worker that stores entries."""
    with crashing.server.client(transport="shm", timeout_s=60.0) as client:
        os.kill(ready_worker(client)["pid"], signal.SIGKILL)


STRIKES: dict[str, Callable[[Crashing], None]] = {"control": Crashing.restart, "worker": kill_worker}


@pytest.mark.slow
@pytest.mark.parametrize("struck", STRIKES)
def test_puts_when_the_server_is_killed_again_and_again_then_whole_in_order_and_none_is_lost(
    crashing: Crashing, client: tdserve.Client, struck: str
) -> None:
    kv = client.create_kv(f"puts-{struck}-{client.transport}", like=torch.zeros(100, dtype=torch.int64))
    versions: list[int] = []

    def put(number: int) -> None:
        versions.extend(kv.put(KEYS, torch.full((len(KEYS), 100), number)))

    writer = Writer(put)
    for _ in range(2):
        writer.goes_on()
        STRIKES[struck](crashing)
        acknowledged = writer.acknowledged[-1]
        with crashing.server.client(transport="shm", timeout_s=60.0) as other:
            found = other.kv(kv.name).get(KEYS).unique().tolist()
        assert len(found) == 1, "a mixture"
        assert found[0] >= acknowledged, "what was acknowledged is lost"
    writer.goes_on()
    last = writer.end()[-1]
    assert kv.get(KEYS).unique().tolist() == [last]
    assert versions == sorted(set(versions))
    assert kv.versions(KEYS) == versions[-len(KEYS) :]


@pytest.mark.slow
@pytest.mark.parametrize("struck", STRIKES)
def test_counts_when_clients_compete_and_the_server_is_killed_then_each_counts_once(
    crashing: Crashing, client: tdserve.Client, struck: str
) -> None:
    kv = client.create_kv(f"counts-{struck}-{client.transport}")
    kv.put("count", 0)

    def count(transport: Any) -> int:
        num_counted = 0
        with crashing.server.client(transport=transport, timeout_s=60.0) as own:
            handle = own.kv(kv.name)
            while num_counted < NUM_COUNTS:
                value, version = handle.get_with_versions("count")
                try:
                    handle.put("count", value + 1, if_version=version)
                except tdserve.VersionConflictError:
                    continue
                num_counted += 1
        return num_counted

    with ThreadPoolExecutor(3) as pool:
        counting = [pool.submit(count, transport) for transport in ("gloo", "shm", "gloo")]
        for floor in (10, 40):
            wait_for(lambda floor=floor: kv["count"] >= floor, "counts", timeout_s=60.0)  # type: ignore[misc]
            STRIKES[struck](crashing)
        assert sum(each.result(120.0) for each in counting) == 3 * NUM_COUNTS
    assert kv["count"] == 3 * NUM_COUNTS


@pytest.mark.slow
@pytest.mark.parametrize("struck", STRIKES)
def test_pops_when_the_server_is_killed_then_each_entry_goes_to_one(
    crashing: Crashing, client: tdserve.Client, struck: str
) -> None:
    kv = client.create_kv(f"pops-{struck}-{client.transport}")
    kv.put([str(number) for number in range(NUM_ENTRIES)], list(range(NUM_ENTRIES)))

    def take(transport: Any) -> list[int]:
        found = []
        with crashing.server.client(transport=transport, timeout_s=60.0) as own:
            handle = own.kv(kv.name)
            while keys := handle.keys():
                try:
                    found.append(handle.pop(keys[len(keys) // 2]))
                except tdserve.KeyNotFoundError:
                    continue
        return found

    with ThreadPoolExecutor(2) as pool:
        taking = [pool.submit(take, transport) for transport in ("gloo", "shm")]
        wait_for(lambda: len(kv) < NUM_ENTRIES - 10, "pops", timeout_s=60.0)
        STRIKES[struck](crashing)
        taken = [number for each in taking for number in each.result(120.0)]
    assert sorted(taken) == list(range(NUM_ENTRIES))


@pytest.mark.parametrize(("default_s", "timeout_s"), [(0.5, 0), (0.5, None), (60.0, 0.5)])
def test_pop_when_the_deletion_is_not_answered_in_time_then_the_error_has_the_values(
    crashing: Crashing, default_s: float, timeout_s: float | None
) -> None:
    with crashing.server.client(transport="shm", timeout_s=60.0) as client:
        kv = client.create_kv(f"unanswered-{default_s}-{timeout_s}")
        kv.put(["a", "b"], [1, 2])
        assert kv["a"] == 1  # so that the next read needs no server
        pids = [crashing.server.pid, *(worker["pid"] for worker in client.stats()["workers"])]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        client.timeout_s = default_s
        try:
            with pytest.raises(tdserve.UnansweredPopError, match=r"unanswered.* within 0\.5 s") as raised:
                kv.pop(["a", "b"], timeout_s=timeout_s)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert raised.value.values == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("num_puts", [1, 5])
def test_puts_when_the_client_is_killed_then_whole_and_others_go_on(
    crashing: Crashing, client: tdserve.Client, forked_clients: ForkedClients, num_puts: int
) -> None:
    kv = client.create_kv(f"killed-{num_puts}-{client.transport}", like=torch.zeros(20_000, dtype=torch.int64))
    with forked_clients.start(
        "put_entries", crashing.server.address, kv.name, KEYS, transport=client.transport
    ) as process:
        last = [int(process.line()) for _ in range(num_puts)][-1]
        process.kill()
    found = kv.get(KEYS).unique().tolist()
    assert len(found) == 1, "a mixture"
    assert found[0] >= last
    kv.put(KEYS, torch.zeros(len(KEYS), 20_000, dtype=torch.int64))
    assert kv.get(KEYS).unique().tolist() == [0]


@pytest.mark.slow
def test_entries_when_the_server_is_stopped_and_started_then_all_there(
    crashing: Crashing, client: tdserve.Client
) -> None:
    name = f"stopped-{client.transport}"
    kv = client.create_kv(name, max_bytes=1_000_000, eviction="lru", ttl_s=3600.0)
    version = kv.put("a", {"b": 1})
    crashing.server.shutdown()
    crashing.start()
    assert kv.get_with_versions("a") == ({"b": 1}, version)
    assert kv.put("a", 2, if_version=version) > version
    assert (len(kv), kv.keys()) == (1, ["a"])
