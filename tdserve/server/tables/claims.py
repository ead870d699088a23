"""Rows that a local client takes by itself, and says in its claim file what it has put there: followed and committed.

The rows are the next of the ring. Whoever looks at the table looks at the file first, so that nobody sees less than
what the client was told; its messages only say when to look. Before anybody else changes which rows are whose, the
claim is taken back: the client asks for rows again, as every other does, and may wish for another claim.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from tdserve.base.errors import CapacityError, RemoteProtocolError, StoreNotFoundError, TDServeError
from tdserve.rules.replay.plans import PLAIN_ARRIVAL
from tdserve.rules.replay.reservation import Reservation
from tdserve.server.idempotency import CommittedAnswers
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.sessions.session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.stores import Stores
from tdserve.server.tables.commits import commit_rows
from tdserve.store.claims import FOLDER, MAX_RECORDS, ClaimFile
from tdserve.v1 import control_pb2

_log = logging.getLogger("tdserve.server")


class TableClaims:
    """The claim of one client (``tdserve.rules.replay.claims.Claims``). A table has one at most.

    Args:
        claiming: Who lets it claim.
        entry: The table.
        file: Its claim file.
        record: What the client may claim; saved already.
        session: The client's, which is ended when the file contradicts itself: nothing of it is believed any more; None
            for a claim of before a restart.
        window: Rows that it may be ahead.
        unfilled: Rows that were claimed before a restart, an array per claim.
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
        unfilled: Sequence[Reservation] = (),
    ) -> None:
        self._stores = claiming.stores
        self._answers = claiming.answers
        self._traffic = claiming.traffic
        self._entry = entry
        self._table = entry.replay_table()
        self._file = file
        self._record = record
        self._session = session
        self._window = window
        self._pending = deque(unfilled)  # claimed, and not known to be filled
        self._num_claimed = record.num_filled + sum(map(len, unfilled))
        self._is_over = self._is_looking = self._is_broken = self._is_listening = False
        self._failure: CapacityError | None = None
        self._last_request: int | None = None  # with an answer that the client may still ask for
        self._table.claims = self
        self._active = claiming.active
        self._active.add(self)
        entry.changed.on_wait = self.listen
        self._ring_when_needed()

    def catch_up(self) -> None:
        """Commits what was filled, and takes what was claimed out of every sample."""
        if self._is_looking or self._is_broken:
            return
        self._is_looking = True
        self._failure = None
        try:
            # The claims first: but for the last of them, what was claimed by now is filled, and its record is there.
            num_claimed, num_written = self._file.num_claimed, self._file.num_written
            if self._record.num_taken < num_written:
                self._take_records(num_written)
            if num_claimed > self._num_claimed:
                self._claim(num_claimed - self._num_claimed)
            if self._is_listening and not self._entry.changed.num_waiting:
                self._ring_when_needed()
        except CapacityError as error:  # tried again when somebody looks next
            self._failure = error
            _log.error("rows that were claimed of store %r are not committed yet: %s", self._entry.name, error)
        except StoreNotFoundError:
            self._is_broken = True  # it was deleted: nobody asks for these rows
        except TDServeError as error:
            self._is_broken = True
            _log.error("rows that were claimed of store %r cannot be committed: %s", self._entry.name, error)
            if self._session is not None:
                self._session.ended.set()
        finally:
            self._is_looking = False
        self._settle()

    def check_committed(self) -> None:
        """Raises CapacityError when rows that were filled could not be committed when somebody looked last."""
        if self._failure is not None:
            raise self._failure

    def take_back(self) -> None:
        """Ends the claim: rows that are being filled are all that the client still has."""
        if not self._is_over:
            self._is_over = True
            self._file.end()
        self.catch_up()

    def abandon(self) -> None:
        """Ends the claim; the client fills nothing more."""
        self.take_back()
        while self._pending:
            self._table.abort(self._pending.pop())
        self._settle()

    @property
    def num(self) -> int:
        """Tells it from other claims of its client."""
        return self._record.num

    @property
    def is_settled(self) -> bool:
        """Whether the claim is over, and nothing of it is open."""
        return self._is_over and not self._pending

    def _settle(self) -> None:
        if not self.is_settled or self._table.claims is not self:
            return
        self._active.discard(self)
        self._table.claims = self._entry.changed.on_wait = None
        if not self._entry.changed.is_deleted:
            self._stores.db.delete("pending", self._record.key)
        self._file.unlink()
        self._entry.changed.wake()
        if self._session is not None:
            self._session.mover.claims.pop(self._record.uid)

    def _claim(self, num_rows: int) -> Reservation:
        if self._num_claimed + num_rows > self._record.num_allowed:
            expected = f"claims of at most {self._record.num_allowed} rows"
            raise RemoteProtocolError(expected=expected, received=f"{self._num_claimed + num_rows}")
        reservation = self._table.claim(num_rows)
        self._num_claimed += num_rows
        self._pending.append(reservation)
        return reservation

    def _take_records(self, num_written: int) -> None:
        """Commits what was filled: of several extends together, but for those that were claimed before they were."""
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
        self._ring_when_needed()

    def _commit(self, num_rows: int, last: tuple[int, int], num_taken: int) -> None:
        """Commits the rows of some records, and in the same transaction that these were taken: each is committed once,
        whatever becomes of answers.

        Args:
            last: The last of them: only what was written last is ever tried again, and finds its answer here.
            num_taken: Records up to there.
        """
        if not num_rows:
            return
        reservation = self._pending[0] if self._pending else self._claim(num_rows)
        if len(reservation) != num_rows:
            raise RemoteProtocolError(expected=f"a record of {len(reservation)} rows", received=f"one of {num_rows}")
        num_allowed = self._record.num_allowed
        if not self._is_over:
            promised = num_allowed - self._num_claimed
            num_allowed = self._num_claimed + self._table.num_claimable(self._window, num_promised=promised)
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
        self._traffic.count_received("shm", control_pb2.Content())  # as of a request that several extends share
        self._record, self._last_request = record, request
        self._file.take(num_taken, num_allowed)

    def listen(self) -> None:
        """Somebody waits for the table: the client tells of every record."""
        self._ring_when_needed()
        self.catch_up()

    def _ring_when_needed(self) -> None:
        self._is_listening = bool(self._entry.changed.num_waiting)
        self._file.ring_at(0 if self._is_listening else self._num_claimed + self._window // 2)


class Claiming:
    """Lets local clients claim rows, and follows them to their end, over a restart too.

    Attributes:
        stores: The book.
        answers: Of requests that were committed.
        traffic: Counts what is committed.
        active: Claims that are not settled.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, traffic: Traffic) -> None:
        self.active: set[TableClaims] = set()
        self.stores = stores
        self.answers = answers
        self.traffic = traffic
        self._nums = count(1)

    def offer(
        self, session: ClientSession, entry: OpenedStore, asked: control_pb2.ExtendRequest
    ) -> control_pb2.Claim | None:
        """What a client that has just extended a table may claim; None where it goes on asking for rows."""
        mover, table = session.mover, entry.replay_table()
        if not mover.lock_name or table.claims is not None or session.ended.is_set():
            return None
        if entry.spec.values or entry.group_keys or entry.lost or entry.record.read_only or entry.record.adopted:
            return None
        if entry.record.durability == "disk":  # its writers are answered one by one
            return None
        window = min(asked.wished_claim, table.step_rows)  # what is found filled is committed in one turn
        num_allowed = table.num_claimable(window)
        if num_allowed < asked.num_rows:
            return None
        uid, lock_name = entry.record.uid, mover.lock_name
        record = ClaimRecord(uid, lock_name, session.client_id, next(self._nums), table.ring.cursor, num_allowed)
        path = _path_of(entry, record)
        try:
            file = ClaimFile.create(path, num_allowed)
        except TDServeError as error:  # such as a full disk: it is let extend all the same
            _log.warning("rows of store %r cannot be claimed: %s", entry.name, error)
            return None
        record.save(self.stores.db)
        mover.claims[uid] = TableClaims(self, entry, file, record, session=session, window=window)
        claim = control_pb2.Claim(first_row=record.first_row, uid=uid, num=record.num)
        claim.structure, claim.path = entry.record.structure, str(path.relative_to(self.stores.root.path))
        return claim

    def on_claimed(self, session: ClientSession, claimed: control_pb2.Claimed) -> None:
        """A client has filled rows, or will not."""
        claims = session.mover.claims.get(claimed.uid)
        if claims is None or claims.num != claimed.num:
            return
        if claimed.abandons:
            claims.abandon()
        else:
            claims.catch_up()

    def catch_up(self) -> None:
        """Commits all that was filled."""
        for claims in tuple(self.active):
            claims.catch_up()

    def on_session_ended(self, session: ClientSession) -> None:
        """Its claims are taken back: what it may still be filling waits for the proof that it is gone."""
        for claims in list(session.mover.claims.values()):
            claims.take_back()
            if not claims.is_settled:  # what it has filled by the time it is gone is committed, the rest is free
                self._wait_for_end(session.mover.lock_name, claims.abandon)

    def restore(self) -> None:
        """After a restart: commits what was filled, and waits for those who may still fill the others."""
        for uid in ClaimRecord.uids(self.stores.db):
            try:
                entry = self.stores.find_uid(uid)
            except TDServeError as error:
                _log.error("rows that were claimed before the restart cannot be looked at: %s", error)
                continue
            if entry is not None:
                for record, unfilled in entry.unfilled:
                    self._restore(entry, record, unfilled)

    def _restore(self, entry: OpenedStore, record: ClaimRecord, unfilled: list[Reservation]) -> None:
        table = entry.replay_table()
        try:
            file = ClaimFile.open(_path_of(entry, record))
        except TDServeError:  # what was filled, nobody knows
            self._wait_for_end(record.lock_name, partial(self._free, entry, record, unfilled))
            return
        for reservation in unfilled:
            table.ring.resume(reservation)
        claims = TableClaims(self, entry, file, record, unfilled=unfilled)
        claims.take_back()
        if not claims.is_settled:
            self._wait_for_end(record.lock_name, claims.abandon)

    def _wait_for_end(self, lock_name: str, on_gone: Callable[[], None]) -> None:
        if self.stores.departures.is_gone(lock_name):
            on_gone()
        else:
            self.stores.departures.watch(lock_name, on_gone)

    def _free(self, entry: OpenedStore, record: ClaimRecord, unfilled: list[Reservation]) -> None:
        for reservation in unfilled:
            entry.replay_table().release(reservation)
        self.stores.db.delete("pending", record.key)
        entry.changed.wake()


def _path_of(entry: OpenedStore, record: ClaimRecord) -> Path:
    return entry.folder / FOLDER / record.file_name
