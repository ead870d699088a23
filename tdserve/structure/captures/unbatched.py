"""``UnbatchedTensor`` entries: one tensor that all rows share, stored as one value."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import UnbatchedTensor

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.structure.stacks.elements import flatten_elements
from tdserve.structure.tensors.pieces import decode_tensor, encode_tensor
from tdserve.structure.tensors.plain_tensors import to_plain
from tdserve.structure.tensors.torch_types import from_torch
from tdserve.structure.trees.nodes import ValueLeaf


def to_value(tensor: torch.Tensor) -> list[Any]:
    """Returns the stored form of an ``UnbatchedTensor``: its dtype by name, its shape, and its bytes in C order."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if plain.is_nested or plain.layout is not torch.strided or plain.is_meta:
        raise NotSupportedError(
            feature=f"a {plain.layout} UnbatchedTensor", reason="only dense ones with memory can be sent"
        )
    plain = to_plain(plain)
    return [from_torch(plain.dtype), *encode_tensor(plain)]


def from_value(value: Any, batch_size: tuple[int, ...]) -> Any:
    """Returns the ``UnbatchedTensor`` of a stored value, in a tensordict of this batch size.

    Raises:
        RemoteProtocolError: It is not the value of one.
    """
    make: Any = UnbatchedTensor
    try:
        dtype, shape, data = value
        found = make(decode_tensor(dtype, shape, data))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise RemoteProtocolError(expected="an unbatched tensor", received="something else") from None
    found.batch_size = torch.Size(batch_size)
    return found


def find_shared_value(values: Any, leaf: ValueLeaf) -> Any:
    """Returns the one value of rows that share it.

    Raises:
        NotSupportedError: Rows have values of their own.
    """
    found = flatten_elements(values, len(leaf.batch_size))
    if not found or any(value != found[0] for value in found):
        reason = "all rows share one UnbatchedTensor; write it with set(), not by rows"
        raise NotSupportedError(feature="rows that differ in an UnbatchedTensor, or none", reason=reason)
    return found[0]
