"""The entries of a keyed store as columns: rows if the store has a structure, else nested keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection, lazy_stack

from tdserve.base.errors import InvalidRequestError, KeyNotFoundError
from tdserve.exports.column_spool import ColumnSpool
from tdserve.exports.content_columns import Columns, Key, list_columns

KEY_COLUMN = "key"
"""Of rows: the column of the entries' keys."""

TENSOR_COLUMN = "tensor"
"""Of rows: the column of entries that are tensors."""

PIECE_NBYTES = 16 << 20
"""Entries that are asked for at a time."""

MAX_PIECE_ENTRIES = 4096


def read_entries(
    client: Any,
    described: Any,
    keys: Sequence[Key],
    spool: ColumnSpool,
    on_progress: Callable[[int, int], object],
) -> tuple[Columns, int | None]:
    """Returns all entries, and how many rows they are; None if they are no rows.

    Entries of one structure are rows, with their keys in the column ``KEY_COLUMN``. Others are what is at their key, in
    which a slash separates parts; they are in memory all at once. Entries that come or go meanwhile may be missed.

    Raises:
        KeyNotFoundError: A chosen key does not exist.
        InvalidRequestError: The key of one entry is also the beginning of another's, or a structure has ``KEY_COLUMN``.
        NotSupportedError: An entry has rows that differ in shape or structure.
    """
    store = client.kv(described.name)
    names = store.keys()
    entry_nbytes = max(described.nbytes // max(len(names), 1), 1)
    num_at_once = min(max(PIECE_NBYTES // entry_nbytes, 1), MAX_PIECE_ENTRIES)
    pieces = (_read_piece(store, names[start : start + num_at_once]) for start in range(0, len(names), num_at_once))
    if described.spec.root.entries:
        for found, values in pieces:
            if found:
                spool.append(_make_rows(described.name, found, values, keys), len(found))
            on_progress(spool.num_rows, len(names))
        return spool.finish(), spool.num_rows
    columns: Columns = {}
    num_read = 0
    for found, values in pieces:
        for name, value in zip(found, values, strict=True):
            for path, column in _list_entry(described.name, tuple(name.split("/")), value, keys):
                _check_free(path, columns)
                columns[path] = column
        num_read += len(found)
        on_progress(num_read, len(names))
    _check_columns(described.name, columns, keys)
    return columns, None


def _read_piece(store: Any, names: Sequence[str]) -> tuple[list[str], Any]:
    """Returns the keys of entries that are still there, and their values."""
    try:
        return list(names), store.get(names)
    except KeyNotFoundError:
        return _read_each(store, names)


def _read_each(store: Any, names: Sequence[str]) -> tuple[list[str], list[Any]]:
    found, values = [], []
    for name in names:
        with suppress(KeyNotFoundError):
            values.append(store.get(name))
            found.append(name)
    return found, values


def _make_rows(store: str, names: Sequence[str], values: Any, keys: Sequence[Key]) -> Columns:
    if isinstance(values, list):
        values = torch.stack(values) if isinstance(values[0], torch.Tensor) else lazy_stack(values).to_tensordict()
    if isinstance(values, torch.Tensor):
        values = TensorDict({TENSOR_COLUMN: values}, [len(names)])
    if KEY_COLUMN in values.keys():  # noqa: SIM118 (a tensordict is no dict)
        reason = (
            f"the entries of {store!r} have a key {KEY_COLUMN!r} of their own, the name of the column of their keys"
        )
        raise InvalidRequestError(argument="name", reason=reason)
    wants_names = not keys or (KEY_COLUMN,) in keys
    of_values = [key for key in keys if key != (KEY_COLUMN,)]
    columns = {} if keys and not of_values else list_columns(values, of_values, store)
    return {(KEY_COLUMN,): list(names), **columns} if wants_names else columns


def _list_entry(store: str, path: Key, value: Any, keys: Sequence[Key]) -> Iterator[tuple[Key, Any]]:
    columns: Columns = {(): value}
    if is_tensor_collection(value):
        columns = list_columns(value, (), f"{store}[{'/'.join(path)}]")
    elif isinstance(value, torch.Tensor):
        columns = {(): value.detach().cpu().contiguous()}
    for below, column in columns.items():
        whole = path + below
        if not keys or any(whole[: len(each)] == each for each in keys):
            yield whole, column


def _check_free(path: Key, columns: Columns) -> None:
    if path in columns:
        reason = (
            f"two entries have {'/'.join(path)!r}, where slashes separate parts; choose others by key (--key, keys=)"
        )
        raise InvalidRequestError(argument="key", reason=reason)


def _check_columns(store: str, columns: Columns, keys: Sequence[Key]) -> None:
    for each in keys:
        if not any(path[: len(each)] == each for path in columns):
            raise KeyNotFoundError(store=store, key="/".join(each))
    for path in columns:
        for depth in range(1, len(path)):
            if path[:depth] in columns:
                reason = f"{'/'.join(path)!r} is below the entry {'/'.join(path[:depth])!r}; choose others by key "
                raise InvalidRequestError(argument="key", reason=f"{reason}(--key, keys=)")
