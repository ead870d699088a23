"""What observers ask for: the figures of the whole server, of its stores and of its sessions."""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import time
from collections import Counter
from collections.abc import Sequence, Set as AbstractSet
from importlib.metadata import PackageNotFoundError, version

from tdserve.base.call_times import CallTimes
from tdserve.base.machine import get_descriptor_limit, read_process_use
from tdserve.messages.store_kinds import count_kind
from tdserve.rules.access.grants import FULL_GRANT, Grant
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.descriptions import describe, describe_packed
from tdserve.server.dispatch.services import Services
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.processes.client_process import ClientProcess
from tdserve.server.processes.observer_process import ObserverProcess
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.register import Sessions
from tdserve.store.roots.root import Root
from tdserve.v1 import control_pb2

MAX_ASKED = 10_000
"""Most stores, and most sessions, in one answer."""

STORES_PER_TURN = 10
"""Stores that are looked at in one turn of the event loop: they take it about half a millisecond."""

NAMES_PER_TURN = 1_000
"""Names of stores that are compared with patterns in one turn: about a millisecond for each pattern."""

SUM_AGAIN_S = 15.0
"""Age up to which the sums over all other stores are shown again: they may be ten thousand."""


class Observation:
    """Answers ``GetStats`` and ``Observe``.

    Args:
        root: The acquired root.
        services: The parts that answer requests.
        workers: The data workers.
        worker_processes: Where their processes come from.
        sessions: The open sessions.
        observer: The process that shows the figures by HTTP; None if there is none.
        checkpoints: The process that writes checkpoints; None if there is none.
        checkpoint_interval_s: Time from one to the next; 0 if there is none.
    """

    def __init__(
        self,
        root: Root,
        services: Services,
        workers: Sequence[DataWorker],
        worker_processes: WorkerProcesses,
        sessions: Sessions,
        observer: ObserverProcess | None,
        checkpoints: ClientProcess | None,
        checkpoint_interval_s: float,
    ) -> None:
        self._root = root
        self._services = services
        self._workers = workers
        self._worker_processes = worker_processes
        self._sessions = sessions
        self._observer = observer
        self._checkpoints = checkpoints
        self._checkpoint_interval_s = checkpoint_interval_s
        self._started_s, self._start_time_s = time.monotonic(), time.time()
        self._sums = control_pb2.StoreFigures()
        self._summed_s = -math.inf

    async def get_stats(self, grant: Grant = FULL_GRANT) -> control_pb2.GetStatsResponse:
        """Returns figures of the whole server; without a grant of them, only of the sessions with the same token."""
        services = self._services
        if grant.is_server_wide:
            await services.traffic.collect_counts(self._workers)
            services.claiming.catch_up()
            num_stores = len(services.stores.catalog)
        else:
            num_stores = sum((await self._count_kinds(grant)).values())
        sessions = self._list_sessions(grant)
        response = control_pb2.GetStatsResponse(
            num_stores=num_stores,
            sessions=map(_describe_session, sessions),
            observer=self._observer.address if self._observer is not None else "",
        )
        self._add_identity(response, len(sessions))
        if grant.is_server_wide:
            response.root = str(self._root.path)
            self._add_parts(response)
        return response

    def _add_identity(
        self, response: control_pb2.GetStatsResponse | control_pb2.ObserveResponse, num_sessions: int
    ) -> None:
        """Adds what both answers have for every caller."""
        response.server_id, response.version = self._root.server_id, read_package_version()
        response.uptime_s, response.num_sessions = time.monotonic() - self._started_s, num_sessions

    def _add_parts(self, response: control_pb2.GetStatsResponse | control_pb2.ObserveResponse) -> None:
        """Adds what both answers have of the parts of the server, for callers with a grant of all of it."""
        response.workers.extend(map(_describe_worker, self._workers))
        response.transports.extend(self._services.traffic.list_stats())
        response.root_free_bytes = self._root.free_bytes()
        if (last := self._services.moves.checkpoints.last) is not None:
            response.checkpoint, response.checkpoint_age_s = last.id, last.age_s

    async def observe(
        self, asked: control_pb2.ObserveRequest, grant: Grant = FULL_GRANT
    ) -> control_pb2.ObserveResponse:
        """Returns all that an observer shows. Stores are looked at a few at a time, and requests are served in
        between.

        Args:
            grant: Without that of the whole server, there are only its stores and the sessions with the same token.
        """
        services, sessions = self._services, self._list_sessions(grant)
        shown = sessions[-min(asked.max_sessions, MAX_ASKED) :] if asked.max_sessions else []
        await services.traffic.collect_counts(self._workers)
        services.claiming.catch_up()
        kinds = await self._count_kinds(grant)
        response = control_pb2.ObserveResponse(
            time_s=time.time(),
            start_time_s=self._start_time_s,
            sessions_by_transport=Counter(session.transport for session in sessions),
            kinds=(count_kind(kind, num) for kind, num in kinds.items()),
            sessions=(_observe_session(session, self._started_s) for session in shown),
        )
        self._add_identity(response, len(sessions))
        if grant.is_server_wide:
            self._add_server(response)
        await self._add_stores(asked, response, grant)
        return response

    def _add_server(self, response: control_pb2.ObserveResponse) -> None:
        """Adds the figures of the whole server."""
        services = self._services
        self._add_parts(response)
        response.root_size_bytes = self._root.size_bytes()
        response.held_bytes, response.held_limit_bytes = services.held.nbytes, services.held.limit_bytes
        response.processes.extend(self._list_processes())
        response.calls.extend(_list_calls("control", services.call_times))
        response.calls.extend(_list_calls("worker", services.traffic.work_times))
        response.calls.extend(_list_calls("client", services.client_reports.call_times))
        response.num_observer_restarts = self._observer.num_restarts if self._observer is not None else 0
        response.checkpoint_interval_s = self._checkpoint_interval_s
        response.num_unsynced_stores = len(services.syncing.unsynced)
        if (age_s := services.syncing.age_s) is not None:
            response.sync_age_s = age_s

    def _list_sessions(self, grant: Grant) -> list[ClientSession]:
        if grant.is_server_wide:
            return list(self._sessions)
        return [session for session in self._sessions if session.caller.grant.name == grant.name]

    async def _count_kinds(self, grant: Grant) -> Counter[str]:
        """Returns how many stores of each kind the grant includes; others are served while many names are compared."""
        catalog = self._services.stores.catalog
        if grant.has_all_stores:
            return Counter(catalog.count_kinds())
        counts: Counter[str] = Counter()
        for number, record in enumerate(catalog, start=1):
            counts[record.shown_kind] += not record.loading and grant.has_store(record.name)
            if number % NAMES_PER_TURN == 0:
                await asyncio.sleep(0)
        return +counts

    def _list_processes(self) -> list[control_pb2.ProcessFigures]:
        observer = self._observer
        pids = {
            "control": os.getpid(),
            **{f"worker-{worker.number}": worker.pid for worker in self._workers},
            "fork-server": self._worker_processes.fork_server_pid,
            "syncer": self._services.syncing.pid,
            "observer": observer.pid if observer is not None else 0,
            "checkpoints": self._checkpoints.pid if self._checkpoints is not None else 0,
        }
        found = [control_pb2.ProcessFigures(process=process, pid=pid) for process, pid in pids.items() if pid]
        for figures in found:
            use = read_process_use(figures.pid)
            figures.resident_bytes, figures.anonymous_bytes = use.resident_bytes, use.anonymous_bytes
            figures.cpu_s, figures.num_descriptors = use.cpu_s, use.num_descriptors
            figures.max_descriptors = get_descriptor_limit()
        return found

    async def _add_stores(
        self, asked: control_pb2.ObserveRequest, response: control_pb2.ObserveResponse, grant: Grant
    ) -> None:
        """Adds the stores that were used last, then those that were not used since the start, and those that are
        asked for by name; of all others the sums, if the grant includes all."""
        catalog, max_stores = self._services.stores.catalog, min(asked.max_stores, MAX_ASKED)
        opened = [store for store in self._services.stores.opened.list_stores() if grant.has_store(store.name)]
        names = {store.name for store in heapq.nlargest(max_stores, opened, key=lambda store: store.used_at)}
        names |= await self._find_unopened(max_stores - len(names), grant)
        names |= set(filter(grant.has_store, asked.names[:MAX_ASKED]))
        for number, name in enumerate(sorted(names), start=1):
            figures = self._observe_store(name)
            if figures is not None:
                response.stores.append(figures)
            if number % STORES_PER_TURN == 0:
                await asyncio.sleep(0)
        num_others = len(catalog) - len(response.stores)
        if num_others > 0 and grant.has_all_stores:
            response.num_other_stores = num_others
            if time.monotonic() - self._summed_s >= SUM_AGAIN_S:
                self._sums, self._summed_s = await self._sum_up(names), time.monotonic()
            response.other_stores.CopyFrom(self._sums)

    async def _find_unopened(self, max_stores: int, grant: Grant) -> set[str]:
        """Returns names of stores that are not open, at most this many."""
        stores, found = self._services.stores, set[str]()
        for number, record in enumerate(stores.catalog, start=1):
            if len(found) >= max_stores:
                break
            if not record.loading and stores.opened.peek(record.name) is None and grant.has_store(record.name):
                found.add(record.name)
            if number % NAMES_PER_TURN == 0:
                await asyncio.sleep(0)
        return found

    def _observe_store(self, name: str) -> control_pb2.StoreFigures | None:
        """Returns the figures of a store; None if it does not exist, or not any more."""
        stores = self._services.stores
        record, store = stores.catalog.find(name), stores.opened.peek(name)
        if record is None:
            return None
        if store is None:
            return control_pb2.StoreFigures(description=describe_packed(stores, record, with_spec=False))
        figures = control_pb2.StoreFigures(description=describe(stores, store, with_spec=False), is_open=True)
        del figures.description.versions[:-1]
        for kind, tally in store.waiters.tallies.items():
            figures.waits.add(
                call=kind,
                num_waits=tally.num_waits,
                sum_s=tally.sum_s,
                num_waiting=tally.num_waiting,
                longest_s=store.waiters.find_longest_s(kind) if tally.num_waiting else 0.0,
            )
        KINDS[record.kind].observe(store, figures)
        return figures

    async def _sum_up(self, shown: AbstractSet[str]) -> control_pb2.StoreFigures:
        """Returns the sums over all stores but those that are shown."""
        sums = control_pb2.StoreFigures(is_open=True)
        waits: dict[str, control_pb2.WaitFigures] = {}
        stores = self._services.stores
        for number, record in enumerate(stores.catalog, start=1):
            figures = None
            if not record.loading and record.name not in shown:
                is_open = stores.opened.peek(record.name) is not None
                figures = self._observe_store(record.name) if is_open else _count_unopened(record)
            if figures is not None:
                for field in SUMMED:
                    total = getattr(sums.description, field) + getattr(figures.description, field)
                    setattr(sums.description, field, total)
                for wait in figures.waits:
                    total_wait = waits.setdefault(wait.call, control_pb2.WaitFigures(call=wait.call))
                    total_wait.num_waits += wait.num_waits
                    total_wait.sum_s += wait.sum_s
                    total_wait.num_waiting += wait.num_waiting
                    total_wait.longest_s = max(total_wait.longest_s, wait.longest_s)
            if number % STORES_PER_TURN == 0:
                await asyncio.sleep(0)
        sums.waits.extend(waits.values())
        return sums


