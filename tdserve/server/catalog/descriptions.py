"""Descriptions of stores, as clients are sent them."""

from __future__ import annotations

from tdserve.messages.store_kinds import KIND_NUMBERS
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.stores import Stores
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import get_message
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


def describe(stores: Stores, store: OpenedStore, *, with_spec: bool = True) -> control_pb2.StoreDescription:
    """Returns the description of a store as it is now."""
    record = store.record
    description = _describe_record(record, store.row_spec or store.spec, with_spec=with_spec)
    description.nbytes = store.count_bytes()
    description.num_waiting = store.waiters.num_waiting
    KINDS[record.kind].describe(store, stores, description)
    return description


def describe_packed(stores: Stores, record: StoreRecord, *, with_spec: bool = True) -> control_pb2.StoreDescription:
    """Returns the description of a store that was never used."""
    spec = stores.specs.get(record.fingerprint, record.order)
    description = _describe_record(record, spec, with_spec=with_spec)
    description.nbytes, description.version = record.nbytes, stores.packed.get_version(record)
    KINDS[record.kind].describe_packed(record, description)
    return description


def _describe_record(record: StoreRecord, spec: Spec, *, with_spec: bool) -> control_pb2.StoreDescription:
    return control_pb2.StoreDescription(
        name=record.name,
        kind=KIND_NUMBERS[record.kind],
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
        checksum=record.checksum,
        adopted=record.adopted,
        read_only=record.read_only,
    )
