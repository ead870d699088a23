"""Looks at every record of an LMDB environment that no process has open. LMDB itself checks little: a damaged page may
end the process that follows it, so a child does this.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lmdb

from tdserve.store.database.environments import MAX_TABLES, find_damage
from tdserve.store.disk.sealed import is_whole
from tdserve.store.values.entry_tables import DERIVED_TABLES
from tdserve.store.values.object_rows import NAME_BYTES, make_name

SEALED_TABLES = frozenset(
    ("stores", "specs", "states", "packed", "requests", "pending", "draws", "arriving")  # of the catalog
) | {"values", "entries", "answers", "counters"}

_AGE_AT, _EXPIRY_AT, _NUMBER_BYTES = 16, 8, 8
"""Places of two numbers in the header of an entry: see ``entry_tables``."""

MAX_DAMAGED = 100_000
"""Most damaged records that are listed."""


OUT_OF_ORDER = "its key is out of order"
"""Reason of a record that is whole, where it cannot be found by its key."""


@dataclass(frozen=True)
class DamagedRecord:
    """A record that is not what was written.

    Attributes:
        table: Its table.
        key: Its key, as it is now; b"" stands for records that cannot be found.
        reason: What is wrong.
        num_records: How many it stands for.
    """

    table: str
    key: bytes
    reason: str
    num_records: int = 1


@dataclass(frozen=True)
class ScannedEnvironment:
    """What was found.

    Attributes:
        num_records: Records of all tables.
        damaged: Damaged ones.
        failure: Why not all could be read; "" if they could.
        broken_page: A page at which LMDB may end the process that uses it; "" if there is none.
    """

    num_records: int
    damaged: tuple[DamagedRecord, ...]
    failure: str = ""
    broken_page: str = ""


class EnvironmentScanner:
    """Compares the records of environments with their checksums. Its child is forked at the first scan, and again after
    one that has ended it. Not thread-safe."""

    def __init__(self) -> None:
        self._child: _ScanProcess | None = None

    def __enter__(self) -> EnvironmentScanner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def scan(self, path: Path) -> ScannedEnvironment:
        """Compares every record of an environment with its checksum, and what other tables have of it.

        Args:
            path: Its data file. No process has it open, and none opens it meanwhile.
        """
        try:
            nbytes = path.stat().st_size
        except OSError as fault:
            return ScannedEnvironment(0, (), f"{path}: {fault.strerror}")
        if not nbytes:
            return ScannedEnvironment(0, (), "an empty file")
        if reason := find_damage(path, follows_pages=False):
            return ScannedEnvironment(0, (), reason)
        broken_page = find_damage(path)
        found = self._scan_apart(path)
        if found.failure:
            others = self._scan_apart(path, DERIVED_TABLES)
            if not others.failure:
                reason = f"was not read; with all tables: {found.failure}"
                damaged = (DamagedRecord(name, b"", reason) for name in sorted(DERIVED_TABLES))
                found = replace(others, damaged=(*others.damaged, *damaged))
        return replace(found, failure=found.failure and (broken_page or found.failure), broken_page=broken_page)

    def _scan_apart(self, path: Path, skipped: Collection[str] = ()) -> ScannedEnvironment:
        """Returns what a child has found without some tables, or how that has ended it."""
        if self._child is None:
            self._child = _ScanProcess()
        found = self._child.scan(path, skipped)
        if found is not None:
            return found
        failure = self._child.end()
        self._child = None
        return ScannedEnvironment(0, (), failure)


class _ScanProcess:
    """A child that answers the path of an environment and tables to skip, in a line, by what it has found, in
    another."""

    def __init__(self) -> None:
        paths, asking = os.pipe()
        answering, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(asking)
                os.close(answering)
                _answer_paths(paths, answers)
            finally:
                os._exit(0)
        os.close(paths)
        os.close(answers)
        self._asking = os.fdopen(asking, "wb", buffering=0)
        self._answers = os.fdopen(answering, "rb")

    def scan(self, path: Path, skipped: Collection[str]) -> ScannedEnvironment | None:
        """Returns what it has found; None if that has ended it."""
        try:
            self._asking.write(json.dumps([os.fspath(path), *skipped]).encode() + b"\n")
            line = self._answers.readline()
        except BrokenPipeError:
            return None
        return _decode(line) if line.endswith(b"\n") else None

    def end(self) -> str:
        """Lets it end; returns how it did."""
        self._asking.close()
        self._answers.close()
        status = os.waitpid(self._pid, 0)[1]
        if os.WIFSIGNALED(status):
            return f"reading it ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return "reading it failed"


def _answer_paths(paths: int, answers: int) -> None:
    with os.fdopen(paths, "rb") as asked, os.fdopen(answers, "wb", buffering=0) as pipe:
        for line in asked:
            path, *skipped = json.loads(line)
            pipe.write(_encode(scan_here(Path(path), skipped)) + b"\n")


def count_used_bytes(folder: Path) -> int:
    """Returns the bytes of an environment up to its last page that is, or was, in use; it may be open elsewhere."""
    with lmdb.open(os.fspath(folder), readonly=True, lock=False, create=False, max_dbs=MAX_TABLES) as env:
        return (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])


def _encode(found: ScannedEnvironment) -> bytes:
    damaged = [(each.table, each.key.hex(), each.reason, each.num_records) for each in found.damaged]
    return json.dumps([found.num_records, damaged, found.failure]).encode()


def _decode(content: bytes) -> ScannedEnvironment:
    num_records, damaged, failure = json.loads(content)
    records = (DamagedRecord(table, bytes.fromhex(key), *others) for table, key, *others in damaged)
    return ScannedEnvironment(num_records, tuple(records), failure)


def scan_here(path: Path, skipped: Collection[str] = ()) -> ScannedEnvironment:
    """Compares the records as ``EnvironmentScanner`` does, in this process, which a damaged page may end.

    Args:
        skipped: Tables that are not looked at.
    """
    num_records, damaged = 0, list[DamagedRecord]()
    try:
        with (
            lmdb.open(
                os.fspath(path), subdir=False, readonly=True, lock=False, create=False, max_dbs=MAX_TABLES
            ) as env,
            env.begin(buffers=True) as txn,
        ):
            names = [bytes(name).decode() for name in txn.cursor().iternext(values=False)]
            looked_at = [name for name in names if name not in skipped]
            tables = {name: env.open_db(name.encode(), txn=txn, create=False) for name in looked_at}
            for name, table in tables.items():
                num_records += txn.stat(table)["entries"]
                damaged += _scan_table(txn, name, tables)
    except (lmdb.Error, ValueError) as fault:  # a name that is no text is a damaged one
        return ScannedEnvironment(num_records, tuple(damaged[:MAX_DAMAGED]), str(fault))
    return ScannedEnvironment(num_records, tuple(damaged[:MAX_DAMAGED]))


def _scan_table(txn: Any, name: str, tables: dict[str, Any]) -> list[DamagedRecord]:
    damaged, num_found, before = [], 0, b""
    for view, value in txn.cursor(db=tables[name]):
        key = bytes(view)
        num_found += 1
        reason = _explain_damage(txn, name, key, value, tables)
        if not reason and (key <= before or txn.get(key, db=tables[name]) is None):
            reason = OUT_OF_ORDER
        if reason:
            damaged.append(DamagedRecord(name, key, reason))
        before = key
    num_listed = txn.stat(tables[name])["entries"]
    if num_found != num_listed:
        reason = f"{num_found} records can be read of {num_listed}"
        damaged.append(DamagedRecord(name, b"", reason, max(num_listed - num_found, 1)))
    return damaged


def _explain_damage(txn: Any, name: str, key: bytes, value: Any, tables: dict[str, Any]) -> str:
    """Returns why a record is not what was written; "" if it is."""
    if name in SEALED_TABLES and not is_whole(key, value):
        return "its checksum is another"
    if name == "paths":
        return "" if _is_path(txn, key, value, tables[name]) else "its name is that of another path"
    if name in ("ages", "expiries"):
        place, entry_key = (key, bytes(value)) if name == "ages" else (key[:_NUMBER_BYTES], key[_NUMBER_BYTES:])
        at = _AGE_AT if name == "ages" else _EXPIRY_AT
        entry = txn.get(entry_key, db=tables["entries"]) if "entries" in tables else None
        is_current = entry is not None and bytes(entry[at : at + _NUMBER_BYTES]) == place
        # an entry that was put again leaves its earlier expiry behind until that comes
        return "" if is_current or (name == "expiries" and entry is not None) else "no entry has this place"
    return ""


def _is_path(txn: Any, key: bytes, value: Any, table: Any) -> bool:
    if len(key) > NAME_BYTES:
        return key[NAME_BYTES:] == b"in" and txn.get(bytes(value), db=table) is not None
    try:
        found = json.loads(bytes(value))
        path = tuple(map(tuple, found)) if found and isinstance(found[0], list) else tuple(found)
    except (ValueError, TypeError):
        return False
    return make_name(path) == key
