"""Tensors in lists, tuples and other values: a structure makes a column of them; as values they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from tdserve.structure.tensors.plain_tensors import check_memory
from tdserve.structure.tensors.torch_types import FROM_TORCH, to_torch
from tdserve.structure.trees.dtypes import WIDER

REMEDY = "stack the tensors, or give them as values of a dict with a key each"


def find_listed_tensor(value: Any) -> str | None:
    """Returns where in nested containers the first tensor or tensordict is that a list or tuple holds; None without."""
    return _find_listed(value, "", False, set())


def _find_listed(value: Any, place: str, is_listed: bool, seen: set[int]) -> str | None:
    if is_listed and (isinstance(value, torch.Tensor) or is_tensor_collection(value)):
        return place
    if not isinstance(value, (list, tuple, dict)) or id(value) in seen:
        return None
    seen.add(id(value))  # a list may contain itself
    is_listed = is_listed or not isinstance(value, dict)
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if (found := _find_listed(each, f"{place}[{key!r}]", is_listed, seen)) is not None:
            return found
    return None


def make_array(value: Any) -> NDArray[Any]:
    """Returns an array of a number or of nested lists, which may end in arrays and tensors.

    Tensors of dtypes that NumPy lacks become float32, which holds all of their values.

    Raises:
        ValueError: The lists differ in length.
        TypeError: They hold tensordicts, or other objects of which no array consists.
        NotSupportedError: They hold tensors whose memory was freed, which NumPy would read nevertheless.
    """
    for tensor in _iter_tensors(value):
        check_memory(tensor)
    try:
        return np.asarray(value)
    except (TypeError, RuntimeError):  # tensors that require grad, lazy conjugates, dtypes that NumPy lacks
        return np.asarray(_change_items(value, _to_array))


def stack_tensors(value: Any) -> torch.Tensor | None:
    """Returns nested lists of dense tensors of one dtype and shape as one tensor; None if they are anything else."""
    if isinstance(value, torch.Tensor):
        return None if value.is_nested or value.layout is not torch.strided else value.detach()
    found = [*map(stack_tensors, value)] if isinstance(value, (list, tuple)) else []
    tensors = [each for each in found if each is not None]
    forms = {(each.dtype, each.shape, each.device) for each in tensors}
    return torch.stack(tensors) if len(tensors) == len(found) and len(forms) == 1 else None


def list_items(value: Any) -> list[Any]:
    """Returns the numbers of nested lists, arrays and tensors, in C order, as those of Python."""
    if isinstance(value, (list, tuple)):
        return [item for each in value for item in list_items(each)]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        found: list[Any] = value.reshape(-1).tolist()
        return found
    return [value.item() if isinstance(value, np.generic) else value]


def _change_items(value: Any, change: Callable[[Any], Any]) -> Any:
    return [_change_items(each, change) for each in value] if isinstance(value, (list, tuple)) else change(value)


def _iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists whose first item is one: numbers are not gone through."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple, torch.Tensor)):
        for each in value:
            yield from _iter_tensors(each)


def _to_array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wider = WIDER.get(FROM_TORCH.get(value.dtype, ""))
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    return (plain if wider is None else plain.to(to_torch(wider))).numpy()
