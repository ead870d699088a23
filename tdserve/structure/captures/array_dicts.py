"""Dicts of NumPy arrays as content: read as tensordicts, which share their memory where torch can.

A dict has no batch size. Where a structure is known it follows from the dimensions that leaves have there, so that one
row and several rows are told apart. Its arrays and tensors are leaves. Its numbers and lists are leaves only where a
structure has leaves, or where the dict declares one; elsewhere they remain the values that they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, is_tensor_collection, lazy_stack

from tdserve.base.errors import SpecMismatchError
from tdserve.structure.captures.listed_numbers import NumberReader
from tdserve.structure.stacks.elements import make_single_value
from tdserve.structure.tensordict_private import new_tensordict
from tdserve.structure.tensors.array_tensors import make_refusal, read_array
from tdserve.structure.tensors.plain_tensors import check_memory, to_plain
from tdserve.structure.trees.matching import show
from tdserve.structure.trees.nodes import Entry, Form, Node, Path, Ragged, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec
from tdserve.values.supported import ATOMS

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


class _DictNode(NamedTuple):
    """A node of a structure, prepared for look-ups by key."""

    num_dims: int
    entries: Mapping[str, Entry | _DictNode]


def read_dict(
    content: Mapping[str, Any],
    like: Spec | None = None,
    *,
    batch_size: Sequence[int] | None = None,
    store: str = "",
    is_one: bool = True,
    declares: bool = False,
) -> Any:
    """Reads a dict of arrays, tensors, numbers, values and further dicts as a tensordict.

    Args:
        content: Numbers of Python and lists get the dtype of the structure where they can have it, and are non-tensor
            values where there is none. Arrays share their memory with the tensordict, unless they are read-only, have
            negative strides, or another byte order. Arrays of strings and objects become values, one per row.
        like: A structure, of any number of rows, that it is for: its leaves decide how many dimensions are batch
            dimensions.
        batch_size: Without a structure; None is [].
        store: Name, for errors.
        is_one: Whether a dict without tensors is one row of ``like``. False: it is as many as it has strings at a key.
        declares: Whether numbers stand for tensors where there is no structure, in the dtypes that torch gives them:
            the dict declares a structure, or its lists are columns.

    Raises:
        NotSupportedError: There is an array that no tensor can show; the error names its key.
        SpecMismatchError: A number, list or array does not fit the structure.
    """
    reader = _DictReader(store, declares)
    if like is None:
        return reader.read(content, None, tuple(batch_size or ()), ())
    place = like.memo.get(_DictNode)
    if place is None:
        place = like.memo[_DictNode] = _prepare(like.root)
    return reader.read(content, place, reader.find_batch_size(content, place, is_one), ())


def read_rows(rows: Any, row: Spec, *, store: str) -> Any:
    """Reads one row or several, in a dict of arrays or a list of dicts, as a tensordict; errors as in ``read_dict``.

    What is neither is returned as it is.

    Args:
        row: The structure of one row.
    """
    if isinstance(rows, dict):
        return read_dict(rows, row, store=store, is_one=False)
    if not rows or not all(isinstance(each, dict) for each in rows):
        return rows
    found = [read_dict(each, row, store=store) for each in rows]
    if row.has_ragged:
        return lazy_stack(found)
    try:
        return torch.stack(found)
    except RuntimeError:
        _check_alike(found, store)
        return lazy_stack(found)  # they differ in size, which is the table's to judge


def _check_alike(rows: Sequence[Any], store: str) -> None:
    """Raises an error for the first row that has other keys than the rows before it, or dimensions of its own."""
    first = rows[0]
    keys = set(first.keys(True, True))
    for number, row in enumerate(rows):
        if row.batch_size != first.batch_size:
            expected, actual = f"batch size {list(first.batch_size)} in each row", f"{list(row.batch_size)}"
            raise SpecMismatchError(store=store, key="", expected=expected, actual=f"{actual} in row {number}")
        if differing := keys.symmetric_difference(row.keys(True, True)):
            key = min((key,) if isinstance(key, str) else key for key in differing)
            lacking = number if row.get(key, None) is None else 0
            raise SpecMismatchError(
                store=store, key=show(key), expected="it in each row or in none", actual=f"no such key in row {lacking}"
            )


def read_entry(value: Any, batch_size: Sequence[int], path: Path, *, store: str) -> Any:
    """Reads a dict or an array as an entry of a tensordict of this batch size; anything else is returned as it is.

    Numbers become what ``TensorDict.set`` makes of them. Errors as in ``read_dict``.
    """
    if isinstance(value, dict):
        return _DictReader(store, declares=True).read(value, None, tuple(batch_size), path)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "USO":
        return _make_value(value, tuple(batch_size))
    return read_array(value, path, store=store)


def has_tensors(content: Mapping[Any, Any]) -> bool:
    """Returns whether a dict, or one in it, has a tensor or a tensordict."""
    return any(
        has_tensors(each) if isinstance(each, dict) else isinstance(each, torch.Tensor) or is_tensor_collection(each)
        for each in content.values()
        if type(each) not in ATOMS
    )


def select_entries(content: Mapping[str, Any], paths: Sequence[Path]) -> dict[Path, Any]:
    """Returns what nested dicts have at these paths; others are left out."""
    found: dict[Path, Any] = {}
    for path in paths:
        node: Any = content
        for key in path[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and path[-1] in node:
            found[path] = node[path[-1]]
    return found


class _DictReader:
    """One pass over one dict."""

    def __init__(self, store: str, declares: bool = False) -> None:
        self._store = store
        self._declares = declares
        self._numbers = NumberReader(store)

    def read(self, content: Mapping[str, Any], place: _DictNode | None, batch_size: tuple[int, ...], path: Path) -> Any:
        """Reads a dict that stands for a tensordict of this batch size."""
        entries: dict[str, Any] = {}
        known: Mapping[str, Entry | _DictNode] = {} if place is None else place.entries
        for key, value in content.items():
            if not isinstance(key, str):
                remedy = "use str(key), or nested dicts for a tuple"
                raise make_refusal(f"the key {key!r}", path, self._store, remedy)
            entry = known.get(key)
            if type(value) is np.ndarray and not isinstance(entry, ValueLeaf) and value.dtype.kind not in "USO":
                entries[key] = read_array(value, (*path, key), store=self._store, dtype=_get_dtype(entry))
                continue
            entries[key] = self._read_entry(value, entry, batch_size, (*path, key))
        return new_tensordict(entries, batch_size=torch.Size(batch_size), device=None, names=None, nested=False)

    def find_batch_size(self, content: Mapping[str, Any], place: _DictNode, is_one: bool) -> tuple[int, ...]:
        """Returns the batch size of a dict: the dimensions that precede those that the first leaf has in one row."""
        found = self._find_leading(content, place, place.num_dims, ())
        if found is None and not is_one:
            found = _measure_texts(content, place)
        if found is not None:
            return found
        for key, value in content.items():  # without any tensor
            if isinstance(place.entries.get(key), (ValueLeaf, Node)):
                return _find_shape(value)[: place.num_dims]
        return ()

    def _find_leading(
        self, content: Mapping[str, Any], place: _DictNode, num_dims: int, path: Path
    ) -> tuple[int, ...] | None:
        """Returns the sizes of the first dimensions of the first leaf: ``num_dims``, if it has as many as stored."""
        for key, value in content.items():
            entry = place.entries.get(key)
            if isinstance(entry, _DictNode):
                found = self._find_leading(value, entry, num_dims, (*path, key)) if isinstance(value, dict) else None
                if found is not None:
                    return found
                continue
            num_known = _count_dims(entry)
            if num_known is None or getattr(value, "is_nested", False):
                continue
            sizes = _find_shape(value)
            if (num_own := num_dims + len(sizes) - num_known) < 0:
                expected = f"at least {num_known - num_dims} dimensions"
                raise self._make_mismatch((*path, key), expected, f"shape {list(sizes)}")
            return sizes[:num_own]
        return None

    def _read_entry(self, value: Any, entry: Entry | _DictNode | None, batch_size: tuple[int, ...], path: Path) -> Any:
        if isinstance(value, (np.ndarray, np.generic)) and _is_unknown(value.dtype):
            return read_array(np.asanyarray(value), path, store=self._store)  # raises the reason
        if isinstance(value, NonTensorData):
            value = value.data
        elif isinstance(value, torch.Tensor) or is_tensor_collection(value):
            return check_memory(value, path, store=self._store) if isinstance(value, torch.Tensor) else value
        if isinstance(entry, Node) or (isinstance(entry, _DictNode) and isinstance(value, (list, tuple))):
            return self._read_packed(value, batch_size, path)
        if isinstance(entry, ValueLeaf):
            is_tensor = entry.ragged is not None and entry.ragged.form is not Form.PACKED
            if is_tensor:
                return self._read_ragged(value, entry, batch_size, path)
            is_per_row = entry.per_row or len(entry.batch_size) < len(batch_size)
            return self._read_values(value, batch_size, path) if is_per_row else _make_value(value, batch_size)
        if isinstance(value, dict):
            return self._read_nested(value, entry if isinstance(entry, _DictNode) else None, batch_size, path)
        if isinstance(value, _NUMBERS):
            return self._read_numbers(value, entry, batch_size, path)
        if isinstance(value, (list, tuple)):
            return self._read_list(value, entry, batch_size, path)
        if not isinstance(value, np.ndarray) and hasattr(value, "__array__") and not isinstance(value, np.generic):
            value = np.asarray(value)
        if isinstance(value, np.ndarray) and value.dtype.kind not in "USO":
            return read_array(value, path, store=self._store, dtype=_get_dtype(entry))
        return _make_value(value, batch_size)

    def _read_nested(
        self, value: Mapping[Any, Any], place: _DictNode | None, batch_size: tuple[int, ...], path: Path
    ) -> Any:
        if place is None and not all(isinstance(key, str) for key in value) and not has_tensors(value):
            return _make_value(value, batch_size)  # no tensordict has such keys
        return self.read(value, place, self._find_nested_size(value, place, batch_size, path), path)

    def _find_nested_size(
        self, content: Mapping[str, Any], place: _DictNode | None, batch_size: tuple[int, ...], path: Path
    ) -> tuple[int, ...]:
        """Returns the batch size of a nested dict, which may have more dimensions in the structure."""
        if place is None or not place.num_dims:
            return batch_size
        return self._find_leading(content, place, place.num_dims, path) or batch_size

    def _read_list(self, value: Sequence[Any], entry: Any, batch_size: tuple[int, ...], path: Path) -> Any:
        """Reads a list or tuple: as a leaf where a structure has or declares one, else as the value that it is."""
        if not isinstance(entry, TensorLeaf) and not self._declares:
            return _make_value(value, batch_size)
        array = self._numbers.make_array(value, path)
        if array is None:
            return _make_value(value, batch_size)
        if _is_unknown(array.dtype):
            return read_array(array, path, store=self._store)  # raises the reason
        is_large = array.dtype.kind == "O" and array.size and all(type(each) is int for each in array.flat)
        if array.dtype.kind not in "biufc" and not (is_large and isinstance(entry, TensorLeaf)):
            return _make_value(value, batch_size)
        return self._numbers.read(value, entry.dtype if isinstance(entry, TensorLeaf) else "", path)

    def _read_numbers(self, value: Any, entry: Any, batch_size: tuple[int, ...], path: Path) -> Any:
        """Reads a number as a leaf in the dtype of the structure; without one, see ``declares``."""
        if isinstance(entry, TensorLeaf):
            return self._numbers.read(value, entry.dtype, path)
        if isinstance(value, np.generic):
            return read_array(np.asarray(value), path, store=self._store)
        return self._numbers.read(value, "", path) if self._declares else _make_value(value, batch_size)

    def _read_ragged(self, value: Any, leaf: ValueLeaf, batch_size: tuple[int, ...], path: Path) -> torch.Tensor:
        """Reads a tensor whose rows differ in size: one row, or a list of rows."""
        dtype = leaf.ragged.dtype if isinstance(leaf.ragged, Ragged) else ""
        if isinstance(value, np.ndarray) and value.dtype.kind not in "USO":
            return read_array(value, path, store=self._store, dtype=dtype)
        if not batch_size or not isinstance(value, (list, tuple, np.ndarray)):
            return self._numbers.read(value, dtype, path)
        rows = [
            to_plain(each, path, store=self._store)
            if isinstance(each, torch.Tensor)
            else read_array(each, path, store=self._store, dtype=dtype)
            if isinstance(each, np.ndarray)
            else self._numbers.read(each, dtype, path)
            for each in value
        ]
        is_jagged = leaf.ragged is not None and leaf.ragged.form is Form.JAGGED
        return torch.nested.nested_tensor(rows, layout=torch.jagged if is_jagged else torch.strided)

    def _read_packed(self, value: Any, batch_size: tuple[int, ...], path: Path) -> Any:
        """Reads rows that differ in structure: a list of dicts, or one dict."""
        if isinstance(value, dict):
            return self.read(value, None, batch_size, path)
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, dict) for each in value):
            return lazy_stack([self.read(each, None, batch_size[1:], path) for each in value])
        return _make_value(value, batch_size)

    def _read_values(self, value: Any, batch_size: tuple[int, ...], path: Path) -> Any:
        """Reads one value per row, or one that is no list, array or tuple of strings, for all of them."""
        if isinstance(value, tuple) and batch_size and _has_only_texts(value):
            value = list(value)
        if batch_size and isinstance(value, (list, np.ndarray)):
            sizes = _find_shape(value)[: len(batch_size)]
            if sizes != batch_size:
                expected, actual = (
                    (f"{batch_size[0]} values, one per row", f"{sizes[0]}")
                    if len(batch_size) == len(sizes) == 1
                    else (f"values of shape {list(batch_size)}, one per row", f"shape {list(sizes)}")
                )
                raise self._make_mismatch(path, expected, actual)
        return _make_value(value, batch_size)

    def _make_mismatch(self, path: Path, expected: str, actual: str) -> SpecMismatchError:
        return SpecMismatchError(store=self._store, key=show(path), expected=expected, actual=actual)


def _prepare(node: Node) -> _DictNode:
    entries: dict[str, Entry | _DictNode] = {
        key: _prepare(entry) if isinstance(entry, Node) and entry.inner is None else entry
        for key, entry in node.entries
    }
    return _DictNode(len(node.batch_size), entries)


def _get_dtype(entry: Entry | _DictNode | None) -> str:
    return entry.dtype if isinstance(entry, TensorLeaf) else ""


def _count_dims(entry: Entry | _DictNode | None) -> int | None:
    """Returns the number of dimensions of a tensor in the structure; None for anything else."""
    if isinstance(entry, TensorLeaf):
        return len(entry.shape)
    if isinstance(entry, ValueLeaf) and entry.ragged is not None and entry.ragged.dtype:
        return len(entry.batch_size) + len(entry.ragged.shape)
    return None


def _measure_texts(content: Mapping[str, Any], place: _DictNode) -> tuple[int, ...] | None:
    """Returns the shape of the first array of strings or objects, or list or tuple of strings; None without any."""
    for key, value in content.items():
        entry = place.entries.get(key)
        if isinstance(entry, _DictNode):
            found = _measure_texts(value, entry) if isinstance(value, dict) else None
            if found is not None:
                return found
        elif isinstance(entry, ValueLeaf) and entry.ragged is None:
            if isinstance(value, np.ndarray) and value.ndim:
                return tuple(value.shape)
            if isinstance(value, (list, tuple)) and _has_only_texts(value):
                return (len(value),)
    return None


def _has_only_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(each, (str, bytes)) for each in values)


def _find_shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of an array, a tensor, or nested lists; of lists that differ that of the first."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    if isinstance(value, (list, tuple)):
        return (len(value), *(_find_shape(value[0]) if value else ()))
    return ()


def _is_unknown(dtype: np.dtype[Any]) -> bool:
    """Returns whether neither tensors nor values show arrays of a dtype: dates, fields and long doubles."""
    return dtype.kind in "MmV" or dtype.char in "gG"


def _make_value(value: Any, batch_size: tuple[int, ...]) -> Any:
    """Returns the entry of a non-tensor value: one per row if there are as many, else one for all."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    sizes = _find_shape(value) if isinstance(value, list) else ()
    if not batch_size or 0 in batch_size or sizes[: len(batch_size)] != batch_size:
        return make_single_value(value, batch_size, None, None)
    return _stack_values(value, batch_size)


def _stack_values(value: Any, batch_size: tuple[int, ...]) -> Any:
    if not batch_size:
        return make_single_value(value, (), None, None)
    return NonTensorStack(*[_stack_values(row, batch_size[1:]) for row in value], stack_dim=0)
