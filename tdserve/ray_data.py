"""Stores and folders as sources of Ray Data; needs the package ``ray[data]``.

``ray.data.read_datasource(TDServeDatasource("frames", address=...))`` is a dataset of a store's rows. Each read task
connects from its own process, and reads a slice of them. Ray is read at version 2.60.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from ray.data import Datasource, ReadTask
from ray.data.block import BlockAccessor, BlockMetadata
from tensordict import NonTensorData, TensorDict

from tdserve.base.errors import InvalidRequestError
from tdserve.client.connecting import connect
from tdserve.structure.building.array_views import to_arrays
from tdserve.structure.tensordict_private import entries_of
from tdserve.structure.trees.tree import Path

BLOCK_NBYTES = 32 * 1024 * 1024
"""Rows of one block, which are in a task's memory at a time."""

SCHEMA_ROWS = 64
"""Rows from which the types of the columns are determined: those of ragged ones show if their lengths differ."""

Keys = Sequence[str | Path]


class _RowsDatasource(Datasource):
    """Rows of something that is indexed by rows.

    Args:
        rows: Handle, view or tensordict; pickled with each task.
        keys: Only these leaves or nested parts; none: all.
        num_rows: How many rows it has.
        nbytes: Size of all of them.
    """

    def __init__(self, rows: Any, keys: Keys, num_rows: int, nbytes: int) -> None:
        super().__init__()
        self._rows = rows
        self._keys = keys
        self._num_rows = num_rows
        self._nbytes = nbytes
        first = _make_block(rows, keys, 0, min(num_rows, SCHEMA_ROWS))
        self._schema = BlockAccessor.for_block(first).schema() if num_rows else None

    def get_name(self) -> str:
        """Returns the name that Ray shows."""
        return "TDServe"

    def estimate_inmemory_data_size(self) -> int | None:
        """Returns the size of all rows in bytes."""
        return self._nbytes

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Returns at most ``parallelism`` tasks, each for as many consecutive rows."""
        num_tasks = min(max(parallelism, 1), self._num_rows)
        row_nbytes = max(self._nbytes // max(self._num_rows, 1), 1)
        tasks = []
        for number in range(num_tasks):
            start, stop = (self._num_rows * each // num_tasks for each in (number, number + 1))
            read = partial(_iter_blocks, self._rows, self._keys, range(start, stop, max(BLOCK_NBYTES // row_nbytes, 1)))
            size_nbytes = (stop - start) * row_nbytes
            metadata = BlockMetadata(num_rows=stop - start, size_bytes=size_nbytes, input_files=None, exec_stats=None)
            tasks.append(ReadTask(read, metadata, schema=self._schema, per_task_row_limit=per_task_row_limit))
        return tasks


class TDServeDatasource(_RowsDatasource):
    """The rows of a tensordict store, or the live rows of a table, for ``ray.data.read_datasource``.

    A column's name is the key, with slashes if it is nested. Its values are arrays, as with ``numpy=True``: bfloat16
    becomes float32, and the rows of a ragged leaf differ in length. Non-tensor values are as they were.

    The rows are counted when the source is made, and read when a task runs, each block of them whole: what is written
    in between shows. A table whose oldest rows leave meanwhile moves the others, so do not extend it.

    Args:
        name: Name of the store.
        address: Address of the server, as the tasks reach it. None: the environment variable ``TDSERVE_ADDRESS``.
        keys: Only these leaves or nested parts.
        **options: Further arguments of ``tdserve.connect``, such as ``token``.

    Raises:
        StoreNotFoundError, KeyError: There is no such store or key.
        InvalidRequestError, WrongStateError: It is a store without rows; or two keys would be one column, such as
            ``"a/b"`` and ``("a", "b")``.
        ConnectError: There is no server.
    """

    def __init__(self, name: str, *, address: str | None = None, keys: Keys = (), **options: Any) -> None:
        with connect(address, **options) as client:  # in a task, the handle opens one of its own
            described = client.describe(name, timeout_s=0)
            if not (described.batch_size or described.capacity):
                raise InvalidRequestError(argument="name", reason=f"store {name!r} has no rows")
            rows, nbytes = client[name], described.nbytes
            if described.capacity:
                nbytes = nbytes * described.num_rows // described.capacity
            elif keys:
                rows = rows.select(*keys)  # only these travel
            super().__init__(rows, keys, described.num_rows, nbytes)


class MemmapDatasource(_RowsDatasource):
    """The rows of a folder that tensordict's ``memmap`` has written, for ``ray.data.read_datasource``.

    No server is needed; the folder must be at the same path wherever tasks run. Columns are as in
    ``TDServeDatasource``.

    Args:
        path: The folder; of a store it is ``rows`` in the store's folder.
        keys: Only these leaves or nested parts.

    Raises:
        InvalidRequestError: It has no rows, or two keys would be one column.
    """

    def __init__(self, path: str | os.PathLike[str], *, keys: Keys = ()) -> None:
        found: Any = TensorDict.load_memmap(os.fspath(path), allow_pickle=False)
        if not found.batch_size:
            raise InvalidRequestError(argument="path", reason=f"{os.fspath(path)} has no rows")
        found = found.select(*keys) if keys else found
        nbytes = sum(leaf.nbytes for leaf in found.values(True, True))
        super().__init__(_Folder(os.path.abspath(path)), keys, found.batch_size[0], nbytes)


class _Folder:
    """A folder, which is opened for each read: pickled are neither its mappings nor its content.

    Args:
        path: Its absolute path.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __getitem__(self, rows: slice) -> Any:
        found: Any = TensorDict.load_memmap(self._path, allow_pickle=False)
        return found[rows].clone()


def _iter_blocks(rows: Any, keys: Keys, starts: range) -> Iterator[Any]:
    for start in starts:
        yield _make_block(rows, keys, start, min(start + starts.step, starts.stop))


def _make_block(rows: Any, keys: Keys, start: int, stop: int) -> Any:
    found = rows[start:stop]
    content = _flatten(found.select(*keys) if keys else found, stop - start, ())
    return BlockAccessor.batch_to_block(_name_columns(content))


def _flatten(content: Any, num_rows: int, path: Path) -> dict[Path, Any]:
    """Returns a tensordict, or a dict of arrays, as columns by their paths, which begin with a given one."""
    entries = entries_of(content) if type(content) is TensorDict else content
    if not isinstance(entries, dict):
        entries = to_arrays(content)
    columns: dict[Path, Any] = {}
    for name, entry in entries.items():
        key = (*path, name)
        value = entry if type(entry) is TensorDict or isinstance(entry, NonTensorData) else to_arrays(entry)
        if isinstance(value, (TensorDict, dict)):
            columns.update(_flatten(value, num_rows, key))
        elif isinstance(value, NonTensorData):
            columns[key] = _make_column([value.data] * num_rows)
        else:
            columns[key] = value if isinstance(value, np.ndarray) else _make_column(value)
    return columns


def _name_columns(columns: dict[Path, Any]) -> dict[str, Any]:
    """Returns columns by name. Raises InvalidRequestError if two have one name."""
    paths: dict[str, Path] = {}
    for path in columns:
        name = "/".join(path)
        other = paths.setdefault(name, path)
        if other != path:
            reason = f"the keys {other!r} and {path!r} would both be the column {name!r}; choose one of them"
            raise InvalidRequestError(argument="keys", reason=reason)
    return {name: columns[path] for name, path in paths.items()}


def _make_column(values: Sequence[Any]) -> Any:
    """Returns values as an array of objects, whatever they are."""
    column = np.empty(len(values), object)
    for number, value in enumerate(values):
        column[number] = value
    return column
