"""A small named tensordict of every common kind of entry, for tests of handles."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def local() -> TensorDict:
    """Returns the content of the store that the fixture ``handle`` makes."""
    return TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"c": torch.arange(3), "t": "text"}}, [3], names=["row"])
