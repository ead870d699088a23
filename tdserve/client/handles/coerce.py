"""Fits values to what they replace in a store, by the rules of tensordict's own assignments.

Tensordict's calls differ in what they broadcast (:class:`Manner`). Dicts are read by key. Tensordict would cast values
even where that changes them, or put them in place of another kind of entry, without an error. Both are refused here: a
write never changes a store's structure, and converts only to dtypes that hold all values.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, UnbatchedTensor, is_tensor_collection

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.client.content.ragged_values import describe_value, split_entries, split_tensors
from tdserve.client.content.row_choice import Where, choose_rows
from tdserve.structure.captures import unbatched
from tdserve.structure.captures.capture import Captured, capture, capture_packed
from tdserve.structure.tensordicts.instances import find_fields
from tdserve.structure.tensors.array_tensors import read_array
from tdserve.structure.tensors.file_tensors import FileTensor, read_into_memory
from tdserve.structure.tensors.plain_tensors import to_plain
from tdserve.structure.tensors.torch_types import from_torch, to_torch
from tdserve.structure.trees.changes import rebatch
from tdserve.structure.trees.dtypes import has_all_values
from tdserve.structure.trees.matching import describe_misfit
from tdserve.structure.trees.nodes import Form, Ragged
from tdserve.structure.trees.tree import (
    Entry,
    Node,
    Path,
    Spec,
    TensorLeaf,
    ValueLeaf,
    check_node,
    describe,
    is_compatible,
    quote,
    show,
)

_NUMBERS = (bool, int, float, complex, torch.Tensor, np.ndarray, np.number, np.bool_)


class Manner(Enum):
    """Which of tensordict's calls writes. This decides what is broadcast and what a nested part accepts."""

    ENTRY = "as set() and update(): the shape of the entry itself; a nested part takes what has keys"
    BROADCAST_AFTER_BATCH = "as set_(): the batch dimensions must be there, the others are broadcast"
    COPY = "as update_() and Tensor.copy_: broadcast"
    ROWS = "as leaf[index] = value: broadcast; every leaf of a nested part takes a tensor or a number"


class FittedValue(NamedTuple):
    """A value that fits what it replaces.

    Attributes:
        captured: The leaves that were given.
        paths: Their keys; none when they are all that is replaced.
    """

    captured: Captured
    paths: list[Path]

    def choose(self, where: Where) -> FittedValue:
        """Returns the value of some of the rows, for a write to a server that has these."""
        captured = self.captured
        tensors = {path: _choose_tensors(tensor, where) for path, tensor in captured.tensors.items()}
        values = dict(captured.values)
        for path, leaf in captured.spec.values:
            if leaf.per_row or leaf.ragged is not None:
                values[path] = choose_rows(values[path], where)
        num_rows = len(range(captured.spec.batch_size[0])[where]) if isinstance(where, slice) else len(where)
        return FittedValue(Captured(captured.spec.with_rows(num_rows), tensors, values, {}), self.paths)

    def check_fits(self, chosen: Spec, *, store: str) -> None:
        """Raises SpecMismatchError if the structure of what is replaced is another one than that it was fitted to."""
        leaves: dict[Path, Entry] = {**dict(self.captured.spec.tensors), **self.captured.spec.values_by_path}
        for path, leaf in leaves.items():
            entry = chosen.values_by_path.get(path) or chosen.find(path, store=store)
            if isinstance(leaf, ValueLeaf) and isinstance(entry, ValueLeaf):
                entry = entry._replace(per_row=leaf.per_row)
            if not is_compatible(entry, leaf):
                expected, actual = describe(entry), describe_misfit(entry, leaf)
                raise SpecMismatchError(store=store, key=show(path), expected=expected, actual=actual)


def _choose_tensors(tensor: torch.Tensor, where: Where) -> torch.Tensor:
    if isinstance(where, slice) or tensor.is_meta or not len(tensor) or tensor.stride(0):
        return tensor[where]
    return tensor[:1].expand(len(where), *tensor.shape[1:])  # one for all rows: no copy of it for each


