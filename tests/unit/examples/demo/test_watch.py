from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.examples.demo.demo_stores import POLICY, open_stores
from tdserve.examples.demo.watch import (
    Begun,
    Episode,
    RunWatch,
    Snapshot,
    compute_mean_return,
    compute_rates,
    read_rows,
)
from tests.processes import quiet_port


def episodes(*returns: float) -> list[Episode]:
    return [Episode(float(number), 0, episode_return, 1) for number, episode_return in enumerate(returns)]


def transitions(num_rows: int) -> TensorDict:
    observation = torch.zeros(num_rows, 4)
    scalar, whole = torch.zeros(num_rows), torch.zeros(num_rows, dtype=torch.int64)
    following = {"observation": observation, "reward": scalar, "discount": scalar}
    return TensorDict(
        {"observation": observation, "action": whole, "policy_version": whole, "next": following}, [num_rows]
    )


def test_mean_return_waits_for_twenty_episodes() -> None:
    assert compute_mean_return(episodes(*[500.0] * 19)) is None


def test_mean_return_is_that_of_the_last_twenty() -> None:
    assert compute_mean_return(episodes(*[0.0] * 50, *[480.0] * 10, *[470.0] * 10)) == 475.0


def test_rates_are_differences_per_second() -> None:
    first = Snapshot(seconds=1.0, num_transitions=100, num_samples=10, num_updates=1, num_bytes={"gloo": 50})
    last = Snapshot(
        seconds=3.0, num_transitions=300, num_samples=30, num_updates=5, num_bytes={"gloo": 70, "inline": 8}
    )
    rates = compute_rates(first, last)
    num_bytes = {"gloo": 10.0, "inline": 4.0}
    assert rates == {"transitions": 100.0, "samples": 10.0, "updates": 2.0, "num_bytes": num_bytes}


def test_rates_without_time_between_are_zero() -> None:
    snapshot = Snapshot(seconds=1.0, num_transitions=5)
    assert compute_rates(Snapshot(seconds=1.0), snapshot)["transitions"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 0, []),
        (5, 5, []),
        (0, 3, [0, 1, 2]),
        (2, 4, [2, 3]),
        (0, 4, [0, 1, 2, 3]),
        (0, 6, [2, 3, 0, 1]),
        (3, 6, [3, 0, 1]),
        (4, 6, [0, 1]),
        (6, 8, [2, 3]),
    ],
)
def test_rows_when_a_ring_of_four_is_full_then_what_is_left_in_order(first: int, end: int, expected: list[int]) -> None:
    parts = read_rows(range(4), first, end, 4)  # type: ignore[arg-type] # it only takes slices
    assert [row for part in parts for row in part] == expected


@pytest.mark.slow
def test_watch_when_the_stores_hold_rows_of_an_earlier_run_then_counts_only_what_came_since(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path) as server, server.client(transport="gloo") as client:
        stores = open_stores(client, "CartPole-v1")
        stores.transitions.extend(transitions(300))
        stores.transitions.sample(8)
        client.publish(POLICY, TensorDict({"w": torch.zeros(3)}, []), metadata={"num_updates": 70})
        begun = Begun.now(client, stores)
        assert begun[1:] == (0, 300, 8, 70)
        watch = RunWatch(client, stores, begun._replace(seconds=5.0))
        first = watch.poll()
        assert (first.num_transitions, first.num_samples, first.num_updates) == (0, 0, 0)
        assert watch.rates["transitions"] == 0.0
        stores.transitions.extend(transitions(10))
        assert watch.poll().num_transitions == 10
        assert watch.rates["transitions"] > 0.0


@pytest.mark.slow
def test_watch_when_the_server_restarts_then_what_was_moved_goes_on_growing(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path, port=quiet_port()) as server, server.client(transport="gloo") as client:
        stores = open_stores(client, "CartPole-v1")
        watch = RunWatch(client, stores, Begun.now(client, stores))
        stores.transitions.extend(transitions(300))
        before = sum(watch.poll().num_bytes.values())
        assert before > 0
        server.shutdown()
        server.start()
        stores.transitions.extend(transitions(2))
        assert sum(watch.poll().num_bytes.values()) >= before
        assert all(rate >= 0.0 for rate in watch.rates["num_bytes"].values())
