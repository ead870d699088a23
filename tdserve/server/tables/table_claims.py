"""Claims of local clients: rows that a client takes by itself, and whose content it records in its claim file.

A sole writer gets the next rows of the ring, as many as it can use; of several writers each gets a block of rows.
Every access to the table reads the files first, so that nobody sees less than the clients have been promised; the
clients' messages only say when to read them. Before anyone else changes which rows belong to whom, the claim of a sole
writer is taken back: it asks for rows again, like every other, and may ask for another claim. Blocks stay when others
extend the table, and end when rows are removed or written in part.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

from tdserve.base.errors import CapacityError, LocalProtocolError, RemoteProtocolError, StoreNotFoundError, TDServeError
from tdserve.messages.row_numbers import NO_ROWS, Rows
from tdserve.rules.replay.plans import PLAIN_ARRIVAL
from tdserve.rules.replay.promises import num_promisable
from tdserve.rules.replay.reservation import Reservation
from tdserve.rules.replay.table import Table
from tdserve.server.idempotency import CommittedAnswers
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.stores import Stores
from tdserve.server.tables.commits import commit_rows
from tdserve.store.claim_file import FOLDER, MAX_RECORDS, ClaimFile
from tdserve.v1 import control_pb2

_log = logging.getLogger("tdserve.server")

NUM_REMEMBERED = 8
"""Claims of a table in a row after which their writer counts as the only one."""

MIN_BLOCK_EXTENDS = 4
"""Smaller blocks are not worth their request."""


class _ClaimState(Enum):
    OPEN = "open"  # the client may claim rows
    ENDED = "ended"  # it may fill the rows that it has claimed
    BROKEN = "broken"  # the store was deleted, or the file contradicts itself: nothing is committed any more
    SETTLED = "settled"  # all rows are committed or free


_NEXT_STATES = {
    _ClaimState.OPEN: (_ClaimState.ENDED, _ClaimState.BROKEN),
    _ClaimState.ENDED: (_ClaimState.BROKEN, _ClaimState.SETTLED),
    _ClaimState.BROKEN: (_ClaimState.SETTLED,),
    _ClaimState.SETTLED: (),
}


class TableClaims:
    """The claim of one client on one table (``tdserve.rules.replay.claims.Claims``).

    Args:
        claiming: The claims of all clients.
        entry: The table.
        file: Its claim file.
        record: What the client may claim; saved already.
        session: Session of the client. It is ended if the file contradicts itself, which invalidates the file. None for
            a claim from before a restart.
        window: Rows that the client may be ahead.
        promised: Rows of a block, in the order in which the client claims them; None for the next rows of the ring.
        unfilled: Rows that were claimed before a restart, one reservation per claim.
    """

    def __init__(
        self,
        claiming: Claiming,
        entry: OpenedStore,
        file: ClaimFile,
        record: ClaimRecord,
        *,
        session: ClientSession | None = None,
        window: int = 0,
        promised: Rows | None = None,
        unfilled: Sequence[Reservation] = (),
    ) -> None:
        self._stores = claiming.stores
        self._answers = claiming.answers
        self._traffic = claiming.traffic
        self._entry = entry
        self._table = entry.get_table()
        self._file = file
        self._record = record
        self._session = session
        self._window = window
        self.is_block = promised is not None
        self.promised = NO_ROWS if promised is None else promised
        self._pending = deque(unfilled)  # claimed, and not known to be filled
        self._num_claimed = record.num_filled + sum(map(len, unfilled))
        self._state = _ClaimState.OPEN
        self._is_catching_up = False  # a commit wakes others, who catch up too
        self._failure: CapacityError | None = None
        self._last_request: int | None = None  # with an answer that the client may still ask for
        self._table.claims.append(self)
        self._active = claiming.active
        self._active.add(self)
        entry.waiters.on_wait = self._table.listen
        self._request_messages()

    def catch_up(self) -> bool:
        """Commits the rows that were filled, and takes claimed rows out of every sample."""
        if self._is_catching_up or self._state in (_ClaimState.BROKEN, _ClaimState.SETTLED):
            return not self._is_catching_up
        was_open = self._state is _ClaimState.OPEN
        self._is_catching_up = True
        self._failure = None
        try:
            # num_claimed is read first: every claim that it counts, but for the last, is filled, and num_written counts
            # its record.
            num_claimed, num_written = self._file.num_claimed, self._file.num_written
            if self._record.num_taken < num_written:
                self._take_records(num_written)
            if num_claimed > self._num_claimed:
                self._claim(num_claimed - self._num_claimed)
            self._request_messages()
        except CapacityError as error:  # the next call tries again
            self._failure = error
            _log.error("rows that were claimed of store %r are not committed yet: %s", self._entry.name, error)
        except StoreNotFoundError:
            self._enter(_ClaimState.BROKEN)  # it was deleted: nobody asks for these rows
        except TDServeError as error:
            self._enter(_ClaimState.BROKEN)
            _log.error("rows that were claimed of store %r cannot be committed: %s", self._entry.name, error)
            if self._session is not None:
                self._session.ended.set()
        finally:
            self._is_catching_up = False
        if was_open and self._state is _ClaimState.ENDED:  # meanwhile: the client may have claimed more before
            return self.catch_up()
        self._end_promise()
        self._settle()
        return self._failure is None

    @property
    def has_failed(self) -> bool:
        """Whether rows that were filled could not be committed at the last attempt."""
        return self._failure is not None

    def check_committed(self) -> None:
        """Raises CapacityError if rows that were filled could not be committed at the last attempt."""
        if self._failure is not None:
            raise self._failure

    def take_back(self) -> None:
        """Ends the claim: the client keeps only the rows that it is filling."""
        if self._state is _ClaimState.OPEN:
            self._enter(_ClaimState.ENDED)
        self.catch_up()

    def abandon(self) -> None:
        """Ends the claim of a client that fills nothing more."""
        self.take_back()
        while self._pending:
            self._table.abort(self._pending.pop())
        self._settle()

    @property
    def client_id(self) -> bytes:
        """Id of the client."""
        return self._record.client_id

    @property
    def num(self) -> int:
        """Number that distinguishes it from other claims of its client."""
        return self._record.num

    @property
    def is_settled(self) -> bool:
        """Whether the claim is over and all of its rows are committed or free."""
        return self._state is _ClaimState.SETTLED

    def _enter(self, state: _ClaimState) -> None:
        if state not in _NEXT_STATES[self._state]:
            raise LocalProtocolError(reason=f"a claim that is {self._state.value} cannot become {state.value}")
        if self._state is _ClaimState.OPEN:
            self._file.end()
        self._state = state

    def _end_promise(self) -> None:
        """Lets others have the rows of a block that the client will not claim any more."""
        if self._state is _ClaimState.OPEN or self._failure is not None:  # it may have claimed more than is known here
            return
        self.promised, rows = NO_ROWS, self.promised
        self._table.ring.end_promise(rows)

    def _settle(self) -> None:
        if self._pending or self._state in (_ClaimState.OPEN, _ClaimState.SETTLED):
            return
        self._enter(_ClaimState.SETTLED)
        self._active.discard(self)
        self._table.claims.remove(self)
        if not self._entry.waiters.is_deleted:
            self._stores.db.delete("pending", self._record.key)
        self._file.unlink()
        self._entry.waiters.wake()
        if self._session is not None:
            self._session.mover.claims.pop(self._record.uid)

    def _claim(self, num_rows: int) -> Reservation:
        if self._num_claimed + num_rows > self._record.num_allowed:
            expected = f"claims of at most {self._record.num_allowed} rows"
            raise RemoteProtocolError(expected=expected, received=f"{self._num_claimed + num_rows}")
        if self.is_block:
            reservation = self._table.claim_promised(self.promised[:num_rows])
            self.promised = self.promised[num_rows:]
        else:
            reservation = self._table.claim(num_rows)
        self._num_claimed += num_rows
        self._pending.append(reservation)
        return reservation

    def _take_records(self, num_written: int) -> None:
        """Commits the rows of new records. Joins several records into one commit, except where a claim was already
        registered."""
        if num_written - self._record.num_taken > MAX_RECORDS:
            raise RemoteProtocolError(expected=f"at most {MAX_RECORDS} records", received=f"{num_written}")
        num_rows, last = 0, (0, 0)
        for number in range(self._record.num_taken, num_written):
            request, num_filled = self._file.record(number)
            if num_filled < 1:
                raise RemoteProtocolError(expected="a record of filled rows", received=f"one of {num_filled} rows")
            num_rows, last = num_rows + num_filled, (request, num_filled)
            if self._pending and num_rows >= len(self._pending[0]):
                self._commit(num_rows, last, number + 1)
                num_rows = 0
        self._commit(num_rows, last, num_written)

    def _commit(self, num_rows: int, last: tuple[int, int], num_taken: int) -> None:
        """Commits the rows of some records. The same transaction records that they were taken, so each is committed
        once, whether or not its answer arrives.

        Args:
            last: The last of them. Only the last request that was written is ever retried, and finds its answer here.
            num_taken: Number of records taken so far, these included.
        """
        if not num_rows:
            return
        reservation = self._pending[0] if self._pending else self._claim(num_rows)
        if len(reservation) != num_rows:
            raise RemoteProtocolError(expected=f"a record of {len(reservation)} rows", received=f"one of {num_rows}")
        num_allowed = self._record.num_allowed
        if self._state is _ClaimState.OPEN and not self.is_block:
            num_left = num_allowed - self._num_claimed
            num_allowed = self._num_claimed + self._table.num_claimable(self._window, num_promised=num_left)
        num_filled = self._record.num_filled + num_rows
        record = replace(self._record, num_filled=num_filled, num_taken=num_taken, num_allowed=num_allowed)
        request, num_last = last
        commit_rows(
            self._stores,
            self._answers,
            self._entry,
            reservation,
            PLAIN_ARRIVAL,
            client_id=self._record.client_id,
            request=request,
            instead_of=self._last_request,
            num_last=num_last,
            also=record.save,
        )
        self._pending.popleft()
        self._traffic.count_received("shm", control_pb2.Content())  # one transfer, as for coalesced extends
        self._record, self._last_request = record, request
        self._file.take(num_taken, num_allowed)

    def listen(self) -> None:
        """Makes the client report every record, because somebody waits for the table."""
        self._request_messages()
        self.catch_up()

    def _request_messages(self) -> None:
        is_awaited = bool(self._entry.waiters.num_waiting)
        self._file.request_messages(0 if is_awaited else self._num_claimed + self._window // 2)


class Claiming:
    """Lets local clients claim rows, and follows the claims to their end, also over a restart.

    Attributes:
        stores: All stores of the server.
        answers: Answers to committed requests.
        traffic: Counts transfers.
        active: Claims that are not settled.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, traffic: Traffic) -> None:
        self.active: set[TableClaims] = set()
        self.stores = stores
        self.answers = answers
        self.traffic = traffic
        self._nums = count(1)
        self._writers: WeakKeyDictionary[Table, deque[bytes]] = WeakKeyDictionary()  # clients that asked last

    def end_own(self, session: ClientSession, entry: OpenedStore) -> None:
        """Ends the claim of a client that asks for another one: it has used up the first, but for fewer rows than it
        wants now, which are next in line."""
        if (own := session.mover.claims.get(entry.record.uid)) is not None:
            own.take_back()

    def offer(
        self, session: ClientSession, entry: OpenedStore, asked: control_pb2.ExtendRequest
    ) -> control_pb2.Claim | None:
        """Returns a claim for a client that has just extended a table; None if the client goes on asking for rows."""
        mover, table = session.mover, entry.get_table()
        if not mover.lock_name or session.ended.is_set():
            return None
        if entry.spec.values or entry.group_keys or entry.lost or entry.record.read_only or entry.record.adopted:
            return None
        if entry.record.durability == "disk":  # its writes are answered one by one
            return None
        uid, lock_name = entry.record.uid, mover.lock_name
        if uid in mover.claims:  # it is still filling rows
            return None
        for claims in tuple(table.claims):
            if not claims.is_block:  # of a writer that has come since rows were reserved: it takes the same next rows
                claims.take_back()
        if any(claims.has_failed for claims in table.claims):  # then it is not known which rows are claimed
            return None
        window = min(asked.wished_claim, table.step_rows)  # rows found filled are committed in one turn
        num_writers = self._count_writers(session, table)
        is_block = num_writers > 1
        if is_block:
            window = num_promisable(table.ring, window, num_writers=num_writers) // asked.num_rows * asked.num_rows
        num_allowed = table.num_claimable(window) if window else 0
        if num_allowed < asked.num_rows * (MIN_BLOCK_EXTENDS if is_block else 1):
            return None
        record = ClaimRecord(uid, lock_name, session.client_id, next(self._nums), table.ring.cursor, num_allowed)
        path = _make_path(entry, record)
        try:
            file = ClaimFile.create(path, num_allowed)
        except TDServeError as error:  # for example a full disk; the client extends without a claim
            _log.warning("rows of store %r cannot be claimed: %s", entry.name, error)
            return None
        record.save(self.stores.db)
        promised = table.ring.promise(num_allowed) if is_block else None
        mover.claims[uid] = TableClaims(self, entry, file, record, session=session, window=window, promised=promised)
        claim = control_pb2.Claim(first_row=record.first_row, uid=uid, num=record.num)
        claim.structure, claim.path = entry.record.structure, str(path.relative_to(self.stores.root.path))
        return claim

    def _count_writers(self, session: ClientSession, table: Table) -> int:
        """Notes that a client asks for a claim; returns how many clients have done so lately, or have one."""
        writers = self._writers.setdefault(table, deque(maxlen=NUM_REMEMBERED))
        writers.append(session.client_id)
        return len({*writers, *(each.client_id for each in table.claims)})

    def on_claimed(self, session: ClientSession, claimed: control_pb2.Claimed) -> None:
        """Handles a client's report that it has filled rows, or will not fill them."""
        claims = session.mover.claims.get(claimed.uid)
        if claims is None or claims.num != claimed.num:
            return
        if claimed.abandons:
            claims.abandon()
        else:
            claims.catch_up()

    def catch_up(self) -> None:
        """Commits all rows that were filled."""
        for claims in tuple(self.active):
            claims.catch_up()

    def on_session_ended(self, session: ClientSession) -> None:
        """Takes back the claims of an ended session. Rows that the client may still be filling wait for the proof that
        it is gone."""
        for claims in list(session.mover.claims.values()):
            claims.take_back()
            if not claims.is_settled:  # then its filled rows are committed, and the rest are free
                self._wait_for_end(session.mover.lock_name, claims.abandon)

    def restore(self) -> None:
        """Takes up claims after a restart: commits the rows that were filled, and waits for clients that may still fill
        others."""
        for uid in ClaimRecord.list_uids(self.stores.db):
            try:
                entry = self.stores.find_uid(uid)
            except TDServeError as error:
                _log.error("rows that were claimed before the restart cannot be looked at: %s", error)
                continue
            if entry is not None:
                for record, unfilled in entry.unfilled:
                    self._restore(entry, record, unfilled)

    def _restore(self, entry: OpenedStore, record: ClaimRecord, unfilled: list[Reservation]) -> None:
        table = entry.get_table()
        try:
            file = ClaimFile.open(_make_path(entry, record))
        except TDServeError:  # it is unknown which rows were filled
            self._wait_for_end(record.lock_name, partial(self._free, entry, record, unfilled))
            return
        for reservation in unfilled:
            table.ring.resume(reservation)
        claims = TableClaims(self, entry, file, record, unfilled=unfilled)
        claims.take_back()
        if not claims.is_settled:
            self._wait_for_end(record.lock_name, claims.abandon)

    def _wait_for_end(self, lock_name: str, on_gone: Callable[[], None]) -> None:
        if self.stores.process_watch.is_gone(lock_name):
            on_gone()
        else:
            self.stores.process_watch.watch(lock_name, on_gone)

    def _free(self, entry: OpenedStore, record: ClaimRecord, unfilled: list[Reservation]) -> None:
        for reservation in unfilled:
            entry.get_table().release(reservation)
        self.stores.db.delete("pending", record.key)
        entry.waiters.wake()


def _make_path(entry: OpenedStore, record: ClaimRecord) -> Path:
    return entry.folder / FOLDER / record.file_name
