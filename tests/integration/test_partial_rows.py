"""Rows that are written key by key: when they can be sampled, each consumer's own progress, and whole groups."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing, Writer
from tests.integration.fleet import Fleet
from tests.processes import wait_for

pytestmark = pytest.mark.integration

GROUP_SIZE = 4
SMALL, LARGE = 3, 60_000
"""Tokens of a row: few are sent inline, many over the data transport."""


def rows(*numbers: int, size: int = SMALL) -> TensorDict:
    """Returns responses, four per prompt."""
    number = torch.tensor(numbers, dtype=torch.int64)
    tokens = number[:, None].expand(-1, size).contiguous()
    prompt_id = number // GROUP_SIZE
    leaves = {"number": number, "tokens": tokens, "prompt_id": prompt_id, "reward": 0.5 * number}
    return TensorDict({**leaves, "logp": {"old": -1.0 * number}}, [len(numbers)])


def bare(*numbers: int, size: int = SMALL) -> TensorDict:
    """Returns the same rows without their rewards."""
    td: TensorDict = rows(*numbers, size=size).exclude("reward")
    return td


def numbers(td: Any) -> list[int]:
    """Returns the number of each row; fails if a row is torn."""
    assert (td["tokens"] == td["number"][:, None]).all()
    found: list[int] = td["number"].tolist()
    return found


def judge(table: Any, index: Any) -> None:
    """Writes the rewards of rows whose number is their row number."""
    table.set_at_("reward", 0.5 * torch.as_tensor(index), index)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_require_when_a_key_was_not_written_then_its_rows_come_when_it_was(
    client: tdserve.Client, name: str, size: int
) -> None:
    replay = client.create_replay(name, rows(0, size=size)[0], 16)
    index = replay.extend(bare(*range(8), size=size))
    for require in (None, ("reward",), ("number", "reward")):
        with pytest.raises(tdserve.DeadlineExceededError, match=name) as raised:
            replay.sample(2, require=require, timeout_s=0)
        assert "keys" in str(raised.value) or "whole" in str(raised.value)
    assert set(numbers(replay.sample(200, require=("tokens",)))) == set(range(8))
    assert (replay.sample(4, require=())["reward"] == 0).all()
    judge(replay, index[2:5])
    batch = replay.sample(32, require=("reward",))
    assert set(numbers(batch)) == {2, 3, 4}
    assert torch.equal(batch["reward"], 0.5 * batch["number"])
    judge(replay, index)
    assert set(numbers(replay.sample(200))) == set(range(8))


def test_sample_when_it_waits_for_a_key_then_writing_it_wakes_the_waiting(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, rows(0)[0], 16)
    replay.extend(bare(*range(8)))
    with server.client(timeout_s=30.0) as learner:
        waiting = learner.run_later(lambda: learner.replay(name).sample(4, require=("reward",)))
        wait_for(lambda: replay.info()["num_waiting"] == 1, "a sampler that waits")
        judge(replay, [3])
        assert numbers(waiting.result(20.0)) == [3] * 4


def test_row_when_its_place_is_used_again_then_it_lacks_the_key_again(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows(0)[0], 8)
    judge(replay, replay.extend(bare(*range(8))))
    replay.extend(bare(*range(8, 12)))
    assert set(numbers(replay.sample(60))) == {4, 5, 6, 7}
    replay.extend(rows(12, 13))
    assert set(numbers(replay.sample(60))) == {6, 7, 12, 13}


def test_keys_when_several_workers_write_them_then_rows_come_with_the_last(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows(0)[0], 8)
    index = replay.extend(rows(0, 1, 2, 3).select("number", "tokens"))
    values = {"prompt_id": torch.zeros(4, dtype=torch.int64), "reward": torch.ones(4)}
    later = [client.run_later(partial(replay.set_at_, key, value, index)) for key, value in values.items()]
    for each in later:
        each.result(20.0)
    with pytest.raises(tdserve.DeadlineExceededError):
        replay.sample(1, timeout_s=0)
    replay.set_at_(("logp", "old"), torch.full((4,), 2.0), index)
    batch = replay.sample(8)
    assert (batch["logp", "old"] == 2).all()
    assert (batch["reward"] == 1).all()


def test_extend_when_a_nested_leaf_is_left_out_then_it_is_written_later(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows(0)[0], 8)
    index = replay.extend(rows(0, 1).exclude(("logp", "old")))
    with pytest.raises(tdserve.DeadlineExceededError):
        replay.sample(1, timeout_s=0)
    replay.set_at_("logp", TensorDict({"old": torch.ones(2)}, [2]), index)
    assert (replay.sample(4)["logp", "old"] == 1).all()


# ---------------------------------------------------------------- consumers


def test_consumers_when_each_has_a_name_then_each_gets_each_row_once(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows(0)[0], 16)
    replay.extend(rows(*range(12)))
    had = {consumer: Counter[int]() for consumer in ("trainer", "critic")}
    for _ in range(3):
        for consumer, counts in had.items():
            counts.update(numbers(replay.sample(4, consumer=consumer)))
    assert had == dict.fromkeys(had, dict.fromkeys(range(12), 1))
    for consumer in had:
        with pytest.raises(tdserve.DeadlineExceededError, match=consumer):
            replay.sample(1, consumer=consumer, timeout_s=0)
    assert len(replay) == 12
    replay.extend(rows(12, 13))
    assert sorted(numbers(replay.sample(2, consumer="critic"))) == [12, 13]


def test_consumers_when_one_fails_or_dies_then_its_rows_are_there_for_its_name_again(
    client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, rows(0)[0], 16)
    replay.extend(rows(*range(8)))
    with pytest.raises(KeyError), replay.take(3, consumer="trainer"):
        raise KeyError
    with Fleet(client, ("hold", {"name": name, "num_rows": 5, "consumer": "trainer"})) as fleet:
        fleet.wait_all("holds")
        held = fleet.numbers(0, "holds")
        left = numbers(replay.sample(3, consumer="trainer"))
        assert sorted(held + left) == [*range(8)]
        with pytest.raises(tdserve.DeadlineExceededError):
            replay.sample(1, consumer="trainer", timeout_s=0)
        assert len(numbers(replay.sample(8, consumer="critic"))) == 8
        fleet.kill(0)
        assert sorted(numbers(replay.sample(5, consumer="trainer", timeout_s=20.0))) == sorted(held)


# ---------------------------------------------------------------- groups


@pytest.mark.slow
def test_groups_when_sampled_then_whole_adjacent_and_complete(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows(0)[0], 64)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    number_at = torch.tensor(order)
    index = replay.extend(bare(*order))
    judge_at = [place for place in range(40) if order[place] % 8 != 0]  # every second group lacks a reward
    replay.set_at_("reward", 0.5 * number_at[judge_at], index[judge_at])
    seen = Counter[int]()
    for _ in range(50):
        batch = replay.sample(3 * GROUP_SIZE, group_by="prompt_id", group_size=GROUP_SIZE, require=("reward",))
        groups = torch.tensor(numbers(batch)).reshape(3, GROUP_SIZE)
        prompts = (groups // GROUP_SIZE)[:, 0].tolist()
        assert [sorted(group) for group in groups.tolist()] == [
            [GROUP_SIZE * prompt + member for member in range(GROUP_SIZE)] for prompt in prompts
        ]
        assert len(set(prompts)) == 3
        seen.update(prompts)
    assert set(seen) == {1, 3, 5, 7, 9}


def test_groups_when_fewer_are_complete_than_asked_then_it_waits_for_the_last_reward(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, rows(0)[0], 32)
    index = replay.extend(bare(*range(12)))
    judge(replay, index[:7])
    grouped: dict[str, Any] = {"group_by": "prompt_id", "group_size": GROUP_SIZE, "require": ("reward",)}
    with pytest.raises(tdserve.DeadlineExceededError, match="whole groups of 4"):
        replay.sample(2 * GROUP_SIZE, timeout_s=0, **grouped)
    with server.client(timeout_s=30.0) as learner:
        waiting = learner.run_later(lambda: learner.replay(name).sample(2 * GROUP_SIZE, **grouped))
        wait_for(lambda: replay.info()["num_waiting"] == 1, "a sampler that waits")
        judge(replay, index[7:8])
        assert sorted(numbers(waiting.result(20.0))) == [*range(8)]
    with pytest.raises(tdserve.InvalidRequestError):
        replay.sample(GROUP_SIZE + 1, **grouped)


def test_groups_when_a_consumer_takes_them_then_each_group_once(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows(0)[0], 32)
    replay.extend(rows(*range(16)))
    had = []
    for _ in range(4):
        with replay.take(GROUP_SIZE, consumer="trainer", group_by="prompt_id", group_size=GROUP_SIZE) as batch:
            had.append(numbers(batch))
    assert sorted(had) == [[start + member for member in range(GROUP_SIZE)] for start in range(0, 16, GROUP_SIZE)]
    replay.delete([0])
    batch = replay.sample(3 * GROUP_SIZE, group_by="prompt_id", group_size=GROUP_SIZE)
    assert sorted(numbers(batch)) == [*range(4, 16)]


# ---------------------------------------------------------------- crashes


NUM_OVERWRITTEN, REWARD_SIZE = 24, 4096
HALF = NUM_OVERWRITTEN // 2


def create_overwritten(client: tdserve.Client) -> tuple[Any, torch.Tensor]:
    """Creates a table of rows without rewards."""
    like = TensorDict({"number": torch.tensor(0), "reward": torch.zeros(REWARD_SIZE)}, [])
    replay = client.create_replay("partial", like, 2 * NUM_OVERWRITTEN)
    return replay, replay.extend(TensorDict({"number": torch.arange(NUM_OVERWRITTEN)}, [NUM_OVERWRITTEN]))


def rewards(batch: Any) -> torch.Tensor:
    """Returns the single number in each row's reward; fails if a row is torn."""
    assert (batch["reward"] == batch["reward"][:, :1]).all(), "a row is torn"
    found: torch.Tensor = batch["reward"][:, 0]
    return found


