"""The writer of single rows of a shared table whose rows choose their shards by a key: a writer for each shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, TDServeError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.tables.writers.writer import ReplayWriter

if TYPE_CHECKING:
    from typing_extensions import Self


@leave_modes_in_calls
class ShardedWriter:
    """Appends each row to the shard of its key; see :class:`ReplayWriter`, whose names it has.

    The rows of one key are stored in the order in which they were appended, those of a shard together in batches.
    Threads: safe.

    Args:
        name: Name of the table.
        choose_shard: Returns the shard of a row. Raises InvalidRequestError if the row lacks the key.
        make_writer: Makes the writer of a shard: of the first one now, which checks the arguments of all, of the others
            when the first row comes for them.
    """

    def __init__(
        self,
        name: str,
        choose_shard: Callable[[Any], int],
        make_writer: Callable[[int], ReplayWriter],
    ) -> None:
        self.name = name
        self._choose_shard = choose_shard
        self._make_writer = make_writer
        self._writers = {0: make_writer(0)}
        self._last = self._writers[0]
        self._policy_version = self._last.policy_version
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ShardedWriter {self.name!r}: {self.num_acknowledged} of {self.num_appended} rows stored>"

    @property
    def policy_version(self) -> int | None:
        """See :class:`ReplayWriter`."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int | None) -> None:
        for writer in self._list_writers():
            writer.policy_version = version
        self._policy_version = version

    @property
    def num_appended(self) -> int:
        """Rows that ``append`` has accepted."""
        return sum(writer.num_appended for writer in self._list_writers())

    @property
    def num_acknowledged(self) -> int:
        """Rows that are stored."""
        return sum(writer.num_acknowledged for writer in self._list_writers())

    @property
    def num_under_way(self) -> int:
        """Rows that were sent and are not acknowledged."""
        return sum(writer.num_under_way for writer in self._list_writers())

    @property
    def num_buffered(self) -> int:
        """Rows that have not been sent yet."""
        return sum(writer.num_buffered for writer in self._list_writers())

    def append(self, td: Any, priority: Any = None) -> None:
        """Appends one row; arguments and errors as in ``ReplayWriter.append``.

        Raises:
            InvalidRequestError: The row lacks the key that chooses its shard. It was not accepted.
        """
        writer = self._get_writer(self._choose_shard(td))
        writer.append(td, priority)
        self._last = writer

    def end_trajectory(self) -> None:
        """Marks the row that was appended last as the last of its trajectory; see ``ReplayWriter.end_trajectory``."""
        self._last.end_trajectory()

    def flush(self, timeout_s: float | None = None) -> None:
        """Sends the appended rows, and waits until they are stored; errors as in ``ReplayWriter.flush``."""
        self._end_all(timeout_s, lambda writer, wait_s: writer.flush(wait_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Sends the appended rows, waits until they are stored, and ends the writer; as ``ReplayWriter.close``."""
        self._is_closed = True
        self._end_all(timeout_s, lambda writer, wait_s: writer.close(wait_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        if error is None:
            self.close()
            return
        for writer in self._list_writers():
            writer.__exit__(kind, error, trace)

    def _list_writers(self) -> Sequence[ReplayWriter]:
        return list(self._writers.values())

    def _get_writer(self, shard: int) -> ReplayWriter:
        writer = self._writers.get(shard)
        if writer is None:
            if self._is_closed:
                raise ClosedError(what=f"the writer of {self.name!r}")
            made = self._make_writer(shard)
            made.policy_version = self._policy_version
            writer = self._writers.setdefault(shard, made)
            if writer is not made:  # another thread was faster
                made.close()
        return writer

    def _end_all(self, timeout_s: float | None, end: Callable[[ReplayWriter, float | None], None]) -> None:
        """Calls each writer, within one deadline for all; raises the first error in the end."""
        deadline = Deadline.after(timeout_s)
        failures: list[TDServeError] = []
        for writer in self._list_writers():
            try:
                end(writer, deadline.remaining_s)  # None: the default of each
            except TDServeError as error:
                failures.append(error)
        if failures:
            raise failures[0]
