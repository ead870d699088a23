"""Rows on their way between TorchRL and a table: keys that the table needs for itself, and keys that rows lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection, is_tensorclass

from tdserve.base.errors import InvalidRequestError, SpecMismatchError
from tdserve.messages.content import INDEX_KEY, RESERVED_KEYS, SLICE_END_KEY
from tdserve.structure.building.assembly import RowsWithColumns
from tdserve.structure.tensordicts.instances import find_tensorclass, make_instance
from tdserve.structure.trees.tree import Path, Spec

_PREFIX = "torchrl_"
_STORED_NAMES = {f"{_PREFIX}{key}": key for key in RESERVED_KEYS}

TENSOR_KEY = "torchrl_tensor"
"""Key of rows that are tensors for TorchRL: a table has tensordicts."""


class RowTable(Protocol):
    """The table of the rows: a ReplayHandle has these members."""

    @property
    def spec(self) -> Spec:
        """Structure of one row."""

    def add_leaves(self, like: Any) -> None:
        """Adds the leaves of a row that rows of the table lack."""


def to_batch(data: Any, *, keeps_index: bool) -> Any:
    """Returns rows as a table takes them: one batch, without keys that the table adds itself.

    Keys of the user's that samples of a table have too, such as ``"priority"``, are stored under other names.

    Args:
        data: The rows.
        keeps_index: Whether ``"index"`` is such a key. A ``TensorDictReplayBuffer`` puts it into samples itself, and so
            into rows that come back; there it is left out.

    Raises:
        InvalidRequestError: They are neither tensordicts nor tensors.
    """
    if isinstance(data, list):
        data = _stack(data)
    elif isinstance(data, LazyStackedTensorDict) and data.stack_dim:  # its rows are stacks themselves
        data = LazyStackedTensorDict.maybe_dense_stack(data.tensordicts, data.stack_dim)
    if isinstance(data, torch.Tensor):
        data = TensorDict({TENSOR_KEY: data}, [len(data)])
    if not is_tensor_collection(data):
        raise _refuse(data)
    if is_tensorclass(data):
        return data
    names = set(data.keys())
    taken = [key for key in RESERVED_KEYS if key in names]
    if taken:
        data = data.copy() if keeps_index else data.exclude(INDEX_KEY)
        for key in taken:
            if key != INDEX_KEY or keeps_index:
                data.rename_key_(key, f"{_PREFIX}{key}")
    return data


def pair_rows(cursor: Any, data: Any, *, num_rows: int, capacity: int, keeps_index: bool) -> tuple[torch.Tensor, Any]:
    """Returns the numbers of rows that are written, and the rows as a batch.

    Args:
        cursor: Numbers of any shape, a slice, or a mask. A slice is one of the live rows if there are as many as rows
            of ``data``, else one of all numbers.
        data: As in :func:`to_batch`; for one number one row.
        num_rows, capacity: Rows and capacity of the table.
        keeps_index: As in :func:`to_batch`.

    Raises:
        InvalidRequestError: There are more or fewer rows than numbers, or they are no rows.
    """
    cursor = cursor[0] if isinstance(cursor, tuple) and len(cursor) == 1 else cursor
    if isinstance(cursor, slice):
        live = range(*cursor.indices(num_rows))
        cursor = live if len(live) == len(data) else range(*cursor.indices(capacity))
    index = torch.as_tensor(list(cursor) if isinstance(cursor, range) else cursor)
    if index.dtype == torch.bool:
        index = index.nonzero().reshape(-1)
    elif not index.ndim:
        data = data.unsqueeze(0) if hasattr(data, "unsqueeze") else [data]
    elif index.ndim > 1:
        data = data.flatten(0, index.ndim - 1)
    batch, index = to_batch(data, keeps_index=keeps_index), index.to(torch.int64).reshape(-1)
    if len(batch) != len(index):
        raise InvalidRequestError(argument="data", reason=f"{len(batch)} rows for {len(index)} row numbers")
    return index, batch


def _stack(rows: list[Any]) -> Any:
    if rows and all(isinstance(row, torch.Tensor) for row in rows):
        return torch.stack(rows)
    for row in rows:
        if not is_tensor_collection(row):
            raise _refuse(row)
    if not rows:
        raise InvalidRequestError(argument="data", reason="an empty list: it does not tell what its rows are")
    return LazyStackedTensorDict.maybe_dense_stack(rows)


def _refuse(data: Any) -> InvalidRequestError:
    reason = f"{type(data).__name__}: a table stores tensordicts and tensors; make a TensorDict of it"
    return InvalidRequestError(argument="data", reason=reason)


def from_table(rows: Any) -> Any:
    """Returns rows of a table as TorchRL had them, see :func:`to_batch`; their device is the CPU."""
    rows = rows if rows.device is not None else rows.to("cpu")
    if is_tensorclass(rows):
        return rows
    names = set(rows.keys())
    for stored in _STORED_NAMES.keys() & names:
        rows.rename_key_(stored, _STORED_NAMES[stored])
    return rows[TENSOR_KEY] if TENSOR_KEY in names else rows


def split_sample(sample: Any, tensorclass: str | None) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """Splits a sample of a table into its row numbers, the columns that the table has added, and the rows.

    Args:
        sample: The sample.
        tensorclass: Name of the rows' class, which a sample is not an instance of; None: they are tensordicts.

    Raises:
        NotSupportedError: The class is unknown here.
    """
    columns = sample.beside if isinstance(sample, RowsWithColumns) else sample
    names = set(columns.keys())
    added = {key: columns.pop(key) for key in (*RESERVED_KEYS, SLICE_END_KEY) if key in names}
    rows = from_table(sample)
    if tensorclass is not None:
        rows = make_instance(find_tensorclass(tensorclass, (), set(rows.keys())), rows, {})
    return added.pop(INDEX_KEY), added, rows


def complete_rows(batch: Any, table: RowTable, *, fills: bool) -> Any:
    """Returns a batch with the keys of the table's rows: zeros stand for those that it lacks. Keys that the table lacks
    are added to it.

    Args:
        fills: Whether zeros are put in. Otherwise rows stay without the keys that they lack.
    """
    if is_tensorclass(batch):
        return batch
    given = {_find_stored_path(to_path(key), table.spec) for key in batch.keys(True, True)}
    if not given.issubset(table.spec.leaf_paths):
        table.add_leaves(batch[0])
    spec = table.spec
    if not fills or given.issuperset(spec.leaf_paths):
        return batch
    batch = batch.copy()
    for path, leaf in spec.tensors:
        if path not in given:
            dtype = getattr(torch, leaf.dtype)
            batch.set(path, torch.zeros((*batch.batch_size, *leaf.shape[len(spec.batch_size) :]), dtype=dtype))
    return batch


def iter_parts(rows: Any, spec: Spec, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields rows key by key, each with what is below it; where they lack keys of the table, one level further down."""
    for key, value in rows.items():
        path = (*above, key)
        lacks_keys = is_tensor_collection(value) and not is_tensorclass(value) and path not in spec.packed
        if lacks_keys:
            given = {(*path, *to_path(each)) for each in value.keys(True, True)}
            lacks_keys = any(leaf[: len(path)] == path and leaf not in given for leaf in spec.leaf_paths)
        if lacks_keys:
            yield from iter_parts(value, spec, path)
        else:
            yield path, value


