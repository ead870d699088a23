"""One tensor for all rows becomes a value, and a tensor again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import UnbatchedTensor

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.structure.captures.unbatched import find_shared_value, from_value, to_value
from tdserve.structure.trees.nodes import ValueLeaf

unbatched_tensor: Any = UnbatchedTensor


@pytest.mark.parametrize("values", [[], [to_value(torch.ones(1)), to_value(torch.ones(2))]])
def test_shared_when_rows_have_values_of_their_own_then_refused(values: Any) -> None:
    with pytest.raises(NotSupportedError, match="UnbatchedTensor"):
        find_shared_value(values, ValueLeaf((len(values),), True, is_unbatched=True))


def test_unbatched_tensor_when_read_then_has_the_batch_size_around_it() -> None:
    value = to_value(unbatched_tensor(torch.arange(3)))
    found: Any = from_value(find_shared_value([value, value], ValueLeaf((2,), True, is_unbatched=True)), (2,))
    assert type(found) is UnbatchedTensor
    assert torch.equal(found.as_subclass(torch.Tensor), torch.arange(3))
    assert found.batch_size == (2,)


@pytest.mark.parametrize(
    "value", [None, 3, (), ("float32", (2,), b"1"), ("float32", (1 << 70,), b""), ("bool", (1,), b"7")]
)
def test_unbatched_tensor_when_value_is_none_then_refused(value: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        from_value(value, (2,))


def test_value_when_a_tensor_has_no_content_then_refused() -> None:
    with pytest.raises(NotSupportedError, match="UnbatchedTensor"):
        to_value(torch.ones(2, device="meta"))