@pytest.mark.slow
def test_set_at_when_control_is_killed_meanwhile_then_the_writers_go_on_and_nothing_said_is_lost(
    tmp_path: Path,
) -> None:
    with (
        Crashing(tmp_path) as crashing,
        crashing.server.client(transport="gloo", timeout_s=60.0) as client,
        crashing.server.client(transport="gloo", timeout_s=60.0) as other,
    ):
        replay, index = create_overwritten(client)

        def write(table: Any, rows: torch.Tensor, number: int) -> None:
            table.set_at_("reward", torch.full((HALF, REWARD_SIZE), float(number)), rows)

        writers = [
            Writer(lambda number: write(replay, index[:HALF], number)),
            Writer(lambda number: write(other.replay("partial"), index[HALF:], number)),
        ]
        for _ in range(2):
            for writer in writers:
                writer.goes_on()
            crashing.kill()
            said = [writer.acknowledged[-1] for writer in writers for _ in range(HALF)]
            crashing.start()
            assert (rewards(replay[index]) >= torch.tensor(said)).all()
        ends = [writer.end()[-1] for writer in writers for _ in range(HALF)]
        assert rewards(replay[index]).tolist() == ends
        assert set(replay.sample(1000)["number"].tolist()) == set(range(NUM_OVERWRITTEN))
        assert replay.info()["reserved_rows"] == 0


