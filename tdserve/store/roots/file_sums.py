"""Checksums of whole files, recorded when a server ends in order, so that ``tdserve check`` finds any change since.

While a server runs, its records have checksums of their own (``sealed``), and so do rows and versions as of the last
sync. The files' checksums cover the rest too: the pages of the catalog and of the values, generations, columns and
metadata. Files of tensors are left out, since they may be of any size: each of their rows has a checksum
(``watermark``), and each version (``version_marks``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from tdserve.base.errors import CorruptDataError
from tdserve.store.database.environments import LOCK_FILE
from tdserve.store.disk.checked_json import decode_checked, encode_checked
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, SET_ASIDE, sync_file
from tdserve.store.durability.sync_pass import FOLDER as SYNCED_FOLDER
from tdserve.store.roots.record_file import FILE_NAME as RECORD_FILE
from tdserve.store.values.use_marks import FILE_NAME as MARKS_FILE

FILE_NAME = "sums.json"

MAX_SUMMED_BYTES = 1 << 30
"""Larger files are left out: to read one again takes a second or more per gigabyte, and an end should be quick."""

_CHUNK_BYTES = 1 << 22

_MADE_ANEW = frozenset(("tdserve.lock", "nonce", "control.sock", "run.json", f"{SYNCED_FOLDER}/{FILE_NAME}"))
"""Files that each start creates again, that have a checksum of their own, or this very record."""

_KEPT = ("catalog", SYNCED_FOLDER, "stores", "arriving")
"""Folders of a root whose files stay."""

_OWN_FILES = ("tdserve.json", "run.json", "nonce")
"""Files of a root beside them; others are the user's."""

_OF_FOLDERS = ("stores", "arriving")
"""Those of them that have nothing but folders."""

_NUM_PARTS_OF_STORE = 2

_TENSOR_FOLDERS = ("rows", "extra", "versions")
"""Folders of a store whose large files have checksums elsewhere."""


class FileSum(NamedTuple):
    """The state of one file.

    Attributes:
        nbytes: Its size.
        modified_ns: When it was written last; a file of the same size and time is not read again.
        checksum: CRC-32C of its content.
    """

    nbytes: int
    modified_ns: int
    checksum: int


def record_sums(root: Path, *, keeps: Collection[str] = (), rereads: bool = False) -> None:
    """Records the checksums of a root's files. Nothing may be written below the root afterwards.

    Args:
        keeps: Files, by path below the root, of which the last record stays: they are damaged.
        rereads: Whether to read files again that look unchanged: a mapping may have written them unnoticed, unless it
            was synced.

    Raises:
        TDServeError: A file cannot be read, or the record cannot be written.
    """
    before = _read_if_whole(root)
    found = {}
    for name in list_summed_files(root):
        path = root / name
        with convert_os_errors(path):
            status = path.stat()
            known = before.get(name)
            is_known = known is not None and (
                name in keeps
                or (not rereads and (known.nbytes, known.modified_ns) == (status.st_size, status.st_mtime_ns))
            )
            checksum = known.checksum if is_known and known is not None else compute_file_checksum(path)
        found[name] = FileSum(status.st_size, status.st_mtime_ns, checksum)
    found |= {name: before[name] for name in keeps if name in before}
    target = root / SYNCED_FOLDER / FILE_NAME
    fresh = target.with_name(FILE_NAME + FRESH_SUFFIX)
    with convert_os_errors(target):
        fresh.write_bytes(encode_checked({"files": found}))
        sync_file(fresh)
        os.replace(fresh, target)
    sync_file(target.parent)


def read_sums(root: Path) -> dict[str, FileSum]:
    """Returns what was recorded at the last orderly end, by path below the root; {} before the first.

    Raises:
        CorruptDataError: The record is damaged.
    """
    path = root / SYNCED_FOLDER / FILE_NAME
    if not path.exists():
        return {}
    with convert_os_errors(path):
        found = decode_checked(path.read_bytes(), str(path))
    return {name: FileSum(*fields) for name, fields in found["files"].items()}


def compute_file_checksum(path: Path) -> int:
    """Returns the CRC-32C of a file's content."""
    checksum = 0
    with convert_os_errors(path), open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = crc32c(chunk, checksum)
    return checksum


def list_summed_files(root: Path) -> Iterator[str]:
    """Yields the paths, below the root, of the files whose checksums are recorded: regular ones that are no user's."""
    for folder, folders, names in os.walk(root):
        below = os.path.relpath(folder, root)
        parts = () if below == "." else tuple(below.split(os.sep))
        folders[:] = sorted(each for each in folders if not _is_left_out(parts, each))
        for name in sorted(names):
            path = os.path.join(*parts, name)
            is_made_anew = path in _MADE_ANEW or name in (LOCK_FILE, MARKS_FILE)
            is_made_anew |= name == RECORD_FILE and len(parts) == _NUM_PARTS_OF_STORE
            if is_made_anew or _has_own_checksums(parts, name) or not is_own(Path(path)):
                continue
            try:
                status = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:  # a user's, which has gone
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_SUMMED_BYTES:
                yield path


def is_own(path: Path) -> bool:
    """Returns whether a file below the root, in none of the folders that each start empties, can be one of tdserve's
    that stay: a user may keep others beside them, and beside the folders of stores."""
    top, *below = path.parts
    if not below:
        return top.removesuffix(FRESH_SUFFIX) in _OWN_FILES
    return top in _KEPT and (top not in _OF_FOLDERS or len(below) > 1)


def _is_left_out(parts: tuple[str, ...], folder: str) -> bool:
    """Returns whether nothing in a folder counts: each start empties it, it is a user's, or it is to be moved away or
    deleted."""
    return (not parts and folder not in _KEPT) or (parts == ("stores",) and folder.startswith(SET_ASIDE))


def _has_own_checksums(parts: tuple[str, ...], name: str) -> bool:
    return len(parts) > 2 and parts[0] == "stores" and parts[2] in _TENSOR_FOLDERS and not name.endswith(".json")


def _read_if_whole(root: Path) -> dict[str, FileSum]:
    try:
        return read_sums(root)
    except CorruptDataError:
        return {}
