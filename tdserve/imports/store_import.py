"""Writes the rows of a source into a new store, in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tdserve.base.errors import (
    CorruptDataError,
    NotSupportedError,
    StoreExistsError,
    TDServeError,
)
from tdserve.base.ids import check_store_name
from tdserve.client.client import Client
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.tensordicts.store_filling import StoreFilling
from tdserve.imports.formats import open_source
from tdserve.imports.import_source import CHOOSE_OTHERS, ImportOptions, ImportSource, split_key
from tdserve.rules.catalog import DEFAULT_MAX_OBJECT_BYTES

PIECE_NBYTES = 16 * 1024 * 1024
"""Rows that are in memory at a time; larger pieces are no faster."""

MAX_PIECE_ROWS = 1 << 16

_VALUE_ROOM = 4
"""Room for values that have turned out larger than the source had estimated; it costs address space only."""

_VALUE_ROOM_PER_ROW = 1024

OnProgress = Callable[[int, int], object]
"""Called with the number of rows that are written, and of all rows."""


def import_store(
    client: Client,
    kind: str,
    path: str | os.PathLike[str],
    name: str,
    *,
    keys: Sequence[str] = (),
    split: str = "",
    has_rows: bool | None = True,
    replaces: bool = False,
    on_progress: OnProgress = lambda num_written, num_rows: None,
) -> StoreHandle:
    """Imports a file or data set into a new tensordict store; returns its handle.

    Rows are read and written in pieces, so memory does not limit the size. The store becomes visible when all of it is
    written. An import that fails, or whose process is killed, leaves nothing.

    Args:
        client: A client of the server, or of several: the store is then where the hash of its name puts it.
        kind: Format: ``"npz"``, ``"npy"``, ``"hdf5"``, ``"jsonl"``, ``"hf"``, ``"minari"``, ``"safetensors"``,
            ``"pt"`` or ``"memmap"``.
        path: The file, folder or name of a data set.
        name: Name of the store.
        keys: Only these keys, with what is below them; a nested one is written with slashes.
        split: For ``"hf"``: the part to import of a data set that has several.
        has_rows: False imports arrays that have no common first dimension, as a tensordict without rows; they are in
            memory all at once. None does so if they have none.
        replaces: Deletes a store that has this name, after the first rows were read.
        on_progress: Called after each piece with the number of rows that are written, and of all rows.

    Raises:
        StoreExistsError: There is a store of this name.
        InvalidRequestError: The path or a key does not exist, or has content of another kind than expected.
        NotSupportedError: The format's package is not installed (the error names it), or a column cannot be stored.
        CorruptDataError: The file is damaged.
        TransferAbortedError: The connection was lost.
        CapacityError: The server's disk is full.
    """
    client = client.get_home(check_store_name(name))
    if not replaces and name in client:
        remedy = (
            "replace it (replaces=True, import --replace, put --force), or choose another name; put appends to tables"
        )
        raise StoreExistsError(name=name, reason=remedy)
    options = ImportOptions([split_key(key) for key in keys], split, has_rows)
    with open_source(kind, os.fspath(path), options) as source:
        if source.has_rows:
            return _write_rows(client, source, str(path), name, replaces, on_progress)
        handle = _write_whole(client, source, name, replaces, batch_size=())
    on_progress(1, 1)
    return handle


def _write_whole(
    client: Client, source: ImportSource, name: str, replaces: bool, *, batch_size: tuple[int, ...]
) -> StoreHandle:
    content = source.read_whole()
    _make_way(client, name, replaces)
    with _add_remedy():
        handle: StoreHandle = client.memmap(content, name, batch_size=batch_size)
    return handle


def _write_rows(
    client: Client, source: ImportSource, path: str, name: str, replaces: bool, on_progress: OnProgress
) -> StoreHandle:
    num_rows = source.num_rows
    if not num_rows:
        return _write_whole(client, source, name, replaces, batch_size=(0,))
    room = _VALUE_ROOM * num_rows * source.row_nbytes + _VALUE_ROOM_PER_ROW * num_rows
    filling = StoreFilling(client, name, num_rows, StoreOptions(False, max(DEFAULT_MAX_OBJECT_BYTES, room), None))
    try:
        for num_read, content in iter_checked(source, path):
            if not filling.num_written:
                _make_way(client, name, replaces)
            with _add_remedy():
                filling.write(content, [num_read])
            on_progress(filling.num_written, num_rows)
        return filling.show()
    except BaseException:
        filling.give_up()
        raise


def iter_checked(
    source: ImportSource, path: str, *, max_rows: int = MAX_PIECE_ROWS
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a source in pieces; its faults become errors of ours."""
    max_rows = min(max(PIECE_NBYTES // source.row_nbytes, 1), max_rows, MAX_PIECE_ROWS)
    try:
        yield from source.iter_batches(max_rows)
    except (TDServeError, GeneratorExit):
        raise
    except Exception as fault:  # a library that reads the file may raise anything
        raise CorruptDataError(path=path, expected="readable rows", actual=f"{fault!r}"[:300]) from fault


@contextmanager
def _add_remedy() -> Iterator[None]:
    """Adds to the error about an array that no store can hold that the array can be left out."""
    try:
        yield
    except NotSupportedError as error:
        raise NotSupportedError(feature=error.feature, reason=f"{error.reason}, or {CHOOSE_OTHERS}") from None


def _make_way(client: Client, name: str, replaces: bool) -> None:
    if replaces and name in client:
        client.delete(name)
