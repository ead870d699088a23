from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.errors import InvalidRequestError

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"t": "text"}}, [3])


def test_memmap_like_when_made_then_zeros_with_more_rows(client: tdserve.Client, name: str) -> None:
    handle = client.memmap_like(TD, name, batch_size=(5,))
    assert handle.batch_size == torch.Size([5, 3])
    assert torch.equal(handle["a"], torch.zeros(5, 3, 2))
    assert handle[1, 2]["n", "t"] == "text"


@pytest.mark.parametrize("batch_size", [(-1,), (2.0,), (True,)])
def test_memmap_like_when_a_size_is_none_then_refused(client: tdserve.Client, name: str, batch_size: Any) -> None:
    with pytest.raises(InvalidRequestError, match="batch_size"):
        client.memmap_like(TD, name, batch_size=batch_size)
