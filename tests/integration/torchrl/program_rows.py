"""The rows of programs over TorchRL's own storage and over a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

MakeStorage = Callable[[], Any]


def make_rows(*numbers: int) -> TensorDict:
    """Rows as a collector makes them; ``obs`` says which they are."""
    obs = torch.tensor(numbers, dtype=torch.float32)
    flags = {key: torch.zeros(len(numbers), 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
    return TensorDict({"obs": obs, "next": {"obs": obs + 1, **flags}}, [len(numbers)])


def make_episodes(*lengths: int) -> TensorDict:
    """Rows of several episodes, each with its number, its steps, and its end."""
    rows = make_rows(*range(sum(lengths)))
    rows["episode"] = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    rows["step"] = torch.cat([torch.arange(length) for length in lengths])
    rows["next", "done"][torch.tensor(lengths).cumsum(0) - 1] = True
    return rows


def describe(td: Any) -> dict[Any, Any]:
    """Shape and dtype of every leaf, and the device."""
    leaves = {key: (tuple(leaf.shape), leaf.dtype) for key, leaf in td.items(True, True)}
    return {**leaves, "batch_size": tuple(td.batch_size), "device": td.device}
