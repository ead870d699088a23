"""Data-parallel readers: every rank gets its share of one draw, also if it is late or restarted, or if others draw
too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
import tdserve.aio
from tests.integration.checked_rows import checked_ids, checked_rows
from tests.integration.crashing import Crashing, Writer
from tests.integration.fleet import Fleet
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_FLOATS = 200
WORLD_SIZE = 3
NUM_ROWS = 4
NUM_STEPS = 12


def create(client: tdserve.Client, name: str, capacity: int = 64, **parts: Any) -> Any:
    """Returns a full table of checked rows."""
    table = client.create_replay(name, checked_rows(0, 0, 1, NUM_FLOATS)[0], capacity, **parts)
    table.extend(checked_rows(0, 0, capacity, NUM_FLOATS))
    return table


def task(name: str, rank: int, *, first: int = 0, num_steps: int = NUM_STEPS) -> tuple[str, dict[str, Any]]:
    """Returns the orders for a process that reads the shares of a rank."""
    arguments = {"name": name, "rank": rank, "world_size": WORLD_SIZE, "num_rows": NUM_ROWS}
    return "share", {**arguments, "first": first, "num_steps": num_steps}


def shares(fleet: Fleet, child: int) -> dict[int, list[int]]:
    """Returns the rows that a process has got in each step."""
    lines = [[int(number) for number in line.split()] for line in fleet.words(child, "step")]
    return {step: rows for step, *rows in lines}


@pytest.mark.slow
@pytest.mark.once("gloo")
def test_sample_when_ranks_are_processes_and_writers_go_on_then_one_draw_per_step(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name, 256)
    ranks = [0, 1, 2, 2]  # the last two are a tensor-parallel group
    writer = Writer(lambda number: table.extend(checked_rows(1, 8 * number, 8, NUM_FLOATS)))
    with Fleet(client, *(task(name, rank) for rank in ranks)) as fleet:
        fleet.wait_all("done")
        writer.end()
        found = [shares(fleet, child) for child in range(len(ranks))]
    assert found[2] == found[3]
    for step in range(NUM_STEPS):
        drawn = [number for rank in range(WORLD_SIZE) for number in found[rank][step]]
        assert len(set(drawn)) == WORLD_SIZE * NUM_ROWS
    assert table.info()["samples"] == NUM_STEPS * WORLD_SIZE * NUM_ROWS


@pytest.mark.slow
def test_sample_when_a_rank_is_killed_and_started_again_then_it_gets_its_step_again(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name, sampler=tdserve.WithoutReplacement())
    with Fleet(client, *(task(name, rank, num_steps=3) for rank in range(WORLD_SIZE))) as fleet:
        fleet.wait_all("done")
        fleet.kill(1)
        before = shares(fleet, 1)
        for start in range(0, 512, 32):  # goes round several times
            table.extend(checked_rows(2, start, 32, NUM_FLOATS))
        with Fleet(client, task(name, 1, first=1, num_steps=2)) as again:
            again.wait_all("done")
            assert shares(again, 0) == {step: before[step] for step in (1, 2)}
    assert table.info()["samples"] == 3 * WORLD_SIZE * NUM_ROWS


@pytest.fixture(params=["gloo", "shm"])
def crashing(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[tuple[Crashing, tdserve.Client]]:
    """A server to be killed, and its client."""
    with Crashing(tmp_path) as crashing, crashing.server.client(transport=request.param, timeout_s=60.0) as client:
        yield crashing, client


@pytest.mark.slow
def test_sample_when_the_server_was_killed_then_late_ranks_get_the_rest_of_the_draw(
    crashing: tuple[Crashing, tdserve.Client],
) -> None:
    server, client = crashing
    table = create(client, "rows", max_times_sampled=1)
    arguments: dict[str, Any] = {"world_size": 2, "step": 5, "balance": "number"}
    first = table.sample(16, rank=0, **arguments)
    server.restart()
    again, second = (table.sample(16, rank=rank, **arguments) for rank in (0, 1))
    assert torch.equal(again["number"], first["number"])
    assert not set(first["number"].tolist()) & set(second["number"].tolist())
    assert table.info()["num_rows"] == 32, "rows that were sampled for the last time do not come back"
    others = table.sample(16, rank=0, world_size=2, step=6)
    assert not set(others["number"].tolist()) & set(first["number"].tolist() + second["number"].tolist())


@pytest.mark.slow
def test_rows_when_one_of_their_draw_was_deleted_then_a_restart_brings_none_back(
    crashing: tuple[Crashing, tdserve.Client],
) -> None:
    server, client = crashing
    table = create(client, "rows", 8, max_times_sampled=2)
    twice = set(table.sample(4, rank=0, world_size=1, step=0)["index"].tolist())
    table.sample(8, rank=0, world_size=1, step=1)
    table.delete(torch.tensor([next(row for row in range(8) if row not in twice)]))
    assert len(table) == 3
    server.restart()
    assert len(table) == 3
    assert not twice & set(table.sample(3)["index"].tolist())


def test_sample_when_no_step_is_named_then_each_caller_counts(client: tdserve.Client, name: str) -> None:
    table, other = create(client, name), client.replay(name)
    first, second = table.sample(4, rank=0, world_size=2), table.sample(4, rank=0, world_size=2)
    with pytest.raises(tdserve.DeadlineExceededError):
        table.sample(4, rank=0, world_size=2, require=(), group_by="number", group_size=2, timeout_s=0)
    third = table.sample(4, rank=0, world_size=2)
    by_step = [other.sample(4, rank=0, world_size=2, step=step) for step in range(3)]
    for counted, named in zip((first, second, third), by_step, strict=True):
        assert torch.equal(counted["index"], named["index"])
    rest = [table.sample(4, rank=1, world_size=2)["index"] for _ in range(3)]
    for mine, theirs in zip(by_step, rest, strict=True):
        assert not set(mine["index"].tolist()) & set(theirs.tolist())


def test_sample_when_with_several_handles_then_they_share_one_count(client: tdserve.Client, name: str) -> None:
    table, other = create(client, name), client.replay(name)
    counted = [each.sample(4, rank=0, world_size=2)["index"] for each in (table, other, table)]
    for step, rows in enumerate(counted):
        assert torch.equal(rows, table.sample(4, rank=0, world_size=2, step=step)["index"])
    client.delete(name)
    again = create(client, name)
    begun = again.sample(4, rank=0, world_size=2)["index"]
    assert torch.equal(begun, again.sample(4, rank=0, world_size=2, step=0)["index"])


def test_sample_when_a_rank_was_late_then_one_call_with_a_step_brings_it_back(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name)
    for step in range(20):
        table.sample(4, rank=0, world_size=2, step=step)
    for _ in range(2):
        with pytest.raises(tdserve.StepForgottenError, match="step=20 in all ranks") as raised:
            table.sample(4, rank=1, world_size=2)
    table.sample(4, rank=1, world_size=2, step=raised.value.next)
    late, first = (table.sample(4, rank=rank, world_size=2)["index"] for rank in (1, 0))
    by_step = {rank: table.sample(4, rank=rank, world_size=2, step=20 + rank)["index"] for rank in (0, 1)}
    assert torch.equal(late, by_step[1])
    assert torch.equal(first, by_step[0])


def test_sample_when_draws_were_forgotten_then_the_client_begins_at_zero(client: tdserve.Client, name: str) -> None:
    table = create(client, name)
    for _ in range(3):
        table.sample(4, rank=0, world_size=2)
    table.forget_draws()
    begun = table.sample(4, rank=0, world_size=2)["index"]
    assert torch.equal(begun, table.sample(4, rank=0, world_size=2, step=0)["index"])


def test_sample_when_a_writer_needs_the_rows_then_it_waits_for_the_ranks(client: tdserve.Client, name: str) -> None:
    table = create(client, name, 8, max_times_sampled=1)
    first = table.sample(4, rank=0, world_size=2)
    writing = table.extend(checked_rows(1, 0, 8, NUM_FLOATS), return_early=True)
    wait_for(lambda: table.info()["num_waiting"] == 1, "a writer that waits")
    second = table.sample(4, rank=1, world_size=2)
    assert sorted(checked_ids(first).tolist() + checked_ids(second).tolist()) == list(range(8))
    later = [client.run_later(partial(table.sample, 4, rank=rank, world_size=2, step=1)) for rank in (0, 1)]
    found = [int(number) for each in later for number in checked_ids(each.result(20.0))]
    assert sorted(found) == sorted(checked_ids(checked_rows(1, 0, 8, NUM_FLOATS)).tolist())
    assert len(writing.result(20.0)) == 8
    with pytest.raises(tdserve.StepForgottenError, match=r"step 0 .* step=2 ") as raised:
        table.sample(4, rank=0, world_size=2, step=0)
    assert (raised.value.step, raised.value.store) == (0, name)
    table.forget_draws()
    table.extend(checked_rows(2, 0, 8, NUM_FLOATS))
    assert len(table.sample(4, rank=0, world_size=2, step=0)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 60_000])
def test_sample_when_balanced_by_lengths_then_ranks_have_as_many_tokens(
    client: tdserve.Client, name: str, size: int
) -> None:
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]) * size
    tokens = torch.nested.nested_tensor([torch.arange(length) for length in lengths.tolist()], layout=torch.jagged)
    texts = NonTensorStack(*("x" * length for length in lengths.tolist()))
    mask = torch.arange(8)[None, :] < torch.arange(1, 9)[:, None]
    rows = TensorDict({"tokens": tokens, "num": lengths, "text": texts, "mask": mask, "part": {"text": texts}}, [8])
    table = client.create_replay(name, rows[0], 8, ragged=["tokens"])
    table.extend(rows)
    for step, key in enumerate(["tokens", "num", "text", "mask", "part"]):
        batches = [table.sample(4, rank=rank, world_size=2, step=step, balance=key) for rank in (0, 1)]
        assert [int(batch["num"].sum()) for batch in batches] == [18 * size] * 2, key
    with pytest.raises(tdserve.KeyNotFoundError, match="absent"):
        table.sample(4, rank=0, world_size=2, step=9, balance="absent")


def test_sample_when_the_leaf_has_fractions_then_refused(client: tdserve.Client, name: str) -> None:
    table = create(client, name)
    with pytest.raises(tdserve.NotSupportedError, match="float32"):
        table.sample(4, rank=0, world_size=2, balance="body")


def test_sample_when_of_groups_then_ranks_get_whole_ones(client: tdserve.Client, name: str) -> None:
    rows = TensorDict({"prompt": torch.arange(32) // 4, "n": torch.arange(32)}, [32])
    table = client.create_replay(name, rows[0], 32, sampler=tdserve.Slices(slice_len=2))
    table.extend(rows)
    arguments: dict[str, Any] = {"world_size": 2, "group_by": "prompt", "group_size": 4, "balance": "n"}
    batches = [table.sample(8, rank=rank, **arguments) for rank in (0, 1)]
    prompts = torch.cat([batch["prompt"] for batch in batches]).reshape(4, 4)
    assert (prompts == prompts[:, :1]).all()
    assert len(set(prompts[:, 0].tolist())) == 4
    with pytest.raises(tdserve.InvalidRequestError, match="slices"):
        table.sample(8, rank=0, world_size=2, step=1)


def test_sample_when_a_leaf_is_written_after_the_draw_then_later_readers_see_it(
    client: tdserve.Client, name: str
) -> None:
    table = create(client, name)
    mine = table.sample(4, rank=0, world_size=2)
    table.set_at_("body", torch.full((4, NUM_FLOATS), 7.0), mine)
    again = table.sample(4, rank=0, world_size=2, step=0)
    assert torch.equal(again["index"], mine["index"])
    assert (again["body"] == 7).all()


@pytest.mark.slow
def test_batches_when_of_ranks_then_the_shares_of_successive_steps(client: tdserve.Client, name: str) -> None:
    table = create(client, name)
    with (
        table.batches(4, rank=0, world_size=2, step=3, prefetch=3) as first,
        table.batches(4, rank=1, world_size=2, step=3) as second,
    ):
        for step in range(3, 20):
            mine, theirs = next(first), next(second)
            assert not set(mine["index"].tolist()) & set(theirs["index"].tolist())
            assert torch.equal(mine["index"], table.sample(4, rank=0, world_size=2, step=step)["index"])
    for options in ({"drop": 1.0}, {"prefetch": 9}):
        with pytest.raises(tdserve.InvalidRequestError):
            table.batches(4, rank=0, world_size=2, **options)


def test_batches_when_opened_again_then_go_on_behind_what_was_returned(client: tdserve.Client, name: str) -> None:
    table = create(client, name)
    options: dict[str, Any] = {"rank": 0, "world_size": 2}
    found = [table.sample(4, **options)["index"]]
    for _ in range(2):
        with table.batches(4, **options, prefetch=4) as batches:  # those that are prefetched at its end come again
            found += [next(batches)["index"] for _ in range(3)]
            found.append(table.sample(4, **options)["index"])
            found.append(next(batches)["index"])  # not the one that the call has had
    found.append(table.sample(4, **options)["index"])
    for step, rows in enumerate(found):
        assert torch.equal(rows, table.sample(4, **options, step=step)["index"]), step


def test_batches_when_a_step_is_named_then_calls_go_on_behind_it(client: tdserve.Client, name: str) -> None:
    table = create(client, name)
    with table.batches(4, rank=0, world_size=2, step=5) as batches:
        next(batches)
    counted = table.sample(4, rank=0, world_size=2)["index"]
    assert torch.equal(counted, table.sample(4, rank=0, world_size=2, step=6)["index"])


def test_batches_when_one_was_late_then_the_next_has_its_step(client: tdserve.Client, name: str) -> None:
    table = client.create_replay(name, checked_rows(0, 0, 1, NUM_FLOATS)[0], 64)
    with table.batches(4, rank=0, world_size=2, timeout_s=0.2) as batches:
        with pytest.raises(tdserve.DeadlineExceededError):
            next(batches)
        table.extend(checked_rows(0, 0, 8, NUM_FLOATS))
        found = None
        while found is None:
            try:
                found = next(batches)
            except tdserve.DeadlineExceededError:
                continue
    assert torch.equal(found["index"], table.sample(4, rank=0, world_size=2, step=0)["index"])


def test_sample_when_of_tasks_then_each_counts_its_steps(client: tdserve.Client, name: str) -> None:
    create(client, name)

    async def train(rank: int) -> list[list[int]]:
        async with tdserve.aio.connect(client.address, transport=client.transport, timeout_s=20.0) as asynchronous:
            table = await asynchronous.replay(name)
            return [checked_ids(await table.sample(4, rank=rank, world_size=2)).tolist() for _ in range(3)]

    async def train_all() -> list[list[list[int]]]:
        return list(await asyncio.gather(train(0), train(1), train(1)))

    first, second, same = asyncio.run(train_all())
    assert second == same
    for mine, theirs in zip(first, second, strict=True):
        assert not set(mine) & set(theirs)


def test_sample_when_a_new_run_begins_then_it_gets_draws_of_its_own(client: tdserve.Client, name: str) -> None:
    table = create(client, name, 16)

    def draw(rank: int, **options: Any) -> list[int]:
        found: list[int] = table.sample(8, rank=rank, world_size=2, **options)["index"].tolist()
        return found

    first = [draw(rank, step=3, run="a") for rank in range(2)]
    assert draw(0, step=3, run="a") == first[0]
    with pytest.raises(tdserve.DeadlineExceededError):  # all rows are the ranks'
        table.extend(checked_rows(1, 0, 4, NUM_FLOATS), timeout_s=0)
    second = [draw(rank, run="b") for rank in range(2)]  # its own count begins at 0
    assert sorted(second[0] + second[1]) == list(range(16))
    assert [draw(rank, run="b") for rank in range(2)] != second
    assert draw(1, step=0, run="b") == second[1]
    third = draw(0, step=0, run=7)
    assert draw(0, step=0, run="7") == third
    with table.batches(8, rank=0, world_size=2, run="c") as batches:
        assert next(batches)["index"].tolist() == draw(0, step=0, run="c")


def test_rows_when_used_up_by_ranks_then_no_writer_of_a_queue_overwrites_others(
    client: tdserve.Client, name: str
) -> None:
    row = TensorDict({"number": torch.tensor(0)}, [])
    table = client.create_replay(name, row, 12, limiter=tdserve.Queue(12), max_times_sampled=1, sampler=tdserve.Fifo())
    table.extend(TensorDict({"number": torch.arange(12)}, [12]))
    first = [table.sample(4, rank=rank, world_size=2, step=0)["number"].tolist() for rank in range(2)]
    assert sorted(first[0] + first[1]) == list(range(8))
    with pytest.raises(tdserve.DeadlineExceededError, match="kept for the ranks of a step 8"):
        table.extend(TensorDict({"number": torch.arange(12, 16)}, [4]), timeout_s=0.2)
    assert sorted(table[:]["number"].tolist()) == [8, 9, 10, 11]
    waiting = table.extend(TensorDict({"number": torch.arange(12, 16)}, [4]), return_early=True)
    with ThreadPoolExecutor(2) as ranks:  # that both ask for the next step makes room
        second = ranks.map(lambda rank: table.sample(4, rank=rank, world_size=2, step=1, timeout_s=20.0), range(2))
        assert sorted(number for part in second for number in part["number"].tolist()) == list(range(8, 16))
    waiting.result(timeout=20)
