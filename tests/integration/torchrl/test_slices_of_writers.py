"""Slices that are drawn in the process from rows of several writers, by the ends of trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytest.importorskip("torchrl")

from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler, SliceSamplerWithoutReplacement

from tdserve.torchrl import TDServeStorage

pytestmark = pytest.mark.integration

END = {"end_key": ("next", "done"), "strict_length": False}
SAMPLERS = {
    "short": lambda: SliceSampler(slice_len=4, **END),
    "several ends": lambda: SliceSampler(slice_len=4, end_keys=[("next", "done"), "truncated"], strict_length=False),
    "each once": lambda: SliceSamplerWithoutReplacement(slice_len=4, **END),
}


def make_steps(writer: int, begin: int, end: int, *, is_done: bool = False) -> TensorDict:
    """Steps of one trajectory of a writer."""
    step = torch.arange(begin, end)
    done = (step == end - 1)[:, None] & is_done
    columns = {"writer": torch.full_like(step, writer), "step": step, "next": {"done": done}}
    return TensorDict({**columns, "truncated": torch.zeros_like(done)}, [len(step)])


def list_slices(sample: Any) -> list[list[tuple[int, int]]]:
    """Returns the writers and steps of the rows of each slice."""
    rows = list(zip(sample["writer"].tolist(), sample["step"].tolist(), strict=True))
    ends = (sample["next", "truncated"].flatten().nonzero().flatten() + 1).tolist()
    return [rows[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def check_slices(sample: Any) -> int:
    """Checks that the rows of each slice follow each other; returns the length of the longest."""
    slices = list_slices(sample)
    for rows in slices:
        writer, begin = rows[0]
        assert rows == [(writer, begin + step) for step in range(len(rows))]
    return max(map(len, slices))


_opened: list[tdserve.Client] = []


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    """Closes the connections of buffers after each test."""
    yield
    while _opened:
        _opened.pop().close()


def make_buffer(server: tdserve.Server, name: str, transport: Any, sampler: Any, capacity: int = 100) -> Any:
    """Returns a buffer that writes and reads over a connection of its own."""
    client = tdserve.connect(server.address, transport=transport)
    _opened.append(client)
    storage = TDServeStorage(capacity, address=client, name=name)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("transport", ["shm", "gloo", "grpc"])
def test_slices_by_ends_when_writers_take_turns_then_no_slice_mixes_them(
    server: tdserve.Server, name: str, transport: str, kind: str
) -> None:
    first, second = (make_buffer(server, name, transport, SAMPLERS[kind]()) for _ in range(2))
    first.extend(make_steps(1, 0, 3))
    second.extend(make_steps(2, 0, 5, is_done=True))
    first.extend(make_steps(1, 3, 5))
    first.extend(make_steps(1, 5, 7, is_done=True))
    for _ in range(10):
        longest = check_slices(first.sample())
    assert longest == 4  # a slice goes over two writes of one writer


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo", "grpc"])
def test_slices_by_ends_when_writers_fill_the_ring_by_small_writes_then_no_slice_mixes_them(
    server: tdserve.Server, name: str, transport: str
) -> None:
    buffers = [make_buffer(server, name, transport, SAMPLERS["short"]()) for _ in range(2)]
    for begin in range(0, 240, 3):
        for writer, buffer in enumerate(buffers):
            buffer.extend(make_steps(writer, begin, begin + 3))
        if begin % 30 == 27:
            assert check_slices(buffers[0].sample()) >= 3
    for buffer in buffers:  # alone, one after the other
        for begin in range(240, 340, 2):
            buffer.extend(make_steps(7, begin, begin + 2))
        assert check_slices(buffer.sample()) == 4


def test_slices_by_ends_when_rows_have_left_and_others_took_their_places_then_none_goes_over_them(
    server: tdserve.Server, name: str
) -> None:
    buffer = make_buffer(server, name, "shm", SAMPLERS["short"](), capacity=12)
    buffer.extend(make_steps(1, 0, 12))
    table = buffer.storage.table
    table.delete([4, 5, 9])
    buffer.extend(make_steps(1, 50, 53))
    assert len(table) == 12
    for _ in range(10):
        check_slices(buffer.sample())
