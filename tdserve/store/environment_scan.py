"""Looks at every record of an LMDB environment that no process has open. LMDB itself checks little: a damaged page may
end the process that follows it, so a child of its own does this.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from tdserve.store.environments import MAX_TABLES, find_damage
from tdserve.store.object_rows import NAME_BYTES, make_name
from tdserve.store.sealed import is_whole

SEALED_TABLES = frozenset(
    ("stores", "specs", "states", "packed", "requests", "pending", "draws", "arriving")  # of the catalog
) | {"values", "entries", "answers", "counters"}

_AGE_AT, _EXPIRY_AT, _NUMBER_BYTES = 16, 8, 8
"""Places of two numbers in the header of an entry: see ``entry_tables``."""

MAX_DAMAGED = 100_000
"""Most damaged records that are listed."""


@dataclass(frozen=True)
class DamagedRecord:
    """A record that is not what was written.

    Attributes:
        table: Its table.
        key: Its key, as it is now.
        reason: What is wrong.
    """

    table: str
    key: bytes
    reason: str


@dataclass(frozen=True)
class ScannedEnvironment:
    """What was found.

    Attributes:
        num_records: Records of all tables.
        damaged: Those that are damaged.
        failure: Why not all could be read; "" if they could.
    """

    num_records: int
    damaged: tuple[DamagedRecord, ...]
    failure: str = ""


def scan_environment(path: Path) -> ScannedEnvironment:
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
    if reason := find_damage(path):
        return ScannedEnvironment(0, (), reason)
    return _run_apart(lambda: _scan(path))


def count_used_bytes(folder: Path) -> int:
    """Returns the bytes of an environment up to its last page that is, or was, in use; it may be open elsewhere."""
    with lmdb.open(os.fspath(folder), readonly=True, lock=False, create=False, max_dbs=MAX_TABLES) as env:
        return (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])


def _run_apart(scan: Callable[[], ScannedEnvironment]) -> ScannedEnvironment:
    """Returns what ``scan`` returns in a child, which a damaged page may end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(_encode(scan()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        content = answer.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return ScannedEnvironment(0, (), f"reading it ended by {signal.Signals(os.WTERMSIG(status)).name}")
    return _decode(content) if content else ScannedEnvironment(0, (), "reading it failed")


def _encode(found: ScannedEnvironment) -> bytes:
    damaged = [(each.table, each.key.hex(), each.reason) for each in found.damaged]
    return json.dumps([found.num_records, damaged, found.failure]).encode()


def _decode(content: bytes) -> ScannedEnvironment:
    num_records, damaged, failure = json.loads(content)
    records = (DamagedRecord(table, bytes.fromhex(key), reason) for table, key, reason in damaged)
    return ScannedEnvironment(num_records, tuple(records), failure)


def _scan(path: Path) -> ScannedEnvironment:
    num_records, damaged = 0, list[DamagedRecord]()
    try:
        env = lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False, create=False, max_dbs=MAX_TABLES)
        with env.begin(buffers=True) as txn:
            names = [bytes(name) for name in txn.cursor().iternext(values=False)]
            tables = {name.decode(): env.open_db(name, txn=txn, create=False) for name in names}
            for name, table in tables.items():
                found = _scan_table(txn, name, tables)
                damaged += found
                num_records += txn.stat(table)["entries"]
    except (lmdb.Error, ValueError) as fault:  # a name that is no text is a damaged one
        return ScannedEnvironment(num_records, tuple(damaged[:MAX_DAMAGED]), str(fault))
    return ScannedEnvironment(num_records, tuple(damaged[:MAX_DAMAGED]))


def _scan_table(txn: Any, name: str, tables: dict[str, Any]) -> list[DamagedRecord]:
    damaged, num_found, before = [], 0, b""
    for view, value in txn.cursor(db=tables[name]):
        key = bytes(view)
        num_found += 1
        if key <= before or txn.get(key, db=tables[name]) is None:
            damaged.append(DamagedRecord(name, key, "its key is out of order"))
        elif reason := _explain_damage(txn, name, key, value, tables):
            damaged.append(DamagedRecord(name, key, reason))
        before = key
    num_listed = txn.stat(tables[name])["entries"]
    if num_found != num_listed:
        damaged.append(DamagedRecord(name, b"", f"{num_found} records can be read of {num_listed}"))
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
