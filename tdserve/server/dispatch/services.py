"""The parts that answer the requests of sessions, assembled for a control process and for tests of its parts."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from tdserve.base.call_times import CallTimes
from tdserve.base.config import VALUES_WORKER, ServerConfig
from tdserve.server.catalog.adoption import Adoption
from tdserve.server.catalog.catalog_requests import CatalogRequests
from tdserve.server.catalog.creation import Creation
from tdserve.server.catalog.stores import Stores
from tdserve.server.dispatch.groups import Groups
from tdserve.server.dispatch.store_requests import StoreRequests
from tdserve.server.durability.syncing import Syncing
from tdserve.server.execution.admission_budget import AdmissionBudget, make_budgets
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.execution.traces import Traces
from tdserve.server.kv.keyed_entries import KeyedEntries
from tdserve.server.movers.mover_context import MoverContext
from tdserve.server.moves.move_requests import MoveRequests
from tdserve.server.processes.workers import DataWorker
from tdserve.server.recovery.process_watch import ProcessWatch
from tdserve.server.sessions.client_reports import ClientReports
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.tables.claiming import Claiming
from tdserve.server.tables.dead_values import DeadValues
from tdserve.server.tables.extends import Extends
from tdserve.server.tables.lease_timer import LeaseTimer
from tdserve.server.tables.row_changes import RowChanges
from tdserve.server.tables.row_reads import RowReads
from tdserve.server.tables.rule_keys import RuleKeys
from tdserve.server.tables.samples import Samples
from tdserve.server.tensordicts.alterations import Alterations
from tdserve.server.tensordicts.reads import Reads
from tdserve.server.tensordicts.writes import Writes
from tdserve.server.weights.publishing import Publishing
from tdserve.server.weights.relays import Relays
from tdserve.server.weights.version_sender import VersionSender
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.roots.root import Root

Workers = Sequence[DataWorker]


@dataclass(frozen=True)
class Services:
    """The assembled parts; see the class of each.

    Attributes:
        mover_context: What the movers of sessions share.
        traces: Exports the spans of requests; None if the server traces nothing.
        call_times: The requests that have ended, by kind.
    """

    stores: Stores
    creation: Creation
    answers: CommittedAnswers
    traffic: Traffic
    held: AdmissionBudget
    unsent: AdmissionBudget
    mover_context: MoverContext
    reads: Reads
    writes: Writes
    alterations: Alterations
    adoption: Adoption
    claiming: Claiming
    samples: Samples
    lease_timer: LeaseTimer
    extends: Extends
    row_reads: RowReads
    changes: RowChanges
    publishing: Publishing
    relays: Relays
    groups: Groups
    syncing: Syncing
    catalog: CatalogRequests
    moves: MoveRequests
    entries: KeyedEntries
    store_requests: StoreRequests
    dead_values: DeadValues
    traces: Traces | None
    call_times: CallTimes = field(default_factory=CallTimes)
    client_reports: ClientReports = field(default_factory=ClientReports)


def assemble(
    config: ServerConfig, root: Root, db: CatalogDB, watch: ProcessWatch, workers: Workers, sessions: Container[object]
) -> Services:
    """Assembles the parts; reads and starts nothing yet.

    Args:
        sessions: Numbers of the open sessions.
    """
    stores, (held, unsent) = Stores(root, db, watch, workers), make_budgets(config.memory_limit_bytes)
    creation, answers, values_worker = Creation(stores, sessions), CommittedAnswers(db), workers[VALUES_WORKER]
    reads, groups, traffic, rule_keys = Reads(), Groups(), Traffic(unsent), RuleKeys()
    entries, lease_timer = KeyedEntries(stores, answers, values_worker=values_worker), LeaseTimer(stores)
    changes = RowChanges(stores, answers, lease_timer=lease_timer)
    writes = Writes(stores, creation, answers, values_worker=values_worker, traffic=traffic)
    alterations = Alterations(stores, answers, values_worker=values_worker)
    adoption = Adoption(stores, answers, values_worker=values_worker, folders=config.adoptable)
    claiming = Claiming(stores, answers, traffic=traffic)
    samples = Samples(stores, rule_keys=rule_keys, lease_timer=lease_timer)
    extends = Extends(stores, answers, rule_keys=rule_keys, claiming=claiming, values_worker=values_worker)
    row_reads, versions = RowReads(stores, samples), VersionSender(stores, traffic=traffic)
    publishing = Publishing(stores, answers, versions=versions)
    syncing = Syncing(stores, interval_s=config.sync_interval_s, before=claiming.catch_up)
    return Services(
        stores=stores,
        creation=creation,
        answers=answers,
        traffic=traffic,
        held=held,
        unsent=unsent,
        mover_context=MoverContext(stores, values_worker, writes, versions, traffic, held),
        reads=reads,
        writes=writes,
        alterations=alterations,
        adoption=adoption,
        claiming=claiming,
        samples=samples,
        lease_timer=lease_timer,
        extends=extends,
        row_reads=row_reads,
        changes=changes,
        publishing=publishing,
        relays=versions.relays,
        groups=groups,
        syncing=syncing,
        catalog=CatalogRequests(stores, held),
        moves=MoveRequests(stores, creation, syncing, entries, versions.relays),
        entries=entries,
        store_requests=StoreRequests(stores, creation, answers, versions.relays, syncing),
        dead_values=DeadValues(stores, values_worker),
        traces=Traces.from_config(config, root.server_id),
    )
