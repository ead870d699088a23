"""Extends over a network that a data worker carries out by itself."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.conftest import FreshServer
from tests.integration.local_roles import is_claiming
from tests.processes import state_of, wait_for

pytestmark = pytest.mark.integration

CAPACITY = 1 << 16
WIDTH = 40
"""Single rows of this width are part of their requests; many rows follow over the channel."""


def make_rows(first: int, num_rows: int, *, width: int = WIDTH) -> TensorDict:
    """Rows that show their numbers, from ``first`` on, in every element."""
    numbers = torch.arange(first, first + num_rows)
    return TensorDict({"x": numbers[:, None].expand(-1, width).clone(), "n": numbers}, [num_rows])


def read_numbers(replay: Any) -> list[int]:
    """Returns the numbers of all rows in the order of the ring; each row must be whole."""
    rows = replay[:]
    assert (rows["x"] == rows["n"][:, None]).all()
    found: list[int] = rows["n"].tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 64])
def test_extends_when_control_stands_still_then_go_on_and_are_stored_in_order(
    fresh_server: FreshServer, num_rows: int
) -> None:
    server = fresh_server()
    numbers = count(0, num_rows)
    with server.client(transport="gloo") as client:
        replay = client.create_replay("r", make_rows(0, 1)[0], CAPACITY)

        def extend() -> None:
            replay.extend(make_rows(next(numbers), num_rows))

        def is_let_claim() -> bool:
            extend()
            return is_claiming(client, "r")

        wait_for(is_let_claim, "a claim of the worker")
        extend()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: state_of(server.pid) == "T", "the control process to stand still")
            for _ in range(5):
                extend()
        finally:
            os.kill(server.pid, signal.SIGCONT)
        for _ in range(200):
            extend()
        assert read_numbers(replay) == list(range(next(numbers)))
        assert replay.info()["inserts"] == len(replay)


@pytest.mark.slow
def test_sample_when_it_waits_for_rows_that_a_worker_writes_then_it_gets_them(fresh_server: FreshServer) -> None:
    server = fresh_server()
    with server.client(transport="gloo") as writer, server.client(transport="gloo") as reader:
        replay = writer.create_replay("r", make_rows(0, 1)[0], CAPACITY, limiter=tdserve.MinSize(100))
        other = reader.replay("r")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(other.sample, 10, timeout_s=60.0)
            for number in range(100):
                assert not waiting.done()
                replay.extend(make_rows(number, 1))
            assert len(waiting.result(60.0)) == 10


@pytest.mark.slow
def test_extends_when_small_and_large_ones_take_turns_then_rows_lie_in_the_order_of_the_calls(
    fresh_server: FreshServer,
) -> None:
    server = fresh_server()
    sizes = [1, 64, 3, 2000, 1, 1, 64, 900] * 12
    with server.client(transport="gloo") as client:
        replay = client.create_replay("r", make_rows(0, 1)[0], CAPACITY)
        futures, first = [], 0
        for num_rows in sizes:
            futures.append(replay.extend(make_rows(first, num_rows), return_early=True))
            first += num_rows
        indices = [index for future in futures for index in future.result().tolist()]
        assert indices == list(range(first))
        assert read_numbers(replay) == list(range(first))


@pytest.mark.slow
def test_extends_when_the_table_is_replaced_by_one_of_its_name_then_the_new_one_gets_them(
    fresh_server: FreshServer,
) -> None:
    server = fresh_server()
    with server.client(transport="gloo") as client, server.client(transport="gloo") as other:
        for generation in range(3):
            replay = client.create_replay("r", make_rows(0, 1)[0], CAPACITY)
            also = other.replay("r")
            for number in range(40):
                (replay, also)[number % 2].extend(make_rows(number + generation, 1))
            assert read_numbers(replay) == [number + generation for number in range(40)]
            client.delete("r")
            with pytest.raises(tdserve.StoreNotFoundError):
                also.extend(make_rows(0, 1))


@pytest.mark.slow
def test_extends_when_the_worker_is_killed_again_and_again_then_each_is_stored_once_in_order(
    fresh_server: FreshServer,
) -> None:
    server = fresh_server()
    with server.client(transport="gloo") as client:
        replay = client.create_replay("r", make_rows(0, 1)[0], CAPACITY)
        number = 0
        for _ in range(3):
            (pid,) = [worker["pid"] for worker in client.stats()["workers"]]
            for _ in range(60):
                replay.extend(make_rows(number, 1))
                number += 1
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in range(60):
            replay.extend(make_rows(number, 1))
            number += 1
        assert read_numbers(replay) == list(range(number))
