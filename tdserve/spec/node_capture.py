"""The nodes of a tensordict on their way into a spec: tensordicts, instances, lazy stacks, one in another.

Owns the knowledge of how tensordict and tensorclass instances hold their entries.
"""

from __future__ import annotations

from functools import lru_cache
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

from tdserve.errors import NotSupportedError
from tdserve.spec.changes import rebatch
from tdserve.spec.elements import elements_of, flat_elements
from tdserve.spec.files import in_memory
from tdserve.spec.instances import class_name
from tdserve.spec.leaf_capture import LeafReader
from tdserve.spec.members import needs_note, num_levels, shared_values
from tdserve.spec.nodes import (
    MAX_DEPTH,
    DimNames,
    Entry,
    Node,
    Params,
    Path,
    has_state,
)
from tdserve.spec.packing import exact, holds_exact
from tdserve.spec.stacks import Part, known_of, stacked
from tdserve.spec.state import params_of
from tdserve.spec.views import items_of, shows_others

_NOTHING: dict[str, Any] = {}


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return str(device)


class NodeReader(LeafReader):
    """One walk over one tensordict."""

    def node(self, td: Any, path: Path, above: tuple[int, ...] | None = None) -> Node:
        """Takes a node apart; ``above`` is the batch size of the one around it, None for the root."""
        if len(path) >= MAX_DEPTH:
            raise self._refusal("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")
        plain, extra, tensorclass, params = (
            (td, _NOTHING, None, None) if type(td) is TensorDict else self._unwrap(td, path)
        )
        if path in self.packed:
            is_element = params is not None and above == ()
            return self._packed(td if is_element else plain, extra, tensorclass, path, above)
        if isinstance(plain, LazyStackedTensorDict):
            return self._stack(plain, extra, tensorclass, path, above)
        batch_size = tuple(plain.batch_size)
        entries: list[tuple[str, Entry]] = []
        for key, item in items_of(plain):
            if not key.isascii():
                self._check_key(key, path)
            below = (*path, key)
            kind = type(item)
            if kind is torch.Tensor or issubclass(kind, torch.Tensor):
                entries.append((key, self._tensor(item, kind, below, batch_size)))
            elif kind is TensorDict:
                entries.append((key, self._child(item, below, batch_size)))
            elif issubclass(kind, (NonTensorData, NonTensorStack)):
                entries.append((key, self._value(item, below, batch_size)))
            else:
                entries.append((key, self._child(item, below, batch_size)))
        for key, value in extra.items():
            entries.append((key, self._bare_value(value, (*path, key), batch_size)))
        device = plain.device
        device_name = None if device is None else _device_name(device)
        is_typed = tensorclass is not None and isinstance(td, TypedTensorDict)
        if not self.is_exact:
            return Node(batch_size, _names(plain), device_name, tensorclass, tuple(entries), is_typed=is_typed)
        return Node(
            batch_size,
            _names(plain),
            device_name,
            tensorclass,
            tuple(entries),
            is_locked=bool(td.is_locked),
            params=params,
            is_typed=is_typed,
        )

    def _unwrap(self, td: Any, path: Path) -> tuple[TensorDictBase, dict[str, Any], str | None, Params | None]:
        """The tensordict inside of a wrapper, non-tensor fields that lie beside it, the wrapper's class name, and how
        its parameters are held."""
        kind = type(td)
        if isinstance(td, type):
            raise self._refusal(f"the class {td.__qualname__}", path, "instances travel")
        if kind is TensorDict or (shows_others(kind) and not self.is_destination):
            return td, {}, None, None
        if kind is TensorDictParams:
            plain, extra, tensorclass, _ = self._unwrap(td._param_td, path)
            return plain, extra, tensorclass, self._params(td, path)
        if issubclass(kind, TypedTensorDict):
            plain, extra, tensorclass, params = self._unwrap(td._source, path)
            if tensorclass is not None or params is not None:
                raise self._refusal(
                    f"a {kind.__name__} around a {type(td._source).__name__}", path, "give it a TensorDict"
                )
            return plain, extra, class_name(kind), None
        if is_tensorclass(kind):
            if issubclass(kind, NonTensorData):
                raise self._refusal(f"a {kind.__name__} by itself", path, "put it into a tensordict, under a key")
            if kind._is_non_tensor or getattr(kind, "_pass_through", False):
                raise self._refusal(f"a {kind.__name__}", path, "only NonTensorData and NonTensorStack entries travel")
            inner, _, _, params = self._unwrap(td._tensordict, path)
            params = None if params is None else params._replace(is_in_class=True)
            return inner, td._non_tensordict or {}, class_name(kind), params
        if isinstance(td, LazyStackedTensorDict) and not isinstance(td, NonTensorStack):
            return td, {}, None, None
        if isinstance(td, NonTensorStack):
            raise self._refusal("a NonTensorStack by itself", path, "put it into a tensordict, under a key")
        if isinstance(td, TensorDictBase):
            raise self._refusal(f"a {kind.__name__}", path, "convert it with .to_tensordict()")
        raise self._refusal(f"an object of {class_name(kind)}", path, "tensordicts and tensorclasses travel")

    def _params(self, td: TensorDictParams, path: Path) -> Params | None:
        try:
            return params_of(td) if self.is_exact else None
        except NotSupportedError as error:
            raise self._refusal(error.feature, path, error.reason) from None

    def _child(self, item: Any, path: Path, batch_size: tuple[int, ...]) -> Node:
        node = self.node(item, path, batch_size)
        if node.batch_size[: len(batch_size)] != batch_size:
            raise self._contradiction(path, node.batch_size, batch_size)
        return node

    def _stack(
        self,
        td: LazyStackedTensorDict,
        extra: dict[str, Any],
        tensorclass: str | None,
        path: Path,
        above: tuple[int, ...] | None,
    ) -> Node:
        """A lazy stack: leaf by leaf where its rows have one structure, else packed."""
        names = _names(td)
        if not td.tensordicts:
            device = None if td.device is None else _device_name(td.device)
            is_locked = self.is_exact and bool(td.is_locked)
            return Node(tuple(td.batch_size), names, device, tensorclass, (), td.stack_dim, is_locked=is_locked)
        parts = [self._part(row, path, ()) for row in map(in_memory, td.tensordicts)]
        found = None if extra else stacked(parts, td.stack_dim, path=path, names=names)
        if self.takes_structure:
            self._check_stacked(parts, found.tensors if found is not None else {})
        if found is None:
            return self._packed(td, extra, tensorclass, path, above, parts)
        self.tensors.update(found.tensors)
        self.values.update(found.values)
        return found.root._replace(tensorclass=tensorclass)

    def _packed(
        self,
        td: Any,
        extra: dict[str, Any],
        tensorclass: str | None,
        path: Path,
        above: tuple[int, ...] | None,
        parts: list[Part] | None = None,
    ) -> Node:
        """A node whose elements describe themselves. ``parts`` are the rows of a stack, if they were looked at."""
        td = in_memory(td)
        can_list = not isinstance(td, LazyStackedTensorDict) or td.stack_dim == 0
        batch_size = tuple(td.batch_size[:1]) if above is None and can_list else above or ()
        is_locked = self.is_exact and bool(td.is_locked)
        if extra:
            td = td.copy()
            for key, value in extra.items():
                td.set_non_tensor(key, value)
        elements = elements_of(td, batch_size)
        stack_dim = None
        members = self._members(td, path, batch_size, None if extra else parts)
        if parts is not None and not batch_size:
            stack_dim = td.stack_dim
        elif parts is None or len(batch_size) != 1 or not can_list:
            parts = [self._part(element, path, ()) for element in flat_elements(elements, len(batch_size))]
        rows = [part.root for part in parts]
        is_noted = self.is_exact and any(holds_exact(value) for part in parts for value in part.values.values())
        if members and 0 in batch_size:
            num_around = len(batch_size) - (td.stack_dim < len(batch_size))
            rows = [rebatch(member, num_around, (), None) for member in members]
            stack_dim = None if td.stack_dim < len(batch_size) else td.stack_dim - len(batch_size)
        inner, entries = known_of(rows, batch_size, stack_dim)
        if is_noted or (self.is_exact and any(has_state(row, is_locked=not is_locked) for row in rows)):
            elements = exact(elements, len(batch_size), keeps_locks=not is_locked)
        self.values[path] = elements
        names = _names(td)
        names = None if names is None else names[: len(batch_size)]
        device = None if td.device is None else _device_name(td.device)
        names = None if names is None or not any(names) else names
        return Node(
            batch_size,
            names,
            device,
            tensorclass,
            entries,
            stack_dim=_noted_stack_dim(td, len(batch_size), len(batch_size) + len(inner)),
            inner=inner,
            is_locked=is_locked,
            members=members,
        )

    def _members(self, td: Any, path: Path, batch_size: tuple[int, ...], parts: list[Part] | None) -> tuple[Node, ...]:
        """What is stacked, each without the dimension along which; () where elements tell it."""
        depth = len(batch_size)
        if not isinstance(td, LazyStackedTensorDict) or path in self.packed or not depth or _is_by_rows(td, depth):
            return ()
        if not td.tensordicts:
            return ()
        around = batch_size[: td.stack_dim] + batch_size[td.stack_dim + 1 :]
        if parts is None or any(part.root.inner is not None for part in parts):  # which are one element each there
            parts = [self._part(member, path, around) for member in map(in_memory, td.tensordicts)]
        members = tuple(part.root for part in parts)
        if not needs_note(members, batch_size, is_locked=bool(td.is_locked)):
            return ()
        if len(path) + max(map(num_levels, members)) > MAX_DEPTH:
            raise self._refusal("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")
        for below in (below for member in members if 0 in around for below in shared_values(member)):
            reason = "its stack of different keys has no elements that could hold it"
            raise self._refusal("a value for all elements", (*path, *below), reason)
        return members

    def _part(self, td: Any, path: Path, above: tuple[int, ...]) -> Part:
        """A part that is looked at for itself."""
        reader = NodeReader(
            self.store,
            self.is_destination,
            checks=self.checks,
            encodes=False,
            is_exact=self.is_exact,
            takes_structure=self.takes_structure,
        )
        return Part(reader.node(td, path, above), reader.tensors, reader.values)

    def _check_key(self, key: str, path: Path) -> None:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise self._refusal(f"the key {key!r}", path, "it is not valid unicode") from None


def _noted_stack_dim(td: Any, depth: int, num_shown: int) -> int | None:
    """What a packed node has to note of a lazy stack, so that elements over ``depth`` dimensions give it again."""
    if not depth or not isinstance(td, LazyStackedTensorDict) or td.stack_dim >= num_shown or _is_by_rows(td, depth):
        return None
    dim: int = td.stack_dim
    return dim


def _is_by_rows(td: Any, depth: int) -> bool:
    if not isinstance(td, LazyStackedTensorDict) or td.stack_dim:
        return False
    return depth == 1 or all(_is_by_rows(row, depth - 1) for row in td.tensordicts)


def _names(td: TensorDictBase) -> DimNames | None:
    names = td._td_dim_names if type(td) is TensorDict else td.names
    if names is None or all(name is None for name in names):
        return None
    return tuple(names)
