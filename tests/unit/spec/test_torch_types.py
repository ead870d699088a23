from __future__ import annotations

import pytest
import torch

from tdserve.errors import NotSupportedError
from tdserve.spec.dtypes import ITEMSIZE
from tdserve.spec.torch_types import from_torch, to_torch


@pytest.mark.parametrize("name", ITEMSIZE)
def test_dtype_when_translated_then_comes_back_with_its_size(name: str) -> None:
    assert from_torch(to_torch(name)) == name
    assert to_torch(name).itemsize == ITEMSIZE[name]


def test_to_torch_when_this_torch_lacks_the_name_then_refuses() -> None:
    with pytest.raises(NotSupportedError, match="float3_future"):
        to_torch("float3_future")


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.bits8])
def test_from_torch_when_dtype_does_not_travel_then_refuses(dtype: torch.dtype) -> None:
    with pytest.raises(NotSupportedError, match=str(dtype)):
        from_torch(dtype)
