"""What a data worker, or a local client, does with the entries of a keyed store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tdserve.base.errors import RemoteProtocolError
from tdserve.base.ids import REQUEST_BYTES
from tdserve.data.mapped_stores import MappedStore
from tdserve.rules.kv.entry_changes import ABSENT, Entries, compute_begin, put_entries, remove_entries
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.store.exchange.spools import read_spooled
from tdserve.store.values.entry_tables import EntryTables, FoundEntries
from tdserve.store.values.objects import Count
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.values.value_columns import Buffer, ValueColumn, decode_block, encode_block

MAX_LISTED = 10_000
"""Most keys of one page: at 500 bytes each they take 5 MB, and mostly a twentieth of that."""


def find_entries(store: MappedStore, keys: Sequence[bytes], *, count: Count | None = None) -> FoundEntries:
    """Returns the entries of some keys as of one moment; ``count`` as in ``Objects.get_many``."""
    tables = _open_tables(store)
    if tables is None:
        return FoundEntries([ABSENT] * len(keys), [b""] * len(keys))
    return tables.find(keys, _read_clock_ms(), count=count)


def encode_entries(found: FoundEntries, *, asks_versions: bool) -> bytes:
    """Returns a ValueBlock of two columns: the records, if they were asked for, and the versions."""
    versions = np.array(found.versions, "<u8").tobytes()
    return encode_block([ValueColumn(True, [] if asks_versions else found.records), ValueColumn(False, [versions])])


def decode_entries(content: bytes) -> FoundEntries:
    """Returns what ``encode_entries`` was given; no records if only versions were asked for.

    Raises:
        RemoteProtocolError: It is something else.
    """
    block = decode_block(content)
    if len(block) != 2 or block[1].per_row or len(block[1].values[0]) % 8:
        raise RemoteProtocolError(expected="records and versions", received=f"{len(content)} bytes of other values")
    versions: list[int] = np.frombuffer(block[1].values[0], "<u8").tolist()
    return FoundEntries(versions, list(block[0].values))


def list_entries(store: MappedStore, asked: control_pb2.ListRequest) -> control_pb2.Done:
    """Returns a page of keys, or their number."""
    tables = _open_tables(store)
    if tables is None:
        return control_pb2.Done()
    now_ms = _read_clock_ms()
    if asked.asks_count:
        return control_pb2.Done(num_rows=tables.count(asked.prefix, now_ms))
    limit = min(asked.page_size or MAX_LISTED, MAX_LISTED)
    return control_pb2.Done(keys=tables.list_keys(asked.prefix, asked.after, limit, now_ms))


def change_entries(store: MappedStore, order: worker_pb2.ChangeEntries) -> bytes:
    """Carries out a change, once; returns the serialised answer. Called only in the one worker that writes values.

    Raises:
        VersionConflictError, KeyNotFoundError, InvalidRequestError, TooLargeError, CapacityError: Nothing was changed.
        RemoteProtocolError: There is not one record per key.
    """
    settings = KeyedSettings.from_json(order.settings)
    tables = _open_tables(store, writable=True)
    if tables is None:
        raise RemoteProtocolError(expected="tables that this process has created", received="none")
    keys, records = list(order.keys), [] if order.removes else _read_records(order)
    if_versions, name = list(order.if_versions), store.name
    now_ms = int(order.now_s * 1000)

    def put(entries: Entries) -> bytes:
        former_version = store.generations.former_version
        begin = compute_begin(store.uid, former_version=former_version, num_shards=settings.num_shards)
        version = put_entries(entries, settings, keys, records, if_versions, begin=begin, now_ms=now_ms, store=name)
        return control_pb2.Done(version=version).SerializeToString()

    def remove(entries: Entries) -> bytes:
        num_removed = remove_entries(
            entries, settings, keys, if_versions, skips_missing=order.skips_missing, now_ms=now_ms, store=name
        )
        return control_pb2.Done(num_rows=num_removed).SerializeToString()

    return tables.change(
        remove if order.removes else put,
        settings,
        request=order.client_id + order.request.to_bytes(REQUEST_BYTES, "big"),
        recorded=order.recorded,
        num_puts=len(records),
        asked_bytes=sum(map(len, records)),
    )


def _read_records(order: worker_pb2.ChangeEntries) -> Sequence[Buffer]:
    values = order.values
    spooled = read_spooled(values.spool, values.spool_offset, values.spool_nbytes) if values.spool else b""
    columns = decode_block(spooled + values.values)
    if len(columns) != 1 or not columns[0].per_row or len(columns[0].values) != len(order.keys):
        raise RemoteProtocolError(expected=f"a column of {len(order.keys)} records", received=f"{len(columns)} columns")
    return columns[0].get_views((), len(order.keys))


def _open_tables(store: MappedStore, *, writable: bool = False) -> EntryTables | None:
    """Returns the tables of a store; None for a reader if nothing was ever put."""
    objects = store.open_objects(writable=writable)
    opened = store.tables
    if opened is not None and opened[0] is objects:
        return opened[1]
    tables = None if objects is None else EntryTables.open(objects, store.folder)
    store.tables = None if objects is None or tables is None else (objects, tables)
    return tables


def _read_clock_ms() -> int:
    return int(time.time() * 1000)
