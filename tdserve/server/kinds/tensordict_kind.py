"""Tensordict stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np

from tdserve.base.errors import CorruptDataError
from tdserve.messages.content import may_be_packed_as_zeros
from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import StoreRecord
from tdserve.server.kinds.store_kind import KindStores, StoreKind
from tdserve.server.kinds.surviving_rows import SurvivingRows
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs
from tdserve.server.recovery.lost_rows import POWER_LOSS, Overwrite
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.rows.adopted import check_adopted
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


class TensordictKind(StoreKind):
    """Tensordict stores; see :class:`StoreKind`."""

    name = "tensordict"
    has_rules = False

    def make_record(self, asked: control_pb2.CreateStoreRequest, spec: Spec, stores: KindStores) -> StoreRecord:
        record = super().make_record(asked, spec, stores)
        return replace(record, num_rows=spec.num_rows, share_non_tensor=asked.share_non_tensor)

    def may_be_packed(self, record: StoreRecord, spec: Spec) -> bool:
        return may_be_packed_as_zeros(spec)

    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        folder, spec = stores.root.store_folder(record.name), stores.specs.get(record.fingerprint, record.order)
        if record.adopted and checks:
            check_adopted(folder, spec)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        store = OpenedStore(record, spec, folder, generations=generations)
        stores.unfinished_writes.restore(store)
        return store

    def read_last_version(self, store: OpenedStore, db: CatalogDB) -> int:
        if store.generations is None:
            raise CorruptDataError(path=str(store.folder), expected="generations", actual="none that can be read")
        return store.content_version

    def repair(self, folder: FilePath, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        rows = SurvivingRows.find(folder, record, specs.get(record.fingerprint, record.order))
        lost = np.flatnonzero(~rows.is_whole)
        if len(lost):
            Overwrite(record.uid, POWER_LOSS, 0, RowSet.from_rows(lost), ()).save(db)
        rows.replace_generations(folder, record, lost, marks_store=len(lost) > 0)
        return f"{len(lost)} rows, which are damaged until they are written again" if len(lost) else ""
