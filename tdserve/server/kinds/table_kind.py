"""Replay tables and queues.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from tdserve.base.errors import InvalidRequestError, InvalidSpecError, KeyNotFoundError
from tdserve.messages.content import POLICY_VERSION_KEY, RESERVED_KEYS, may_be_packed_as_zeros
from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.allocation.ring import compute_first_generation
from tdserve.rules.replay.allocation.shared_numbers import SharedNumbers
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.row_indexes.row_order import to_last_sequence
from tdserve.rules.replay.sample_ages import measure_sample_age
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tdserve.server.execution.rule_memory import ROW_BYTES, check_rule_memory
from tdserve.server.kinds.policies import check_policy, describe_policy
from tdserve.server.kinds.store_kind import KindStores, StoreKind, load_state
from tdserve.server.kinds.surviving_rows import SurvivingRows
from tdserve.server.open_store.counts import find_lost
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs
from tdserve.server.recovery.claim_records import find_unfilled_claims
from tdserve.server.recovery.departure_records import complete_departure
from tdserve.server.recovery.draw_records import rename_draws, restore_draws
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.rows.row_columns import open_column
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

MAX_CAPACITY_ROWS = 2**40

LONG_ROWS = 1 << 15
"""Capacity from which on a thread restores the rules of a table. For smaller ones it takes a few milliseconds at most,
less than waiting for a thread."""


class TableKind(StoreKind):
    """Replay tables and queues; see :class:`StoreKind`."""

    name = "replay"

    def __init__(self) -> None:
        self._rng = np.random.default_rng()

    def make_record(self, asked: control_pb2.CreateStoreRequest, spec: Spec, stores: KindStores) -> StoreRecord:
        capacity = asked.capacity
        if not 1 <= capacity <= MAX_CAPACITY_ROWS:
            raise InvalidRequestError(argument="capacity", reason=f"{capacity} is not from 1 to {MAX_CAPACITY_ROWS}")
        settings = Settings.from_json(asked.settings, min_size=asked.min_size or 1)
        settings.check(capacity)
        if capacity >= LONG_ROWS:
            check_rule_memory(capacity, ROW_BYTES)
        for key in settings.sampler.trajectory_keys:
            if key not in dict(spec.tensors):
                raise KeyNotFoundError(store=asked.name, key=".".join(key))
        record = super().make_record(asked, spec, stores)
        record = replace(record, num_rows=capacity, capacity=capacity, settings=settings.to_json())
        check_policy(stores, record)
        return record

    def make_stored_spec(self, record: StoreRecord, spec: Spec) -> Spec:
        """Returns the structure on disk, which has the capacity in front of one row's batch size.

        Raises:
            InvalidSpecError: A row has a key that sampling adds.
        """
        own = (POLICY_VERSION_KEY,) if Settings.from_json(record.settings).policy else ()
        taken = [key for key, _ in spec.root.entries if key in (*RESERVED_KEYS, *own)]
        if taken:
            raise InvalidSpecError(store=record.name, reason=f"key {taken[0]!r} is added by sample(); rename it")
        return spec.prepend((record.capacity,))

    def may_be_packed(self, record: StoreRecord, spec: Spec) -> bool:
        """Returns whether it has no policy, for whose figures a description needs the rules."""
        has_policy = bool(Settings.from_json(record.settings).policy)
        return not has_policy and may_be_packed_as_zeros(self.make_stored_spec(record, spec))

    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        make, finish = self.split_opening(record, stores)
        return finish(make())

    def is_long_to_open(self, record: StoreRecord) -> bool:
        return record.capacity >= LONG_ROWS

    def split_opening(
        self, record: StoreRecord, stores: KindStores
    ) -> tuple[Callable[[], TableState], Callable[[TableState], OpenedStore]]:
        folder, state = stores.root.store_folder(record.name), load_state(stores.db, record.uid)
        spec = stores.specs.get(record.fingerprint, record.order)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        stored = self.make_stored_spec(record, spec)
        reserved = stores.unfinished_writes.find_reserved(record.uid)
        claimed = find_unfilled_claims(stores.db, folder, record, generations.values)
        make = partial(
            TableState.restore,
            record.name,
            generations.values[:-1],
            Settings.from_json(state.get("settings", record.settings)),
            state,
            now_reserved=[*(rows.rows for rows in reserved), *(rows for _, several in claimed for rows in several)],
            held=stores.unfinished_writes.find_overwritten(record.uid, stored),
            make_column=partial(open_column, folder),
            num_keys=len(spec.tensors) + len(spec.values) - len(record.added_leaves),
            shared=SharedNumbers(generations.numbers),
            first_generation=compute_first_generation(record.uid),
        )

        def finish(restored: TableState) -> OpenedStore:
            table = Table(restored)
            store = OpenedStore(record, stored, folder, row_spec=spec, generations=generations, table=table)
            store.group_keys.extend(tuple(path) for path in state.get("group_keys", ()))
            store.known_groups.update(store.group_keys)
            left = iter(stores.unfinished_writes.restore(store, reserved))
            table.ages.note_rows(0, time.monotonic())
            restore_draws(stores.db, record.uid, table)
            complete_departure(stores.db, record.uid, table)
            table.departures.remove_had_by_all()
            store.unfilled.extend((writer, list(islice(left, len(several)))) for writer, several in claimed)
            return store

        return make, finish

    def arrive(self, state: dict[str, Any]) -> dict[str, Any]:
        """Keeps the policy, which is elsewhere now; see :class:`Staleness`."""
        is_new = bool(state.get("policy_uid")) and state.get("policy_elsewhere_since_s") is None
        return {**state, "policy_elsewhere_since_s": 0.0} if is_new else state

    def get_state(self, store: OpenedStore) -> dict[str, Any]:
        return store.get_table_state()

    def describe(self, store: OpenedStore, stores: KindStores, description: control_pb2.StoreDescription) -> None:
        super().describe(store, stores, description)
        describe_policy(stores, store, description)
        table = store.get_table()
        counts = table.counts
        description.num_rows, description.inserts = counts.num_rows - description.num_damaged, table.totals.inserts
        description.samples = counts.samples
        description.reserved_rows = counts.reserved + description.num_damaged
        description.num_leased = table.selectors.leases.num_leased
        description.num_incomplete = table.selectors.num_incomplete
        description.num_pinned = len(table.ring.pins)
        description.backlog.update(table.selectors.count_backlog())
        description.is_closed = table.is_closed
        description.settings = table.settings.to_json()
        description.min_size = getattr(table.settings.limiter, "min_size", 0)

    def find_lost(self, store: OpenedStore) -> RowSet:
        return find_lost(store)

    def observe(self, store: OpenedStore, figures: control_pb2.StoreFigures) -> None:
        table = store.get_table()
        figures.is_queue = table.settings.is_queue
        if table.settings.sampler.uses_priority:
            figures.priority_sum = table.selectors.get(PLAIN).mass
        age = measure_sample_age(table.state, time.monotonic(), rng=self._rng)
        if age is not None:
            figures.sample_age.MergeFrom(control_pb2.SampleAge(**age._asdict()))

    def describe_packed(self, record: StoreRecord, description: control_pb2.StoreDescription) -> None:
        description.num_rows = 0
        description.min_size = getattr(Settings.from_json(record.settings).limiter, "min_size", 0)

    def repair(self, folder: FilePath, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        stored = self.make_stored_spec(record, specs.get(record.fingerprint, record.order))
        rows, state = SurvivingRows.find(folder, record, stored), load_state(db, record.uid)
        sequence = open_column(folder, "sequence", np.dtype(np.int64), (record.capacity,))
        last = int(state.get("last_sequence", to_last_sequence(state.get("inserts", 0))))
        is_whole = rows.is_whole & (rows.generations[:-1] > 0) & (sequence <= last)
        for before, end in state.get("arriving", ()):  # of an extend that was not on record then
            is_whole &= (sequence <= before) | (sequence > end)
        lost = np.flatnonzero(~is_whole & rows.was_written)
        rename = rows.replace_generations(folder, record, lost, marks_store=False)
        rename_draws(db, record.uid, rename)
        return f"{len(lost)} rows" if len(lost) else ""
