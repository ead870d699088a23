"""Captures the nodes of a tensordict: tensordicts, instances and lazy stacks, nested in one another.

This module handles how tensordict and tensorclass instances hold their entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
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

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.structure.changes import rebatch
from tdserve.structure.file_tensors import read_into_memory
from tdserve.structure.instances import get_class_name, to_inner_stack, to_stack
from tdserve.structure.leaf_capture import LeafReader
from tdserve.structure.matching import show
from tdserve.structure.nodes import (
    MAX_DEPTH,
    DimNames,
    Entry,
    Node,
    Params,
    Path,
)
from tdserve.structure.stacks.annotation import annotate, find_shared_values, needs_note, num_levels
from tdserve.structure.stacks.common_structure import CapturedPart, join_parts, summarise
from tdserve.structure.stacks.elements import (
    Element,
    find_stack_dim,
    flatten_elements,
    is_by_rows,
    nest_list,
    split_elements,
)
from tdserve.structure.state import read_params
from tdserve.structure.tensordict_private import (
    content_of,
    is_transparent_class,
    names_of,
    params_content,
    stored_fields,
    typed_content,
)
from tdserve.structure.views import iter_items, shows_others

_NOTHING: dict[str, Any] = {}


class NodeReader(LeafReader):
    """One pass over one tensordict."""

    _wanted: Mapping[Path, Node] = MappingProxyType({})
    _is_locked = False

    def take_forms(self, td: Any, nodes: Mapping[Path, Node]) -> None:
        """Gives elements the form of the packed nodes that they are for.

        They become instances, if the nodes' elements have no class of their own. In an exact capture they also get
        notes of their members, if the nodes may describe other ones.

        Args:
            td: The root of the pass.
            nodes: By path.
        """
        self._wanted = nodes
        self._is_locked = bool(getattr(td, "is_locked", False))

    def capture_node(self, td: Any, path: Path, above: tuple[int, ...] | None = None) -> Node:
        """Captures a node; ``above`` is the batch size of the one around it, None for the root."""
        if len(path) >= MAX_DEPTH:
            raise self._make_refusal("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")
        plain, extra, tensorclass, params = (
            (td, _NOTHING, None, None) if type(td) is TensorDict else self._unwrap(td, path)
        )
        if path in self.packed:
            return self._for_packed(td, plain, extra, tensorclass, params, path, above)
        if isinstance(plain, LazyStackedTensorDict):
            return self._stack(plain, extra, tensorclass, path, above)
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
        device_name = None if device is None else _get_device_name(device)
        is_typed = tensorclass is not None and isinstance(td, TypedTensorDict)
        if not self.is_exact:
            return Node(batch_size, _get_names(plain), device_name, tensorclass, tuple(entries), is_typed=is_typed)
        return Node(
            batch_size,
            _get_names(plain),
            device_name,
            tensorclass,
            tuple(entries),
            is_locked=bool(td.is_locked),
            params=params,
            is_typed=is_typed,
        )

    def _for_packed(
        self,
        td: Any,
        plain: TensorDictBase,
        extra: dict[str, Any],
        tensorclass: str | None,
        params: Params | None,
        path: Path,
        above: tuple[int, ...] | None,
    ) -> Node:
        """Returns what is split into elements, in the form that the packed node needs."""
        wanted = self._wanted.get(path)
        if wanted is not None and wanted.tensorclass != tensorclass and params is None:
            plain, extra, tensorclass = _to_wanted_form(td, plain, extra, tensorclass, wanted.tensorclass)
        is_element = params is not None and above == ()
        packed = self._pack_node(td if is_element else plain, extra, tensorclass, path, above)
        if self.is_exact and wanted is not None and packed.batch_size and wanted.batch_size == packed.batch_size:
            is_params = params is not None and tensorclass is None and wanted.stack_dim == -1
            self._note(td if is_params else plain, extra, path, wanted)
        return packed

    def _unwrap(self, td: Any, path: Path) -> tuple[TensorDictBase, dict[str, Any], str | None, Params | None]:
        """Returns the tensordict inside of a wrapper, non-tensor fields beside it, the wrapper's class name, and its
        parameters."""
        kind = type(td)
        if isinstance(td, type):
            raise self._make_refusal(f"the class {td.__qualname__}", path, "only instances can be sent")
        if kind is TensorDict or (shows_others(kind) and not self.is_destination):
            return td, {}, None, None
        if kind is TensorDictParams:
            plain, extra, tensorclass, _ = self._unwrap(params_content(td), path)
            return plain, extra, tensorclass, self._capture_params(td, path)
        if issubclass(kind, TypedTensorDict):
            plain, extra, tensorclass, params = self._unwrap(typed_content(td), path)
            if tensorclass is not None or params is not None:
                raise self._make_refusal(
                    f"a {kind.__name__} around a {type(typed_content(td)).__name__}", path, "give it a TensorDict"
                )
            return plain, extra, get_class_name(kind), None
        if is_tensorclass(kind):
            if issubclass(kind, NonTensorData):
                raise self._make_refusal(f"a {kind.__name__} by itself", path, "put it into a tensordict, under a key")
            if is_transparent_class(kind):
                raise self._make_refusal(
                    f"a {kind.__name__}", path, "only NonTensorData and NonTensorStack entries can be sent"
                )
            inner, _, _, params = self._unwrap(content_of(td), path)
            params = None if params is None else params._replace(is_in_class=True)
            return inner, stored_fields(td) or {}, get_class_name(kind), params
        if isinstance(td, LazyStackedTensorDict) and not isinstance(td, NonTensorStack):
            return td, {}, None, None
        if isinstance(td, NonTensorStack):
            raise self._make_refusal("a NonTensorStack by itself", path, "put it into a tensordict, under a key")
        if isinstance(td, TensorDictBase):
            raise self._make_refusal(f"a {kind.__name__}", path, "convert it with .to_tensordict()")
        raise self._make_refusal(f"an object of {get_class_name(kind)}", path, _suggest_remedy(td))

    def _capture_params(self, td: TensorDictParams, path: Path) -> Params | None:
        try:
            return read_params(td) if self.is_exact else None
        except NotSupportedError as error:
            raise self._make_refusal(error.feature, path, error.reason) from None

    def _capture_child(self, item: Any, path: Path, batch_size: tuple[int, ...]) -> Node:
        node = self.capture_node(item, path, batch_size)
        if node.batch_size[: len(batch_size)] != batch_size:
            raise self._make_contradiction_error(path, node.batch_size, batch_size)
        return node

    def _stack(
        self,
        td: LazyStackedTensorDict,
        extra: dict[str, Any],
        tensorclass: str | None,
        path: Path,
        above: tuple[int, ...] | None,
    ) -> Node:
        """Captures a lazy stack: leaf by leaf if its rows have one structure, else packed."""
        names = _get_names(td)
        if not td.tensordicts:
            device = None if td.device is None else _get_device_name(td.device)
            is_locked = self.is_exact and bool(td.is_locked)
            return Node(tuple(td.batch_size), names, device, tensorclass, (), td.stack_dim, is_locked=is_locked)
        parts = [self._capture_part(row, path, ()) for row in map(read_into_memory, td.tensordicts)]
        found = None if extra else join_parts(parts, td.stack_dim, path=path, names=names)
        if self.takes_structure:
            self._check_stacked(parts, found.tensors if found is not None else {})
        if found is None:
            return self._pack_node(td, extra, tensorclass, path, above, None if extra else parts)
        self.tensors.update(found.tensors)
        self.values.update(found.values)
        return found.root._replace(tensorclass=tensorclass)

    def _pack_node(
        self,
        td: Any,
        extra: dict[str, Any],
        tensorclass: str | None,
        path: Path,
        above: tuple[int, ...] | None,
        parts: list[CapturedPart] | None = None,
    ) -> Node:
        """Captures a node whose elements carry their own structure.

        ``parts`` are captured rows of a stack, if available.
        """
        td = read_into_memory(td)
        can_list = not isinstance(td, LazyStackedTensorDict) or td.stack_dim == 0
        batch_size = tuple(td.batch_size[:1]) if above is None and can_list else above or ()
        is_locked = self.is_exact and bool(td.is_locked)
        td = _with_fields(td, extra)
        members = self._capture_members(td, path, batch_size, parts)
        stack_dim = td.stack_dim if parts is not None and not batch_size else None
        if stack_dim is not None:
            held = td.tensordicts
        else:
            held = flatten_elements(split_elements(td, batch_size), len(batch_size))
            parts = parts if len(batch_size) == 1 and can_list else None
        parts = [self._capture_part(element, path, ()) for element in held] if parts is None else parts
        rows = [part.root for part in parts]
        elements = [*map(Element.from_part, held, parts)]
        is_lock_implied = self._is_lock_implied(is_locked, path)
        if is_lock_implied:
            elements = [element.remove_locks() for element in elements]
        if members and 0 in batch_size:
            num_around = len(batch_size) - (td.stack_dim < len(batch_size))
            rows = [rebatch(member, num_around, (), None) for member in members]
            stack_dim = None if td.stack_dim < len(batch_size) else td.stack_dim - len(batch_size)
        elif stack_dim is not None:
            elements = [Element.from_rows(td, elements, path, is_locked=is_locked and not is_lock_implied)]
        inner, entries = summarise(rows, batch_size, stack_dim)
        if not rows and path in self.packed:
            inner = tuple(td.batch_size[len(batch_size) :])
        self.values[path] = nest_list(elements, batch_size) if batch_size else elements[0]
        names = _get_names(td)
        names = None if names is None else names[: len(batch_size)]
        device = None if td.device is None else _get_device_name(td.device)
        names = None if names is None or not any(names) else names
        return Node(
            batch_size,
            names,
            device,
            tensorclass,
            entries,
            stack_dim=find_stack_dim(td, len(batch_size), len(batch_size) + len(inner)),
            inner=inner,
            is_locked=is_locked,
            members=members,
        )

    def _note(self, td: Any, extra: dict[str, Any], path: Path, wanted: Node) -> None:
        """Adds notes of their members to elements."""

        def look(member: Any, around: tuple[int, ...]) -> Node:
            found = self._capture_part(member, path, around).root
            self._check_depth([found], path)
            return found

        td = _with_fields(read_into_memory(td), extra)
        elements = self.values[path]
        is_locked = self._is_lock_implied(bool(td.is_locked), path)
        found = annotate(td, elements, wanted, look=look, is_locked=is_locked)
        if found is None:
            expected = "members like those of the store, since there are no elements to record others"
            raise SpecMismatchError(store=self.store, key=show(path), expected=expected, actual="others")
        self.values[path] = found

    def _is_lock_implied(self, is_locked: bool, path: Path) -> bool:
        """Returns whether elements of a packed node need not record its lock.

        Then all that is written, or the node, has it.
        """
        wanted = self._wanted.get(path)
        return is_locked and (wanted is None or wanted.is_locked or self._is_locked)

    def _capture_members(
        self, td: Any, path: Path, batch_size: tuple[int, ...], parts: list[CapturedPart] | None
    ) -> tuple[Node, ...]:
        """Returns the stacked tensordicts, each without the stacked dimension; () if the elements show them."""
        depth = len(batch_size)
        if not isinstance(td, LazyStackedTensorDict) or path in self.packed or not depth or is_by_rows(td, depth):
            return ()
        if not td.tensordicts:
            return ()
        around = batch_size[: td.stack_dim] + batch_size[td.stack_dim + 1 :]
        if parts is None or any(part.root.inner is not None for part in parts):  # such a part is one element
            parts = [self._capture_part(member, path, around) for member in map(read_into_memory, td.tensordicts)]
        members = tuple(part.root for part in parts)
        if not needs_note(members, batch_size, is_locked=bool(td.is_locked)):
            return ()
        self._check_depth(members, path)
        for below in (below for member in members if 0 in around for below in find_shared_values(member)):
            reason = "its stack of different keys has no elements that could hold it"
            raise self._make_refusal("a value for all elements", (*path, *below), reason)
        return members

    def _check_depth(self, members: Sequence[Node], path: Path) -> None:
        """Raises NotSupportedError if members are too deep: they are one level below the path."""
        if max(len(path), 1) + max(map(num_levels, members)) > MAX_DEPTH:
            raise self._make_refusal("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")

    def _capture_part(self, td: Any, path: Path, above: tuple[int, ...]) -> CapturedPart:
        """Captures a part by itself."""
        reader = NodeReader(
            self.store,
            self.is_destination,
            checks=self.checks,
            encodes=False,
            is_exact=self.is_exact,
            takes_structure=self.takes_structure,
        )
        return CapturedPart(reader.capture_node(td, path, above), reader.tensors, reader.values, path)

    def _check_key(self, key: str, path: Path) -> None:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise self._make_refusal(f"the key {key!r}", path, "it is not valid unicode") from None


def _to_wanted_form(
    td: Any, plain: TensorDictBase, extra: dict[str, Any], tensorclass: str | None, wanted: str | None
) -> tuple[TensorDictBase, dict[str, Any], str | None]:
    """Returns the unwrapped ``td`` as a stack of instances, or as an instance around a stack, as wanted."""
    if wanted is None:
        return to_stack(td), _NOTHING, None
    if tensorclass is None and isinstance(plain, LazyStackedTensorDict):
        found, is_instance = to_inner_stack(plain, wanted)
        return found, extra, wanted if is_instance else None
    return plain, extra, tensorclass


@lru_cache(maxsize=64)
def _get_device_name(device: torch.device) -> str:
    return str(device)


def _with_fields(td: Any, fields: dict[str, Any]) -> Any:
    """Returns a tensordict with the non-tensor fields of the instance around it as entries."""
    if fields:
        td = td.copy()
        for key, value in fields.items():
            td.set_non_tensor(key, value)
    return td


def _get_names(td: TensorDictBase) -> DimNames | None:
    names = names_of(td) if type(td) is TensorDict else td.names
    if names is None or all(name is None for name in names):
        return None
    return tuple(names)


def _suggest_remedy(item: Any) -> str:
    """Returns advice for an object that is neither a tensordict nor an instance of a tensorclass."""
    if isinstance(item, Mapping):
        return "make a tensordict of it: TensorDict(it, batch_size=[...])"
    if isinstance(item, (list, tuple)):
        return "make one tensordict of them: torch.stack(them), or lazy_stack(them) if they differ"
    if isinstance(item, torch.nn.Module):
        return "make a tensordict of it: TensorDict.from_module(it); latest(into=it) fills it"
    return "only tensordicts and tensorclasses can be sent"
