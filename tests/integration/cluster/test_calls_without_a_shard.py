"""Calls that need a shard whose server is away: they end in time, and their errors have what was done elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tdserve.base.errors import ConnectError
from tdserve.rules.placement import hash_to_shard
from tests.integration.cluster.losing import connecting
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Crashing

pytestmark = pytest.mark.integration


@contextmanager
def without(crashing: list[Crashing], server: int) -> Iterator[None]:
    """A block during which a server is away."""
    crashing[server].kill()
    try:
        yield
    finally:
        crashing[server].start()


def measure_failure_s(call: Callable[[], object]) -> float:
    """Returns after how many seconds a call has not reached its shard."""
    begun_s = time.monotonic()
    with pytest.raises(ConnectError):
        call()
    return time.monotonic() - begun_s


def test_keyed_store_when_the_server_of_a_key_is_away_then_each_call_takes_its_own_timeout(
    crashing: list[Crashing],
) -> None:
    name, value = next_name(), torch.arange(3)
    by_shard = [
        next(key for key in map(str, range(100)) if hash_to_shard(key.encode(), 3) == each) for each in range(3)
    ]
    key = by_shard[1]
    with connecting(crashing) as client:
        client.create_kv(name, shards="all").put(by_shard, [value] * 3)
    with connecting(crashing, timeout_s=6.0) as client:
        unused: Any = client.kv(name)
        calls: list[Callable[[], object]] = [
            lambda: unused.get(key, timeout_s=1),
            lambda: unused.get(by_shard, timeout_s=1),
            lambda: unused.get_with_versions(key, timeout_s=1),
            lambda: unused.pop(key, timeout_s=1),
            lambda: unused.put(key, value, timeout_s=1),
            lambda: unused.put(by_shard, [value] * 3, timeout_s=1),
            lambda: unused.delete(key, timeout_s=1),
        ]
        with without(crashing, unused.placement.servers[1]):
            for call in calls:
                assert measure_failure_s(call) < 4.0
            assert measure_failure_s(lambda: unused.put(key, value, timeout_s=8)) > 7.5
        assert unused.get(key, timeout_s=20).tolist() == [0, 1, 2]
