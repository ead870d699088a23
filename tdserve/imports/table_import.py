"""Appends the rows of a source to a table, in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tdserve.base.errors import SpecMismatchError, WrongStateError
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.imports.formats import open_source
from tdserve.imports.import_source import ImportOptions, split_key
from tdserve.imports.store_import import iter_checked
from tdserve.structure.captures.array_dicts import read_dict
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Spec


def append_rows(
    client: Any,
    kind: str,
    path: str | os.PathLike[str],
    name: str,
    *,
    keys: Sequence[str] = (),
    split: str = "",
    on_progress: Callable[[int, int], object] = lambda num_written, num_rows: None,
) -> int:
    """Appends the rows of a file or data set to a table or queue, by ``extend``; returns their number.

    Rows are read and written in pieces, each of which becomes visible at once: rows that were appended before an error
    stay. The first piece is checked before anything is written. A limiter makes this wait as it does any writer.

    Args:
        client: A client of the server, or of several.
        kind, path, keys, split: As in ``import_store``.
        name: Name of the table.
        on_progress: Called after each piece with the number of rows that are written, and of all rows.

    Raises:
        StoreNotFoundError: There is no store of this name.
        WrongStateError: It is no table or queue, or was closed.
        SpecMismatchError: The rows lack a key of the table, or do not fit it.
        InvalidRequestError, NotSupportedError, CorruptDataError: As in ``import_store``.
        DeadlineExceededError, CapacityError: There was no room.
    """
    described = client.describe(name)
    if not described.capacity:
        raise WrongStateError(state=f"store {name!r} is of kind {described.kind}", event="appending rows")
    table, num_written = client[name], 0
    with open_source(kind, os.fspath(path), ImportOptions([split_key(key) for key in keys], split)) as source:
        for num_read, content in iter_checked(source, str(path), max_rows=described.capacity):
            rows = read_dict(content, batch_size=[num_read], store=name, declares=True)
            if not num_written:
                _check_complete(described, capture(rows, store=name).spec)
            table.extend(rows)
            num_written += num_read
            on_progress(num_written, source.num_rows)
    return num_written


def _check_complete(described: StoreDescription, given: Spec) -> None:
    """Raises SpecMismatchError if rows lack a key: ``extend`` would let them wait for it, unsampled."""
    missing = _list_leaves(described.spec) - _list_leaves(given)
    if missing:
        raise SpecMismatchError(
            store=described.name,
            key="/".join(min(missing)),
            expected="a column of each key of the table",
            actual="none of this key",
        )


def _list_leaves(spec: Spec) -> set[tuple[str, ...]]:
    return {path for path, _ in (*spec.tensors, *spec.values)}
