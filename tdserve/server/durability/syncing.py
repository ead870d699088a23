"""Syncs stores to the disk in repeated passes, off the event loop and outside this process.

A pass covers every store that was used since the start. A request that must not be answered before its write has
reached the disk waits for a pass that began after the write; one pass serves all such requests. Regular passes come at
their time however often others are requested. What a pass could not sync, for example because the disk is full, is
tried again after a pause, for as long as a request waits for it.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Set as AbstractSet
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import Event

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, PeerLostError, TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.kept_records import keep_records
from tdserve.server.catalog.moments import note_pass
from tdserve.server.catalog.stores import Stores
from tdserve.server.durability.sync_process import SyncProcess
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.exit_reasons import may_be_damage
from tdserve.server.weights.version_files import release_version
from tdserve.store.database.environments import hold_page_checks
from tdserve.store.disk.files import is_in_memory
from tdserve.store.durability.sync_pass import COPY_FILE, Pass, SyncedWeights
from tdserve.store.durability.watermark import SyncedStore

MIN_REST = 4.0
"""Pause after a pass, as a multiple of its duration: a long pass means a slow disk, and others write to it too."""

STORES_PER_TURN = 100
"""Stores that are visited in one turn of the event loop."""

RETRY_S = 1.0
"""Pause before what a pass could not sync is tried again, seconds; it doubles with each further failure."""

MAX_RETRY_S = 30.0
"""Longest such pause, seconds."""

_log = logging.getLogger("tdserve.server")


class Syncing:
    """The passes over the stores.

    Args:
        stores: The server's stores.
        interval_s: Time between passes; 0: only when a request waits for one. Taken as 0 if the root is in memory.
        before: Called before each pass; records what is done but not on record yet.

    Attributes:
        unsynced: Uids of the stores that the last pass over each of them could not sync.
    """

    def __init__(self, stores: Stores, *, interval_s: float, before: Callable[[], object]) -> None:
        self._stores = stores
        self._is_worth_it = not is_in_memory(stores.root.path)
        self._interval_s = interval_s if self._is_worth_it else 0.0
        self._before = before
        self._process: SyncProcess | None = None
        self._known: dict[str, SyncedStore] = {}  # by uid; those that were looked at longest ago first
        self._gone: list[str] = []  # uids of those that were forgotten since the last pass
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._wanted: set[str] = set()
        self._resting: set[str] = set()  # those of the wanted stores that could not be synced
        self._all_rest = False  # the last pass failed as a whole, and any other would now
        self._due_s = math.inf  # when the next regular pass is due
        self._retry_s = math.inf  # when the next pass over those that rest is due
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_seen_all = False
        self._begins_run = True
        self.unsynced: set[str] = set()
        self._whole_s = time.monotonic()
        self._is_closed = False
        self._is_over = Event()
        self._checks_pages = False  # of LMDB, from the first end of the process that a damaged one may have caused

    @property
    def pid(self) -> int:
        """Id of the process that syncs; 0 while there is none."""
        return 0 if (process := self._process) is None else process.pid

    @property
    def age_s(self) -> float | None:
        """Time since the beginning of the last regular pass that has brought all to the disk, or since the start; None
        if there are no regular passes."""
        return time.monotonic() - self._whole_s if self._interval_s else None

    async def start(self) -> None:
        """Starts the passes; afterwards a copy of the catalog exists in any case."""
        root = self._stores.root
        if not (root.synced_folder / COPY_FILE).exists():
            await asyncio.to_thread(Pass(str(root.catalog_folder), str(root.synced_folder)).run)
        self._task = asyncio.create_task(self._run(), name="tdserve-syncing")

    async def wait_synced(self, uid: str = "") -> None:
        """Waits until all that was written to a store by now has reached the disk, and the catalog with it.

        Args:
            uid: Uid of the store; "" for the catalog alone.

        Raises:
            ClosedError: The server is shutting down.
        """
        if self._is_closed:
            raise ClosedError(what="the server's syncing")
        self._wanted.add(uid)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((uid, waiter))
        self._wakeup.set()
        await waiter

    def sync_soon(self, uid: str) -> None:
        """Requests a pass over a store now, if there are regular passes: before it, a loss of power would cost the
        whole store."""
        if self._interval_s:
            self._wanted.add(uid)
            self._wakeup.set()

    async def stop(self, timeout_s: float) -> bool:
        """Ends the passes with a last one over all stores; returns whether everything reached the disk in time.

        Call it when there are no writes any more.
        """
        self._is_closed = True
        if self._task is None:
            return False
        deadline = Deadline.after(timeout_s)
        self._wakeup.set()
        await asyncio.wait({self._task}, timeout=timeout_s)  # it may be in the middle of a pass
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(ClosedError(what="the server's syncing"))
        try:
            if not self._task.done():
                raise asyncio.TimeoutError
            if not self._is_worth_it:
                return False
            try:
                failures = await asyncio.wait_for(self._pass(is_all=True), deadline.remaining_s)
            except PeerLostError:  # the next process knows what may have ended this one
                failures = await asyncio.wait_for(self._pass(is_all=True), deadline.remaining_s)
        except (asyncio.TimeoutError, TDServeError) as error:
            _log.warning(
                "not everything could be synced at the end: %s", str(error) or f"it took more than {timeout_s} s"
            )
            return False
        finally:
            self._is_over.set()  # else a pass in this process would go on, and hold up its end
            self._end_process()
            self._task.cancel()
        for reason in failures.values():
            _log.warning("a store could not be synced at the end: %s", reason)
        return not failures

    async def _run(self) -> None:
        if self._interval_s:
            self._due_s = time.monotonic() + self._interval_s
        has_failed, pause_s = False, RETRY_S
        while True:
            is_due = await self._wait()
            if self._is_closed:
                return
            started_s = time.monotonic()
            waiting, wanted = self._take_requests(with_resting=is_due or started_s >= self._retry_s)
            failed, reason, is_whole = wanted, "", False
            try:
                failures = await self._pass(is_all=is_due, wanted=wanted)
                failed = wanted.intersection(failures)
                reason = "; ".join(failures[uid] for uid in sorted(failed))
                has_failed &= any(not self._has_changed(uid) for uid in failed)
            except Exception as error:  # noqa: BLE001 (the outermost frame: waiters continue waiting)
                reason, is_whole = repr(error), True
            else:
                self._note_pass(failures, started_s, over=None if is_due else wanted)
                _resolve_futures(waiter for uid, waiter in waiting if uid not in failed)
                waiting = [(uid, waiter) for uid, waiter in waiting if uid in failed]
            ended_s = time.monotonic()
            if is_due:
                self._due_s = max(started_s + self._interval_s, ended_s + MIN_REST * (ended_s - started_s))
            if reason:
                if has_failed:  # else a version may have been retired meanwhile, which does not happen again
                    _log.warning("stores could not be synced, and will be later: %s", reason)
                is_again = has_failed and (self._all_rest if is_whole else failed <= self._resting)
                pause_s = min(2 * pause_s, MAX_RETRY_S) if is_again else RETRY_S
                self._waiting, self._wanted = waiting + self._waiting, failed | self._wanted
                self._retry_s = ended_s + pause_s
            self._resting, self._all_rest = failed | (self._resting - wanted), is_whole
            has_failed = bool(reason or self._resting)
            if not has_failed:
                self._retry_s = math.inf

    def _take_requests(self, *, with_resting: bool) -> tuple[list[tuple[str, asyncio.Future[None]]], set[str]]:
        """Returns those who wait for a pass, and the stores that are wanted, for the next pass to serve."""
        wanted = self._wanted if with_resting else self._wanted - self._resting
        self._wanted = self._wanted - wanted
        waiting = [each for each in self._waiting if each[0] in wanted]
        self._waiting = [each for each in self._waiting if each[0] not in wanted]
        return waiting, wanted

    def _note_pass(self, failures: Mapping[str, str], started_s: float, *, over: AbstractSet[str] | None) -> None:
        """Notes a pass over some stores, by uid, or over all."""
        left = set() if over is None else set(filter(self._stores.catalog.find_name, self.unsynced - over))
        self.unsynced = left | failures.keys()
        if over is None and not failures:
            self._whole_s = started_s

    def _has_changed(self, uid: str) -> bool:
        """Returns whether keys of a store came, went or were renamed during the pass, and their files with them."""
        known, name = self._known.get(uid), self._stores.catalog.find_name(uid)
        if known is None or name is None:
            return False
        return known.structure != self._stores.catalog.get(name, with_loading=True).structure

    async def _wait(self) -> bool:
        """Waits until a pass is due, requested, or to be tried again; returns whether it is due."""
        while not self._is_closed:
            self._wakeup.clear()
            now_s = time.monotonic()
            if now_s >= self._due_s:
                return True
            rests = self._all_rest or self._wanted <= self._resting
            if self._wanted and (now_s >= self._retry_s or not rests):
                return False
            next_s = min(self._due_s, self._retry_s if self._wanted else math.inf)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), None if math.isinf(next_s) else next_s - now_s)
        return False

    async def _pass(self, *, is_all: bool, wanted: AbstractSet[str] = frozenset()) -> dict[str, str]:
        """Makes one pass; returns the reason for each store that was not synced, by uid.

        A version that a loss of power would lead back to is held until the next pass is done.
        """
        root, held = self._stores.root, list[tuple[OpenedStore, int]]()
        root.check_in_place()  # a pass writes by path
        self._before()
        if is_all or self._begins_run:
            note_pass(self._stores.db, begins_run=self._begins_run)
            self._begins_run = False
        unsynced = self._stores.opened.take_unsynced() if is_all else set[str]()
        try:
            stores, weights = [], []
            async for record in self._iter_records(is_all=is_all, wanted=wanted, unsynced=unsynced):
                if KINDS[record.kind].has_versions:
                    weights.append(self._describe_weights(record, held))
                elif not record.adopted and (synced := await self._store(record)) is not None:
                    stores.append(synced)
            work = Pass(str(root.catalog_folder), str(root.synced_folder), stores, weights, is_all=is_all)
            failures = await asyncio.to_thread(self._choose_place(work))
        except BaseException as error:
            self._stores.opened.add_unsynced(unsynced)
            for store, number in held:
                release_version(store, number)
            if isinstance(error, PeerLostError):
                self._end_process()
            raise
        _keep_synced(held, failures)
        for synced in stores:
            if synced.uid not in failures:
                self._stores.packed.forget_synced(synced.uid)
        self._stores.opened.add_unsynced(unsynced.intersection(map(self._stores.catalog.find_name, failures)))
        return {
            uid: reason for uid, reason in failures.items() if self._stores.catalog.find_name(uid)
        }  # unless deleted

    def _choose_place(self, work: Pass) -> Callable[[], dict[str, str]]:
        """Returns what carries out a pass: the process, or this one at the end of a server that had none so far."""
        if self._process is None and (self._checks_pages or not self._is_closed):
            self._process = SyncProcess(self._stores.root.lock_fd, checks_pages=self._checks_pages)
        if self._process is not None:
            gone, self._gone = self._gone, []
            return partial(self._process.run, work, gone=gone)
        return partial(_run_here, work, self._is_over.is_set)

    async def _iter_records(
        self, *, is_all: bool, wanted: AbstractSet[str], unsynced: AbstractSet[str]
    ) -> AsyncIterator[StoreRecord]:
        """Yields the stores of a pass, a few in each turn of the event loop: all that were used since the last one."""
        is_first = is_all and not self._has_seen_all  # a killed server may have left any store unsynced
        catalog = self._stores.catalog
        opened = self._stores.opened.list_names() if is_all else ()
        names = {*filter(None, map(catalog.find_name, wanted)), *opened, *unsynced}
        for number, record in enumerate(catalog if is_first else filter(None, map(catalog.find, names))):
            if number % STORES_PER_TURN == 0:
                await asyncio.sleep(0)
            if not (record.loading or record.packed):
                yield record
        self._has_seen_all |= is_all

    async def _store(self, record: StoreRecord) -> SyncedStore | None:
        known = self._known.get(record.uid)
        if known is None or known.structure != record.structure:
            try:
                spec = self._stores.specs.get(record.fingerprint, record.order)
                stored = KINDS[record.kind].make_stored_spec(record, spec)
            except TDServeError as error:
                _log.warning("store %r cannot be synced: %s", record.name, error)
                return None
            folder = str(self._stores.root.store_folder(record.name))
            known = await asyncio.to_thread(
                SyncedStore.from_spec, stored, uid=record.uid, folder=folder, structure=record.structure
            )
            self._known.pop(record.uid, None)
            self._known[record.uid] = known
            self._forget_deleted()
        return known

    def _forget_deleted(self) -> None:
        """Forgets those that were deleted of the two stores that were looked at longest ago.

        Called for each that comes, so that there are never many, and the event loop never looks through all.
        """
        for uid in list(islice(self._known, 2)):
            known = self._known.pop(uid)
            if self._stores.catalog.find_name(uid) is None:
                self._gone.append(uid)
            else:
                self._known[uid] = known

    def _describe_weights(self, record: StoreRecord, held: list[tuple[OpenedStore, int]]) -> SyncedWeights:
        versions = self._stores.get_versions(record)
        state = versions.get_state()
        orders = dict(state["orders"])
        records = {kept[0]: json.dumps([kept, orders.get(kept[0], "")]) for kept in state["kept"]}
        store = self._stores.opened.peek(record.name)
        if store is not None and store.record.uid == record.uid and versions.newest is not None:
            versions.acquire(versions.newest.version)
            held.append((store, versions.newest.version))
        return SyncedWeights(record.uid, str(self._stores.root.store_folder(record.name) / "versions"), records)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._checks_pages |= may_be_damage(process.end())
            self._stores.db.check_readers()  # it may have died in the middle of copying the catalog


def _keep_synced(held: Iterable[tuple[OpenedStore, int]], failures: Container[str]) -> None:
    """Keeps the versions that a pass has brought to the disk, until the next one, and lets go those before them. Of
    stores that it could not sync, the version before stays: a loss of power leads back to that."""
    for store, number in held:
        let_go = number
        if store.record.uid not in failures:
            let_go, store.synced_version = store.synced_version, number
        if let_go:
            release_version(store, let_go)


def _run_here(work: Pass, is_over: Callable[[], bool]) -> dict[str, str]:
    with hold_page_checks():  # a damaged one would end this process
        failures = work.run(is_over)
        keep_records(work)
        return failures


def _resolve_futures(waiting: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
