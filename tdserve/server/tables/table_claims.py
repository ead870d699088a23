"""Claims: rows that a writer takes by itself, and whose content it records in its claim file.

The writer is a local client, or a data worker that writes for the clients of its sessions. A sole writer gets the next
rows of the ring, as many as it can use; of several writers each gets a block of rows. Every access to the table reads
the files first, so that no reader sees less than the writers have promised; their messages only say when to read them.
Before anyone else changes which rows belong to whom, the claim of a sole writer is taken back: it asks for rows again,
like every other, and may ask for another claim. Blocks stay when others extend the table, and end when rows are removed
or written in part.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tdserve.base.errors import (
    CapacityError,
    LocalProtocolError,
    RemoteProtocolError,
    StoreNotFoundError,
    TDServeError,
    TransferAbortedError,
)
from tdserve.base.failpoints import reach
from tdserve.messages.row_numbers import NO_ROWS, Rows
from tdserve.rules.replay.allocation.claim_pacing import MIN_EXTENDS
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.plans import Arrival
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.processes.claim_writers import make_claim_writer
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.tables.commits import commit_rows
from tdserve.store.rows.claim_file import MAX_RECORDS, ClaimedRows, ClaimFile

_log = logging.getLogger("tdserve.server")


class _ClaimState(Enum):
    OPEN = "open"  # the writer may claim rows
    ENDED = "ended"  # it may fill the rows that it has claimed
    BROKEN = "broken"  # the store was deleted, or the file contradicts itself: nothing is committed any more
    SETTLED = "settled"  # all rows are committed or free


_NEXT_STATES = {
    _ClaimState.OPEN: (_ClaimState.ENDED, _ClaimState.BROKEN),
    _ClaimState.ENDED: (_ClaimState.BROKEN, _ClaimState.SETTLED),
    _ClaimState.BROKEN: (_ClaimState.SETTLED,),
    _ClaimState.SETTLED: (),
}


@dataclass(frozen=True)
class ClaimContext:
    """What all claims share.

    Attributes:
        stores: All stores of the server.
        answers: Answers to committed requests.
        traffic: Counts transfers.
        active: Claims that are not settled, by number.
    """

    stores: Stores
    answers: CommittedAnswers
    traffic: Traffic
    active: dict[int, TableClaim] = field(default_factory=dict)


class TableClaim:
    """The claim of one writer on one table (``tdserve.rules.replay.allocation.claims.WriterClaim``).

    Args:
        context: What all claims share.
        store: The table.
        file: Its claim file.
        record: What the writer may claim; saved already.
        holder: The writer; None for a claim from before a restart.
        window: Rows that the writer may be ahead.
        promised: Rows of a block, in the order in which the writer claims them; None for the next rows of the ring.
        unfilled: Rows that were claimed before a restart, one reservation per claim.

    Attributes:
        holder: The writer; None for a claim from before a restart.
        table: The table.
    """

    def __init__(
        self,
        context: ClaimContext,
        store: OpenedStore,
        file: ClaimFile,
        record: ClaimRecord,
        *,
        holder: ClaimHolder | None = None,
        window: int = 0,
        promised: Rows | None = None,
        unfilled: Sequence[Reservation] = (),
    ) -> None:
        self._stores = context.stores
        self._answers = context.answers
        self._traffic = context.traffic
        self._store = store
        self.table = store.get_table()
        self._file = file
        self._record = record
        self.holder = holder
        self._writer = make_claim_writer(record.lock_name, record.client_id)
        self._window = window
        self.is_block = promised is not None
        self.promised = NO_ROWS if promised is None else promised
        self._pending = deque(unfilled)  # claimed, and not known to be filled
        self._num_claimed = record.num_filled + sum(map(len, unfilled))
        self._state = _ClaimState.OPEN
        self._row_nbytes = store.spec.with_rows(1).nbytes
        self._is_catching_up = False  # a commit wakes others, who catch up too
        self._is_abandoned = False
        self._failure: CapacityError | None = None
        self._last_request: int | None = None  # with an answer that the client may still ask for
        self.table.claims.append(self)
        self._active = context.active
        self._active[self.num] = self
        store.waiters.on_wait = self.table.state.listen
        self._request_messages()

    def catch_up(self) -> bool:
        """Commits the rows that were filled, and takes claimed rows out of every sample."""
        if self._is_catching_up or self._state in (_ClaimState.BROKEN, _ClaimState.SETTLED):
            return not self._is_catching_up
        was_open = self._state is _ClaimState.OPEN
        self._is_catching_up = True
        self._failure = None
        try:
            # num_claimed is read first: every claim that it counts, except the last, is filled, and num_written counts
            # its record.
            num_claimed, num_written = self._file.num_claimed, self._file.num_written
            if self._record.num_taken < num_written:
                self._take_records(num_written)
            if num_claimed > self._num_claimed:
                self._claim(num_claimed - self._num_claimed)
            self._request_messages()
        except CapacityError as error:  # the next call tries again
            self._failure = error
            _log.error("rows that were claimed of store %r are not committed yet: %s", self._store.name, error)
        except StoreNotFoundError:
            self._enter(_ClaimState.BROKEN)  # it was deleted: no request asks for these rows
        except TDServeError as error:
            self._enter(_ClaimState.BROKEN)
            _log.error("rows that were claimed of store %r cannot be committed: %s", self._store.name, error)
            if self.holder is not None:
                self.holder.on_broken()
        finally:
            self._is_catching_up = False
        if was_open and self._state is _ClaimState.ENDED:  # meanwhile: the client may have claimed more before
            return self.catch_up()
        self._end_promise()
        self._free_unfilled()
        self._settle()
        return self._failure is None

    @property
    def has_failed(self) -> bool:
        """Whether rows that were filled could not be committed at the last attempt."""
        return self._failure is not None

    def check_committed(self, client_id: bytes, request: int) -> None:
        """Checks that an extend may ask for rows.

        Raises:
            CapacityError: Rows that were filled could not be committed at the last attempt.
            TransferAbortedError: The same; and an earlier attempt of this very extend has filled some of them, which
                are committed as soon as there is room. It has not failed: its client may retry it.
        """
        if self._failure is None:
            return
        records = (self._file.record(number) for number in range(self._record.num_taken, self._file.num_written))
        if any((each.client_id, each.request) == (client_id, request) for each in records):
            reason = f"its rows wait for room in the catalog: {self._failure}"
            raise TransferAbortedError(transfer=request, reason=reason)
        raise self._failure

    def take_back(self) -> None:
        """Ends the claim: the writer keeps only the rows that it is filling."""
        if self._state is _ClaimState.OPEN:
            self._enter(_ClaimState.ENDED)
        self.listen()

    def abandon(self) -> None:
        """Ends the claim of a writer that fills nothing more. Rows that it has filled are committed first, and as long
        as there is no room for that, it keeps all."""
        self._is_abandoned = True
        self.take_back()
        self._free_unfilled()
        self._settle()

    def may_hold(self, client_id: bytes) -> bool:
        """Returns whether an extend of this client may be among the rows."""
        return self._writer.may_write_for(client_id)

    @property
    def writer_id(self) -> bytes:
        """Id of the writer, also across its sessions."""
        return self._writer.writer_id

    @property
    def num(self) -> int:
        """Number that distinguishes it from other claims."""
        return self._record.num

    @property
    def uid(self) -> str:
        """Incarnation of the table."""
        return self._record.uid

    @property
    def num_left(self) -> int:
        """Rows that the writer may still claim, as far as is known here."""
        return self._record.num_allowed - self._num_claimed

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
        """Lets others have the rows of a block that the writer will not claim any more."""
        if self._state is _ClaimState.OPEN or self._failure is not None:  # it may have claimed more than is known here
            return
        self.promised, rows = NO_ROWS, self.promised
        self.table.ring.end_promise(rows)

    def _free_unfilled(self) -> None:
        """Frees what the writer has claimed and will not fill. After a failure it is not known what that is."""
        if self._is_abandoned and self._failure is None:
            while self._pending:
                self.table.ring.abort(self._pending.pop())

    def _settle(self) -> None:
        if self._pending or self._state in (_ClaimState.OPEN, _ClaimState.SETTLED):
            return
        self._enter(_ClaimState.SETTLED)
        self._active.pop(self.num, None)
        self.table.claims.remove(self)
        if not self._store.waiters.is_gone:
            self._stores.db.delete("pending", self._record.key)
        self._file.unlink()
        self._store.waiters.wake()
        if self.holder is not None:
            self.holder.claims.pop(self._record.uid)
            was_worth_it = self._record.num_taken >= MIN_EXTENDS
            self.holder.pace(self.table).on_ended(was_worth_it=was_worth_it, is_next_due=was_worth_it)

    def _claim(self, num_rows: int) -> Reservation:
        if self._num_claimed + num_rows > self._record.num_allowed:
            expected = f"claims of at most {self._record.num_allowed} rows"
            raise RemoteProtocolError(expected=expected, received=f"{self._num_claimed + num_rows}")
        if self.is_block:
            reservation = self.table.arrivals.claim_promised(self.promised[:num_rows])
            self.promised = self.promised[num_rows:]
        else:
            reservation = self.table.arrivals.claim(num_rows)
        self._num_claimed += num_rows
        self._pending.append(reservation)
        return reservation

    def _take_records(self, num_written: int) -> None:
        """Commits the rows of new records. Joins several records into one commit, except where a claim was already
        registered."""
        if num_written - self._record.num_taken > MAX_RECORDS:
            raise RemoteProtocolError(expected=f"at most {MAX_RECORDS} records", received=f"{num_written}")
        extends: list[ClaimedRows] = []
        num_rows = 0
        for number in range(self._record.num_taken, num_written):
            extend = self._file.record(number)
            if extend.num_rows < 1 or not self.may_hold(extend.client_id):
                raise RemoteProtocolError(expected="a record of rows that this writer has filled", received=f"{extend}")
            if self._writer.is_overtaken(extend, self._answers):
                self._commit(extends, number)
                self._give_up(extend, number + 1)
                extends, num_rows = [], 0
                continue
            extends.append(extend)
            num_rows += extend.num_rows
            if self._pending and num_rows >= len(self._pending[0]):
                self._commit(extends, number + 1)
                extends, num_rows = [], 0
        self._commit(extends, num_written)

    def _commit(self, extends: list[ClaimedRows], num_taken: int) -> None:
        """Commits the rows of some records. The same transaction records that they were taken, so each is committed
        once, whether or not its answer arrives.

        Args:
            extends: The records.
            num_taken: Number of records taken so far, these included.
        """
        if not extends:
            return
        reach("claim.found")
        num_rows = sum(extend.num_rows for extend in extends)
        reservation = self._get_claimed(num_rows)
        num_allowed = self._record.num_allowed
        if self._state is _ClaimState.OPEN and not self.is_block:
            num_left = num_allowed - self._num_claimed
            num_allowed = self._num_claimed + self.table.arrivals.count_claimable(self._window, num_promised=num_left)
        record = self._record.take(num_rows, num_taken=num_taken, num_allowed=num_allowed)
        commit_rows(
            self._stores,
            self._answers,
            self._store,
            reservation,
            Arrival(writers=[(extend.client_id, extend.num_rows) for extend in extends]),
            self._writer.select_retried(extends),
            instead_of=self._writer.find_outdated(self._last_request),
            uses_reserve=True,
            also=record.save,
        )
        reach("claim.committed")
        content = self._writer.describe_content(num_rows * self._row_nbytes)
        self._traffic.count_received(self._writer.transport, content)
        self._last_request = extends[-1].request
        self._finish_oldest(record)

    def _give_up(self, extend: ClaimedRows, num_taken: int) -> None:
        """Frees the rows of an extend whose retry was faster."""
        reservation = self._get_claimed(extend.num_rows)
        record = self._record.take(extend.num_rows, num_taken=num_taken)
        record.save(self._stores.db)
        self.table.shared.count_given_up()
        self.table.ring.abort(reservation)
        self._finish_oldest(record)

    def _get_claimed(self, num_rows: int) -> Reservation:
        """Returns the oldest rows that were claimed, which are filled according to a record."""
        reservation = self._pending[0] if self._pending else self._claim(num_rows)
        if len(reservation) != num_rows:
            raise RemoteProtocolError(expected=f"a record of {len(reservation)} rows", received=f"one of {num_rows}")
        return reservation

    def _finish_oldest(self, record: ClaimRecord) -> None:
        self._pending.popleft()
        self._record = record
        self._file.take(record.num_taken, record.num_allowed)

    def listen(self) -> None:
        """Makes the writer report every record, because a call waits for the table or for the end of the claim."""
        self._request_messages()
        self.catch_up()

    def _request_messages(self) -> None:
        is_awaited = self._state is not _ClaimState.OPEN or bool(self._store.waiters.num_waiting)
        self._file.request_messages(0 if is_awaited else self._num_claimed + self._window // 2)
