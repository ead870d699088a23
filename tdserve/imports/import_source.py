"""What a reader of a format provides: the rows of a file or data set, in order, a piece at a time."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError, NotSupportedError

Key = tuple[str, ...]

MAX_NAMED = 8
"""Most columns that an error lists."""

CHOOSE_OTHERS = "choose others by key (--key, keys=)"
"""What to do about an array that cannot be imported, in words of the command and of Python."""

_OS_FAULTS = {
    errno.ENOENT: "there is no such file",
    errno.EISDIR: "it is a folder, not a file",
    errno.EACCES: "it may not be read",
}
"""Short words for what libraries describe by the call that failed."""


class ImportOptions(NamedTuple):
    """How a path is read.

    Attributes:
        keys: Only these keys are read, with all that is below them; none: all.
        split: Which part of a data set that has several; "" if it has one.
        has_rows: Whether the first dimension counts rows; otherwise everything is one tensordict without rows. None: it
            does if it is the same everywhere.
    """

    keys: Sequence[Key] = ()
    split: str = ""
    has_rows: bool | None = True


class ImportSource(ABC):
    """Rows to import. A context manager, which closes what it reads from.

    Attributes:
        num_rows: How many there are.
        row_nbytes: Size of one in memory, estimated, at least 1.
        has_rows: Whether it is read as rows; otherwise as a whole.
    """

    num_rows: int
    row_nbytes: int
    has_rows: bool = True

    @abstractmethod
    def iter_batches(self, max_rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields consecutive rows, from the first one on, as their number and a dict as for ``read_dict``.

        All of them have the same keys and dtypes.

        Args:
            max_rows: Number of rows that fit into a piece.
        """

    def read_whole(self) -> dict[str, Any]:
        """Reads everything, without rows.

        Raises:
            NotSupportedError: It consists of rows.
        """
        raise NotSupportedError(feature="an import without rows (--no-rows)", reason="this format consists of rows")

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Closes the files."""

    def __enter__(self) -> ImportSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SourceColumn(NamedTuple):
    """An array of a file.

    Attributes:
        path: Its key.
        shape: Its shape; the first dimension counts the rows.
        nbytes: Its size in memory, estimated.
        read: Reads rows ``[start, stop)``; called with consecutive ones.
        read_whole: Reads all of it.
    """

    path: Key
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[int, int], Any]
    read_whole: Callable[[], Any]

    def __str__(self) -> str:
        return f"{'/'.join(self.path)} {list(self.shape)}"


class ColumnSource(ImportSource):
    """Rows that lie in a file as arrays with a common first dimension.

    Args:
        path: The file, for errors.
        columns: Its arrays.
        options: How it is read.
        close: Closes the file.

    Raises:
        InvalidRequestError: The arrays have no common first dimension, or a key does not exist. The file is closed.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[SourceColumn],
        options: ImportOptions,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._close = close
        try:
            self._columns = _choose_columns(path, columns, options.keys)
            self.has_rows = _has_rows(self._columns) if options.has_rows is None else options.has_rows
            self.num_rows = _count_rows(path, self._columns) if self.has_rows else 1
        except BaseException:
            close()
            raise
        self.row_nbytes = max(sum(column.nbytes for column in self._columns) // max(self.num_rows, 1), 1)

    def iter_batches(self, max_rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for start in range(0, self.num_rows, max_rows):
            stop = min(start + max_rows, self.num_rows)
            yield stop - start, nest_columns({column.path: column.read(start, stop) for column in self._columns})

    def read_whole(self) -> dict[str, Any]:
        return nest_columns({column.path: column.read_whole() for column in self._columns})

    def close(self) -> None:
        self._close()


def nest_columns(columns: dict[Key, Any]) -> dict[str, Any]:
    """Returns columns as dicts in dicts."""
    tree: dict[str, Any] = {}
    for path, value in columns.items():
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = value
    return tree


def make_value_array(values: Sequence[Any]) -> NDArray[Any]:
    """Returns an array of objects, which become one non-tensor value per row whatever they are."""
    array = np.empty(len(values), object)
    for number, value in enumerate(values):
        array[number] = value
    return array


def split_key(text: str) -> Key:
    """Returns the path of a key that is written with slashes."""
    return tuple(part for part in text.split("/") if part)


def make_path_error(path: object, fault: object) -> InvalidRequestError:
    """Returns the error for a path that a format cannot read."""
    return InvalidRequestError(argument="path", reason=" ".join(f"{path}: {fault}".split())[:500])


def make_open_error(path: object, fault: OSError) -> InvalidRequestError:
    """Returns the error for a file that cannot be opened."""
    return make_path_error(path, _OS_FAULTS.get(fault.errno or 0, fault))


def make_missing_package_error(package: str, extra: str) -> NotSupportedError:
    """Returns the error for a format whose library is not installed."""
    return NotSupportedError(feature=f"this format without the package {package}", reason=f"pip install '{extra}'")


def _choose_columns(path: str, columns: Sequence[SourceColumn], keys: Sequence[Key]) -> list[SourceColumn]:
    for key in keys:
        if not any(column.path[: len(key)] == key for column in columns):
            raise InvalidRequestError(argument="key", reason=f"{path} has no {'/'.join(key)}: {_list_columns(columns)}")
    chosen = [column for column in columns if not keys or any(column.path[: len(key)] == key for key in keys)]
    if not chosen:
        raise make_path_error(path, "there is no array in it")
    counts = Counter(column.path for column in chosen)
    paths = counts.keys()
    if () in paths:
        raise make_path_error(path, f"an array in it has an empty name; {CHOOSE_OTHERS}")
    double = next((each for each in paths if counts[each] > 1), None)
    if double is not None:
        raise make_path_error(path, f"{counts[double]} arrays in it have the key {'/'.join(double)}; {CHOOSE_OTHERS}")
    for column in chosen:
        if any(column.path[:depth] in paths for depth in range(1, len(column.path))):
            raise make_path_error(path, f"{'/'.join(column.path)} is below the key of another array")
    return chosen


def _has_rows(columns: Sequence[SourceColumn]) -> bool:
    """Returns whether all arrays have the same first dimension."""
    sizes = {column.shape[:1] for column in columns}
    return len(sizes) == 1 and () not in sizes


def _count_rows(path: str, columns: Sequence[SourceColumn]) -> int:
    sizes = {column.shape[:1] for column in columns}
    (size,) = sizes if len(sizes) == 1 else ((),)
    if not size:
        reason = f"{path}: its arrays have no common first dimension: {_list_columns(columns)}; choose some by key "
        reason += "(--key, keys=), or import them without rows (--no-rows, has_rows=False)"
        raise InvalidRequestError(argument="path", reason=reason)
    return size[0]


def _list_columns(columns: Sequence[SourceColumn]) -> str:
    shown = ", ".join(map(str, columns[:MAX_NAMED]))
    return f"{shown}, ..." if len(columns) > MAX_NAMED else shown
