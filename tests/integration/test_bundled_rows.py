"""Rows with several values, which are kept together: by every transport, in every order, over restarts."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.base.config import TransportName
from tests.integration.conftest import FreshServer
from tests.integration.programs import worker_of
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_ROWS = 6

TRANSPORTS: list[TransportName] = ["shm", "gloo"]


def rows(tag: str, size: int = 1, num_rows: int = NUM_ROWS) -> TensorDict:
    """Texts, dicts, and tokens of any length."""
    numbers = range(num_rows)
    return TensorDict(
        {
            "prompt": NonTensorStack(*[f"{tag} {number} " * size for number in numbers]),
            "call": NonTensorStack(*[{"of": tag, "number": number} for number in numbers]),
            "tokens": torch.nested.nested_tensor(
                [torch.arange(size * number) for number in numbers], layout=torch.jagged
            ),
            "x": torch.arange(num_rows),
        },
        [num_rows],
    )


def like() -> TensorDict:
    """Returns one row."""
    row = {"prompt": "", "call": NonTensorData({}), "tokens": torch.zeros(0, dtype=torch.int64), "x": torch.tensor(0)}
    return TensorDict(row, [])


def content(td: Any) -> list[tuple[Any, ...]]:
    """What rows have, to compare."""
    tokens = [each.tolist() for each in td["tokens"].unbind()]
    return list(zip(td["prompt"], [dict(call) for call in td["call"]], tokens, td["x"].tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4_000], ids=["in messages", "in files"])
@pytest.mark.parametrize("writes", TRANSPORTS)
def test_rows_when_written_by_one_transport_then_all_read_them(
    server: tdserve.Server, name: str, writes: TransportName, size: int
) -> None:
    with server.client(transport=writes) as writer:
        replay = writer.create_replay(name, like=like(), capacity=2 * NUM_ROWS, ragged=["tokens"])
        futures = [replay.extend(rows(tag, size), return_early=True) for tag in "abc"]
        index = torch.cat([future.result(20) for future in futures][1:])
        expected = content(rows("b", size)) + content(rows("c", size))
        for reads in TRANSPORTS:
            with server.client(transport=reads) as reader:
                assert content(reader.replay(name)[index]) == expected


@pytest.mark.parametrize("overwrites", TRANSPORTS)
def test_value_when_overwritten_by_itself_then_the_others_of_its_row_stay(
    server: tdserve.Server, name: str, overwrites: TransportName
) -> None:
    with server.client(transport="shm") as writer, server.client(transport=overwrites) as other:
        replay = writer.create_replay(name, like=like(), capacity=NUM_ROWS, ragged=["tokens"])
        index = replay.extend(rows("old"))
        other.replay(name).set_at_("prompt", ["new", "newer"], index[[1, 4]])
        expected = content(rows("old"))
        for number, text in ((1, "new"), (4, "newer")):
            expected[number] = (text, *expected[number][1:])
        assert content(replay[index]) == content(other.replay(name)[index]) == expected
        assert content(replay[other.replay(name).extend(rows("next"))]) == content(rows("next"))


def test_rows_when_some_come_without_a_key_then_it_is_none_and_not_what_was_there(
    server: tdserve.Server, name: str
) -> None:
    with server.client(transport="shm") as client:
        replay = client.create_replay(name, like=like(), capacity=NUM_ROWS, ragged=["tokens"])
        replay.extend(rows("old"))
        index = replay.extend(rows("new").exclude("call"))
        found = replay[index]
        assert found["call"].tolist() == [None] * NUM_ROWS
        assert found["prompt"].tolist() == rows("new")["prompt"].tolist()
        replay.set_at_("call", [{"later": True}], index[[2]])
        assert replay[index]["call"].tolist() == [None, None, {"later": True}, None, None, None]


@pytest.mark.slow
def test_rows_when_deleted_and_the_server_starts_again_then_the_others_are_there_in_less_space(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with tdserve.Server(root, port=0) as server, server.client(transport="shm") as client:
        replay = client.create_replay("r", like=like(), capacity=4 * NUM_ROWS, ragged=["tokens"])
        for tag in "abcdefghijklmnop":
            index = replay.extend(rows(tag, 4_000))
        for tag in "qrst":
            index = replay.extend(rows(tag))
        replay.delete(index[[0, 1]])
        replay.set_at_("prompt", ["own"], index[[2]])
        expected = content(replay[:])
        assert len(expected) == 4 * NUM_ROWS - 2
    size = sum(path.stat().st_size for path in root.glob("stores/r/objects*/data.mdb"))
    with tdserve.Server(root, port=0) as server:
        assert sum(path.stat().st_size for path in root.glob("stores/r/objects*/data.mdb")) < size // 2
        for transport in TRANSPORTS:
            with server.client(transport=transport) as client:
                assert content(client.replay("r")[:]) == expected
                client.replay("r").extend(rows(transport, num_rows=2))
                expected = content(client.replay("r")[:])


@pytest.mark.slow
def test_extends_when_over_then_nothing_is_left_for_the_garbage_collector(server: tdserve.Server, name: str) -> None:
    with server.client(transport="shm") as client:
        replay = client.create_replay(name, like=like(), capacity=4 * NUM_ROWS, ragged=["tokens"])
        batches = [rows(tag, 1_000) for tag in "abcdefgh"]
        for batch in batches:
            replay.extend(batch)
        gc.collect()
        gc.disable()
        try:
            for future in [replay.extend(batch, return_early=True) for batch in batches]:
                future.result(20)
            num_left = gc.collect()
        finally:
            gc.enable()
        assert num_left < 8 * len(batches), "what an extend holds lives until somebody collects it"


NUM_KILLS = 4


@pytest.mark.slow
@pytest.mark.once("gloo")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_extends_when_the_worker_is_killed_again_and_again_then_what_was_acknowledged_is_whole(
    fresh_server: FreshServer, transport: TransportName
) -> None:
    server = fresh_server()
    with server.client(transport=transport, timeout_s=60.0) as client:
        replay = client.create_replay("rows", like=like(), capacity=100 * NUM_ROWS, ragged=["tokens"])
        is_over, stored = Event(), dict[int, tuple[str, int]]()

        def write() -> None:
            for number in itertools.count():
                if is_over.is_set():
                    return
                for place, row in enumerate(replay.extend(rows(f"{number}", 2_000)).tolist()):
                    stored[row] = (f"{number}", place)

        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(write)
            for _ in range(NUM_KILLS):
                target = len(stored) + 2 * NUM_ROWS
                wait_for(partial(_has_more, stored, target, writing), "more rows")
                os.kill(worker_of(client), signal.SIGKILL)
            is_over.set()
            writing.result(60.0)
        expected = {tag: content(rows(tag, 2_000)) for tag in {tag for tag, _ in stored.values()}}
        index = sorted(stored)
        found = content(replay[index])
        assert found == [expected[tag][place] for tag, place in map(stored.__getitem__, index)]


def _has_more(stored: dict[int, tuple[str, int]], num_rows: int, writing: Future[None]) -> bool:
    return len(stored) >= num_rows or writing.done()