def coerce_value(
    value: Any,
    chosen: Spec,
    *,
    at: Path = (),
    store: str,
    manner: Manner = Manner.ROWS,
    is_whole: bool = False,
    allow_pickle: bool = False,
    is_exact: bool = True,
) -> FittedValue:
    """Splits a value into leaves of a structure.

    Args:
        value: Tensordict, tensorclass instance, dict, tensor, number, or non-tensor value.
        chosen: Structure of what is replaced: the store's, selected.
        at: Key of what is replaced; the root by default. ``chosen`` has no leaf outside of it.
        store: Name of the store, for errors.
        manner: What is broadcast.
        is_whole: Whether every leaf below ``at`` must be given.
        allow_pickle: As in ``capture``.
        is_exact: Whether rows that carry their own structure keep what is not content, too.

    Raises:
        SpecMismatchError: The value does not fit. The error names the key, what was expected and what was given.
            Nothing was written.
        NotSupportedError: The value contains something that cannot be sent.
    """
    reader = _Fitting(store, chosen, manner, allow_pickle, is_exact=is_exact)
    reader.check_not_within(chosen, at)
    entry = chosen.find(at, store=store)
    reader.put(value, entry, at)
    leaves: list[tuple[Path, Entry]] = [*chosen.tensors, *chosen.values]
    given = [path for path, _ in leaves if path in reader.given]
    is_all = len(given) == len(leaves)
    if is_whole and not is_all:
        path, leaf = next((path, leaf) for path, leaf in leaves if path[: len(at)] == at and path not in reader.given)
        raise reader.make_mismatch(path, describe(leaf), "no such key")
    spec = (chosen if is_all else chosen.select(given)).with_per_row(reader.per_row)
    return FittedValue(Captured(spec, reader.tensors, reader.values, {}), [] if is_all else given)


