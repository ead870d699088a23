"""Captures single rows of one known structure, one after the other: 2 us each, where ``capture`` takes 20.

Rows of plain tensors in plain tensordicts or tensorclasses are checked leaf by leaf. All others go through ``capture``,
which handles everything, and raises what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from tdserve.base.errors import LocalProtocolError
from tdserve.structure.captures.adapting import NO_KEYS
from tdserve.structure.captures.array_dicts import read_dict
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.captured import EncodedValues
from tdserve.structure.tensordict_private import content_of, entries_of, get_inner_content, get_set_fields
from tdserve.structure.tensordicts.instances import get_class_name
from tdserve.structure.tensors.plain_tensors import is_in_memory
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.torch_private import copy_all
from tdserve.structure.trees.nodes import Node, Path
from tdserve.structure.trees.tree import Spec, check_matches

_NO_VALUES: tuple[Any, ...] = ()


class _Place(NamedTuple):
    """A node of the row. ``parent`` is its parent's number in the order of the walk; the root is its own."""

    parent: int
    key: str
    batch_size: torch.Size
    num_entries: int
    tensorclass: str | None


class RowReader:
    """Reader of rows of one structure: it returns their leaves in the order of its spec.

    Threads: safe.

    Args:
        spec: Structure of one row.
        store: Name, for errors.
        allow_pickle, ignores: As in ``capture``.
    """

    def __init__(
        self, spec: Spec, *, store: str, allow_pickle: bool = False, ignores: frozenset[str] = NO_KEYS
    ) -> None:
        self._spec = spec
        self._ignores = ignores
        self._allow_pickle = allow_pickle
        self._store = store
        self._places: list[_Place] = []
        numbers: dict[Path, int] = {}
        self._walk(spec.root, (), 0, numbers)
        self._kinds: list[Any] = [None if place.tensorclass else TensorDict for place in self._places]
        self._leaves = tuple(
            (numbers[path[:-1]], path[-1], to_torch(leaf.dtype), torch.Size(leaf.shape)) for path, leaf in spec.tensors
        )
        self._paths = tuple(path for path, _ in spec.tensors)

    def read(self, td: Any) -> tuple[list[torch.Tensor], Sequence[Any]]:
        """Returns the leaves of a row, in the order of ``spec.tensors`` and ``spec.values``; copies nothing.

        If a row has dimensions itself, its values are (nested) lists with one value per element.

        Raises:
            SpecMismatchError: The row does not fit; the error names the key and both sides.
            NotSupportedError: It contains something that cannot be sent; the error names the key.
        """
        if isinstance(td, dict):
            td = read_dict(td, self._spec, store=self._store)
        try:
            tensors = None if self._spec.values else self._look(td)
        except (AttributeError, KeyError, RuntimeError):  # no tensordict; another key; no shape
            tensors = None
        if tensors is not None:
            return tensors, _NO_VALUES
        captured = capture(
            td, store=self._store, like=self._spec, allow_pickle=self._allow_pickle, ignores=self._ignores
        )
        check_matches(self._spec, captured.spec, store=self._store)
        self._learn(td)
        is_per_row = {path: leaf.per_row for path, leaf in captured.spec.values}
        values = [
            _copy_values(captured.values[path])
            if is_per_row[path]
            else repeat_value(captured.values[path], leaf.batch_size)
            for path, leaf in self._spec.values
        ]
        return [captured.tensors[path] for path in self._paths], values

    def _look(self, td: Any) -> list[torch.Tensor] | None:
        """Returns the leaves of a plain row; None if anything about it is special."""
        kinds = self._kinds
        found: list[dict[str, Any]] = []
        for number, (parent, key, batch_size, num_entries, tensorclass) in enumerate(self._places):
            node = found[parent][key] if number else td
            if type(node) is not kinds[number]:
                return None
            if tensorclass is not None:
                if get_set_fields(node):
                    return None
                node = content_of(node)
                if type(node) is not TensorDict:
                    return None
            entries = entries_of(node)
            if len(entries) != num_entries or node.batch_size != batch_size:
                return None
            found.append(entries)
        tensors = []
        for number, key, dtype, shape in self._leaves:
            item = found[number][key]
            if (
                type(item) is not torch.Tensor
                or item.dtype is not dtype
                or item.shape != shape
                or item.requires_grad
                or item.layout is not torch.strided
                or item.is_meta
                or not is_in_memory(item)
            ):
                return None
            tensors.append(item)
        return tensors

    def _learn(self, td: Any) -> None:
        """Remembers the tensorclasses of a row that fits, so that ``_look`` recognises them next time."""
        if self._spec.values or None not in self._kinds:
            return
        nodes: list[Any] = []
        for number, place in enumerate(self._places):
            node = nodes[place.parent].get(place.key) if number else td
            if place.tensorclass is not None and get_class_name(type(node)) == place.tensorclass:
                self._kinds[number] = type(node)
            nodes.append(node if type(node) is TensorDict else get_inner_content(node, node))

    def _walk(self, node: Node, path: Path, parent: int, numbers: dict[Path, int]) -> None:
        number = numbers[path] = len(self._places)
        key = path[-1] if path else ""
        self._places.append(_Place(parent, key, torch.Size(node.batch_size), len(node.entries), node.tensorclass))
        for name, entry in node.entries:
            if isinstance(entry, Node):
                self._walk(entry, (*path, name), number, numbers)


class RowSlots:
    """Memory for a fixed number of rows, written one by one: 2 us per row, where indexing takes 1 us per leaf.

    Args:
        spec: Structure of one row.
        num_rows: Number of rows.

    Attributes:
        tensors: Every tensor leaf of all rows, in the order of ``spec.tensors``, ``[num_rows, *shape]``, on the CPU.
        rows: This memory by row: its leaves in that order.
    """

    VIEW_BYTES = 600
    """Memory that one leaf of one row takes besides its content (measured)."""

    def __init__(self, spec: Spec, num_rows: int) -> None:
        # Tensors made in inference mode could only be written in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = [
                torch.empty((num_rows, *leaf.shape), dtype=to_torch(leaf.dtype), device="cpu")
                for _, leaf in spec.tensors
            ]
            columns = [tensor.unbind(0) for tensor in self.tensors]
        self.rows: list[list[torch.Tensor]] = [[column[row] for column in columns] for row in range(num_rows)]

    @staticmethod
    def compute_nbytes(spec: Spec, num_rows: int) -> int:
        """Returns the memory for this many rows, in bytes."""
        return num_rows * (spec.nbytes + RowSlots.VIEW_BYTES * len(spec.tensors))


def copy_leaves(targets: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """Copies tensors over others of the same dtypes and shapes, in one call.

    Raises:
        LocalProtocolError: Their numbers differ, which is a bug of the caller.
    """
    if len(targets) != len(leaves):
        raise LocalProtocolError(reason=f"{len(leaves)} leaves for {len(targets)} places")
    if leaves:
        copy_all(targets, leaves)


def _copy_values(value: Any) -> Any:
    """Returns the values of a row, to be encoded together with those of other rows."""
    return list(value) if isinstance(value, EncodedValues) else value


def repeat_value(value: Any, batch_size: tuple[int, ...]) -> Any:
    """Repeats one value for all elements of a batch."""
    for size in reversed(batch_size):
        value = [value] * size
    return value