def check_dims(batch: Any, spec: Spec, *, name: str) -> None:
    """Refuses rows in several dimensions, such as those of a batch of environments. Rows that are stored whole, since
    they differ in size, may have any.

    Args:
        spec: Structure of one row.
        name: Name of the table.

    Raises:
        SpecMismatchError: They are in several dimensions.
    """
    num_extra = batch.ndim - 1 - len(spec.batch_size)
    if num_extra > 0 and () not in spec.packed:
        call = f".flatten(0, {num_extra})" if spec.batch_size else ".reshape(-1)"
        expected = f"batch size {['n', *spec.batch_size]}"
        actual = f"{list(batch.shape)} ({call} makes one dimension of rows)"
        raise SpecMismatchError(store=name, key="", expected=expected, actual=actual)


def _find_stored_path(path: Path, spec: Spec) -> Path:
    """Returns the path of the stored leaf in which a leaf is: that of a node, if its rows are stored whole."""
    return next((node for node in spec.packed if path[: len(node)] == node), path)


def to_stored_key(key: Any) -> Any:
    """Returns the key under which a table has one of TorchRL's, see :func:`to_batch`."""
    first, *rest = to_path(key)
    return (f"{_PREFIX}{first}" if first in RESERVED_KEYS else first, *rest)


def to_path(key: Any) -> Path:
    """Returns a key of TorchRL's, a string or a tuple, as a path."""
    return (key,) if isinstance(key, str) else tuple(key)
