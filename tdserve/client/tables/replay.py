"""The handle of a replay: sampled, over and over, by whoever learns."""

from __future__ import annotations

from typing import Any

from tdserve.base.integers import check_integer
from tdserve.client.content.devices import to_device
from tdserve.client.content.fake_modes import ROWS, check_real
from tdserve.client.content.padding import Pad
from tdserve.client.tables.batches import Batches
from tdserve.client.tables.changes import change_priorities, priorities_messages
from tdserve.client.tables.sampling import Query, check_num_rows, draw_whole_rows
from tdserve.client.tables.table import TableHandle
from tdserve.client.tables.taking import Taken, TakenBatches, acknowledge, take_rows


class ReplayHandle(TableHandle):
    """A replay store: a ring of rows that writers extend and readers sample. Threads: safe."""

    def sample(
        self,
        num_rows: int,
        *,
        require: Any = None,
        consumer: str = "",
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        device: Any = None,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draws rows, as the table's sampler says.

        Args:
            num_rows: At least 1.
            require: Keys that must have been written in a row for it to be drawn; None: all of them. ``()`` draws rows
                in any state; what was not written reads as zeros.
            consumer: Only rows that the consumer of this name has not had; it has had them when this call returns. A
                table knows up to 64 names, for as long as it lives: name a consumer by what it does, not by its run.
            group_by: A leaf: whole groups of rows that have an equal value there, each complete and in order, one
                group after the other. ``num_rows`` is a multiple of ``group_size``. From the first time on the table
                orders its rows by this leaf, for good: every row must bring it, and it is not written later.
            group_size: Rows of a complete group.
            max_lag: Only rows whose policy was at most so many versions behind the newest published one when they were
                drawn; waits where there are too few, which only new rows change. Of a slice every row counts.
            device: Where the result goes; None leaves it on the CPU.
            pad: Fills ragged tensors up to the longest of the result with this number (or numbers by key), and adds
                masks of what is content under ``("masks", *key)``; None leaves them ragged. Parts whose rows differ in
                batch size stay as they are.
            timeout_s: Seconds to wait until there are enough rows; None is the client's default, 0 asks once.

        Returns:
            Tensordict of batch size ``[num_rows, *row]`` with more keys: ``"index"``, the row numbers, and
            ``"generation"``, which tells later whether a row was overwritten, both int64 ``[num_rows]``; of a
            prioritized table ``"priority"``, ``"probability"`` and ``"priority_weight"``, float32; ``"times_sampled"``,
            int64, where the table counts it; ``"policy_version"``, int64, of a table with a policy (-1: of one that was
            deleted since). What :class:`~tdserve.Slices` adds, they say. Where the rows differ in structure, these
            columns belong to the whole: ``td["index"]`` gives them, ``td.keys()`` does not list them.

        Raises:
            DeadlineExceededError: There were not enough rows in time; says what lacks.
            CapacityError: The table knows 64 names of consumers already.
            InvalidRequestError: There can never be so many at once; or, without replacement, there are fewer now: set
                ``min_size`` where a learner may start before its actors.
        """
        num_rows = check_num_rows(num_rows, device)
        deadline = self._client.deadline(timeout_s)

        def draw() -> Any:
            query = self._query(
                require=require,
                consumer=consumer,
                group_by=group_by,
                group_size=group_size,
                max_lag=max_lag,
                is_lease=bool(consumer),
                pad=pad,
                device=device,
            )
            if not consumer:
                return draw_whole_rows(self._client, query, num_rows, num_batches=1, deadline=deadline).build()
            td = take_rows(self._client, query, num_rows, deadline)
            acknowledge(self._client, query, td, self._client.deadline(None))
            return td

        td = self._following(draw)
        return to_device(td, device)

    def take(
        self,
        num_rows: int,
        *,
        consumer: str,
        require: Any = None,
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        ack: bool = True,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draws rows for a consumer, which has had them once they are acknowledged, and not before.

        Rows that are too old for ``max_lag`` stay where they are; other consumers may want them.

        Args:
            consumer: Its name; several processes may share it, and each row goes to one of them.
            ack: True gives a context manager: acknowledged at a clean exit, given back on an exception. False gives
                the rows, to be acknowledged with :meth:`ack`.

        Other arguments and errors as of :meth:`sample`.
        """
        check_real("drawing rows", ROWS)
        num_rows = check_integer("num_rows", num_rows, 1)
        query = self._query(
            require=require,
            consumer=consumer,
            group_by=group_by,
            group_size=group_size,
            max_lag=max_lag,
            is_lease=True,
            pad=pad,
        )
        rows = take_rows(self._client, query, num_rows, self._client.deadline(timeout_s))
        return Taken(self._client, query, rows, None) if ack else rows

    def ack(self, rows: Any, *, consumer: str, timeout_s: float | None = None) -> None:
        """Says that a consumer has had rows that it took with ``ack=False``.

        Raises:
            WrongStateError: They are not this client's any more. Nothing was changed.
        """
        query = self._query(consumer=consumer, is_lease=True)
        acknowledge(self._client, query, rows, self._client.deadline(timeout_s))

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        generation: Any = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Gives rows other priorities.

        Args:
            index: A sampled batch, or row numbers.
            priority: At least 0; one per row, or one for all. Of a row that comes twice the last one counts.
            generation: Of each row, where ``index`` is no batch: rows that were overwritten since are skipped. None:
                all rows must be live.
            return_early: True returns a future at once; the arguments are copied before.

        Returns:
            How many rows were skipped, because they were overwritten or deleted meanwhile, or a future of it.

        Raises:
            InvalidRequestError: A priority is negative or not finite, or the table has none. Nothing was changed.
            SelectionError: A row is out of range, or not live. Nothing was changed.
        """
        check_real("writing priorities", ROWS)
        messages = priorities_messages(index, priority, generation)
        deadline = self._client.deadline(timeout_s)

        def update() -> int:
            return change_priorities(self._client, self.name, deadline, messages)

        return self._client.perform(update, return_early)

    def batches(
        self,
        num_rows: int,
        *,
        prefetch: int = 4,
        device: Any = None,
        pad: Pad = None,
        drop: float | None = None,
        require: Any = None,
        consumer: str = "",
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        timeout_s: float | None = None,
    ) -> Batches | TakenBatches:
        """An endless iterator over samples, with some of them under way while the caller works.

        Args:
            num_rows: Rows of each batch.
            prefetch: Batches under way or waiting, at most; several of them share one message.
            device: Where batches go.
            pad: As of :meth:`sample`; each batch is as long as its own longest row.
            drop: Seconds: a batch that has waited longer for its taker is dropped, and a fresh one taken. None: none
                is.
            require, consumer, group_by, group_size: As of :meth:`sample`. With a consumer a batch counts as had when
                the next one is asked for, and nothing is prefetched.
            max_lag: As of :meth:`sample`. Looked at once more when a batch is handed out, which costs a message: one
                that became too old while it waited is dropped, and a fresh one taken.
            timeout_s: Seconds that one batch may take; then the iterator raises DeadlineExceededError.
        """
        num_rows = check_num_rows(num_rows, device)
        prefetch = check_integer("prefetch", prefetch, 1)
        seconds = self._client.timeout_s if timeout_s is None else timeout_s
        query: Query = self._query(
            require=require,
            consumer=consumer,
            group_by=group_by,
            group_size=group_size,
            max_lag=max_lag,
            is_lease=bool(consumer),
            pad=pad,
            device=device,
        )
        if consumer:
            return TakenBatches(self._client, query, num_rows, device=device, timeout_s=seconds)
        return Batches(
            self._client, query, num_rows, prefetch=prefetch, device=device, drop_after_s=drop, timeout_s=seconds
        )
