"""Rows of a table that a reader (a data worker, or a client on the server's machine) finds without control."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from threading import Event

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.local_roles import is_claiming
from tests.processes import state_of, wait_for
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

CAPACITY = 64
WIDTH = 40
"""Rows of this width are inline one by one, and are sent over the channel when there are many."""


def make_rows(*numbers: int, text: bool = False) -> TensorDict:
    """Rows that show their numbers in every element."""
    x = torch.tensor(numbers)[:, None].expand(-1, WIDTH).clone()
    td = TensorDict({"x": x, "n": {"y": x[:, 0].clone()}}, [len(numbers)])
    if text:
        td["text"] = [f"row {number} " * 20 for number in numbers]
    return td


def read_numbers(rows: TensorDict) -> list[int]:
    """Returns the numbers of rows, each of which must be whole."""
    assert (rows["x"] == rows["n", "y"][:, None]).all()
    found: list[int] = rows["n", "y"].tolist()
    if rows.get("text", None) is not None:
        assert list(rows["text"]) == [f"row {number} " * 20 for number in found]
    return found


@pytest.fixture(scope="module")
def other_server() -> Iterator[tdserve.Server]:
    """A server whose control process these tests stop, with no client but theirs."""
    with make_quick_root() as root, tdserve.Server(root, port=0) as started:
        yield started


@contextmanager
def stopped(server: tdserve.Server) -> Iterator[None]:
    """Stops the control process, and no other, during the block."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: state_of(server.pid) == "T", "the control process to stand still")
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("num_rows", [1, 24, CAPACITY])
def test_reads_when_control_stands_still_then_go_on(
    other_server: tdserve.Server, transport: str, num_rows: int, text: bool
) -> None:
    with other_server.client(transport=transport) as client:
        replay = client.create_replay(f"{transport} {num_rows} {text}", make_rows(0, text=text)[0], CAPACITY)
        replay.extend(make_rows(*range(CAPACITY), text=text))
        numbers = list(range(num_rows))

        def goes_alone() -> bool:
            replay.sample(num_rows)  # now control lets this reader read the table, and opens channels
            with stopped(other_server), suppress(tdserve.DeadlineExceededError):
                return len(replay.sample(num_rows, timeout_s=0.5)) > 0
            return False

        wait_for(goes_alone, "a sample without control")
        before = replay.info()["samples"]
        with stopped(other_server):
            for _ in range(5):
                assert set(read_numbers(replay.sample(num_rows))) <= set(range(CAPACITY))
                assert read_numbers(replay[numbers[::-1]]) == numbers[::-1]
            with replay.batches(num_rows, prefetch=2) as batches:
                for _ in range(6):
                    read_numbers(next(batches))
        assert before + 11 * num_rows <= replay.info()["samples"] <= before + 13 * num_rows


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A table of ``CAPACITY`` rows, which this client has sampled and read before."""
    made = client.create_replay(name, make_rows(0)[0], CAPACITY)
    made.extend(make_rows(*range(CAPACITY)))
    for _ in range(3):
        made.sample(CAPACITY)
        assert read_numbers(made[list(range(CAPACITY))]) == list(range(CAPACITY))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("claims", [False, True])
def test_sample_when_another_client_has_just_extended_then_has_these_rows(
    server: tdserve.Server, client: tdserve.Client, name: str, claims: bool
) -> None:
    capacity = 4
    replay = client.create_replay(name, make_rows(0)[0], capacity)
    replay.extend(make_rows(0, 0, 0, 0))
    with server.client(transport="shm" if claims else "gloo") as other:
        writer = other.replay(name)
        for number in range(1, 200):
            writer.extend(make_rows(number, number))
            # A sample of 256 misses a given one of four rows once in 10^32.
            assert set(read_numbers(replay.sample(256))) == {number - 1, number}
            assert number <= 10 or not claims or is_claiming(other, name)


def test_read_when_rows_leave_then_the_reader_gets_a_selection_error(replay: tdserve.ReplayHandle) -> None:
    replay.delete([3, 5])
    with pytest.raises(tdserve.SelectionError, match="not live"):
        replay[[2, 3]]
    assert not {3, 5} & set(read_numbers(replay.sample(512)))


def test_sample_when_there_are_too_few_rows_then_waits_until_there_are_enough(
    client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, make_rows(0)[0], CAPACITY, min_size=CAPACITY)
    replay.extend(make_rows(*range(CAPACITY)))
    replay.sample(8)
    replay.delete([0])
    with pytest.raises(tdserve.DeadlineExceededError, match="size of 64"):
        replay.sample(8, timeout_s=0)
    replay.extend(make_rows(7))
    assert len(replay.sample(8, timeout_s=0)) == 8


def test_sample_when_rows_lack_leaves_then_draws_none_of_them(replay: tdserve.ReplayHandle) -> None:
    replay.extend(make_rows(*range(32)).select("x"))
    assert set(replay.sample(2048)["index"].tolist()) == set(range(32, CAPACITY))
    replay.set_at_("n", TensorDict({"y": torch.arange(32)}, [32]), list(range(32)))
    assert set(replay.sample(4096)["index"].tolist()) == set(range(CAPACITY))


def test_sample_when_a_limiter_comes_to_count_them_then_those_without_control_count(
    replay: tdserve.ReplayHandle,
) -> None:
    before = replay.info()["samples"]
    for _ in range(4):
        replay.sample(32)
    assert replay.info()["samples"] == before + 4 * 32
    replay.set_limiter(tdserve.SampleToInsertRatio(1.0, min_size=1, error_buffer=CAPACITY))
    with pytest.raises(tdserve.DeadlineExceededError, match=f"samples {before + 4 * 32}"):
        replay.sample(1, timeout_s=0)


def test_reads_when_the_table_is_deleted_and_made_again_then_of_the_new_one(
    server: tdserve.Server, client: tdserve.Client, replay: tdserve.ReplayHandle
) -> None:
    with server.client(transport="gloo") as other:
        other.delete(replay.name)
        other.create_replay(replay.name, make_rows(0)[0], CAPACITY).extend(make_rows(*range(100, 110)))
    assert set(read_numbers(replay.sample(64))) <= set(range(100, 110))
    assert read_numbers(replay[[0, 9]]) == [100, 109]


@pytest.mark.slow
def test_reads_when_writers_overwrite_all_the_time_then_every_row_is_whole(
    server: tdserve.Server, replay: tdserve.ReplayHandle
) -> None:
    is_over = Event()

    def write(transport: str, first: int) -> None:
        with server.client(transport=transport) as other:
            writer = other.replay(replay.name)
            for number in count(first):
                if is_over.is_set():
                    return
                writer.extend(make_rows(*[number] * 16))

    with ThreadPoolExecutor(2) as threads:
        writing = [threads.submit(write, transport, first) for transport, first in (("gloo", 1000), ("shm", 10**6))]
        try:
            for _ in range(300):
                assert len(read_numbers(replay.sample(32))) == 32
                with suppress(tdserve.SelectionError):  # a row that is being overwritten is not live
                    read_numbers(replay[[1, 2, 3]])
        finally:
            is_over.set()
        for each in writing:
            each.result()


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("text", [False, True])
def test_get_by_name_when_control_stands_still_then_goes_on(
    other_server: tdserve.Server, transport: str, text: bool
) -> None:
    name = f"{transport} {text}"
    with other_server.client(transport=transport, timeout_s=1.0) as client:
        client.init_remote(make_rows(1, 2, text=text), name)

        def goes_alone() -> bool:
            client.from_remote_init(name)
            with stopped(other_server), suppress(tdserve.DeadlineExceededError):
                return read_numbers(client.from_remote_init(name)) == [1, 2]
            return False

        wait_for(goes_alone, "a read without control")
        client.send(make_rows(3, 4, text=text), name)
        with stopped(other_server):
            assert read_numbers(client.from_remote_init(name)) == [3, 4]


def test_get_by_name_when_the_store_was_made_again_then_as_it_is_now(client: tdserve.Client, name: str) -> None:
    """In all that its fingerprint leaves out, too."""
    td = TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}, [2], names=["time"])
    client.init_remote(td, name)
    for _ in range(2):
        assert client.from_remote_init(name).names == ["time"]
    client.delete(name)
    client.init_remote(TensorDict({"b": torch.ones(2), "a": torch.zeros(2)}, [2]), name)
    for _ in range(2):
        found = client.from_remote_init(name)
        assert (list(found.keys()), found.names) == (["b", "a"], [None])
        assert found["b"].tolist() == [1, 1]


def test_get_by_name_when_keys_were_added_then_has_them(client: tdserve.Client, name: str) -> None:
    client.init_remote(make_rows(1, 2), name)
    client.from_remote_init(name)
    client[name].update({"more": torch.ones(2)})
    assert client.from_remote_init(name)["more"].tolist() == [1, 1]


def test_get_by_name_when_the_store_is_gone_then_waits_for_the_next(client: tdserve.Client, name: str) -> None:
    client.init_remote(make_rows(1, 2), name)
    client.from_remote_init(name)
    client.delete(name)
    with pytest.raises(tdserve.StoreNotFoundError):
        client.from_remote_init(name, timeout_s=0)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(client.from_remote_init, name)
        client.init_remote(make_rows(5, 6), name)
        assert read_numbers(waits.result(20.0)) == [5, 6]


def test_send_when_the_store_was_made_again_then_goes_to_it_if_it_fits(client: tdserve.Client, name: str) -> None:
    client.init_remote(make_rows(1, 2), name)
    client.send(make_rows(3, 4), name)
    client.delete(name)
    with pytest.raises(tdserve.StoreNotFoundError):
        client.send(make_rows(3, 4), name)
    client.init_remote(make_rows(1, 2), name)
    client.send(make_rows(5, 6), name)
    assert read_numbers(client.from_remote_init(name)) == [5, 6]
    client.delete(name)
    client.init_remote(make_rows(1, 2, 3), name)
    with pytest.raises(tdserve.SpecMismatchError):
        client.send(make_rows(5, 6), name)
    client.delete(name)
    client.create_replay(name, make_rows(0)[0], 2).extend(make_rows(1, 2))
    with pytest.raises(tdserve.WrongStateError):
        client.send(make_rows(5, 6), name)
    assert read_numbers(client.replay(name)[:]) == [1, 2]
