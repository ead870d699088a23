"""A policy that came back from a checkpoint skips version numbers. Skipped numbers do not count as lag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.numbered_rows import numbers, rows

pytestmark = pytest.mark.integration

WEIGHTS = TensorDict({"w": torch.zeros(4)}, [])


@pytest.fixture
def restored(client: tdserve.Client, name: str, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A replay and a queue of rows 0 to 3 by version 2 and 4 to 7 by version 3, which is the newest; they and their
    policy came from a checkpoint."""
    policy, names = f"p-{name}", [f"p-{name}", name, f"q-{name}"]
    for _ in range(3):
        client.publish(policy, WEIGHTS)
    tables: list[Any] = [
        client.create_replay(name, like=rows(0)[0], capacity=64, policy=policy),
        client.create_queue(f"q-{name}", like=rows(0)[0], max_size=64, policy=policy),
    ]
    for table in tables:
        table.extend(rows(0, 1, 2, 3), policy_version=2)
        table.extend(rows(4, 5, 6, 7), policy_version=3)
    client.checkpoint(tmp_path / "place")
    for store in names:
        client.delete(store)
    client.restore(tmp_path / "place", names=names)
    yield client.replay(name), client.queue(f"q-{name}")
    client.delete(policy)
    client.delete(f"q-{name}")


@pytest.mark.slow
def test_rows_when_tables_and_policy_were_restored_then_lags_go_on_as_if_no_number_was_skipped(
    client: tdserve.Client, name: str, restored: tuple[Any, Any]
) -> None:
    replay, queue = restored

    def draw(max_lag: int) -> set[int]:
        versions: list[int] = replay.sample(200, max_lag=max_lag, timeout_s=20.0)["policy_version"].tolist()
        return set(versions)

    batches = replay.batches(8, max_lag=2, timeout_s=20.0)
    assert draw(1) == {2, 3}
    assert client.publish(f"p-{name}", WEIGHTS) > 4
    assert (draw(1), draw(2)) == ({3}, {2, 3})
    assert replay.info()["lag_max"] == 2
    with batches:
        assert len(next(batches)) == 8
    with queue.take(4, max_lag=1, timeout_s=20.0) as taken:
        assert numbers(taken) == [4, 5, 6, 7]
    assert queue.info()["num_discarded"] == 4
