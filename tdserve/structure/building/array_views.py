"""Tensordicts as dicts of NumPy arrays, which share their memory: the reverse of ``array_dicts``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from tensordict.utils import is_non_tensor

from tdserve.structure.building.assembly import RowsWithColumns
from tdserve.structure.stacks.elements import list_values, restack_by_rows
from tdserve.structure.tensordict_private import entries_of, get_set_fields
from tdserve.structure.tensordicts.instances import strip_wrappers
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.dtypes import WIDER

_WIDER = {to_torch(name): to_torch(wider) for name, wider in WIDER.items()}


def to_arrays(found: Any) -> Any:
    """Returns a tensordict as a dict of arrays, a tensor as an array; what is neither, as it is.

    Arrays share the memory of CPU tensors, except where NumPy lacks the dtype: bfloat16 and float8 become float32,
    complex32 becomes complex64. A nested tensor becomes a list of arrays. Nested tensordicts become dicts, non-tensor
    data the values themselves: one, or a list with one per row. A lazy stack becomes one dict too: a key has an array
    where rows have one shape, else a list, with None for rows that lack it.
    """
    if isinstance(found, torch.Tensor):
        return to_array(found)
    if type(found) is TensorDict:
        return {
            key: to_array(entry) if type(entry) is torch.Tensor else to_arrays(entry)
            for key, entry in entries_of(found).items()
        }
    if not is_tensor_collection(found):
        return found
    if isinstance(found, NonTensorStack):
        return list_values(found)
    if isinstance(found, NonTensorData):
        return found.data
    content = strip_wrappers(found)
    if isinstance(content, LazyStackedTensorDict):
        beside = content.__dict__["beside"] if isinstance(content, RowsWithColumns) else {}
        columns = _join_rows(restack_by_rows(content).tensordicts)
        return {**columns, **{key: to_array(column) for key, column in beside.items()}}
    return {**to_arrays(content), **(get_set_fields(found) if content is not found else {})}


def to_array(tensor: torch.Tensor) -> Any:
    """Returns a tensor as an array; see ``to_arrays``."""
    try:
        if type(tensor) is torch.Tensor:
            return tensor.numpy()
    except (TypeError, RuntimeError):  # of another dtype, on another device, with a history, ...
        pass
    if tensor.is_nested:
        return [to_array(row) for row in tensor.unbind()]
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    wider = _WIDER.get(tensor.dtype)
    if wider is not None:
        tensor = tensor.to(wider)
    return tensor.cpu().numpy() if tensor.is_cuda else tensor.resolve_conj().resolve_neg().numpy()


def _join_rows(rows: Sequence[Any]) -> dict[str, Any]:
    """Returns what rows have at each key of any of them."""
    keys = dict.fromkeys(key for row in rows for key in row.keys())  # noqa: SIM118 (of a tensordict)
    return {key: _join_entries([row.get(key, None) for row in rows]) for key in keys}


def _join_entries(entries: list[Any]) -> Any:
    first = entries[0]
    if all(type(each) is torch.Tensor and not each.is_nested for each in entries):
        is_alike = all(each.shape == first.shape and each.dtype == first.dtype for each in entries)
        return to_array(torch.stack(entries)) if is_alike else [to_array(each) for each in entries]
    is_node = all(type(each) is TensorDict and not is_non_tensor(each) for each in entries)
    if is_node and all(each.batch_size == first.batch_size for each in entries):
        return _join_rows(entries)
    return [to_arrays(each) for each in entries]
