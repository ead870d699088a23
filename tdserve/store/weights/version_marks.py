"""Records which version files have reached the disk, with checksums that verify them after a loss of power.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.checked_json import decode_checked, encode_checked
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file
from tdserve.store.disk.held_folder import HeldFolder, find_name
from tdserve.store.weights.version_names import SUFFIX, make_values_name

FILE_NAME = "synced.json"

_CHUNK_BYTES = 1 << 20


def sync_versions(folder: Path, records: Mapping[int, str], *, uid: str) -> None:
    """Syncs versions to the disk and records them; one that is retired meanwhile is left out.

    Args:
        folder: Folder of a weights store's versions.
        uid: Incarnation of the store.
        records: Record of each version, by its number: a list in JSON. What follows its first item may change where the
            store is next, and the file is the same.

    Raises:
        CorruptDataError: They are of another incarnation: the store was deleted, and nothing was written.
        CorruptDataError, CapacityError: They cannot be read, or the record cannot be written.
    """
    held = HeldFolder(folder)  # what is found here, and what is written, is of one folder
    if is_of_another(held.path, uid=uid):
        raise CorruptDataError(path=str(folder), expected="versions of this store", actual="those of another one")
    if _note_versions(held.path, records, uid=uid):
        for each in (held.path, folder.parent, folder.parent.parent):
            sync_file(each)


def _note_versions(folder: Path, records: Mapping[int, str], *, uid: str) -> bool:
    """Syncs and records the versions in an opened folder; returns whether the record has changed."""
    before = find_marks(folder, uid)
    noted = {}
    for number, record in records.items():
        known = before.get(str(number))
        if known is not None and is_of_version(known[0], record):
            noted[str(number)] = [record, known[1]]
            continue
        checksum = _compute_checksum(folder / f"{number}{SUFFIX}", syncs=True)
        if checksum:
            noted[str(number)] = [record, checksum]
    if noted == before:
        return False
    _write_marks(folder, noted, uid=uid)
    return True


def begin_marks(folder: Path, *, uid: str) -> None:
    """Records which incarnation a new folder of versions is of: a sync of an earlier one, which was deleted and has had
    the same name, leaves it alone."""
    with convert_os_errors(folder / FILE_NAME):
        (folder / FILE_NAME).write_bytes(_encode_marks({}, uid=uid))


def is_of_version(known: str, record: str) -> bool:
    """Returns whether two records are of the same version."""
    try:
        return bool(known == record or json.loads(known)[0] == json.loads(record)[0])
    except (ValueError, TypeError, LookupError):  # it may come from elsewhere
        return False


def adopt_marks(folder: Path, *, uid: str) -> None:
    """Makes the record that came with the versions of a moved or copied store that of this incarnation.

    One that was replaced while it was read is removed; the next sync makes it again.
    """
    path = folder / FILE_NAME
    with convert_os_errors(path):
        if not path.exists():
            return
        marks = _read_marks(folder)
        if not marks:
            path.unlink()
        elif marks.get("uid") != uid:
            _write_marks(folder, _select_versions(marks), uid=uid)


def _write_marks(folder: Path, versions: Mapping[str, list[str]], *, uid: str) -> None:
    fresh = folder / f"{FILE_NAME}{FRESH_SUFFIX}"
    with convert_os_errors(find_name(folder) / fresh.name):
        fresh.write_bytes(_encode_marks(versions, uid=uid))
        sync_file(fresh)
        os.replace(fresh, folder / FILE_NAME)


def _encode_marks(versions: Mapping[str, list[str]], *, uid: str) -> bytes:
    return encode_checked({"uid": uid, "versions": versions})


def find_whole_versions(folder: Path, *, uid: str) -> dict[int, str]:
    """Returns the records of those versions of this incarnation whose files are unchanged since their sync; for use
    after a loss of power."""
    return {
        int(number): record
        for number, (record, checksum) in find_marks(folder, uid).items()
        if _compute_checksum(folder / f"{number}{SUFFIX}", syncs=False) == checksum
    }


def is_of_another(folder: Path, *, uid: str) -> bool:
    """Returns whether versions were recorded here for another incarnation of the store than this one."""
    return bool(_read_marks(folder).get("uid", uid) != uid)


def find_marks(folder: Path, uid: str) -> dict[str, list[str]]:
    """Returns record and checksum of each version of this incarnation."""
    marks = _read_marks(folder)
    return _select_versions(marks) if marks.get("uid") == uid else {}


def _select_versions(marks: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns what a record that may come from elsewhere has of versions, as far as it is as a server writes it."""
    found = marks.get("versions")
    return {
        number: each
        for number, each in (found.items() if isinstance(found, dict) else ())
        if number.isdecimal() and isinstance(each, list) and len(each) == 2 and all(isinstance(x, str) for x in each)
    }


def _read_marks(folder: Path) -> dict[str, Any]:
    try:
        return decode_checked((folder / FILE_NAME).read_bytes(), str(folder / FILE_NAME))
    except (OSError, CorruptDataError):
        return {}


def check_marks(folder: Path) -> None:
    """Raises CorruptDataError if the record is there and damaged."""
    path = folder / FILE_NAME
    if path.exists():
        with convert_os_errors(path):
            decode_checked(path.read_bytes(), str(path))


def compute_checksum(path: Path) -> str:
    """Returns the checksum of a version's file and its values; "" if there is no such file. Raises CorruptDataError."""
    with convert_os_errors(path):
        return _compute_checksum(path, syncs=False)


def _compute_checksum(path: Path, *, syncs: bool) -> str:
    """Returns the checksum of a version's file and its values; "" if the version does not exist any more."""
    try:
        found = [_read_checksum(path, syncs=syncs)]
    except FileNotFoundError:
        return ""
    try:
        found.append(_read_checksum(make_values_name(path), syncs=syncs))
    except FileNotFoundError:
        found.append("none")
    return " ".join(found)


def _read_checksum(path: Path, *, syncs: bool) -> str:
    """Returns the checksum; raises FileNotFoundError if the file does not have this name any more at the end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if syncs:
            os.fsync(fd)
        checksum = offset = 0
        while chunk := os.pread(fd, _CHUNK_BYTES, offset):
            checksum = zlib.crc32(chunk, checksum)
            offset += len(chunk)
        if os.stat(path).st_ino != os.fstat(fd).st_ino:
            return "recycled"
    finally:
        os.close(fd)
    return f"{offset}:{checksum:08x}"
