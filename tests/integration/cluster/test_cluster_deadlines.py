"""Calls of a client of several servers keep their deadlines while some or all of these stand still, or are gone."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tdserve
from tests.integration.cluster.losing import connecting, join_addresses
from tests.integration.cluster.timed_cluster_calls import (
    KEYS,
    NOT_TRIED,
    NUM_SERVERS,
    ROW,
    ROWS,
    SharedStores,
    create_shared_stores,
    list_methods,
    make_calls,
    open_shared_stores,
)
from tests.integration.crashing import Crashing
from tests.integration.ending_in_time import LIMIT_S, check_all_end_in_time, stopped, timed
from tests.processes import wait_for

pytestmark = pytest.mark.integration

GIVEN_BACK_S = 4.0
"""Limit for the end of a lease by a client with a short timeout: with a long one it takes 5.4 s."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Crashing]]:
    """Two servers that can be stopped, killed and started again."""
    with ExitStack() as stack:
        yield [stack.enter_context(Crashing(tmp_path_factory.mktemp(f"root{number}"))) for number in range(NUM_SERVERS)]


@pytest.fixture(scope="module")
def stores(pair: list[Crashing]) -> SharedStores:
    """Stores on both."""
    with connecting(pair) as client:
        return create_shared_stores(client)


def is_whole(client: tdserve.ClusterClient, stores: SharedStores) -> bool:
    """Returns whether everything can be read again."""
    with suppress(tdserve.TDServeError):
        rows = [client.from_remote_init(name, timeout_s=1.0) for name in stores.plain]
        return len(rows) == NUM_SERVERS and len(stores.dataset.get("x", timeout_s=1.0)) == len(ROWS)
    return False


def test_methods_with_a_timeout_when_listed_then_each_has_a_case(
    pair: list[Crashing], stores: SharedStores, tmp_path: Path
) -> None:
    with connecting(pair) as client:
        tried = {name.split(" ")[0] for name in make_calls(client, stores, 0.0, tmp_path)}
    assert set(list_methods()) - tried - set(NOT_TRIED) == set()


@pytest.mark.slow
@pytest.mark.parametrize("still", [(0,), (0, 1)], ids=["one", "all"])
@pytest.mark.parametrize("is_used", [True, False], ids=["used", "unused"])
def test_calls_when_servers_stand_still_then_they_end_in_time_and_later_ones_succeed(
    pair: list[Crashing], stores: SharedStores, tmp_path: Path, still: tuple[int, ...], *, is_used: bool
) -> None:
    with connecting(pair) as client, ExitStack() as stack:
        client.checkpoint(str(tmp_path / "checkpoint"))
        handles, caller = open_shared_stores(client, stores), client
        if not is_used:
            handles = SharedStores(*(pickle.loads(pickle.dumps(each)) for each in handles))
            caller = stack.enter_context(pickle.loads(pickle.dumps(client)))
        for timeout_s in (0.0, 0.3):
            with ExitStack() as standing:
                for server in still:
                    standing.enter_context(stopped(pair[server].server))
                check_all_end_in_time(make_calls(caller, handles, timeout_s, tmp_path))
            wait_for(lambda: is_whole(client, handles), "reads after the servers have gone on")


@pytest.mark.slow
def test_calls_when_a_server_stops_amid_them_then_they_end_in_time_and_later_ones_succeed(
    pair: list[Crashing], stores: SharedStores, tmp_path: Path
) -> None:
    with connecting(pair) as client:
        client.checkpoint(str(tmp_path / "checkpoint"))
        for server in range(NUM_SERVERS):
            handles = open_shared_stores(client, stores)
            check_all_end_in_time(make_calls(client, handles, 0.3, tmp_path), stopped(pair[server].server))
            wait_for(lambda: is_whole(client, handles), "reads after the server has gone on")  # noqa: B023 (ends here)


@pytest.mark.slow
def test_calls_when_a_server_is_gone_then_they_end_in_time(
    pair: list[Crashing], stores: SharedStores, tmp_path: Path
) -> None:
    with connecting(pair) as client:
        handles = open_shared_stores(client, stores)
        pair[0].kill()
        try:
            check_all_end_in_time(make_calls(client, handles, 0.0, tmp_path))
            check_all_end_in_time(make_calls(client, handles, 0.3, tmp_path))
        finally:
            pair[0].start()


@pytest.mark.slow
def test_calls_when_many_wait_for_a_server_that_stands_still_then_those_to_another_go_on(
    pair: list[Crashing], stores: SharedStores
) -> None:
    with connecting(pair) as client:
        handles: Any = open_shared_stores(client, stores)
        with stopped(pair[0].server):
            waiting = [
                client.run_later(lambda: handles.entries.put(KEYS, [ROW] * NUM_SERVERS, timeout_s=LIMIT_S))
                for _ in range(4)
            ]
            assert timed(lambda: handles.replay.sample(8, timeout_s=LIMIT_S / 2)) < LIMIT_S
            assert len(handles.replay.sample(8, timeout_s=LIMIT_S / 2)) == 8
            for future in waiting:
                with pytest.raises(tdserve.TDServeError):
                    future.result(2 * LIMIT_S)


def test_batches_of_a_dataset_when_given_pad_numpy_and_a_timeout_then_as_of_one_server(
    pair: list[Crashing], stores: SharedStores
) -> None:
    with connecting(pair) as client:
        dataset: Any = client["dataset"]
        with dataset.batches(25, pad=0, numpy=True, timeout_s=20.0, with_index=True) as batches:
            keys = [batch["key"].tolist() for batch in batches]
        assert keys == [list(range(25)), list(range(25, 40))]
    with tdserve.connect(client.address, transport="gloo", numpy=True) as arrays:
        found: Any = arrays["dataset"]
        with stopped(pair[found.placement.servers[1]].server), found.batches(40, timeout_s=0.3) as batches:
            begun_s = time.monotonic()
            with pytest.raises(tdserve.TDServeError):
                next(batches)
            assert time.monotonic() - begun_s < LIMIT_S
        assert found[3:30]["key"].tolist() == list(range(3, 30))
        assert found.get("key").tolist() == list(range(40))


def test_rows_of_a_shared_table_when_a_leaf_is_written_then_read_back(pair: list[Crashing]) -> None:
    with connecting(pair) as client:
        table: Any = client.create_replay("read-back", ROWS[0], 400, shards="all")  # a writer has one shard
        wanted = torch.cat([table.extend(ROWS[:1], writer=writer) for writer in range(16)])
        assert len({int(row) // table.part_capacity for row in wanted}) == NUM_SERVERS
        table.set_at_("x", torch.full((16, 3), 7.0), wanted)
        assert table[wanted]["x"].tolist() == [[7.0] * 3] * 16


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_end_of_a_lease_when_servers_stand_still_then_no_later_than_the_clients_timeout(
    pair: list[Crashing], transport: Any
) -> None:
    with tdserve.connect(join_addresses(pair), transport=transport) as client:
        queue: Any = client.create_queue(f"given-back-{transport}", ROWS[0], 400, shards="all")
        for writer in range(16):
            queue.extend(ROWS[:2], writer=writer)
        block, batches = queue.take(16), queue.batches(16)
        block.__enter__()
        next(batches)
        client.timeout_s = 0.3
        with ExitStack() as standing:
            for each in pair:
                standing.enter_context(stopped(each.server))
            assert timed(lambda: block.__exit__(OSError, OSError(), None)) < GIVEN_BACK_S
            assert timed(batches.close) < GIVEN_BACK_S
