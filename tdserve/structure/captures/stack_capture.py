"""Captures lazy stacks, and tensordicts whose elements carry their own structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from tdserve.base.errors import SpecMismatchError
from tdserve.structure.captures.leaf_capture import LeafReader
from tdserve.structure.stacks.annotation import annotate, count_levels, find_shared_values, is_note_needed
from tdserve.structure.stacks.common_structure import CapturedPart, join_parts, summarise
from tdserve.structure.stacks.elements import (
    Element,
    find_stack_dim,
    flatten_elements,
    is_by_rows,
    nest_list,
    split_elements,
)
from tdserve.structure.stacks.shared_rows import find_shared
from tdserve.structure.tensordict_private import read_names
from tdserve.structure.tensordicts.instances import to_inner_stack, to_stack
from tdserve.structure.tensors.file_tensors import read_into_memory
from tdserve.structure.trees.changes import rebatch
from tdserve.structure.trees.matching import show
from tdserve.structure.trees.nodes import MAX_DEPTH, DimNames, Node, Params, Path


class Unwrapped(NamedTuple):
    """A tensordict without its wrappers.

    Attributes:
        td: The tensordict.
        fields: Non-tensor fields beside it.
        tensorclass: Name of the class of the instance around it.
        params: Params of the TensorDictParams around it.
    """

    td: Any
    fields: dict[str, Any]
    tensorclass: str | None
    params: Params | None


class StackReader(LeafReader):
    """Capture of the stacks in one pass over a tensordict; a subclass walks over the nodes."""

    _wanted: Mapping[Path, Node] = MappingProxyType({})
    _is_locked = False
    _joins_stacks = False

    def join_stacks(self) -> None:
        """Captures stacks of stacks leaf by leaf too, as what dense content is to be written to."""
        self._joins_stacks = True

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
        raise NotImplementedError

    def _capture_for_packed(self, td: Any, given: Unwrapped, path: Path, above: tuple[int, ...] | None) -> Node:
        """Captures ``td``, which was unwrapped, in the form that the packed node at the path needs."""
        wanted = self._wanted.get(path)
        if wanted is not None and wanted.tensorclass != given.tensorclass and given.params is None:
            given = _to_wanted_form(td, given, wanted.tensorclass)
        is_element = given.params is not None and above == ()
        packed = self._pack_node(given._replace(td=td) if is_element else given, path, above)
        if self.is_exact and wanted is not None and packed.batch_size and wanted.batch_size == packed.batch_size:
            is_params = given.params is not None and given.tensorclass is None and wanted.stack_dim == -1
            self._annotate(given._replace(td=td) if is_params else given, path, wanted)
        return packed

    def _capture_stack(self, given: Unwrapped, path: Path, above: tuple[int, ...] | None) -> Node:
        """Captures a lazy stack: leaf by leaf if its rows have one structure, else packed."""
        td = given.td
        names = get_names(td)
        if not td.tensordicts:
            device = None if td.device is None else get_device_name(td.device)
            is_locked = self.is_exact and bool(td.is_locked)
            return Node(tuple(td.batch_size), names, device, given.tensorclass, (), td.stack_dim, is_locked=is_locked)
        rows = td.tensordicts if self.is_destination else map(read_into_memory, td.tensordicts)
        parts = [self._capture_part(row, path, ()) for row in rows]
        if self.is_destination:
            self._check_shared(td, path)
        found = (
            None
            if given.fields
            else join_parts(parts, td.stack_dim, path=path, names=names, joins_stacks=self._joins_stacks)
        )
        if self.takes_structure:
            self._check_stacked(parts, found.tensors if found is not None else {})
        if found is None:
            return self._pack_node(given, path, above, None if given.fields else parts)
        self.tensors.update(found.tensors)
        self.values.update(found.values)
        return found.root._replace(tensorclass=given.tensorclass)

    def _check_shared(self, td: Any, path: Path) -> None:
        shared = find_shared(td, path)
        if shared is not None:
            what = "a lazy stack whose rows share memory as destination"
            raise self._make_capture_error(what, shared, "each row would get the content of the last one; stack clones")

    def _pack_node(
        self,
        given: Unwrapped,
        path: Path,
        above: tuple[int, ...] | None,
        parts: list[CapturedPart] | None = None,
    ) -> Node:
        """Captures a node whose elements carry their own structure.

        ``parts`` are captured rows of a stack, if available.
        """
        if self.is_destination and isinstance(given.td, LazyStackedTensorDict):
            self._check_shared(given.td, path)
        td = _with_fields(read_into_memory(given.td), given.fields)
        can_list = not isinstance(td, LazyStackedTensorDict) or td.stack_dim == 0
        batch_size = tuple(td.batch_size[:1]) if above is None and can_list else above or ()
        is_locked = self.is_exact and bool(td.is_locked)
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
        names = (get_names(td) or ())[: len(batch_size)]
        return Node(
            batch_size,
            names if any(names) else None,
            None if td.device is None else get_device_name(td.device),
            given.tensorclass,
            entries,
            stack_dim=find_stack_dim(td, len(batch_size), len(batch_size) + len(inner)),
            inner=inner,
            is_locked=is_locked,
            members=members,
        )

    def _annotate(self, given: Unwrapped, path: Path, wanted: Node) -> None:
        """Adds notes of their members to elements."""

        def look(member: Any, around: tuple[int, ...]) -> Node:
            found = self._capture_part(member, path, around).root
            self._check_depth([found], path)
            return found

        td = _with_fields(read_into_memory(given.td), given.fields)
        is_locked = self._is_lock_implied(bool(td.is_locked), path)
        found = annotate(td, self.values[path], wanted, look=look, is_locked=is_locked)
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
        if not is_note_needed(members, batch_size, is_locked=bool(td.is_locked)):
            return ()
        self._check_depth(members, path)
        for below in (below for member in members if 0 in around for below in find_shared_values(member)):
            reason = "its stack of different keys has no elements that could hold it"
            raise self._make_capture_error("a value for all elements", (*path, *below), reason)
        return members

    def _check_depth(self, members: Sequence[Node], path: Path) -> None:
        """Raises NotSupportedError if members are too deep: they are one level below the path."""
        if max(len(path), 1) + max(map(count_levels, members)) > MAX_DEPTH:
            raise self._make_capture_error("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")

    def _capture_part(self, td: Any, path: Path, above: tuple[int, ...]) -> CapturedPart:
        """Captures a part by itself."""
        reader = type(self)(
            self.store,
            self.is_destination,
            checks=self.checks,
            encodes=False,
            is_exact=self.is_exact,
            takes_structure=self.takes_structure,
        )
        reader._joins_stacks = self._joins_stacks
        return CapturedPart(reader.capture_node(td, path, above), reader.tensors, reader.values, path)


def _to_wanted_form(td: Any, given: Unwrapped, wanted: str | None) -> Unwrapped:
    """Returns ``td``, which was unwrapped, as a stack of instances, or as an instance around a stack, as wanted."""
    if wanted is None:
        return Unwrapped(to_stack(td), {}, None, None)
    if given.tensorclass is None and isinstance(given.td, LazyStackedTensorDict):
        found, is_instance = to_inner_stack(given.td, wanted)
        return given._replace(td=found, tensorclass=wanted if is_instance else None)
    return given


def _with_fields(td: Any, fields: dict[str, Any]) -> Any:
    """Returns a tensordict with the non-tensor fields of the instance around it as entries."""
    if fields:
        td = td.copy()
        for key, value in fields.items():
            td.set_non_tensor(key, value)
    return td


@lru_cache(maxsize=64)
def get_device_name(device: torch.device) -> str:
    """Returns the name of a device; cached."""
    return str(device)


def get_names(td: TensorDictBase) -> DimNames | None:
    """Returns the names of the batch dimensions; None if none is named."""
    names = read_names(td)
    if names is None or all(name is None for name in names):
        return None
    return tuple(names)
