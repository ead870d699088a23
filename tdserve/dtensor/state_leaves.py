"""The leaves of a module or a state dict by their names, each with what this process has of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase, is_tensor_collection
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.client.weights.module_misfits import make_meta_error
from tdserve.dtensor.shard_regions import Region, get_local, list_regions, make_whole
from tdserve.structure.tensordicts.module_state import find_stateful
from tdserve.structure.tensors.array_tensors import make_refusal
from tdserve.structure.tensors.plain_tensors import to_plain
from tdserve.structure.tensors.torch_types import from_torch

Set = Callable[[Any], None]


@dataclass(frozen=True)
class StateLeaf:
    """A tensor of the state.

    Attributes:
        dtype: Name of its dtype.
        shape: Shape of the whole tensor.
        is_sharded: Whether it is a DTensor.
        held: The boxes of it that this process has, each with its elements: plain tensors that share their memory.
    """

    dtype: str
    shape: tuple[int, ...]
    is_sharded: bool
    held: list[tuple[Region, torch.Tensor]]


@dataclass(frozen=True)
class StateLeaves:
    """A module or state dict.

    Attributes:
        leaves: Its tensors by name, nested ones with dots.
        values: What is no tensor, by name.
        setters: What replaces each of these values.
        gathering: Its modules whose passes gather their parameters.
    """

    leaves: dict[str, StateLeaf] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    setters: dict[str, Set] = field(default_factory=dict)
    gathering: list[FSDPModule] = field(default_factory=list)

    def reshard(self) -> None:
        """Frees what passes have gathered: the next one takes the parameters that the optimizer changes."""
        for module in self.gathering:
            module.reshard()


def collect_leaves(content: Any, *, store: str, is_destination: bool = False) -> StateLeaves:
    """Returns the leaves of content; FSDP modules are resharded first, as for a ``state_dict()``.

    Args:
        content: An ``nn.Module``, a dict, nested or flat, or a TensorDict.
        store: Name of the weights, for errors.
        is_destination: Whether it is to be filled.

    Raises:
        InvalidRequestError: It is something else, or two leaves have one name.
        NotSupportedError: A leaf cannot be sent, or filled. The error names the key.
    """
    if not isinstance(content, (nn.Module, Mapping)) and not _is_node(content):
        argument = "into" if is_destination else "content"
        reason = f"a {type(content).__name__} is no nn.Module, dict or TensorDict"
        raise InvalidRequestError(argument=argument, reason=reason)
    found = StateLeaves(gathering=[*_iter_gathering(content)])
    found.reshard()
    for key, item, setter in _iter_entries(content, "", store, is_destination):
        if key in found.leaves or key in found.values:
            raise InvalidRequestError(argument="content", reason=f"two of its leaves have the name {key!r}")
        if isinstance(item, torch.Tensor):
            found.leaves[key] = _make_leaf(item, key, store, is_destination)
        else:
            found.values[key], found.setters[key] = item, setter
    return found


def _make_leaf(item: torch.Tensor, key: str, store: str, is_destination: bool) -> StateLeaf:
    if item.is_meta:
        reason = "it has no memory to fill" if is_destination else "it has no content"
        feature = f"key {key!r} of weights {store!r}, on the meta device,"
        raise NotSupportedError(feature=feature, reason=f"{reason}; call to_empty(device=...) first")
    is_sharded = isinstance(item, DTensor)
    local = to_plain(get_local(item), (key,), store=store)
    if is_destination and _has_overlap(local):
        raise make_refusal(
            "an expanded tensor as destination", (key,), store, "its elements share memory, give a clone"
        )
    if isinstance(item, DTensor):
        held = [(region, local[index]) for region, index in list_regions(item, key, store=store)]
    else:
        held = [(make_whole(local.shape), local)] if local.numel() else []
    return StateLeaf(from_torch(local.dtype), tuple(item.shape), is_sharded, held)


def _has_overlap(local: torch.Tensor) -> bool:
    """Returns whether torch would refuse to copy to it."""
    sizes = zip(local.stride(), local.shape, strict=True)
    return not local.is_contiguous() and any(stride == 0 and size > 1 for stride, size in sizes)


def _iter_gathering(content: Any) -> Iterator[FSDPModule]:
    if isinstance(content, nn.Module):
        yield from (each for each in content.modules() if isinstance(each, FSDPModule))
    elif isinstance(content, Mapping):
        for item in content.values():
            yield from _iter_gathering(item)


def _is_node(item: Any) -> bool:
    return is_tensor_collection(item) and not isinstance(item, NonTensorData)


def _iter_entries(content: Any, prefix: str, store: str, is_destination: bool) -> Iterator[tuple[str, Any, Set]]:
    """Yields the name of each leaf below content, the leaf, and what replaces it."""
    if isinstance(content, nn.Module) and not isinstance(content, TensorDictBase):
        yield from _iter_module(content, prefix, store, is_destination)
        return
    if is_destination and isinstance(content, LazyStackedTensorDict):
        where = f"key {prefix.rstrip('.')!r}" if prefix else "content"
        raise NotSupportedError(
            feature=f"filling a stack of tensordicts ({where})", reason="its leaves are copies; call .contiguous()"
        )
    entries: Any = content
    is_fixed = entries.is_locked if _is_node(entries) else not isinstance(entries, MutableMapping)
    for key, item in entries.items():
        if not isinstance(key, str):
            reason = (
                f"key {key!r} below {prefix!r} is no str; torch's get_state_dict gives an optimizer's state by names"
            )
            raise InvalidRequestError(argument="content", reason=reason)
        if is_destination and is_fixed and (not isinstance(item, torch.Tensor) and not _is_container(item)):
            raise NotSupportedError(
                feature=f"filling key {prefix + key!r} of weights {store!r}, which is no tensor,",
                reason=f"its {type(entries).__name__} cannot be changed: give a dict, or an unlocked TensorDict",
            )
        if _is_container(item):
            yield from _iter_entries(item, f"{prefix}{key}.", store, is_destination)
        elif isinstance(item, NonTensorData):
            yield f"{prefix}{key}", item.data, partial(_find_setter(entries), key)
        else:
            yield f"{prefix}{key}", item, partial(_find_setter(entries), key)


def _is_container(item: Any) -> bool:
    return isinstance(item, (nn.Module, Mapping)) or _is_node(item)


def _find_setter(entries: Any) -> Callable[[str, Any], None]:
    if _is_node(entries):
        return entries.set_non_tensor  # type: ignore[no-any-return]
    return entries.__setitem__ if isinstance(entries, MutableMapping) else _set_nothing


def _iter_module(module: nn.Module, prefix: str, store: str, is_destination: bool) -> Iterator[tuple[str, Any, Set]]:
    error = make_meta_error(module, store=store, is_published=not is_destination)
    if error is not None:
        raise error
    stateful = next(iter(find_stateful(module)), None)
    if stateful is not None:
        key = ".".join((*stateful, "_extra_state"))
        raise NotSupportedError(
            feature=f"key {prefix + key!r} of weights {store!r}, extra state of a module,",
            reason="give the module's state_dict(), which has it; load_state_dict() takes what was read into one",
        )
    for name_all in (module.named_parameters, module.named_buffers):
        for key, tensor in name_all(remove_duplicate=False):
            yield prefix + key, tensor, _set_nothing


def _set_nothing(*_: Any) -> None:
    """Takes the place of a setter where there are only tensors, or nothing is filled."""
