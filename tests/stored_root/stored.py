"""The content of the stored root, computed by this file alone: ``make.py`` wrote it once, and a test reads it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

NUM_ROWS = 4
CAPACITY = 8
NUM_INSERTED = 11
"""More rows than the ring holds, so that it has wrapped around."""

PRIORITIES = {3: 2.0, 4: 0.5}
"""Priorities of the updated rows, by number."""

ENTRIES = {"first": 1, "second": 2}
"""Keys of the keyed store, and the numbers of the rows that they have."""


@tensorclass
class Pose:
    """A tensorclass as users have it."""

    angle: torch.Tensor
    frame: str


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    """Returns numbers that are all different."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float32) / 4 + start).view(shape)


def ragged(start: float) -> torch.Tensor:
    """Returns rows of different lengths."""
    return torch.nested.nested_tensor([numbers(length, 2, start=start) for length in (1, 3, 2, 4)], layout=torch.jagged)


def unlike(start: float) -> LazyStackedTensorDict:
    """Returns rows that differ in structure."""
    kinds: list[dict[str, Any]] = [{}, {"call": "search"}, {"y": numbers(2, start=start)}, {"n": {"z": numbers(1)}}]
    return lazy_stack([TensorDict({"x": numbers(number, start=start), **more}) for number, more in enumerate(kinds)])


def tensordict(start: float = 0.0) -> TensorDict:
    """Returns every kind of entry that a tensordict store of this format may have."""
    return TensorDict(
        {
            "obs": numbers(NUM_ROWS, 3, start=start),
            "next": {"done": torch.tensor([False, True, False, True]), "a/b": numbers(NUM_ROWS, start=start).half()},
            "empty": {},
            "none": torch.zeros(NUM_ROWS, 0),
            "shape": torch.arange(NUM_ROWS) + int(start),
            "small": numbers(NUM_ROWS, start=start).to(torch.float8_e4m3fn),
            "bits": torch.tensor([0x7FC00001, 1, -1, 2**31 - 1], dtype=torch.int32).view(torch.float32),
            "text": NonTensorStack(*(f"row {number} of {start}" for number in range(NUM_ROWS))),
            "tag": NonTensorData({"k": [1, None, b"\0", 2.5]}, batch_size=[NUM_ROWS]),
            "pose": Pose(angle=numbers(NUM_ROWS, start=start), frame="world", batch_size=[NUM_ROWS]),  # type: ignore[call-arg]
            "tokens": ragged(start),
            "turns": unlike(start),
        },
        [NUM_ROWS],
        names=["time"],
    )


def row(number: int) -> TensorDict:
    """Returns one row of the table and of the queue."""
    return TensorDict({"x": numbers(2, start=number), "n": {"i": torch.tensor(number)}, "t": f"text {number}"}, [])


def rows(first: int, last: int) -> Any:
    """Returns consecutive rows."""
    return torch.stack([row(number) for number in range(first, last)]).contiguous()


def small() -> TensorDict:
    """Returns a tensordict that nobody reads: the catalog has it."""
    return TensorDict({"a": numbers(4)}, [4])


def weights(version: int) -> TensorDict:
    """Returns one version of weights."""
    return TensorDict({"w": numbers(3, 2, start=version), "b": {"bias": numbers(3, start=-version).bfloat16()}}, [])
