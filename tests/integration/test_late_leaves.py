"""Rows with any combination of leaves. Any part of these is written later, in every way of writing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, cycle
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.base.config import TransportName

pytestmark = pytest.mark.integration

KEYS = ("number", "image", "tokens", "prompt", "call")
"""Dense leaves, a ragged one, and values of any kind."""

WAYS = ("as one batch", "one by one", "at once", "by a writer")
"""Ways of writing rows. Each part of the leaves is written in one of these ways, the next part in the next."""

TRANSPORTS: list[TransportName] = ["gloo", "shm"]

NUM_ROWS = 4


def jagged(components: list[torch.Tensor]) -> torch.Tensor:
    """Returns tensors of several lengths as one leaf."""
    return torch.nested.nested_tensor(components, layout=torch.jagged)


def rows(tag: int, *keys: str, num_rows: int = NUM_ROWS) -> TensorDict:
    """Returns rows that differ in every leaf by their number and ``tag``."""
    numbers = [10 * tag + number for number in range(num_rows)]
    leaves = {
        "number": torch.tensor(numbers),
        "image": torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 3).contiguous(),
        "tokens": jagged([torch.full((1 + number % 3,), number) for number in numbers]),
        "prompt": NonTensorStack(*[f"prompt {number}" for number in numbers]),
        "call": NonTensorStack(*[NonTensorData({"number": number}) for number in numbers]),
    }
    return TensorDict({key: leaves[key] for key in keys or KEYS}, [num_rows])


def like() -> TensorDict:
    """Returns one row."""
    values = {"prompt": "", "call": NonTensorData({"number": 0})}
    tokens = torch.zeros(1, dtype=torch.int64)
    return TensorDict({"number": torch.tensor(0), "image": torch.zeros(3), "tokens": tokens, **values}, [])


def content(td: Any, *keys: str) -> list[tuple[Any, ...]]:
    """Returns the content of rows at some keys, sorted, to compare."""
    columns = []
    for key in keys or KEYS:
        value = td[key]
        is_tensor = isinstance(value, torch.Tensor)
        columns.append(
            [repr(each.tolist() if is_tensor else each) for each in (value.unbind() if is_tensor else value)]
        )
    return sorted(zip(*columns, strict=True))


def write(table: Any, how: str, tag: int, *keys: str) -> torch.Tensor:
    """Writes ``rows`` in one of these ways; returns their numbers."""
    td = rows(tag, *keys)
    if how == "one by one":
        return torch.cat([table.extend(td[number : number + 1]) for number in range(NUM_ROWS)])
    if how == "by a writer":
        first = table.info()["inserts"] % table.capacity
        with table.writer(batch=2, keys=td.keys()) as writer:
            for row in td.unbind(0):
                writer.append(row)
        return torch.arange(first, first + NUM_ROWS)
    if how == "at once":
        parts = [table.extend(td[number : number + 2], return_early=True) for number in range(0, NUM_ROWS, 2)]
        return torch.cat([part.result(20.0) for part in parts])
    index: torch.Tensor = table.extend(td)
    return index


def parts() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields each set of leaves that rows may have at first, neither none nor all, with a way to write it."""
    found = [part for size in range(1, len(KEYS)) for part in combinations(KEYS, size)]
    return zip(found, cycle(WAYS), strict=False)


def set_late(table: Any, index: torch.Tensor, tag: int, given: tuple[str, ...]) -> None:
    """Writes the leaves that were left for later."""
    for key in KEYS:
        if key not in given:
            table.set_at_(key, rows(tag)[key], index)


@pytest.mark.slow
@pytest.mark.parametrize("writes", TRANSPORTS)
def test_replay_when_leaves_come_later_then_rows_are_drawn_for_what_they_have_and_whole_at_last(
    server: tdserve.Server, writes: TransportName
) -> None:
    name = f"late-replay-{writes}"
    judges: TransportName = "gloo" if writes == "shm" else "shm"
    with server.client(transport=writes) as actor, server.client(transport=judges) as judge:
        for given, how in parts():
            # A ring of two writes: late leaves go to rows that were complete before.
            replay = actor.create_replay(name, like(), 2 * NUM_ROWS, sampler=tdserve.Fifo(), ragged=["tokens"])
            write(replay, how, 0)
            write(replay, how, 1, *given)
            index = write(replay, how, 2, *given)
            assert content(judge.replay(name).sample(2 * NUM_ROWS, require=given), *given) == sorted(
                content(rows(1), *given) + content(rows(2), *given)
            )
            with pytest.raises(tdserve.DeadlineExceededError):
                replay.sample(1, timeout_s=0)
            set_late(judge.replay(name), index, 2, given)
            for table in (replay, judge.replay(name)):
                assert content(table.sample(NUM_ROWS)) == content(rows(2))
                assert content(table[index]) == content(rows(2))
            judge.delete(name)


@pytest.mark.slow
@pytest.mark.parametrize("writes", TRANSPORTS)
def test_queue_when_leaves_come_later_then_rows_are_taken_once_they_are_whole(
    server: tdserve.Server, writes: TransportName
) -> None:
    name = f"late-queue-{writes}"
    with server.client(transport=writes) as actor, server.client(transport="shm") as trainer:
        for given, how in parts():
            queue = actor.create_queue(name, like(), max_size=2 * NUM_ROWS, ragged=["tokens"])
            index = write(queue, how, 1, *given)
            with pytest.raises(tdserve.DeadlineExceededError):
                trainer.queue(name).take(1, timeout_s=0)
            set_late(queue, index, 1, given)
            with trainer.queue(name).take(NUM_ROWS) as taken:
                assert content(taken) == content(rows(1))
            actor.delete(name)
