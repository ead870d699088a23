"""Errors of what a server or a client can give now: no room, no time, damaged data, an end."""

from __future__ import annotations

from tdserve.base.errors.tdserve_error import TDServeError


class CapacityError(TDServeError):
    """There is no room: on disk, in a buffer, or under a limit. Nothing was changed."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True
    template = "no room for {what}: asked {asked}, free {free}"
    defaults = {"what": "", "asked": 0, "free": 0}


class TooLargeError(CapacityError):
    """It is larger than all the room that there ever is, so a retry cannot help. Nothing was changed."""

    retryable = False
    template = "no room for {what}: asked {asked}, there are never more than {free}"


class ServerBusyError(TDServeError):
    """The server has reached a limit: ``--memory-limit`` for the content of waiting requests, its file descriptors, or
    that of the caller's token.

    Nothing was changed. Calls retry until their deadline.
    """

    code = "RESOURCE_EXHAUSTED"
    retryable = True
    template = "the server has no room for {what}: {asked} asked for, {free} of {limit} free"
    defaults = {"what": "", "asked": 0, "free": 0, "limit": 0}


class DeadlineExceededError(TDServeError, TimeoutError):
    """A call did not finish before its deadline.

    A read changed nothing. A write may or may not have been stored; a retry stores it once.
    """

    code = "DEADLINE_EXCEEDED"
    retryable = True
    template = "{what} did not happen within {timeout_s} s"
    defaults = {"what": "", "timeout_s": 0}

    def _make_message(self) -> str:  # the time left of a call has many digits
        timeout_s = self.fields["timeout_s"]
        shown = f"{round(timeout_s, 3):g}" if isinstance(timeout_s, (int, float)) else str(timeout_s)
        return self.template.format(**{**self.fields, "timeout_s": shown})


class StoreNotCreatedError(DeadlineExceededError):
    """A store that the call waited for was not created in time. Nothing was changed."""

    template = "{what} did not happen within {timeout_s} s: there is no store {name!r}{near}"
    defaults = {"what": "", "timeout_s": 0, "name": "", "near": ""}


class UnansweredPopError(DeadlineExceededError):
    """Entries of a keyed store were read, but their deletion was not answered: it is unknown whether they are deleted.
    ``values`` is what ``pop`` would have returned.
    """

    retryable = False
    template = "{what} was not answered within {timeout_s} s: it may have happened. Its result: the error's 'values'"


class CorruptDataError(TDServeError):
    """Stored bytes are damaged. They are never served."""

    code = "DATA_LOSS"
    template = "damaged data in {path}: expected {expected}, found {actual}"
    defaults = {"path": "", "expected": "", "actual": ""}


class DamagedRowError(CorruptDataError):
    """A row of a store with ``checksum=True`` is not what was written. Other rows can be read."""

    template = "row {row} of store {store!r}: expected {expected}, found {actual}; write it again, or run tdserve check"
    defaults = {"store": "", "row": 0, "expected": "", "actual": ""}


class EndOfStreamError(TDServeError):
    """A table or queue was closed, and no more rows will come: all were taken and acknowledged, or a sample waits for
    more than the ``num_left`` that it may draw.

    ``num_needed`` are the rows that the sample waits for, of all ranks together; 0 if it is not their number that is
    missing. Where no more are needed than are left, ranks draw from several shards, of which each gives all of them as
    many rows.
    """

    code = "OUT_OF_RANGE"
    template = "{name!r} is closed, and {num_left} rows are left to draw"
    defaults = {"name": "", "num_left": 0, "num_needed": 0}

    def _make_message(self) -> str:
        num_left, num_needed = self.fields["num_left"], self.fields["num_needed"]
        text = super()._make_message()
        if not num_needed:
            return text
        is_enough = isinstance(num_left, int) and isinstance(num_needed, int) and num_needed <= num_left
        return f"{text}, where {num_needed} are needed{', as many of each shard for each rank' * is_enough}"


class RootInUseError(TDServeError):
    """Another server owns this root folder."""

    code = "FAILED_PRECONDITION"
    template = "root {root} is in use by {holder}; stop it, or choose another root"
    defaults = {"root": "", "holder": ""}


class WriterFailedError(TDServeError):
    """A writer of single rows has failed; the cause is chained.

    ``num_acknowledged`` rows are stored and ``num_unsent`` rows are not. Of the ``num_unknown`` rows under way all,
    some or none are stored; those that are follow the acknowledged ones in order.
    """

    code = "UNAVAILABLE"
    template = (
        "the writer of {store!r} has failed: {reason}; {num_acknowledged} rows are stored, {num_unknown} were under "
        "way and may be stored, {num_unsent} were not sent"
    )
    defaults = {"store": "", "num_acknowledged": 0, "num_unknown": 0, "num_unsent": 0, "reason": ""}


class ClosedError(TDServeError):
    """The object was closed before this call."""

    code = "UNAVAILABLE"
    template = "{what} is closed"
    defaults = {"what": ""}


class ForkedClientError(ClosedError):
    """A client that was opened before ``fork()`` was used in the child, which has none of its threads."""

    template = "{what} was opened in process {pid}, and this is a fork of it: call tdserve.connect() in the child"
    defaults = {"what": "", "pid": 0}
