"""A folder as users have it, and what tensordict itself reads from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

NUM_ROWS = 6


@tensorclass
class Shot:
    """A tensorclass as users have it on disk."""

    image: torch.Tensor
    label: str


def content() -> TensorDict:
    """Returns every kind of entry that a folder can hold in place."""
    return TensorDict(
        {
            "x": torch.arange(NUM_ROWS * 3.0).view(NUM_ROWS, 3),
            "n": {"y/z": torch.arange(NUM_ROWS), "empty": torch.zeros(NUM_ROWS, 0)},
            "text": NonTensorStack(*(f"row {number}" for number in range(NUM_ROWS))),
            "tag": NonTensorData({"k": [1, None]}, batch_size=[NUM_ROWS]),
            "shot": Shot(image=torch.rand(NUM_ROWS, 2), label="cat", batch_size=[NUM_ROWS]),  # type: ignore[call-arg]
        },
        [NUM_ROWS],
    )


def loaded(folder: Path) -> Any:
    """Returns what tensordict itself reads there now."""
    return TensorDict.load_memmap(folder, allow_pickle=False).clone()


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Returns the content of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