@pytest.mark.slow
def test_set_at_when_control_and_writers_are_killed_in_the_middle_then_all_rows_of_a_call_or_none(
    tmp_path: Path,
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="gloo", timeout_s=60.0) as client:
        replay, index = create_overwritten(client)
        common = {"name": "partial", "num_rows": HALF, "size": REWARD_SIZE}
        tasks = [("overwrite", {**common, "first": first}) for first in (0, HALF)]
        with Fleet(crashing.server.address, *tasks) as fleet:
            fleet.wait(lambda fleet: all(len(lines) > 5 for lines in fleet.said))
            crashing.kill()
            fleet.end()
            said = [fleet.numbers(child, "stored")[-1] for child in range(2)]
        crashing.start()
        for half, last in zip(rewards(replay[index]).reshape(2, HALF).tolist(), said, strict=True):
            assert half in ([last] * HALF, [last + 1] * HALF)
        assert set(replay.sample(1000)["number"].tolist()) == set(range(NUM_OVERWRITTEN))
        assert replay.info()["reserved_rows"] == 0


@pytest.mark.slow
def test_partial_rows_when_the_server_starts_anew_then_they_lack_what_they_lacked(tmp_path: Path) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport="gloo", timeout_s=60.0) as client:
        replay = client.create_replay("partial", rows(0)[0], 16)
        index = replay.extend(bare(*range(8)))
        judge(replay, index[:4])
        assert len(replay.sample(GROUP_SIZE, group_by="prompt_id", group_size=GROUP_SIZE)) == GROUP_SIZE
        replay.sample(2, consumer="trainer")
        held = replay.take(1, consumer="trainer", ack=False)
        crashing.restart()
        assert set(numbers(replay.sample(60))) == {0, 1, 2, 3}
        assert len(numbers(replay.sample(2, consumer="trainer"))) == 2
        with pytest.raises(tdserve.DeadlineExceededError):
            replay.sample(1, consumer="trainer", timeout_s=0)
        with pytest.raises(tdserve.WrongStateError):
            replay.ack(held, consumer="trainer")
        judge(replay, index)
        batch = replay.sample(2 * GROUP_SIZE, group_by="prompt_id", group_size=GROUP_SIZE)
        assert sorted(numbers(batch)) == [*range(8)]
        wait_for(lambda: replay.info()["num_leased"] == 0, "the end of all leases")
