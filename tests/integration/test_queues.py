"""Queues and stacks: what is taken and acknowledged is consumed once, whatever happens to the consumers."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tests.integration.conftest import FreshServer
from tests.integration.crashing import Crashing
from tests.integration.fleet import Fleet
from tests.integration.numbered_rows import LARGE, SMALL, numbers, rows
from tests.processes import wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def queue(client: tdserve.Client, name: str) -> Any:
    """A queue of at most twelve rows with eight rows in it."""
    made = client.create_queue(name, rows(0)[0], 12)
    made.extend(rows(*range(8)))
    return made


@pytest.fixture
def other(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """Another client."""
    with server.client(timeout_s=20.0) as connected:
        yield connected


def take_all(queue: Any, num_rows: int = 1) -> list[int]:
    """Takes the remaining rows, in order."""
    found = []
    while len(queue):
        with queue.take(min(num_rows, len(queue)), timeout_s=20.0) as batch:
            found += numbers(batch)
    return found


# ---------------------------------------------------------------- exactly once


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [20_000, 30_000, 60_000, 250_000])
def test_take_when_very_many_short_rows_then_they_come_at_once(
    client: tdserve.Client, name: str, num_rows: int
) -> None:
    numbered = TensorDict({"x": torch.arange(num_rows, dtype=torch.uint8)}, [num_rows])
    queue = client.create_queue(name, like=numbered[0], max_size=num_rows)
    queue.extend(numbered)
    with queue.take(num_rows, timeout_s=15.0) as batch:  # half of what a transfer may last that gets stuck
        assert torch.equal(batch["x"], numbered["x"])
    assert len(queue) == 0


@pytest.mark.slow
def test_queue_when_consumers_and_a_data_worker_are_killed_then_every_row_is_consumed_once(
    fresh_server: FreshServer,
) -> None:
    num_rows, num_held = 3000, 7
    with fresh_server(num_workers=2).client(timeout_s=60.0) as client:
        wait_for(lambda: all(worker["is_ready"] for worker in client.stats()["workers"]), "the start of both workers")
        queue = client.create_queue("work", rows(0)[0], 64)
        queue.extend(rows(*range(3 * num_held)))
        holding = [("hold", {"name": "work", "num_rows": num_held})] * 3
        draining = [("drain", {"name": "work", "num_rows": 3})] * 3
        with Fleet(client, *holding) as lost:
            lost.wait_all("holds")
            held = [number for child in range(3) for number in lost.numbers(child, "holds")]
            assert sorted(held) == [*range(3 * num_held)]
            with Fleet(client, *draining) as fleet:
                fleet.wait_all("begins")  # or the first of them could take all
                for start in range(3 * num_held, num_rows, 27):
                    queue.extend(rows(*range(start, min(start + 27, num_rows))))
                    if start == 3 * num_held + 27 * 10:
                        lost.kill(0)
                        lost.kill(1)
                    if start == 3 * num_held + 27 * 40:
                        os.kill(client.stats()["workers"][0]["pid"], signal.SIGKILL)
                lost.kill(2)
                queue.close()
                fleet.wait_all("over")
                consumed = [number for child in range(3) for number in fleet.numbers(child, "consumed")]
                assert all(fleet.numbers(child, "consumed") for child in range(3)), "all three had some"
        assert Counter(consumed) == dict.fromkeys(range(num_rows), 1)
        info = queue.info()
        assert (info["num_rows"], info["num_leased"], info["inserts"]) == (0, 0, num_rows)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_take_when_several_clients_share_a_queue_then_each_row_goes_to_one(
    client: tdserve.Client, other: tdserve.Client, name: str, size: int
) -> None:
    queue = client.create_queue(name, rows(0, size=size)[0], 12)

    def consume(handle: Any) -> list[int]:
        found: list[int] = []
        for batch in handle.batches(2, timeout_s=20.0):
            found += numbers(batch)
        return found

    handles = [each.queue(name) for each in (client, other)]
    taking = [each.run_later(partial(consume, handle)) for each, handle in zip((client, other), handles, strict=True)]
    taking += [each.run_later(partial(consume, handle)) for each, handle in zip((client, other), handles, strict=True)]
    for start in range(0, 120, 4):
        queue.extend(rows(*range(start, start + 4), size=size))
    queue.close()
    found = [each.result(30.0) for each in taking]
    assert sorted(number for each in found for number in each) == [*range(120)]
    assert all(each == sorted(each) for each in found), "each sees them in order"


def test_take_when_very_many_rows_become_too_old_while_it_waits_then_it_gets_those_that_come(
    client: tdserve.Client, name: str
) -> None:
    num_rows, policy = 50_000, f"p-{name}"
    queue = client.create_queue(name, rows(9)[0], num_rows, policy=policy)
    queue.extend(rows(9)[0].expand(num_rows - 8).clone())
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(queue.take, num_rows, max_lag=0, ack=False, timeout_s=20.0)
        client.publish(policy, TensorDict({"w": torch.zeros(4)}))
        queue.extend(rows(3)[0].expand(num_rows).clone(), timeout_s=20.0)
        assert set(numbers(taking.result(20.0))) == {3}
    assert queue.info()["num_discarded"] == num_rows - 8
    client.delete(policy)


def test_ack_when_it_is_not_due_then_refused_and_nothing_changed(
    client: tdserve.Client, other: tdserve.Client, queue: Any
) -> None:
    taken = queue.take(3, ack=False)
    with pytest.raises(tdserve.WrongStateError):
        other.queue(queue.name).ack(taken)
    with pytest.raises(tdserve.WrongStateError):
        queue.ack([0, 1, 3])
    assert queue.info()["num_leased"] == 3
    queue.ack(taken[:1])
    queue.ack(taken[1:])
    with pytest.raises(tdserve.WrongStateError, match="3 of these 3 rows have left the table"):
        queue.ack(taken)
    assert take_all(queue) == [3, 4, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [4, pytest.param(30, marks=pytest.mark.full)])
def test_extend_when_the_first_calls_of_a_client_are_early_then_taken_in_their_order(
    server: tdserve.Server, client: tdserve.Client, name: str, num_clients: int
) -> None:
    for number in range(num_clients):  # meanwhile its session opens, and then its ways for messages, one after the
        # other
        queue = client.create_queue(f"{name}-{number}", rows(0)[0], 100)
        with server.client(transport=client.transport) as fresh:
            own = fresh.queue(queue.name)
            futures = [own.extend(rows(2 * step, 2 * step + 1), return_early=True) for step in range(40)]
            assert [future.result(20.0).tolist() for future in futures] == [[2 * s, 2 * s + 1] for s in range(40)]
        assert take_all(queue) == [*range(80)]


# ---------------------------------------------------------------- failed consumers give rows back


def test_take_when_the_block_raises_then_the_rows_are_in_front_again_in_order(
    client: tdserve.Client, other: tdserve.Client, queue: Any
) -> None:
    elsewhere = other.queue(queue.name)

    def work() -> None:
        with queue.take(3) as first:
            assert numbers(first) == [0, 1, 2]
            with elsewhere.take(2) as second:
                assert numbers(second) == [3, 4]
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert take_all(elsewhere, 2) == [0, 1, 2, 5, 6, 7]


def test_take_when_a_consumer_is_killed_then_the_waiting_get_its_rows(client: tdserve.Client, queue: Any) -> None:
    with Fleet(client, ("hold", {"name": queue.name, "num_rows": 6})) as fleet:
        fleet.wait_all("holds")
        assert fleet.numbers(0, "holds") == [0, 1, 2, 3, 4, 5]
        waiting = client.run_later(lambda: queue.take(8, ack=False, timeout_s=30.0))
        wait_for(lambda: queue.info()["num_waiting"] == 1, "a taker that waits")
        fleet.kill(0)
        taken = waiting.result(30.0)
    assert numbers(taken) == [*range(8)]


@pytest.mark.slow
def test_take_when_a_consumer_vanishes_without_a_word_then_the_waiting_get_its_rows(
    server: tdserve.Server,
) -> None:
    """A stopped process answers no ping, and its connections stay open: like a machine that is cut off."""
    hold = ("hold", {"name": "vanished", "num_rows": 6})
    with server.client(transport="gloo") as client, Fleet(client, hold) as fleet:
        queue = client.create_queue("vanished", rows(0)[0], 12)
        queue.extend(rows(*range(8)))
        fleet.wait_all("holds")
        os.kill(fleet.pids[0], signal.SIGSTOP)
        taken = queue.take(8, ack=False, timeout_s=40.0)  # noticed within 20 s
        fleet.kill(0)
    assert numbers(taken) == [*range(8)]


def test_take_when_a_client_leaves_then_its_rows_are_there_again(server: tdserve.Server, queue: Any) -> None:
    with server.client() as leaving:
        leaving.queue(queue.name).take(5, ack=False)
        assert queue.info()["num_leased"] == 5
    wait_for(lambda: queue.info()["num_leased"] == 0, "the return of the rows")
    assert take_all(queue, 4) == [*range(8)]


@pytest.mark.slow
def test_queue_when_control_is_killed_then_only_what_was_acknowledged_is_gone(tmp_path: Path) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        queue = client.create_queue("work", rows(0)[0], 12)
        stack = client.create_queue("stack", rows(0)[0], 12, sampler=tdserve.Lifo())
        for each in (queue, stack):
            each.extend(rows(*range(8)))
        queue.ack(queue.take(2, ack=False))
        stack.ack(stack.take(2, ack=False))
        held = queue.take(3, ack=False)
        crashing.restart()
        with pytest.raises(tdserve.WrongStateError):
            queue.ack(held)
        assert queue.info()["num_leased"] == 0
        queue.extend(rows(8, 9))
        queue.close()
        crashing.restart()
        with pytest.raises(tdserve.WrongStateError, match="closed"):
            queue.extend(rows(10))
        assert [numbers(batch) for batch in queue.batches(3)] == [[2, 3, 4], [5, 6, 7], [8, 9]]
        assert take_all(stack, 6) == [5, 4, 3, 2, 1, 0]
        crashing.restart()
        with pytest.raises(tdserve.EndOfStreamError):
            queue.take(1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_batches_when_the_server_is_away_while_one_waits_then_it_goes_on(tmp_path: Path, transport: str) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(transport=transport, timeout_s=60.0) as client:
        queue: Any = client.create_queue("work", rows(0)[0], 12)
        with ThreadPoolExecutor(1) as threads, queue.batches(2, timeout_s=60.0) as batches:
            waiting = threads.submit(next, batches)
            wait_for(lambda: queue.info()["num_waiting"] == 1, "the iterator")
            crashing.kill()
            with pytest.raises(TimeoutError):  # several attempts fail
                waiting.result(2.0)
            crashing.start()
            queue.extend(rows(3, 4))
            assert numbers(waiting.result(60.0)) == [3, 4]


# ---------------------------------------------------------------- the end


def test_close_when_rows_are_left_then_they_are_drained_and_then_over(
    client: tdserve.Client, other: tdserve.Client, queue: Any
) -> None:
    queue.close()
    assert [numbers(batch) for batch in other.queue(queue.name).batches(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    for each in (queue, other.queue(queue.name)):
        with pytest.raises(tdserve.EndOfStreamError, match=queue.name):
            each.take(2, timeout_s=20.0)
        assert list(each.batches(3)) == []
        with pytest.raises(tdserve.WrongStateError, match="closed"):
            each.extend(rows(9))


def test_close_when_takers_wait_then_they_get_an_error(
    client: tdserve.Client, other: tdserve.Client, queue: Any
) -> None:
    many = client.run_later(lambda: queue.take(12, ack=False, timeout_s=30.0))
    writing = client.run_later(lambda: queue.extend(rows(*range(8, 14)), timeout_s=30.0))
    wait_for(lambda: queue.info()["num_waiting"] == 2, "a taker and a writer that wait")
    other.queue(queue.name).close()
    with pytest.raises(tdserve.WrongStateError, match="closed"):
        writing.result(20.0)
    taken = many.result(20.0)
    assert numbers(taken) == [*range(8)]
    ending = client.run_later(lambda: queue.take(1, timeout_s=30.0))
    wait_for(lambda: queue.info()["num_waiting"] == 1, "a taker that waits for what becomes of the rows")
    queue.ack(taken)
    with pytest.raises(tdserve.EndOfStreamError):
        ending.result(20.0)


def test_close_when_another_still_holds_rows_then_takers_wait_for_what_becomes_of_them(
    client: tdserve.Client, other: tdserve.Client, queue: Any
) -> None:
    held = queue.take(6)
    queue.close()
    elsewhere = other.queue(queue.name)
    with elsewhere.take(4) as batch:
        assert numbers(batch) == [6, 7]
    with pytest.raises(tdserve.DeadlineExceededError):
        elsewhere.take(4, timeout_s=0)
    waiting = other.run_later(lambda: elsewhere.take(4, ack=False, timeout_s=30.0))
    wait_for(lambda: queue.info()["num_waiting"] == 1, "a taker that waits")
    held.give_back()
    taken = waiting.result(20.0)
    assert numbers(taken) == [0, 1, 2, 3]
    elsewhere.ack(taken)
    assert [numbers(batch) for batch in elsewhere.batches(4, timeout_s=20.0)] == [[4, 5]]


# ---------------------------------------------------------------- order and bounds


def test_extend_when_the_queue_is_full_then_waits_until_rows_are_acknowledged(
    client: tdserve.Client, queue: Any
) -> None:
    queue.extend(rows(8, 9, 10, 11))
    taken = queue.take(6, ack=False)
    with pytest.raises(tdserve.DeadlineExceededError, match="size 12 of 12"):
        queue.extend(rows(12), timeout_s=0)
    waiting = client.run_later(lambda: queue.extend(rows(*range(12, 18)), timeout_s=30.0))
    wait_for(lambda: queue.info()["num_waiting"] == 1, "a writer that waits")
    assert len(queue) == 12
    queue.ack(taken)
    waiting.result(20.0)
    assert take_all(queue, 5) == [*range(6, 18)]
    with pytest.raises(tdserve.InvalidRequestError, match=r"(max_size|capacity of) 12"):
        queue.take(13)


def test_take_when_it_waits_then_gets_as_many_as_it_asked_for(client: tdserve.Client, queue: Any) -> None:
    waiting = client.run_later(lambda: queue.take(10, ack=False, timeout_s=30.0))
    wait_for(lambda: queue.info()["num_waiting"] == 1, "a taker that waits")
    queue.extend(rows(8))
    queue.extend(rows(9, 10))
    assert numbers(waiting.result(20.0)) == [*range(10)]


def test_take_when_others_hold_the_rows_then_the_error_names_their_number(client: tdserve.Client, queue: Any) -> None:
    queue.take(6, ack=False)
    with pytest.raises(tdserve.DeadlineExceededError, match=r"of whose 8 rows too few .*\(6 are on lease\)"):
        queue.take(4, timeout_s=0)


@pytest.mark.parametrize("sampler", [tdserve.Uniform(), tdserve.WithoutReplacement(), "lifo"])
def test_create_queue_when_the_sampler_has_no_order_then_refused(client: tdserve.Client, sampler: Any) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match=r"has no order, as Fifo\(\) has"):
        client.create_queue("unordered", rows(0)[0], 12, sampler=sampler)


def test_stack_when_taken_then_the_newest_first_and_what_comes_back_is_on_top(
    client: tdserve.Client, name: str
) -> None:
    stack = client.create_queue(name, rows(0)[0], 12, sampler=tdserve.Lifo())
    stack.extend(rows(0, 1, 2, 3))
    stack.extend(rows(4, 5))
    taken = stack.take(3)
    with pytest.raises(KeyError), taken:
        raise KeyError
    assert numbers(taken.rows) == [5, 4, 3]
    with stack.take(2) as batch:
        assert numbers(batch) == [5, 4]
    stack.extend(rows(6))
    assert take_all(stack, 2) == [6, 3, 2, 1, 0]


def test_take_when_rows_have_values_then_they_come_along(client: tdserve.Client, name: str) -> None:
    queue = client.create_queue(name, TensorDict({"number": torch.tensor(0), "text": ""}, []), 8)
    for start in (0, 4, 8):
        texts = NonTensorStack(*[f"text {number}" for number in range(start, start + 4)])
        queue.extend(TensorDict({"number": torch.arange(start, start + 4), "text": texts}, [4]))
        with queue.take(4) as batch:
            assert [batch[row]["text"] for row in range(4)] == [f"text {number}" for number in range(start, start + 4)]


def test_queue_when_it_is_asked_for_by_another_kind_then_refused(client: tdserve.Client, queue: Any) -> None:
    with pytest.raises(tdserve.WrongStateError, match="not a replay"):
        client.replay(queue.name)
    assert len(client.create_queue(queue.name, rows(0)[0], 12, exists_ok=True)) == 8
    with pytest.raises(tdserve.StoreExistsError):
        client.create_queue(queue.name, rows(0)[0], 12, sampler=tdserve.Lifo(), exists_ok=True)
