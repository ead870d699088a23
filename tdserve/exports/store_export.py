"""Reads a store in pieces and writes it as a file, which appears when it is whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tdserve.base.errors import CapacityError, ConnectError, DeadlineExceededError, InvalidRequestError, WrongStateError
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.exports.column_spool import ColumnSpool
from tdserve.exports.content_columns import Columns, Key, list_columns
from tdserve.exports.file_formats import WRITERS, find_format
from tdserve.exports.keyed_columns import read_entries
from tdserve.store.disk.files import exchange_paths

PIECE_NBYTES = 16 << 20
"""Rows that are in memory at a time."""

MAX_PIECE_ROWS = 1 << 16

OnProgress = Callable[[int, int], object]
"""Called with the number of rows that are read, and of all rows."""


def export_store(
    client: Any,
    name: str,
    path: str | os.PathLike[str],
    *,
    keys: Sequence[Key] = (),
    version: int | None = None,
    replaces: bool = False,
    on_progress: OnProgress = lambda num_read, num_rows: None,
) -> None:
    """Writes the content of a store into a file or folder, in the format that its name ends with.

    Rows are read and written in pieces; the parts of weights, and tensordicts without rows, as a whole. Live rows of a
    table are read in the order of their numbers; rows that leave or come in the meantime may be missed. Entries of a
    keyed store are rows if it has a structure, with their keys as the column ``key``; otherwise each is at its key,
    where a slash begins a nested one, and all are in memory at once.

    Args:
        client: A client of the server, or of several.
        name: Name of the store.
        path: ``.npz``, ``.npy`` (one key), ``.safetensors``, ``.h5``, ``.pt``, ``.jsonl``, or without an ending a
            folder of ``TensorDict.memmap``.
        keys: Only these, with what is below them.
        version: Version of weights; None: the newest.
        replaces: Whether a file that exists is replaced, or a folder that holds nothing but a tensordict.
        on_progress: Called after each piece.

    Raises:
        StoreNotFoundError, KeyNotFoundError: There is no such store or key.
        WrongStateError: There is such a file.
        InvalidRequestError: There is no format for its name, or a folder of that name with other files.
        NotSupportedError: The format cannot hold a key.
        CapacityError: The disk is full. Nothing was written.
        ConnectError: A server that has a part of it does not answer. Nothing was written.
    """
    target = Path(path)
    write = WRITERS[find_format(target)]
    is_folder = target.is_dir() and not target.is_symlink()
    if is_folder and not _is_of_tensordict(target):
        raise InvalidRequestError(argument="path", reason=f"{target} is a folder with other files; choose another name")
    if os.path.lexists(target) and not replaces:
        raise WrongStateError(state="it exists; replace it (--force, replaces=True)", event=f"writing {target}")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            made, spooled = Path(folder) / f"made{target.suffix}", Path(folder) / "rows"
            spooled.mkdir()
            with ColumnSpool(spooled) as spool:
                _check_whole(client, name)
                columns, num_rows = _read(client, name, keys, version, spool, on_progress)
                _check_whole(client, name)
                write(made, columns, num_rows)
                del columns
            if is_folder:
                replace_folder(made, target)
            else:
                os.replace(made, target)
    except OSError as fault:
        if fault.errno is not None and fault.strerror:
            if fault.errno in (28, 122):  # ENOSPC, EDQUOT
                raise CapacityError(what=f"{target} ({fault.strerror})") from None
            raise InvalidRequestError(argument="path", reason=f"{target}: {fault.strerror}") from None
        raise


def replace_folder(made: Path, target: Path) -> None:
    """Replaces a folder by another beside or below it, whose parent then has the old one; one of them is always at its
    place, except for the moment between two renames where the file system cannot exchange them.

    Raises:
        OSError: It cannot be replaced; it is there as before.
    """
    if exchange_paths(made, target):
        return
    aside = made.with_name(f"{made.name}.replaced")
    try:
        os.replace(target, aside)
        os.replace(made, target)
    except BaseException:  # an interrupt too
        if aside.exists():
            taken = os.path.lexists(target)  # by another process; then the old one stays beside it
            os.replace(aside, target.with_name(f"{target.name}.replaced") if taken else target)
        raise


_OF_TENSORDICT = (".memmap", ".json", ".pickle")
"""Endings of the files that ``TensorDict.memmap`` writes."""


def _is_of_tensordict(folder: Path) -> bool:
    """Returns whether a folder holds a tensordict and nothing else, so that it may be replaced by another."""
    files = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    return (folder / "meta.json").is_file() and all(path.suffix in _OF_TENSORDICT for path in files)


def _check_whole(client: Any, name: str) -> None:
    """Raises ConnectError if a part of a shared store does not answer: reads would leave its rows out."""
    if not isinstance(client, ClusterClient) or client.describe(name).kind == "weights":  # one server has all of it
        return
    store = client[name]
    missing = store.info()["degraded"] if hasattr(store, "ask_parts") else []
    if missing:
        raise ConnectError(address=client.address, reason=f"shards {missing} of {name!r} do not answer")


def _read(
    client: Any,
    name: str,
    keys: Sequence[Key],
    version: int | None,
    spool: ColumnSpool,
    on_progress: OnProgress,
) -> tuple[Columns, int | None]:
    """Returns all content, and how many rows it has; None if it is one tensordict without rows."""
    described = client.describe(name)
    if described.kind == "keyed":
        if version is not None:
            raise InvalidRequestError(argument="version", reason=f"store {name!r} does not hold weights")
        return read_entries(client, described, keys, spool, on_progress)
    if described.kind == "weights":
        found = client.latest(name, timeout_s=0) if version is None else client.version(name, version)
        if found is None:
            raise DeadlineExceededError(what=f"a first version of {name!r}", timeout_s=0.0)
        return list_columns(found.data, keys, name), None
    if version is not None:
        raise InvalidRequestError(argument="version", reason=f"store {name!r} does not hold weights")
    store = client[name]
    if not described.capacity and not described.batch_size:
        return list_columns(store[...], keys, name), None
    num_rows = described.num_rows
    row_nbytes = max(described.nbytes // max(described.capacity or num_rows, 1), 1)
    max_rows = min(max(PIECE_NBYTES // row_nbytes, 1), MAX_PIECE_ROWS)
    ragged = {key for key, leaf in described.spec.values if leaf.ragged is not None}
    for piece in _iter_pieces(store, num_rows, max_rows):
        spool.append(list_columns(piece, keys, name, ragged=ragged), piece.batch_size[0])
        on_progress(spool.num_rows, num_rows)
    return spool.finish(), spool.num_rows


def _iter_pieces(store: Any, num_rows: int, max_rows: int) -> Iterator[Any]:
    for start in range(0, max(num_rows, 1), max_rows):
        piece = store[start : min(start + max_rows, num_rows)]
        yield piece
        if not piece.batch_size[0]:  # its rows have left
            break
