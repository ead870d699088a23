"""Records of stores that several servers share."""

from __future__ import annotations

from pathlib import Path as FilePath

from tdserve.base.errors import InvalidSpecError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.placement import PlacementRecord
from tdserve.rules.weights import STEP_AFTER_LOSS
from tdserve.server.kinds.store_kind import KindStores, StoreKind
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.structure.trees.tree import Node, Spec
from tdserve.v1 import control_pb2

_EMPTY = Spec(Node((), None, None, None, ()))


def make_placement(name: str, placement: PlacementRecord) -> tuple[StoreRecord, Spec]:
    """Returns the record of where a store is, as a store's, and its structure, which is empty."""
    record = StoreRecord(
        name=name, kind="placement", uid="", fingerprint=_EMPTY.fingerprint, num_rows=1, settings=placement.to_json()
    )
    return record, _EMPTY


def read_placement(record: StoreRecord) -> PlacementRecord | None:
    """Returns where a store is, if this record has that."""
    return PlacementRecord.from_json(record.settings) if record.kind == PlacementKind.name else None


def find_forward(record: StoreRecord) -> PlacementRecord | None:
    """Returns which server has a store that has moved, if this record is of one."""
    placement = read_placement(record)
    return placement if placement is not None and placement.is_forward else None


def find_last_elsewhere(record: StoreRecord) -> int:
    """Returns a number above the versions of a store that has moved, if this record is of one: it may have been written
    there since. 0 if it had none when it left."""
    is_of_versions = record.former_version and find_forward(record) is not None
    return record.former_version + STEP_AFTER_LOSS if is_of_versions else 0


def is_listed(record: StoreRecord) -> bool:
    """Returns whether a record is of a store that this server has, or knows how several servers share."""
    placement = read_placement(record)
    return placement is None or placement.is_listed


class PlacementKind(StoreKind):
    """A record without content; see :class:`StoreKind`. This server knows nothing of the others: clients read it."""

    name = "placement"

    def make_record(self, asked: control_pb2.CreateStoreRequest, spec: Spec, stores: KindStores) -> StoreRecord:
        if spec.root.entries:
            raise InvalidSpecError(store=asked.name, reason="a record of a placement has no content")
        return make_placement(asked.name, PlacementRecord.from_json(asked.settings))[0]

    def may_be_packed(self, record: StoreRecord, spec: Spec) -> bool:
        """Returns True: its files are not used."""
        return True

    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        folder, spec = stores.root.store_folder(record.name), stores.specs.get(record.fingerprint, record.order)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        return OpenedStore(record, spec, folder, generations=generations)

    def find_obstacle(self, record: StoreRecord) -> str:
        return "it has parts on several servers, each of which moves by its own name"

    def read_last_version(self, store: OpenedStore, db: CatalogDB) -> int:
        return find_last_elsewhere(store.record)

    def repair(self, folder: FilePath, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        """Repairs nothing: all of it is in the catalog."""
        return ""
