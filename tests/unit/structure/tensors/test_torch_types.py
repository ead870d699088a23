from __future__ import annotations

import pytest
import torch

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensors.torch_types import TO_TORCH, from_torch, to_indexable, to_torch, view_bytes
from tdserve.structure.trees.dtypes import ITEMSIZE


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


@pytest.mark.parametrize("dtype", TO_TORCH.values())
def test_indexable_when_any_dtype_then_rows_are_gathered_and_scattered_bit_for_bit(dtype: torch.dtype) -> None:
    content = torch.arange(8 * dtype.itemsize, dtype=torch.uint8) % 2
    leaf, rows = content.view(dtype), torch.tensor([3, 0, 3])
    found = torch.empty(3, dtype=dtype)
    torch.index_select(to_indexable(leaf), 0, rows, out=to_indexable(found))
    to_indexable(leaf)[rows] = to_indexable(found)
    assert leaf.dtype == found.dtype == dtype
    expected = (torch.arange(8 * dtype.itemsize, dtype=torch.uint8) % 2).view(8, dtype.itemsize)[rows]
    assert torch.equal(found.view(torch.uint8).view(3, dtype.itemsize), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64])
def test_view_bytes_when_one_element_is_a_column_of_a_larger_tensor_then_its_bytes(dtype: torch.dtype) -> None:
    column = torch.tensor([[1, 0]]).to(dtype)[:, 0]
    assert view_bytes(column).tolist() == view_bytes(column.clone()).tolist()
    assert view_bytes(column).data_ptr() == column.data_ptr()
