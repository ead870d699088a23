"""Records of stores that several servers share."""

from __future__ import annotations

from pathlib import Path as FilePath

from tdserve.base.errors import InvalidSpecError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.placement import PlacementRecord
from tdserve.server.kinds.store_kind import KindStores, StoreKind
from tdserve.server.opened_store import OpenedStore
from tdserve.server.specs import Specs
from tdserve.store.catalog_db import CatalogDB
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2


class PlacementKind(StoreKind):
    """A record without content; see :class:`StoreKind`. This server knows nothing of the others: clients read it."""

    name = "placement"

    def make_record(self, asked: control_pb2.CreateStoreRequest, spec: Spec, stores: KindStores) -> StoreRecord:
        if spec.root.entries:
            raise InvalidSpecError(store=asked.name, reason="a record of a placement has no content")
        settings = PlacementRecord.from_json(asked.settings).to_json()
        return StoreRecord(
            name=asked.name, kind=self.name, uid="", fingerprint=spec.fingerprint, num_rows=1, settings=settings
        )

    def may_be_packed(self, record: StoreRecord, spec: Spec) -> bool:
        """Returns True: nobody uses its files."""
        return True

    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        folder, spec = stores.root.store_folder(record.name), stores.specs.get(record.fingerprint, record.order)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        return OpenedStore(record, spec, folder, generations=generations)

    def repair(self, folder: FilePath, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        """Repairs nothing: all of it is in the catalog."""
        return ""
