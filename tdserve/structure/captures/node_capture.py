"""Captures the nodes of a tensordict: tensordicts, instances and lazy stacks, nested in one another.

This module handles how tensordict and tensorclass instances hold their entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    is_tensorclass,
)
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError
from tdserve.structure.captures.stack_capture import StackReader, Unwrapped, get_device_name, get_names
from tdserve.structure.tensordict_private import (
    content_of,
    get_set_fields,
    is_transparent_class,
    params_content,
    typed_content,
)
from tdserve.structure.tensordicts.instances import get_class_name
from tdserve.structure.tensordicts.state import read_params
from tdserve.structure.tensordicts.views import is_shown_by_entry, iter_items
from tdserve.structure.trees.nodes import (
    MAX_DEPTH,
    Entry,
    Node,
    Params,
    Path,
)

_NOTHING: dict[str, Any] = {}


class NodeReader(StackReader):
    """One pass over one tensordict."""

    def capture_node(self, td: Any, path: Path, above: tuple[int, ...] | None = None) -> Node:
        """Captures a node; ``above`` is the batch size of the one around it, None for the root."""
        if len(path) >= MAX_DEPTH:
            raise self._make_capture_error("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")
        plain, extra, tensorclass, params = (
            (td, _NOTHING, None, None) if type(td) is TensorDict else self._unwrap(td, path)
        )
        if path in self.packed:
            return self._capture_for_packed(td, Unwrapped(plain, extra, tensorclass, params), path, above)
        if isinstance(plain, LazyStackedTensorDict):
            return self._capture_stack(Unwrapped(plain, extra, tensorclass, params), path, above)
        batch_size = tuple(plain.batch_size)
        entries: list[tuple[str, Entry]] = []
        for key, item in iter_items(plain):
            if not key.isascii():
                self._check_key(key, path)
            below = (*path, key)
            kind = type(item)
            if kind is torch.Tensor or issubclass(kind, torch.Tensor):
                entries.append((key, self._capture_tensor(item, kind, below, batch_size)))
            elif kind is TensorDict:
                entries.append((key, self._capture_child(item, below, batch_size)))
            elif issubclass(kind, (NonTensorData, NonTensorStack)):
                entries.append((key, self._capture_value(item, below, batch_size)))
            else:
                entries.append((key, self._capture_child(item, below, batch_size)))
        for key, value in extra.items():
            entries.append((key, self._capture_bare_value(value, (*path, key), batch_size)))
        device = plain.device
        device_name = None if device is None else get_device_name(device)
        is_typed = tensorclass is not None and isinstance(td, TypedTensorDict)
        if not self.is_exact:
            return Node(batch_size, get_names(plain), device_name, tensorclass, tuple(entries), is_typed=is_typed)
        return Node(
            batch_size,
            get_names(plain),
            device_name,
            tensorclass,
            tuple(entries),
            is_locked=bool(td.is_locked),
            params=params,
            is_typed=is_typed,
        )

    def _unwrap(self, td: Any, path: Path) -> tuple[TensorDictBase, dict[str, Any], str | None, Params | None]:
        """Returns the tensordict inside of a wrapper, non-tensor fields beside it, the wrapper's class name, and its
        parameters."""
        kind = type(td)
        if isinstance(td, type):
            raise self._make_capture_error(f"the class {td.__qualname__}", path, "only instances can be sent")
        if kind is TensorDict or (is_shown_by_entry(kind) and not self.is_destination):
            return td, {}, None, None
        if kind is TensorDictParams:
            plain, extra, tensorclass, _ = self._unwrap(params_content(td), path)
            return plain, extra, tensorclass, self._capture_params(td, path)
        if issubclass(kind, TypedTensorDict):
            plain, extra, tensorclass, params = self._unwrap(typed_content(td), path)
            if tensorclass is not None or params is not None:
                raise self._make_capture_error(
                    f"a {kind.__name__} around a {type(typed_content(td)).__name__}", path, "give it a TensorDict"
                )
            return plain, extra, get_class_name(kind), None
        if is_tensorclass(kind):
            if issubclass(kind, NonTensorData):
                raise self._make_capture_error(
                    f"a {kind.__name__} by itself", path, "put it into a tensordict, under a key"
                )
            if is_transparent_class(kind):
                raise self._make_capture_error(
                    f"a {kind.__name__}", path, "only NonTensorData and NonTensorStack entries can be sent"
                )
            inner, _, _, params = self._unwrap(content_of(td), path)
            params = None if params is None else params._replace(is_in_class=True)
            return inner, get_set_fields(td), get_class_name(kind), params
        if isinstance(td, LazyStackedTensorDict) and not isinstance(td, NonTensorStack):
            return td, {}, None, None
        if isinstance(td, NonTensorStack):
            raise self._make_capture_error("a NonTensorStack by itself", path, "put it into a tensordict, under a key")
        if isinstance(td, TensorDictBase):
            raise self._make_capture_error(f"a {kind.__name__}", path, "convert it with .to_tensordict()")
        raise self._make_capture_error(f"an object of {get_class_name(kind)}", path, _suggest_remedy(td))

    def _capture_params(self, td: TensorDictParams, path: Path) -> Params | None:
        try:
            return read_params(td) if self.is_exact else None
        except NotSupportedError as error:
            raise self._make_capture_error(error.feature, path, error.reason) from None

    def _capture_child(self, item: Any, path: Path, batch_size: tuple[int, ...]) -> Node:
        node = self.capture_node(item, path, batch_size)
        if node.batch_size[: len(batch_size)] != batch_size:
            raise self._make_contradiction_error(path, node.batch_size, batch_size)
        return node

    def _check_key(self, key: str, path: Path) -> None:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise self._make_capture_error(f"the key {key!r}", path, "it is not valid unicode") from None


def _suggest_remedy(item: Any) -> str:
    """Returns advice for an object that is neither a tensordict nor an instance of a tensorclass."""
    if isinstance(item, dict):  # any other content may be one
        return "arrays are not filled in place: leave out out=, and ask for new ones with numpy=True"
    if isinstance(item, Mapping):
        return "make a dict of it: dict(it)"
    if isinstance(item, (list, tuple)):
        return (
            "tables take a list of dicts; make one tensordict of others: torch.stack(them), or lazy_stack(them) if "
            "they differ"
        )
    if isinstance(item, torch.nn.Module):
        return "make a tensordict of it: TensorDict.from_module(it); latest(into=it) fills it"
    return "only tensordicts, tensorclasses and dicts of arrays can be sent; put it into a dict, under a key"
