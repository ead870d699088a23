"""Rows record the policy version that made them, and a sample with a limit gets recent rows only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing
from tests.integration.numbered_rows import LARGE, SMALL, numbers, rows
from tests.processes import wait_for

pytestmark = pytest.mark.integration


class Policy:
    """Weights of one name, published version by version."""

    def __init__(self, client: tdserve.Client, name: str) -> None:
        self.name = name
        self._client = client

    def publish(self, num_versions: int = 1) -> int:
        """Publishes the next version."""
        version: Any = 0
        for _ in range(num_versions):
            version = self._client.publish(self.name, TensorDict({"w": torch.zeros(4)}))
        return int(version)

    def delete(self) -> None:
        """Deletes the store."""
        self._client.delete(self.name)


@pytest.fixture
def policy(client: tdserve.Client, name: str) -> Iterator[Policy]:
    """Weights without a version yet."""
    made = Policy(client, f"p-{name}")
    yield made
    if made.name in client:
        made.delete()


def drawn(replay: Any, num_rows: int = 200, **conditions: Any) -> set[tuple[int, int]]:
    """Returns number and policy version of the rows in a large sample."""
    batch = replay.sample(num_rows, timeout_s=20.0, **conditions)
    return set(zip(numbers(batch), batch["policy_version"].tolist(), strict=True))


# ---------------------------------------------------------------- versions of rows


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_extend_when_a_version_is_given_or_not_then_each_row_has_its_own(
    client: tdserve.Client, name: str, policy: Policy, size: int
) -> None:
    replay = client.create_replay(name, rows(0, size=size)[0], 64, policy=policy.name)
    replay.extend(rows(0, size=size))
    assert policy.publish(3) == 3
    replay.extend(rows(1, size=size))
    replay.extend(rows(2, 3, size=size), policy_version=1)
    replay.extend(rows(4, 5, size=size), policy_version=torch.tensor([2, 0]))
    early = [replay.extend(rows(number, size=size), policy_version=2, return_early=True) for number in range(6, 10)]
    early.append(replay.extend(rows(10, size=size), return_early=True))
    assert [len(future.result(20)) for future in early] == [1] * 5
    found = {(0, 0), (1, 3), (2, 1), (3, 1), (4, 2), (5, 0), (6, 2), (7, 2), (8, 2), (9, 2), (10, 3)}
    assert drawn(replay, 400) == found
    assert drawn(replay, 400, max_lag=1) == {each for each in found if each[1] >= 2}
    version = replay.sample(4, max_lag=0)["policy_version"]
    assert (version.dtype, version.shape) == (torch.int64, (4,))


def test_take_when_very_many_rows_are_too_old_then_they_leave_and_the_others_come_in_order(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    num_old, young = 50_000, rows(*range(8))
    queue = client.create_queue(name, young[0], num_old + 8, policy=policy.name)
    queue.extend(rows(9)[0].expand(num_old).clone())
    with queue.take(8, ack=True, max_lag=0, timeout_s=20.0):  # some are held meanwhile
        policy.publish()
        queue.extend(young)
        with queue.take(8, max_lag=0, timeout_s=20.0) as batch:
            assert numbers(batch) == [*range(8)]
        assert len(queue) == 8
    assert len(queue) == 0
    assert queue.info()["num_discarded"] == num_old - 8


def test_extend_when_the_version_cannot_be_then_nothing_is_written(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    replay = client.create_replay(name, rows(0)[0], 8, policy=policy.name)
    plain = client.create_replay(f"{name}-plain", rows(0)[0], 8)
    policy.publish(2)
    bad: list[Any] = [3, -1, True, 1.0, "1", torch.tensor([1, 2, 1]), torch.tensor([1.0, 1.0]), torch.tensor([0, -1])]
    for version in bad:
        with pytest.raises(tdserve.InvalidRequestError) as raised:
            replay.extend(rows(0, 1), policy_version=version)
        assert raised.value.argument == "policy_version"
    with pytest.raises(tdserve.InvalidRequestError, match="without a policy"):
        plain.extend(rows(0, 1), policy_version=0)
    with pytest.raises(tdserve.InvalidRequestError, match="without a policy"):
        plain.writer(policy_version=1)
    for max_lag in (-1, True, 0.5):
        with pytest.raises(tdserve.InvalidRequestError) as raised:
            replay.sample(1, max_lag=max_lag)  # type: ignore[arg-type]
        assert raised.value.argument == "max_lag"
    with pytest.raises(tdserve.InvalidRequestError, match="without a policy"):
        plain.sample(1, max_lag=1)
    assert (len(replay), len(plain)) == (0, 0)
    client.delete(plain.name)


def test_writer_when_its_version_is_set_anew_then_rows_keep_theirs(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    replay = client.create_replay(name, rows(0)[0], 64, policy=policy.name)
    policy.publish(3)
    with replay.writer(batch=16, policy_version=1) as writer:
        for number in range(6):
            if number == 2:
                writer.policy_version = 2
            if number == 4:
                writer.policy_version = None
            writer.append(rows(number)[0])
        with pytest.raises(tdserve.InvalidRequestError):
            writer.policy_version = -1
    assert drawn(replay) == {(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3)}


def test_writer_when_it_makes_n_step_rows_then_each_has_the_version_of_its_first_step(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    step = {"reward": torch.tensor(1.0), "done": torch.tensor(False), "number": torch.tensor(0)}
    like = TensorDict({"number": torch.tensor(0), "next": step}, [])
    replay = client.create_replay(name, like, 64, policy=policy.name, sampler=tdserve.Fifo())
    policy.publish(5)
    with replay.writer(batch=8, n_step=tdserve.NStep(3, 1.0)) as writer:
        for number in range(5):
            writer.policy_version = number + 1
            row = like.clone()
            row["number"], row["next", "number"] = torch.tensor(number), torch.tensor(number + 1)
            writer.append(row)
    batch = replay.sample(5)
    assert batch["number"].tolist() == [0, 1, 2, 3, 4]
    assert batch["next", "number"].tolist() == [3, 4, 5, 5, 5]
    assert batch["policy_version"].tolist() == [1, 2, 3, 4, 5]


# ---------------------------------------------------------------- what a lag lets through


def test_sample_when_versions_are_published_then_rows_leave_it_and_new_ones_end_its_wait(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    replay = client.create_replay(name, rows(0)[0], 64, policy=policy.name)
    policy.publish()
    replay.extend(rows(0))
    policy.publish()
    replay.extend(rows(1, 2))
    assert drawn(replay, max_lag=1) == {(0, 1), (1, 2), (2, 2)}
    assert drawn(replay, max_lag=0) == {(1, 2), (2, 2)}
    policy.publish()
    assert drawn(replay, max_lag=1) == {(1, 2), (2, 2)}
    assert drawn(replay) == {(0, 1), (1, 2), (2, 2)}
    with pytest.raises(tdserve.DeadlineExceededError, match="at most 0 versions old"):
        replay.sample(4, max_lag=0, timeout_s=0.05)
    info = replay.info()
    assert (info["policy"], info["newest_policy_version"]) == (policy.name, 3)
    assert (info["lag_min"], info["lag_mean"], info["lag_max"]) == (1, pytest.approx(4 / 3), 2)
    with client.replay(name).batches(4, max_lag=0, timeout_s=20.0) as batches:
        wait_for(lambda: client.replay(name).extend(rows(3)) is not None, "an extend")
        assert set(numbers(next(batches))) == {3}


@pytest.mark.parametrize("sampler", [tdserve.Fifo(), tdserve.Lifo(), tdserve.WithoutReplacement()])
def test_sample_when_rows_are_drawn_once_each_then_only_recent_ones_are_and_it_waits_for_enough(
    client: tdserve.Client, name: str, policy: Policy, sampler: Any
) -> None:
    replay = client.create_replay(name, rows(0)[0], 64, policy=policy.name, sampler=sampler)
    policy.publish()
    replay.extend(rows(*range(8)))
    policy.publish()
    replay.extend(rows(*range(8, 12)))
    assert sorted(numbers(replay.sample(4, max_lag=0))) == [8, 9, 10, 11]
    with pytest.raises(tdserve.DeadlineExceededError):
        replay.sample(5, max_lag=0, timeout_s=0.05)
    assert len(numbers(replay.sample(12, max_lag=1))) == 12
    policy.publish()
    assert sorted(numbers(replay.sample(4, max_lag=1))) == [8, 9, 10, 11]


def test_sample_when_slices_are_drawn_then_every_row_of_one_is_recent(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    replay = client.create_replay(name, rows(0)[0], 64, policy=policy.name, sampler=tdserve.Slices(slice_len=3))
    for version in range(1, 5):
        policy.publish()
        replay.extend(rows(2 * version, 2 * version + 1), policy_version=version)
    for max_lag, oldest in ((3, 2), (2, 4), (1, 6)):
        batch = replay.sample(300, max_lag=max_lag)
        starts = set(batch["number"][::3].tolist())
        assert starts == set(range(oldest, 8))
        assert int(batch["policy_version"].min()) == 4 - max_lag
    with pytest.raises(tdserve.DeadlineExceededError):
        replay.sample(3, max_lag=0, timeout_s=0.05)


def test_sample_when_prioritized_then_the_weights_are_those_among_recent_rows(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    sampler = tdserve.Prioritized(alpha=1.0, beta=1.0, eps=0.0)
    replay = client.create_replay(name, rows(0)[0], 64, policy=policy.name, sampler=sampler)
    policy.publish()
    replay.extend(rows(0), priority=0.5)
    policy.publish()
    index = replay.extend(rows(1, 2), priority=torch.tensor([1.0, 4.0]))
    policy.publish(2)
    batch = replay.sample(500, max_lag=2)
    of_number = dict(zip(numbers(batch), batch["probability"].tolist(), strict=True))
    assert of_number == {1: pytest.approx(0.2), 2: pytest.approx(0.8)}
    assert dict(zip(numbers(batch), batch["priority_weight"].tolist(), strict=True))[1] == pytest.approx(1.0)
    replay.update_priority(index, torch.tensor([0.0, 1.0]))
    assert set(numbers(replay.sample(100, max_lag=2))) == {2}


def test_sample_when_other_conditions_are_asked_for_too_then_all_of_them_hold(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    like = TensorDict({"number": torch.tensor(0), "late": torch.tensor(0.0), "group": torch.tensor(0)}, [])
    replay = client.create_replay(name, like, 64, policy=policy.name)
    number = torch.arange(8)
    policy.publish()
    replay.extend(TensorDict({"number": number, "group": number // 4}, [8]), policy_version=1)
    policy.publish()
    index = replay.extend(TensorDict({"number": number + 8, "group": number // 4 + 2}, [8]), policy_version=2)
    replay.set_at_("late", torch.ones(4), index[:4])
    assert set(replay.sample(100, max_lag=0)["number"].tolist()) == {8, 9, 10, 11}
    assert set(replay.sample(200, max_lag=0, require=("number",))["number"].tolist()) == set(range(8, 16))
    groups = replay.sample(8, max_lag=0, require="number", group_by="group", group_size=4)
    assert sorted(groups["number"].tolist()) == list(range(8, 16))
    had = replay.sample(3, max_lag=0, consumer="critic")["number"].tolist()
    with replay.take(1, max_lag=0, consumer="critic") as rest:
        assert {*had, *rest["number"].tolist()} == {8, 9, 10, 11}
    with pytest.raises(tdserve.DeadlineExceededError):
        replay.sample(1, max_lag=0, consumer="critic", timeout_s=0.05)
    assert len(replay) == 8, "the sample of groups has discarded those that are too old"


def test_batches_when_prefetched_ones_become_too_old_then_they_are_dropped(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    replay = client.create_replay(name, rows(0)[0], 64, policy=policy.name)
    policy.publish()
    replay.extend(rows(0, 1))
    with replay.batches(4, prefetch=4, max_lag=0, timeout_s=20.0) as batches:
        assert set(next(batches)["policy_version"].tolist()) == {1}
        wait_for(lambda: replay.info()["samples"] == 4 * 4, "batches that wait or come")
        policy.publish()
        replay.extend(rows(2))
        assert numbers(next(batches)) == [2, 2, 2, 2]
        for _ in range(8):
            assert set(next(batches)["policy_version"].tolist()) == {2}


def test_batches_when_rows_are_ragged_then_they_too_are_of_recent_versions(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    like = TensorDict({"tokens": torch.zeros(3, dtype=torch.int64)}, [])
    replay = client.create_replay(name, like, 64, policy=policy.name, ragged=["tokens"])
    for version in (1, 2):
        policy.publish()
        tokens = torch.nested.nested_tensor([torch.full((size,), version) for size in (1, 3)], layout=torch.jagged)
        replay.extend(TensorDict({"tokens": tokens}, [2]))
    for pad in (None, 0):
        with replay.batches(4, max_lag=0, pad=pad, timeout_s=20.0) as batches:
            for _ in range(3):
                assert next(batches)["policy_version"].tolist() == [2] * 4


@pytest.mark.slow
def test_sample_when_others_publish_and_write_meanwhile_then_never_a_row_that_is_too_old(
    client: tdserve.Client, server: tdserve.Server, name: str, policy: Policy
) -> None:
    replay = client.create_replay(name, rows(0)[0], 4096, policy=policy.name)
    policy.publish()
    replay.extend(rows(1))

    def learn(other: tdserve.Client) -> int:
        """Publishes versions and writes rows whose number is their version."""
        learning = other.replay(name)
        for version in range(2, 60):
            other.publish(policy.name, TensorDict({"w": torch.zeros(4)}))
            learning.extend(rows(version, version), policy_version=version)
        return version

    with server.client(timeout_s=20.0) as other, replay.batches(32, max_lag=2, timeout_s=20.0) as batches:
        done: Any = other.run_later(lambda: learn(other))
        newest = 1
        while newest < 59:
            newest = client.describe(policy.name).version
            for batch in (replay.sample(32, max_lag=2), next(batches)):
                assert numbers(batch) == batch["policy_version"].tolist()
                assert min(numbers(batch)) >= newest - 2
        assert done.result(20) == 59
    assert replay.info()["lag_max"] == 58


# ---------------------------------------------------------------- queues


def test_take_when_rows_are_too_old_then_they_leave_the_queue_and_writers_get_their_room(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    queue = client.create_queue(name, rows(0)[0], 8, policy=policy.name)
    policy.publish(2)
    queue.extend(rows(0, 1, 2, 3), policy_version=1)
    held = queue.take(1, ack=False)
    queue.extend(rows(4, 5, 6), policy_version=2)
    queue.extend(rows(7), policy_version=1)
    blocked = queue.extend(rows(8, 9), policy_version=2, return_early=True, timeout_s=20.0)
    with queue.take(3, max_lag=0) as batch:
        assert (numbers(batch), batch["policy_version"].tolist()) == ([4, 5, 6], [2, 2, 2])
    assert len(blocked.result(20)) == 2
    assert (queue.info()["num_discarded"], queue.info()["num_leased"]) == (4, 1)
    queue.ack(held)  # what somebody had taken is theirs to the end
    queue.extend(rows(10), policy_version=1)
    queue.close()
    with queue.batches(2, max_lag=0, timeout_s=20.0) as batches:
        assert [numbers(batch) for batch in batches] == [[8, 9]]
    assert (len(queue), queue.info()["num_discarded"]) == (0, 5)


def test_take_when_a_publish_makes_waiting_rows_too_old_then_the_writer_gets_room_and_the_taker_its_rows(
    client: tdserve.Client, server: tdserve.Server, name: str, policy: Policy
) -> None:
    queue = client.create_queue(name, rows(0)[0], 4, policy=policy.name)
    policy.publish()
    queue.extend(rows(0, 1, 2))
    with server.client(timeout_s=20.0) as other:
        future = other.run_later(lambda: other.queue(name).take(4, max_lag=0, ack=False, timeout_s=20.0))
        blocked = queue.extend(rows(3, 4, 5, 6), return_early=True, timeout_s=20.0)
        wait_for(lambda: queue.info()["num_waiting"] == 2, "a taker and a writer that wait")
        policy.publish()
        assert numbers(future.result(20)) == [3, 4, 5, 6]
        assert len(blocked.result(20)) == 4


# ---------------------------------------------------------------- policies that go, servers that go


def test_sample_when_the_policy_was_deleted_and_made_anew_then_rows_of_the_one_before_are_of_no_lag(
    client: tdserve.Client, name: str, policy: Policy
) -> None:
    replay = client.create_replay(name, rows(0)[0], 64, policy=policy.name)
    policy.publish(3)
    replay.extend(rows(0), policy_version=1)
    assert drawn(replay, max_lag=5) == {(0, 1)}
    policy.delete()
    replay.extend(rows(1))
    assert drawn(replay, max_lag=5) == {(1, 0)}
    assert drawn(replay) == {(0, -1), (1, 0)}
    assert policy.publish() == 4
    with pytest.raises(tdserve.InvalidRequestError, match="the newest"):
        replay.extend(rows(2), policy_version=5)
    replay.extend(rows(3), policy_version=4)
    assert drawn(replay, max_lag=0) == {(3, 4)}
    assert drawn(replay, max_lag=100) == {(1, 0), (3, 4)}
    info = replay.info()
    assert (info["lag_min"], info["lag_mean"], info["lag_max"]) == (0, 0.5, 1)
    replay.extend(rows(4), policy_version=3)  # of the policy that was deleted: as if before the first of this one
    assert policy.publish() == 5
    assert drawn(replay, max_lag=1) == {(3, 4)}
    assert drawn(replay, max_lag=2) == {(1, 0), (3, 4), (4, 3)}


@pytest.mark.slow
def test_sample_when_the_server_was_killed_then_rows_have_the_versions_they_had(tmp_path: Path) -> None:
    with (
        Crashing(tmp_path) as crashing,
        crashing.server.client(transport="shm", timeout_s=30.0) as client,
        crashing.server.client(transport="gloo", timeout_s=30.0) as remote,
    ):
        replay = client.create_replay("r", rows(0)[0], 64, policy="p")
        queue = client.create_queue("q", rows(0)[0], 8, policy="p")
        policy = Policy(client, "p")
        policy.publish(3)
        queue.extend(rows(0, 1), policy_version=1)
        queue.extend(rows(2), policy_version=3)
        with queue.take(1, max_lag=0) as batch:
            assert numbers(batch) == [2]
        replay.extend(rows(0), policy_version=1)
        remote.replay("r").extend(rows(1, 2), policy_version=torch.tensor([2, 3]))
        crashing.restart()
        assert replay.info()["lag_mean"] == 1.0
        assert (queue.info()["num_discarded"], len(queue)) == (2, 0)
        assert drawn(replay, max_lag=1) == {(1, 2), (2, 3)}
        policy.publish()
        assert drawn(remote.replay("r"), max_lag=1) == {(2, 3)}
        replay.extend(rows(3))
        assert drawn(replay) == {(0, 1), (1, 2), (2, 3), (3, 4)}
