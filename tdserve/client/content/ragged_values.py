"""Values for ragged leaves and packed nodes: nested tensors, lists, dense tensors, single elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, is_tensor_collection

from tdserve.structure.stacks.elements import flatten_elements, split_elements
from tdserve.structure.tensors.array_tensors import read_array
from tdserve.structure.tensors.pieces import Pieces, split_jagged
from tdserve.structure.tensors.plain_tensors import to_plain
from tdserve.structure.tensors.torch_types import FROM_TORCH, to_torch
from tdserve.structure.trees.nodes import Path, Ragged


def split_tensors(value: Any, batch_size: tuple[int, ...], ragged: Ragged, *, path: Path = (), store: str = "") -> Any:
    """Returns the elements for a ragged leaf, as nested lists over its batch size; None if the value does not fit.

    Args:
        value: A nested tensor, (nested) lists of tensors or arrays, a dense tensor or array with or without the batch
            dimensions, a number. A single element is repeated for all.
        batch_size: Batch size of the leaf.
        ragged: The leaf's elements.
        path, store: For errors.

    Raises:
        NotSupportedError: A tensor has no elements that can be sent; see ``to_plain``.
    """
    if is_tensor_collection(value):
        return None
    ndim = len(ragged.shape)
    if isinstance(value, torch.Tensor) and value.is_nested:
        components = split_jagged(value)
        if len(batch_size) != 1 or len(components) != batch_size[0]:
            return None
        return components if _has_form(components, ragged) else None
    is_list = isinstance(value, (list, tuple)) and bool(batch_size)
    if is_list and _has_tensors(value):
        if len(value) != batch_size[0]:
            return None
        rows = [split_tensors(item, batch_size[1:], ragged, path=path, store=store) for item in value]
        return None if any(row is None for row in rows) else rows
    tensor = _convert_tensor(value, ragged, path, store)
    if tensor is None:
        return None
    if tensor.dim() == ndim + len(batch_size):
        if tuple(tensor.shape[: len(batch_size)]) != batch_size:
            return None
        rows = _split_rows(tensor, len(batch_size))
        return rows if _has_form(flatten_elements(rows, len(batch_size)), ragged) else None
    return _repeat(tensor, batch_size) if tensor.dim() == ndim and _has_form([tensor], ragged) else None


def split_entries(value: Any, batch_size: tuple[int, ...]) -> Any:
    """Returns the elements for a leaf of entries with a structure of their own; None if the value does not fit."""
    if not batch_size:
        if isinstance(value, list):
            return NonTensorStack.from_list(value)
        is_entry = isinstance(value, (torch.Tensor, NonTensorStack, NonTensorData))
        return value if is_entry else NonTensorData(data=value)
    if isinstance(value, NonTensorStack):
        return split_elements(value, batch_size) if tuple(value.batch_size[: len(batch_size)]) == batch_size else None
    if isinstance(value, list) and len(value) == batch_size[0]:
        return [split_entries(item, batch_size[1:]) for item in value]
    return None


def describe_value(value: Any) -> str:
    """Describes a value that did not fit, for an error."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        dtype = str(value.dtype).removeprefix("torch.")
        components = [list(component.shape) for component in value.detach().unbind()[:4]]
        return f"nested {dtype} of {value.size(0)} components {components}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, (torch.Tensor, np.ndarray))


def _convert_tensor(value: Any, ragged: Ragged, path: Path, store: str) -> torch.Tensor | None:
    try:
        is_array = isinstance(value, np.ndarray)
        tensor = read_array(value, dtype=ragged.dtype) if is_array else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    tensor = to_plain(tensor, path, store=store)
    if FROM_TORCH.get(tensor.dtype) == ragged.dtype:
        return tensor
    return None if isinstance(value, (torch.Tensor, np.ndarray)) else tensor.to(to_torch(ragged.dtype))


def _has_form(elements: Sequence[torch.Tensor], ragged: Ragged) -> bool:
    if isinstance(elements, Pieces):
        is_dtype = FROM_TORCH.get(elements.dtype) == ragged.dtype
        shapes = elements.shapes
        return (
            is_dtype
            and shapes.shape[1] == len(ragged.shape)
            and all(size < 0 or bool((shapes[:, dim] == size).all()) for dim, size in enumerate(ragged.shape))
        )
    return all(
        FROM_TORCH.get(element.dtype) == ragged.dtype
        and element.dim() == len(ragged.shape)
        and all(wanted in (-1, size) for wanted, size in zip(ragged.shape, element.shape, strict=True))
        for element in elements
    )


def _split_rows(tensor: torch.Tensor, depth: int) -> Any:
    return tensor if depth == 0 else [_split_rows(row, depth - 1) for row in tensor]


def _repeat(element: Any, batch_size: tuple[int, ...]) -> Any:
    for size in reversed(batch_size):
        element = [element] * size
    return element