class _Fitting:
    """One pass over one value."""

    def __init__(self, store: str, chosen: Spec, manner: Manner, allow_pickle: bool, *, is_exact: bool) -> None:
        self.store = store
        self.chosen = chosen
        self.manner = manner
        self.allow_pickle = allow_pickle
        self.is_exact = is_exact
        self.tensors: dict[Path, torch.Tensor] = {}
        self.values: dict[Path, Any] = {}
        self.per_row: dict[Path, bool] = {}

    @property
    def given(self) -> set[Path]:
        """Returns the paths of all leaves that the value contains."""
        return {*self.tensors, *self.values}

    def put(self, value: Any, entry: Entry, path: Path) -> None:
        if isinstance(value, np.ndarray) and value.dtype.kind in "USO":  # strings and other values, one per row
            value = value.tolist()
        if isinstance(entry, TensorLeaf):
            self.tensors[path] = self._broadcast(value, entry, path)
        elif isinstance(entry, ValueLeaf) and entry.ragged is not None:
            self._coerce_ragged(value, entry, entry.ragged, path)
        elif isinstance(entry, ValueLeaf) and entry.is_unbatched:
            self._coerce_unbatched(value, entry, path)
        elif isinstance(entry, ValueLeaf):
            self._read_value(value, entry, path)
        elif entry.inner is not None:
            self._coerce_packed(value, entry, entry.inner, path)
        elif is_tensor_collection(value):
            self._read_collection(value, entry, path)
        elif isinstance(value, dict):
            self._read_dict(value, entry, path)
        elif self.manner is Manner.ROWS and isinstance(value, _NUMBERS):
            for key, child in entry.entries:
                if not isinstance(child, ValueLeaf):  # takes no number: tensordict 0.17 skips them too
                    self.put(value, child, (*path, key))
        else:
            raise self.make_mismatch(path, self._describe_wanted(entry), describe_value(value))

    def _read_dict(self, value: dict[Any, Any], node: Node, path: Path) -> None:
        entries = dict(node.entries)
        for key, item in value.items():
            below = (*path, *((key,) if isinstance(key, str) else key))
            if item is not None or not is_unset_field(node, below[len(path) :]):
                self.put(item, self._read_entry(entries, below, len(path), item), below)

    def make_mismatch(self, path: Path, expected: str, actual: str) -> SpecMismatchError:
        if actual == "NoneType":
            actual = "None: a key keeps its kind; remove it with del_() before it takes another"
        return SpecMismatchError(store=self.store, key=show(path) if path else "", expected=expected, actual=actual)

    def _read_entry(self, entries: dict[str, Entry], path: Path, depth: int, item: Any) -> Entry:
        """Reads what is at a key of a dict, which may be nested."""
        *above, last = path[depth:]
        for key in above:
            node = entries.get(key)
            entries = dict(node.entries) if isinstance(node, Node) else {}
        found = entries.get(last)
        if found is None:
            raise self.make_mismatch(
                path, "no such key (update() and set() add some, for all rows)", type(item).__name__
            )
        return found

    def check_not_within(self, spec: Spec, path: Path) -> None:
        """Raises NotSupportedError where a path can only be written together with what is around it."""
        for depth in range(len(path)):
            if path[:depth] in spec.packed:
                whole = show(path[:depth]) if depth else "whole rows"
                feature = f"writing {quote(path)} of store {self.store!r} alone"
                raise NotSupportedError(feature=feature, reason=f"its rows differ in structure; write {whole}")

    def _coerce_ragged(self, value: Any, leaf: ValueLeaf, ragged: Ragged, path: Path) -> None:
        """Reads elements of any size; a single element is repeated for all."""
        if ragged.form is Form.PACKED:
            found = split_entries(value, leaf.batch_size)
        else:
            found = split_tensors(value, leaf.batch_size, ragged, path=path, store=self.store)
        if found is None:
            raise self.make_mismatch(path, describe(leaf), describe_value(value))
        self.values[path] = found

    def _coerce_packed(self, value: Any, node: Node, inner: tuple[int, ...], path: Path) -> None:
        """Reads tensordicts that carry their own structure; a single one is repeated for all."""
        if not is_tensor_collection(value):
            raise self.make_mismatch(path, describe(node), type(value).__name__)
        is_single = bool(node.batch_size) and len(value.batch_size) == len(inner)
        wanted = rebatch(node, len(node.batch_size), (), None) if is_single else node
        if tuple(value.batch_size[: len(wanted.batch_size)]) != wanted.batch_size:
            raise self.make_mismatch(path, describe(node), f"batch size {list(value.batch_size)}")
        found, elements = capture_packed(
            value, wanted, store=self.store, allow_pickle=self.allow_pickle, is_exact=self.is_exact
        )
        check_node(wanted, found, path, self.store)
        for size in reversed(node.batch_size) if is_single else ():
            elements = [elements] * size
        self.values[path] = elements

    def _read_collection(self, value: Any, node: Node, path: Path) -> None:
        """Reads the leaves of a tensordict.

        Keys, dtypes and shapes must fit; nested batch sizes and classes need not.
        """
        batch_size = tuple(value.batch_size)
        if batch_size != node.batch_size:
            value = broadcast(value, node.batch_size, self.manner)
            if value is None:
                raise self.make_mismatch(path, f"batch size {list(node.batch_size)}", f"{list(batch_size)}")
        like = Spec(node)
        is_exact = self.is_exact and bool(like.packed)  # such elements are replaced, not filled
        captured = capture(value, store=self.store, like=like, allow_pickle=self.allow_pickle, is_exact=is_exact)
        if captured.spec.root.inner is not None:
            raise self.make_mismatch(path, describe(node), "a lazy stack whose rows differ in structure")
        entries = dict(node.entries)
        for below, leaf in captured.spec.tensors:
            full = (*path, *below)
            entry = self._read_entry(entries, full, len(path), captured.tensors[below])
            if is_compatible(entry, leaf):
                self.tensors[full] = captured.tensors[below]
            elif isinstance(entry, TensorLeaf) and self.manner is not Manner.ENTRY:
                self.tensors[full] = self._broadcast(captured.tensors[below], entry, full)
            else:
                raise self.make_mismatch(full, describe(entry), describe_misfit(entry, leaf))
        for below, value_leaf in captured.spec.values:
            full = (*path, *below)
            if captured.values[below] is None and is_unset_field(node, below):
                continue
            entry = self._read_entry(entries, full, len(path), captured.values[below])
            if isinstance(entry, Node) and entry.inner is not None:
                held = captured.spec.find(below)
                if not isinstance(held, Node):
                    raise self.make_mismatch(full, describe(entry), describe(held))
                check_node(entry, held, full, self.store)
                self.values[full] = captured.values[below]
                continue
            is_single = isinstance(entry, ValueLeaf) and entry.ragged is None and not value_leaf.per_row
            is_fit = isinstance(entry, ValueLeaf) and (
                (is_single and value_leaf.ragged is None) or is_compatible(entry, value_leaf)
            )
            if not is_fit:
                raise self.make_mismatch(full, describe(entry), describe(value_leaf))
            self.values[full] = captured.values[below]
            self.per_row[full] = value_leaf.per_row

    def _coerce_unbatched(self, value: Any, leaf: ValueLeaf, path: Path) -> None:
        if not isinstance(value, UnbatchedTensor):
            raise self.make_mismatch(path, describe(leaf), describe_value(value))
        self.per_row[path] = False
        self.values[path] = unbatched.to_value(value)

    def _read_value(self, value: Any, leaf: ValueLeaf, path: Path) -> None:
        """Reads a non-tensor value. A list with one element per row gives each row its own, as in tensordict."""
        rows: Any = None
        if isinstance(value, NonTensorStack):
            rows = value.tolist()
        elif isinstance(value, NonTensorData):
            value = value.data
        elif isinstance(value, torch.Tensor) or is_tensor_collection(value):
            raise self.make_mismatch(path, self._describe_wanted(leaf), type(value).__name__)
        elif self.manner is not Manner.ROWS and isinstance(value, (dict, *_NUMBERS)):
            # a tensor or a tensordict to tensordict, which puts it there instead of the value
            expected = f"{describe(leaf)} (set_non_tensor() takes it as a value)"
            raise self.make_mismatch(path, expected, describe_value(value))
        elif isinstance(value, list) and leaf.batch_size and _has_shape(value, leaf.batch_size):
            rows = value
        if rows is not None and not _has_shape(rows, leaf.batch_size):
            raise self.make_mismatch(path, describe(leaf), f"values of batch size {list(np.shape(rows))}")
        self.per_row[path] = rows is not None and bool(leaf.batch_size)
        self.values[path] = value if rows is None else rows

    def _broadcast(self, value: Any, leaf: TensorLeaf, path: Path) -> torch.Tensor:
        if is_tensor_collection(value):
            raise self.make_mismatch(path, describe(leaf), type(value).__name__)
        try:
            if isinstance(value, np.ndarray):
                tensor = read_array(value, path, store=self.store, dtype=leaf.dtype)
            elif isinstance(value, FileTensor):
                tensor = value.read_all()
            else:  # a tensor stays on its device, whatever the default one
                tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise self.make_mismatch(path, describe(leaf), type(value).__name__) from None
        tensor = to_plain(tensor, path, store=self.store)
        actual = TensorLeaf(from_torch(tensor.dtype), tuple(tensor.shape))
        if actual.dtype != leaf.dtype:
            is_typed = isinstance(value, (torch.Tensor, np.ndarray))
            if is_typed and not has_all_values(leaf.dtype, actual.dtype):
                found_text = describe_misfit(leaf._replace(shape=actual.shape), actual)
                raise self.make_mismatch(path, self._describe_wanted(leaf), found_text)
            tensor = tensor.to(to_torch(leaf.dtype))
        found = self._broadcast_to(tensor.resolve_neg().resolve_conj(), leaf.shape, path)
        if found is None:
            raise self.make_mismatch(path, self._describe_wanted(leaf), describe(actual))
        return found

    def _describe_wanted(self, entry: Entry) -> str:
        """Describes an existing entry for errors, and how to replace it by another kind of entry."""
        is_replacing = self.manner in (Manner.ENTRY, Manner.BROADCAST_AFTER_BATCH)
        return describe(entry) + (" (del_() it first to put something else there)" if is_replacing else "")

    def _broadcast_to(self, tensor: torch.Tensor, shape: tuple[int, ...], path: Path) -> torch.Tensor | None:
        """Broadcasts a tensor as far as this manner allows; None where it does not fit."""
        if self.manner is Manner.ROWS:
            while tensor.ndim > len(shape) and tensor.shape[0] == 1:  # as torch does
                tensor = tensor[0]
        elif self.manner is not Manner.COPY:
            node = self.chosen.find(path[:-1])
            is_after_batch = self.manner is Manner.BROADCAST_AFTER_BATCH
            num_dims = len(node.batch_size) if is_after_batch and isinstance(node, Node) else len(shape)
            if tensor.ndim != len(shape) or tuple(tensor.shape[:num_dims]) != shape[:num_dims]:
                return None
        try:
            return tensor.expand(shape)
        except RuntimeError:
            return None


