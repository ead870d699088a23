"""What a keyed store is when it is created, opened and described."""

from __future__ import annotations

import os
from pathlib import Path as FilePath

from tdserve.base.errors import InvalidSpecError, TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.kv.keyed_state import KeyedState
from tdserve.store import object_folders
from tdserve.store.entry_tables import EntryTables
from tdserve.store.generations import Generations
from tdserve.store.objects import Objects
from tdserve.store.use_marks import UseMarks
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2

_MIN_MAP_BYTES, _MAX_MAP_BYTES = 1 << 30, 1 << 40
"""Limits for the map of a store without ``max_bytes``. It is address space only; a process has room for 128 of the
largest at a time, and for thousands on a usual disk."""

_MAP_STEP_BYTES = 1 << 20

_MAP_FACTOR = 3
"""Room of the map for each byte that a store may have: overwriting needs new pages before the old ones are free."""

_MAP_MARGIN_BYTES = 1 << 26

_MAX_EXPIRED = 1000
"""Most expired entries that a description looks at: control's event loop makes it."""


def make_keyed_record(name: str, spec: Spec, request: control_pb2.CreateStoreRequest, root: FilePath) -> StoreRecord:
    """Returns the record of a keyed store that a client asks for.

    Raises:
        InvalidRequestError, InvalidSpecError: The settings, or the structure of an entry, are invalid.
    """
    settings = KeyedSettings.from_json(request.settings)
    if settings.like == "any" and spec.root.entries:
        raise InvalidSpecError(store=name, reason="it has entries of any structure, and cannot have one")
    return StoreRecord(
        name=name,
        kind="keyed",
        uid="",
        fingerprint=spec.fingerprint,
        num_rows=1,
        settings=settings.to_json(),
        max_object_bytes=_compute_map_bytes(settings.max_bytes, root),
    )


def _compute_map_bytes(max_bytes: int, root: FilePath) -> int:
    if max_bytes:
        wanted = min(_MAP_FACTOR * max_bytes + _MAP_MARGIN_BYTES, _MAX_MAP_BYTES)
    else:
        found = os.statvfs(root)
        wanted = min(max(found.f_blocks * found.f_frsize, _MIN_MAP_BYTES), _MAX_MAP_BYTES)
    return -(-wanted // _MAP_STEP_BYTES) * _MAP_STEP_BYTES


def open_keyed_state(record: StoreRecord, folder: FilePath) -> KeyedState:
    """Returns the state of a keyed store that is opened.

    Raises:
        CapacityError: There is no room for the marks of use.
    """
    settings = KeyedSettings.from_json(record.settings)
    if settings.eviction == "lru":
        UseMarks(folder, creates=True)
    return KeyedState(settings)


def count_entries(folder: FilePath, generations: Generations, now_s: float) -> int:
    """Returns the number of entries of a store; 0 if they cannot be read."""
    values = object_folders.get_folder(folder, generations.objects_epoch)
    if not Objects.exists(values):
        return 0
    try:
        with Objects(values) as objects:
            tables = EntryTables.open(objects, folder)
            return 0 if tables is None else tables.count(b"", int(now_s * 1000), max_expired=_MAX_EXPIRED)
    except TDServeError:
        return 0