SUMMED = ("num_rows", "capacity", "nbytes", "inserts", "samples", "reserved_rows", "num_leased", "num_waiting")
"""Fields of a description that are counts, whose sum over stores has a meaning."""


def _list_calls(side: str, times: CallTimes) -> list[control_pb2.CallFigures]:
    return [
        control_pb2.CallFigures(
            side=side,
            call=tally.call,
            buckets=tally.buckets,
            sum_s=tally.sum_s,
            errors=(control_pb2.ErrorCount(code=code, num_calls=num) for code, num in tally.errors.items()),
        )
        for tally in times
    ]


def _count_unopened(record: StoreRecord) -> control_pb2.StoreFigures:
    """Returns the counts of a store that are known before it is opened: of a hundred thousand in a second."""
    figures = control_pb2.StoreFigures()
    figures.description.nbytes = record.nbytes
    KINDS[record.kind].describe_packed(record, figures.description)
    return figures


def _describe_worker(worker: DataWorker) -> control_pb2.WorkerStats:
    return control_pb2.WorkerStats(
        worker=worker.number, pid=worker.pid, num_restarts=worker.num_restarts, is_ready=worker.ready.is_set()
    )


def _describe_session(session: ClientSession) -> control_pb2.SessionStats:
    return control_pb2.SessionStats(
        session=session.number,
        host=session.hello.host,
        pid=session.hello.pid,
        transport=session.transport,
        worker=session.worker.number,
    )


def _observe_session(session: ClientSession, started_s: float) -> control_pb2.SessionFigures:
    return control_pb2.SessionFigures(
        session=_describe_session(session),
        uptime_s=time.monotonic() - session.begun_s,
        num_requests=session.num_requests,
        num_errors=session.num_errors,
        bytes_in=session.bytes_in,
        bytes_out=session.bytes_out,
        reported_s=max(session.reported_s - started_s, 0.0),
        num_under_way=len(session.requests),
        degraded=session.degraded,
    )


def read_package_version() -> str:
    """Returns the version of this package; "unknown" if it runs from a source tree that was not installed."""
    try:
        return version("tdserve")
    except PackageNotFoundError:
        return "unknown"