def broadcast(td: Any, batch_size: tuple[int, ...], manner: Manner) -> Any | None:
    """Broadcasts a tensordict to this batch size; None where this manner does not allow it."""
    given = tuple(td.batch_size)
    is_trailing = bool(given) and given == batch_size[-len(given) :]
    is_fit = manner is Manner.COPY or (manner is Manner.ROWS and is_trailing)
    try:
        return read_into_memory(td).expand(*batch_size) if is_fit else None
    except (RuntimeError, ValueError, NotImplementedError, IndexError):
        return None


def is_none(entry: Any) -> bool:
    """Returns whether an entry of a tensordict is None."""
    return entry is None or (isinstance(entry, NonTensorData) and entry.data is None)


def is_number(value: Any) -> bool:
    """Returns whether a value is a single number: of Python, of NumPy, or a tensor without dimensions."""
    return isinstance(value, _NUMBERS) and not getattr(value, "shape", ())


def is_unset_field(node: Node, path: Path) -> bool:
    """Returns whether a path below a node names an empty field of a tensorclass, to which None is written."""
    for key in path[:-1]:
        child = dict(node.entries).get(key)
        if not isinstance(child, Node):
            return False
        node = child
    if node.tensorclass is None or path[-1] in dict(node.entries):
        return False
    return path[-1] in find_fields(node.tensorclass, path[:-1])


def _has_shape(value: Any, batch_size: tuple[int, ...]) -> bool:
    if not batch_size:
        return True
    if not isinstance(value, list) or len(value) != batch_size[0]:
        return False
    return all(_has_shape(row, batch_size[1:]) for row in value)
