"""The entries that a tensordict holds, by path and unconverted; ``get`` would unwrap some, and ``set`` convert some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensordict_private import content_of, entries_of, get_fields, params_content, set_content
from tdserve.structure.tensordicts.instances import find_content
from tdserve.structure.tensordicts.live_values import ValueSource, make_live_entry
from tdserve.structure.tensordicts.state import make_params, read_params
from tdserve.structure.torch_private import FakeTensor
from tdserve.structure.trees.nodes import DimNames, Path


def enliven(td: Any, sources: Mapping[Path, ValueSource]) -> Any:
    """Replaces non-tensor entries by live ones of the same form: a single value, or one per row.

    Args:
        td: Changed in place; tensordicts that nothing else refers to, or unlocked ones.
        sources: By path.

    Returns:
        ``td``.
    """
    for path, source in sources.items():
        _enliven(td, path, source)
    return td


def _enliven(td: Any, path: Path, source: ValueSource) -> None:
    owner = _find_owner(td, path)
    if owner is None:
        stack, below = _find_lazy_stack(td, path)
        for number, row in enumerate(stack.tensordicts if stack is not None else ()):
            _enliven(row, below, source.select((slice(None),) * stack.stack_dim + (number,)))
        return
    wrapper, inner = owner
    beside = get_fields(wrapper)
    entry: Any = (
        NonTensorData(None, batch_size=inner.batch_size) if path[-1] in beside else entries_of(inner).get(path[-1])
    )
    if isinstance(entry, (NonTensorData, NonTensorStack)):
        names = entry.names if any(entry.names) else None
        is_stack = isinstance(entry, NonTensorStack)
        entries_of(inner)[path[-1]] = make_live_entry(source, entry.batch_size, inner.device, names, is_stack)
        beside.pop(path[-1], None)


def exchange_tensors(td: Any, tensors: Mapping[Path, torch.Tensor]) -> Any:
    """Replaces plain tensors on the CPU by others of equal content; parameters and entries of lazy stacks stay.

    Args:
        td: Changed in place; unlocked.
        tensors: By path.

    Returns:
        ``td``.
    """
    for path, tensor in tensors.items():
        owner = _find_owner(td, path)
        if owner is not None and _is_cpu_tensor(entries_of(owner[1]).get(path[-1])):
            entries_of(owner[1])[path[-1]] = tensor
    return td


def change_tensors(td: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replaces every tensor by what ``change`` returns for it, whatever holds it, locked or not.

    Args:
        td: Changed in place; nothing else refers to it.
        change: Returns the tensor itself, or one of the same shape and dtype.

    Returns:
        ``td``; for a TensorDictParams a new one.

    Raises:
        NotSupportedError: An UnbatchedTensor would become a fake tensor.
    """
    if isinstance(td, TensorDictParams):
        return make_params(change_tensors(params_content(td), change), read_params(td))
    if is_tensorclass(td):
        set_content(td, change_tensors(content_of(td), change))
    elif isinstance(td, LazyStackedTensorDict):
        td.tensordicts = [change_tensors(row, change) for row in td.tensordicts]
    else:
        entries = entries_of(td)
        for key, entry in list(entries.items()):
            if is_tensor_collection(entry):
                entries[key] = entry if is_non_tensor(entry) else change_tensors(entry, change)
            elif type(entry) is UnbatchedTensor:
                entries[key] = _change_unbatched(entry, change)
            else:
                entries[key] = change(entry)
    return td


def _change_unbatched(entry: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = change(entry.as_subclass(torch.Tensor))
    if isinstance(changed, FakeTensor):
        reason = "torch makes no subclass of a fake tensor; use device='meta'"
        raise NotSupportedError(feature="an UnbatchedTensor under a FakeTensorMode", reason=reason)
    make: Any = UnbatchedTensor
    return make(changed, entry.batch_size)


def get_entry(td: Any, path: Path) -> Any:
    """Returns the entry itself, while ``get`` of a tensorclass returns the value of a non-tensor one."""
    for key in path:
        owner = _find_owner(td, (key,))
        td = td.get(key) if owner is None else entries_of(owner[1])[key]
    return td


def put_in_order(td: Any, like: Any) -> Any:
    """Orders the entries of a tensordict, and of those nested in it, like those of another; returns it.

    Args:
        td: Changed in place; nothing else refers to it.
        like: The other one, which has the same keys.
    """
    if type(td) is TensorDict and type(like) is TensorDict:
        held, wanted = entries_of(td), entries_of(like)
        entries = dict(held)
        held.clear()
        held.update({key: entries.pop(key) for key in wanted if key in entries} | entries)
        for key, entry in held.items():
            put_in_order(entry, wanted.get(key))
    return td


def name_dims(td: Any, names: DimNames) -> None:
    """Names the first batch dimensions of a tensordict, or of the content of an instance, even a frozen one."""
    while not isinstance(td, (TensorDict, LazyStackedTensorDict)):
        td = find_content(td)
    td.names = [*names, *[None] * (td.ndim - len(names))]


def _is_cpu_tensor(entry: Any) -> bool:
    is_own = isinstance(entry, torch.Tensor) and not isinstance(entry, torch.nn.Parameter)
    return is_own and entry.device.type == "cpu"


def _find_lazy_stack(td: Any, path: Path) -> tuple[Any, Path]:
    """Returns the first lazy stack on a path, and the rest of the path; None if there is none."""
    for depth in range(len(path)):
        inner = td
        while type(inner) not in (TensorDict, LazyStackedTensorDict):
            inner = find_content(inner)
            if isinstance(inner, dict) or inner is None:
                return None, ()
        if type(inner) is LazyStackedTensorDict:
            return inner, path[depth:]
        td = entries_of(inner).get(path[depth])
    return None, ()


def _find_owner(td: Any, path: Path) -> tuple[Any, TensorDict] | None:
    """Returns the holder of an entry: the tensordict or instance, and its inner dict of entries.

    None in a lazy stack.
    """
    for depth in range(len(path)):
        inner = td
        while type(inner) is not TensorDict:
            inner = find_content(inner)
            if isinstance(inner, dict) or inner is None:  # a lazy stack has none
                return None
        if depth < len(path) - 1:
            td = entries_of(inner).get(path[depth])
    return td, inner
