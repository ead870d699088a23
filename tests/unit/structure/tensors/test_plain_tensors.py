from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensors.plain_tensors import check_memory, is_in_memory, to_plain


class Marked(torch.Tensor):
    """A subclass with elements of its own."""


def make_fake() -> torch.Tensor:
    """Returns a tensor without content."""
    with FakeTensorMode():
        return torch.zeros(2)


def resize_storage(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Returns a tensor of whose memory only the first bytes are left."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def read_inside(transform: Callable[..., Any]) -> torch.Tensor:
    """Reads a tensor as a transform of torch.func shows it."""
    read: torch.Tensor = transform(lambda tensor: to_plain(tensor, ("n", "a"), store="store").sum())(torch.zeros(2, 3))
    return read


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0),
        torch.arange(6.0).requires_grad_(),
        torch.nn.Parameter(torch.arange(6.0)),
        torch.arange(6.0).as_subclass(Marked),
        torch.arange(12.0).view(3, 4)[1:, ::2],
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(1).expand(5),
        torch.zeros(0, 3),
        torch.tensor(1.0),
        resize_storage(torch.arange(12.0), 40)[:10],
    ],
)
def test_to_plain_when_elements_are_in_memory_then_the_same_memory_without_class_or_history(
    tensor: torch.Tensor,
) -> None:
    plain = to_plain(tensor)
    assert type(plain) is torch.Tensor
    assert not plain.requires_grad
    assert (plain.data_ptr(), plain.shape, plain.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())


WITHOUT_BYTES: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "freed": (lambda: resize_storage(torch.zeros(4), 0), "memory was freed.*has 0 bytes"),
    "freed with gaps": (lambda: resize_storage(torch.zeros(9)[::2], 0), "memory was freed"),
    "freed behind an offset": (lambda: resize_storage(torch.zeros(9)[1:], 0), "memory was freed"),
    "freed parameter": (lambda: resize_storage(torch.nn.Parameter(torch.zeros(4)), 0), "memory was freed"),
    "vmap": (lambda: read_inside(torch.vmap), "inside torch.vmap"),
    "grad": (lambda: read_inside(torch.func.grad), "inside torch.vmap or another"),
    "functionalize": (lambda: read_inside(torch.func.functionalize), "inside torch.vmap or another"),
    "masked": (lambda: masked_tensor(torch.zeros(2), torch.ones(2).bool()), "a tensor of class MaskedTensor"),
    "meta": (lambda: torch.zeros(2, device="meta"), "a meta tensor"),
    "fake": (make_fake, "a fake tensor"),
    "sparse": (lambda: torch.zeros(2).to_sparse(), "a sparse_coo tensor.*to_dense"),
    "uninitialized": (lambda: torch.nn.LazyLinear(2).weight, "an uninitialized parameter"),
}


@pytest.mark.filterwarnings("ignore:.*MaskedTensor")
@pytest.mark.parametrize(("make", "what"), WITHOUT_BYTES.values(), ids=WITHOUT_BYTES)
def test_to_plain_when_a_tensor_has_no_bytes_then_refused_with_kind_key_and_store(
    make: Callable[[], torch.Tensor], what: str
) -> None:
    with pytest.raises(NotSupportedError, match=what) as raised:
        to_plain(make(), ("n", "a"), store="store")
    assert "at key ('n', 'a') of store 'store'" in str(raised.value)


def test_check_memory_when_memory_is_resized_again_then_passes() -> None:
    tensor = resize_storage(torch.zeros(4), 0)
    assert not is_in_memory(tensor)
    with pytest.raises(NotSupportedError, match="memory was freed at key 'a'"):
        check_memory(tensor, ("a",))
    resize_storage(tensor, 16)
    check_memory(tensor, ("a",))
