"""A writer of single rows: an actor appends them one step at a time, and they are sent to the table in batches."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, SpecMismatchError, TDServeError
from tdserve.base.integers import check_integer
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.value_blocks import compute_row_nbytes
from tdserve.client.handles.key_paths import check_path
from tdserve.client.session.calls.call_deadline import begin_step
from tdserve.client.tables.extends.given_rows import add_form_hint
from tdserve.client.tables.table_policy import check_policy, check_policy_version
from tdserve.client.tables.writers.nstep import NStep
from tdserve.client.tables.writers.row_buffer import NO_PRIORITY, NO_VERSION
from tdserve.client.tables.writers.row_delivery import RowDestination
from tdserve.client.tables.writers.row_sender import RowSender
from tdserve.messages.content import ADDED_KEYS
from tdserve.structure.captures.rows import RowReader
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.structure.trees.tree import Path

MAX_BYTES = 64 * 1024 * 1024

ABANDON_FLUSH_S = 2.0
"""Time for sending rows that were appended before the caller's code raised: the exception must not wait for long."""

MIN_ABANDON_FLUSH_S = 0.1
"""The same in a block of ``within`` whose time is over: a server that is up needs less."""


@leave_modes_in_calls
class ReplayWriter:
    """A writer that accepts single rows, sends them in batches, and keeps track of which are stored.

    Rows are stored in the order in which they were appended. One batch is under way at a time, and everything that was
    appended meanwhile goes into the next one, so that batches grow if the server is slower than the writer. If the
    table's limiter makes writers wait, batches do not grow; they become smaller if the limiter never admits that many
    rows.

    As a context manager it is closed at the end of the block. If the block raises, appended rows are still sent, for a
    short time, and the exception is raised on. A writer that is dropped without ``close`` sends its rows in the
    background; a failure of that is not reported. Closing its client closes it too, within three seconds.

    Trajectories: the rows of one writer follow each other until ``end_trajectory`` (or, with ``n_step``, a done flag).
    The newest row of an open trajectory waits for the next one, or for ``flush_s`` or ``flush``, because it may turn
    out to be the last. If it was sent already, ``end_trajectory`` still ends the trajectory: the row is not marked as
    its last, but no row follows it.

    A limiter may make the writer wait for any time: rows wait in memory, then ``append`` waits, and names the reason if
    it times out. If the table refuses rows, or the server cannot be reached for the client's ``timeout_s`` while rows
    are under way, the writer fails: every call raises WriterFailedError, which describes the state of the rows. Rows
    that were under way may still be stored later, until the client is closed.

    Threads: safe; rows of several threads are one stream. After a fork the child must make a writer of its own.

    Args:
        handle: Handle of the table.
        batch: Rows that are sent together; for a queue at most half of its ``max_size``.
        flush_s: Longest time that a row waits for others; None waits for full batches, ``flush`` and ``close``.
        max_bytes: Limit for the rows that wait and are under way, and the memory around them (600 bytes per leaf and
            row). Rows whose horizon is open are let in beyond it if nothing else can be sent.
        keys: Leaves and nested parts that the rows have; the others are written later with ``set_at_``. None: all.
        policy_version: Version of the table's policy that makes the rows appended from now on; see the property.
        n_step: Turns them into n-step rows. Rows whose horizon is open, at most n-1, are held back, also by ``flush``;
            the end of the trajectory completes them, and so does ``close``.
        timeout_s: Default for calls that wait; None is the client's. In a block of ``tdserve.within`` they wait no
            longer than that.

    Raises:
        InvalidRequestError: An argument is out of range, ``max_bytes`` is too small for two rows, or the rows lack a
            key that ``n_step`` needs.
        KeyNotFoundError: Rows of the table have no such key.
    """

    def __init__(
        self,
        handle: Any,
        *,
        batch: int = 64,
        flush_s: float | None = 1.0,
        max_bytes: int = MAX_BYTES,
        n_step: NStep | None = None,
        keys: Sequence[str | Path] | None = None,
        policy_version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        batch = check_integer("batch", batch, 1)
        max_bytes = check_integer("max_bytes", max_bytes, 1)
        if flush_s is not None and not (type(flush_s) in (int, float) and flush_s > 0):
            raise InvalidRequestError(argument="flush_s", reason=f"{flush_s!r} is not a number of seconds above 0")
        table: RowDestination = handle
        self.name = table.name
        self._timeout_s: float | None = handle._client.timeout_s if timeout_s is None else timeout_s
        Deadline.after(self._timeout_s)
        self._spec = spec = table.spec
        if keys is not None:
            self._spec = spec = spec.select([check_path(key, argument="keys") for key in keys], store=table.name)
        self._has_values = bool(spec.values)
        self._settings = handle.settings
        self.policy_version = policy_version
        self._allows_pickle: bool = handle._client.allow_pickle
        self._reader = RowReader(spec, store=table.name, allow_pickle=self._allows_pickle, ignores=ADDED_KEYS)
        self._sender = RowSender(
            table,
            spec,
            batch=batch,
            flush_s=flush_s,
            max_bytes=max_bytes,
            window=n_step.make_window(spec) if n_step is not None else None,
        )
        handle._client.senders.add(self._sender)
        self._finalizer = weakref.finalize(self, self._sender.drain)
        self._finalizer.atexit = False  # the sender itself handles the exit

    def __repr__(self) -> str:
        return f"<ReplayWriter {self.name!r}: {self.num_acknowledged} rows stored, {self._sender.describe_progress()}>"

    @property
    def policy_version(self) -> int | None:
        """Version of the table's policy that makes the rows appended from now on.

        May change while others are under way.

        None: the newest published one when they are stored. An n-step row has that of its first step.

        The table refuses one above the newest published, which ends the writer.

        Raises:
            InvalidRequestError: It is set to something else than an integer of at least 0, or the table has no policy.
        """
        return None if self._version == NO_VERSION else self._version

    @policy_version.setter
    def policy_version(self, version: int | None) -> None:
        if version is not None:
            check_policy(self._settings, self.name, "policy_version")
        self._version = NO_VERSION if version is None else check_policy_version(version)

    @property
    def num_appended(self) -> int:
        """Rows that ``append`` has accepted."""
        return self._sender.num_appended

    @property
    def num_acknowledged(self) -> int:
        """Rows that are stored: the first ones of those appended."""
        return self._sender.num_acknowledged

    @property
    def num_under_way(self) -> int:
        """Rows that were sent and are not acknowledged."""
        return self._sender.num_sent - self._sender.num_acknowledged

    @property
    def num_buffered(self) -> int:
        """Rows that have not been sent yet."""
        return self._sender.num_appended - self._sender.num_sent

    def append(self, td: Any, priority: Any = None) -> None:
        """Appends one row; its tensors may change as soon as this returns.

        Waits only if rows that wait or are under way fill ``max_bytes``.

        Args:
            td: Like ``like`` of the table: the same keys (or those in the writer's ``keys``), shapes and dtypes.
            priority: At least 0, finite; None uses what the table gives to new rows. Rows with and without one do not
                share a batch.

        Raises:
            SpecMismatchError, NotSupportedError: The row does not fit. It was not accepted; the writer continues.
            InvalidRequestError: The priority is invalid. As above.
            DeadlineExceededError: There was no room within the writer's ``timeout_s``, or the time of the block
                ``tdserve.within``. As above.
            WriterFailedError: Rows could not be stored; every later call raises it too.
            ClosedError: The writer was closed.
            ForkedClientError: This is a forked child of the process that has made the writer.
        """
        if priority is not None:
            self._settings.check_uses_priority(self.name)
        try:
            leaves, values = self._reader.read(td)
        except SpecMismatchError as error:
            raise add_form_hint(error, self._spec) from None
        weight = NO_PRIORITY if priority is None else _check_priority(priority)
        if self._has_values:
            values = [copy.deepcopy(value) for value in values]
            nbytes = compute_row_nbytes(self._spec, values, allow_pickle=self._allows_pickle)
            self._sender.put(leaves, values, nbytes, weight, self._timeout_s, self._version)
        else:
            self._sender.put(leaves, [], 0, weight, self._timeout_s, self._version)

    def end_trajectory(self) -> None:
        """Marks the row that was appended last as the last of its trajectory; the next row begins another.

        Has no effect if no row was appended since the last time.

        Raises:
            WriterFailedError, ClosedError: As ``append``.
        """
        self._sender.end_trajectory()

    def flush(self, timeout_s: float | None = None) -> None:
        """Sends the appended rows, and waits until they are stored.

        Raises:
            DeadlineExceededError: They were not stored in time; they are still under way. The error has their number.
            WriterFailedError, ClosedError: As ``append``.
        """
        self._sender.flush(self._make_deadline(timeout_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Sends the appended rows, waits until they are stored, and ends the writer. Idempotent.

        With ``n_step``, the last rows of an open trajectory get a shorter horizon.

        Raises:
            DeadlineExceededError: As raised by ``flush``; the writer is still open, and may be closed again.
            WriterFailedError: As ``append``.
        """
        self._sender.close(self._make_deadline(timeout_s))

    def __enter__(self) -> ReplayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            with suppress(TDServeError):
                flush_s = max(begin_step(ABANDON_FLUSH_S).limit(ABANDON_FLUSH_S), MIN_ABANDON_FLUSH_S)
                self._sender.close(Deadline.after(flush_s))
        finally:
            self._sender.stop()

    def _make_deadline(self, timeout_s: float | None) -> Deadline:
        return begin_step(self._timeout_s) if timeout_s is None else Deadline.after(timeout_s)


def _check_priority(priority: Any) -> float:
    given = to_host(priority)
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        number = math.nan
    if not 0 <= number < math.inf:
        raise InvalidRequestError(argument="priority", reason=f"{priority!r} is not a finite number of at least 0")
    return number
