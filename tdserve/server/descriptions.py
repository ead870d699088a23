"""Descriptions of stores, as clients are sent them."""

from __future__ import annotations

import time

from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.settings import Settings
from tdserve.server.keyed_stores import count_entries
from tdserve.server.opened_store import OpenedStore
from tdserve.server.specs import get_message
from tdserve.server.stores import Stores
from tdserve.server.tables.counts import make_counts, num_lost
from tdserve.server.tables.policies import describe_policy
from tdserve.store import object_folders
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2

KINDS = {
    "tensordict": control_pb2.STORE_KIND_TENSORDICT,
    "replay": control_pb2.STORE_KIND_REPLAY,
    "weights": control_pb2.STORE_KIND_WEIGHTS,
    "keyed": control_pb2.STORE_KIND_KEYED,
}


def describe(stores: Stores, entry: OpenedStore, *, with_spec: bool = True) -> control_pb2.StoreDescription:
    """Returns the description of a store as it is now."""
    record = entry.record
    description = _describe_record(record, entry.row_spec or entry.spec, with_spec=with_spec)
    description.num_rows, description.version = entry.spec.num_rows, entry.content_version
    description.nbytes = entry.spec.nbytes + (_num_value_bytes(entry) if entry.spec.values else 0)
    description.num_waiting = entry.waiters.num_waiting
    if entry.table is not None:
        describe_policy(stores, entry, description)
        table = entry.table
        counts = make_counts(entry)
        description.num_rows, description.inserts = counts.rows, counts.inserts
        description.samples = table.counts.samples
        description.reserved_rows = table.ring.num_reserved + num_lost(entry)
        description.num_leased = table.selectors.leases.num_leased
        description.is_closed = table.is_closed
        description.settings = table.settings.to_json()
        description.min_size = getattr(table.settings.limiter, "min_size", 0)
    if entry.keyed is not None and entry.generations is not None:
        description.num_rows = count_entries(entry.folder, entry.generations, time.time())
    if entry.versions is not None:
        for version in entry.versions.kept:
            description.versions.add(
                version=version.version,
                nbytes=version.nbytes,
                created_s=version.created_s,
                metadata=version.metadata,
            )
        description.version = entry.versions.newest.version if entry.versions.newest else 0
        description.fanout = entry.versions.fanout
    return description


def describe_packed(stores: Stores, record: StoreRecord, *, with_spec: bool = True) -> control_pb2.StoreDescription:
    """Returns the description of a store that nobody has used."""
    spec = stores.specs.get(record.fingerprint, record.order)
    description = _describe_record(record, spec, with_spec=with_spec)
    description.nbytes, description.version = record.nbytes, stores.packed.get_version(record)
    description.num_rows = 0 if record.kind == "replay" else record.num_rows
    if record.kind == "replay":
        description.min_size = getattr(Settings.from_json(record.settings).limiter, "min_size", 0)
    return description


def _describe_record(record: StoreRecord, spec: Spec, *, with_spec: bool) -> control_pb2.StoreDescription:
    return control_pb2.StoreDescription(
        name=record.name,
        kind=KINDS[record.kind],
        spec=get_message(spec) if with_spec else None,
        fingerprint=spec.fingerprint,
        uid=record.uid,
        capacity=record.capacity,
        created_s=record.created_s,
        extra=record.extra,
        path=f"stores/{record.name}",
        settings=record.settings,
        share_non_tensor=record.share_non_tensor,
        max_object_bytes=record.max_object_bytes,
        structure=record.structure,
        durability=record.durability,
        adopted=record.adopted,
        read_only=record.read_only,
    )


def _num_value_bytes(entry: OpenedStore) -> int:
    """Returns the size of the file that holds non-tensor values and ragged tensors, bytes."""
    generations = entry.generations
    return 0 if generations is None else object_folders.num_bytes(entry.folder, generations.objects_epoch)
