"""The calls of a replay, which one server has, or several share: their arguments, and what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.client.content.fake_modes import ROWS, check_real
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.session.calls.step_counts import StepCount
from tdserve.client.tables.draws.draw_arguments import Ahead, Conditions, check_ahead, check_num_rows
from tdserve.client.tables.draws.row_takes import RowTakes
from tdserve.client.tables.draws.share import Share, parse_share
from tdserve.client.tables.draws.taken_batches import TakenBatches
from tdserve.structure.trees.tree import Path

_Batches = TypeVar("_Batches")


@leave_modes_in_calls
class ReplayCalls(ABC, Generic[_Batches]):
    """The calls of a replay; its handle has the steps that differ between one server and several. Threads: safe."""

    _takes: RowTakes
    """Takes rows on lease."""

    if TYPE_CHECKING:

        def check_key(self, path: Path, deadline: Deadline) -> None: ...

        def _make_deadline(self, timeout_s: float | None) -> Deadline: ...

    def sample(
        self,
        num_rows: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        step: int | None = None,
        run: str | int | None = None,
        balance: Any = None,
        require: Any = None,
        consumer: str = "",
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        device: Any = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draws rows with the table's sampler.

        With ``rank`` and ``world_size`` the rows are this rank's share of one draw for all ranks of a step,
        which the first of them causes: all rows of it differ, and it counts as sampled once. The draw is kept:
        a call that asks for the same rank and step again, such as by another rank of a tensor-parallel group or a rank
        that was restarted, gets the same rows in the same order, also after a restart of the server. A table
        keeps the draws of 16 steps. Until then no writer gets their rows, and rows that reach
        ``max_times_sampled`` stay readable. A writer that needs the room waits until all ranks have asked for a
        later step than the first that is kept, which is then forgotten; so a table that is not much larger than a draw
        makes writers and ranks keep step. Ranks that read later see leaves that were written after the draw; if rows
        are deleted, their share ends.

        Args:
            num_rows: At least 1. With ``rank`` the rows of each rank.
            rank: Which share, from 0; the ranks that work on the same rows pass the same number.
            world_size: Number of shares; the same for all ranks of a step, as all arguments but ``rank`` and ``pad``.
            step: The step; any number of at least 0 that was not forgotten. None is the step after the last one that
                this client has had of this table for this rank and number of ranks, at first 0. So all its handles of
                the table share one count, with :meth:`batches`, and a call that names a step sets it. A call that fails
                is not counted.
            run: Name of the job, of at most 200 bytes, the same in all its ranks. Each run has steps of its own: a new
                one on an old table draws for its first step, and the draws of runs before it are forgotten as soon as
                room is needed. None is the run of torchrun (``TORCHELASTIC_RUN_ID``), if there is one.
            balance: A key by which the rows are dealt so that the totals of the ranks are as equal as can be: of
                integers or flags, whose sum counts in each row (a number of tokens, an attention mask), or of a ragged
                tensor, values or a nested part such as a ``History``, whose size counts. None: they are dealt in turn.
            require: Keys that must have been written in a row for it to be drawn; None: all of them. ``()`` draws rows
                in any state; leaves that were not written read as zeros.
            consumer: Draws only rows that the consumer of this name has not had yet; it has had them when this call
                returns, or with ``rank`` as soon as they are drawn. If its process is killed as it returns, or later,
                they do not come again; those of :meth:`take` do. A table keeps up to 64 names, for as long as it
                exists: name a consumer by its role, not by its run.
            group_by: A leaf. Draws whole groups of rows with an equal value there, each complete and in order, one
                group after the other: at random, each as likely, whatever the sampler. ``num_rows`` is a multiple of
                ``group_size``. From the first such call on the table keeps its rows ordered by this leaf: every row
                must then have it when it is written, and it cannot be written later.
            group_size: Rows of a complete group.
            max_lag: Draws only rows whose policy was at most this many versions behind the newest published one when
                they were drawn; if there are too few, waits for new rows. In a slice every row must fulfil it. With
                ``group_by``, and without a consumer, groups that have an older row leave the table whole, complete or
                not; ``info()`` counts their rows as ``num_discarded``, and rows that lack leaves as ``num_incomplete``.
            device: Where the result is moved; None leaves it on the CPU.
            pad: Pads ragged tensors to the longest of the result with this number (or numbers by key), and adds masks
                of the content under ``("masks", *key)``; None leaves them ragged. Parts whose rows differ in batch size
                stay as they are.
            numpy: True returns a dict of NumPy arrays, which share the memory of what was received, as in
                ``tdserve.connect``; None is the client's setting.
            timeout_s: Seconds to wait until there are enough rows; None is the client's default, 0 asks once.

        Returns:
            Tensordict of batch size ``[num_rows, *row]`` with additional keys: ``"index"``, the row numbers, and
            ``"generation"``, which shows later whether a row was overwritten, both int64 ``[num_rows]``; for a
            prioritized table ``"priority"``, ``"probability"`` and ``"priority_weight"``, float32; ``"times_sampled"``,
            int64, if the table counts it: how often the row has been drawn since it was written, with all times in
            this sample; ``"policy_version"``, int64, for a table with a policy (-1: of a policy that
            was deleted since). :class:`~tdserve.Slices` adds further keys, which it documents. If the rows differ in
            structure, these columns belong to the whole: ``td["index"]`` returns them, ``td.keys()`` does not list
            them.

        Raises:
            DeadlineExceededError: There were not enough rows in time; the error names what is missing.
            EndOfStreamError: The table is closed, and fewer rows are left; it has their number as ``num_left``.
            CapacityError: The table has 64 names of consumers already.
            StepForgottenError: The draw of this step is not kept any more. The error names the next step: calls that
                name no step continue once one has passed it as ``step``.
            WrongStateError: Rows of this share were deleted since the draw.
            InvalidRequestError: Other ranks of this step have asked for something else. Or there can never be that many
                at once. Or, without replacement, there are fewer now: set ``min_size`` if a learner may start
                before its actors.
        """
        num_rows = check_num_rows(num_rows, device)
        deadline = self._make_deadline(timeout_s)
        conditions = Conditions(require, consumer, group_by, group_size, max_lag)
        share = parse_share(rank, world_size, step, balance, run)
        if share is not None:
            share.check_balance(self, deadline)
        return self._sample(num_rows, conditions, share, deadline, device=device, pad=pad, numpy=numpy)

    @abstractmethod
    def _sample(
        self, num_rows: int, conditions: Conditions, share: Share | None, deadline: Deadline, **form: Any
    ) -> Any:
        """Draws rows; with a share those of a rank, in a step that is counted.

        Args:
            form: ``device``, ``pad`` and ``numpy`` of the caller.
        """

    @abstractmethod
    def _get_step_count(self, share: Share) -> StepCount:
        """Returns the count of the steps of a rank."""

    def forget_draws(self, *, timeout_s: float | None = None) -> None:
        """Forgets the draws of all steps of all runs: a run of the same name may begin at step 0 again.

        Call it once, before the first rank of the run samples; the ranks of an earlier run must have ended. The counts
        of this client begin at 0 again, too. It is not needed for a run with another name (``run=``).
        """
        self._forget_draws(timeout_s)

    @abstractmethod
    def _forget_draws(self, timeout_s: float | None) -> None:
        """Forgets the draws of all steps, and makes the counts begin at 0 again."""

    def take(
        self,
        num_rows: int,
        *,
        consumer: str,
        min_rows: int | None = None,
        require: Any = None,
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        ack: bool = True,
        lease_s: float | None = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draws rows for a consumer; it has had them once they are acknowledged.

        Rows that are too old for ``max_lag`` stay in the table for other consumers, unless the table was created with
        ``consumers=``: there they are discarded, as in a queue.

        Args:
            consumer: Its name; several processes may share it, and each row goes to one of them.
            min_rows: From this many rows on, as many as can be taken now suffice, up to ``num_rows``; None waits for
                all. 1 takes what is there, and waits only for the first row.
            ack: True returns a context manager: the rows are acknowledged at a clean exit, and given back on an
                exception. That end may take the client's default timeout, and not ``timeout_s``, since the block may
                last long. False returns the rows, to be acknowledged with :meth:`ack`, whose timeout can be given.
            lease_s: The server gives the rows back to others this many seconds after it has chosen them (the transfer
                included), unless they were acknowledged by then, or their lease was renewed (:meth:`Taken.renew`,
                :meth:`renew`); an acknowledgement that comes later raises WrongStateError. For consumers that may hang.
                None: the lease lasts as long as the session.

        Other arguments and errors as in :meth:`sample`.
        """
        num_rows = check_num_rows(num_rows, None)
        conditions = Conditions(require, consumer, group_by, group_size, max_lag).adapt_to_take(
            num_rows, min_rows, lease_s
        )
        taken = self._takes.take(num_rows, conditions, timeout_s, pad=pad, numpy=numpy)
        return taken if ack else taken.rows

    def ack(self, rows: Any, *, consumer: str, timeout_s: float | None = None) -> None:
        """Acknowledges rows that a consumer took with ``ack=False``.

        Args:
            rows: What ``take(n, ack=False)`` has returned, or rows of it with their ``index`` (and ``generation``, so
                that a newer row with the same number is not meant).
            consumer: Who took them.
            timeout_s: None is the client's default.

        Raises:
            InvalidRequestError: ``rows`` names none. Nothing was changed.
            WrongStateError: This client does not hold them any more. Nothing was changed.
        """
        self._takes.acknowledge(rows, timeout_s, consumer=consumer)

    def renew(self, rows: Any, lease_s: float, *, consumer: str, timeout_s: float | None = None) -> None:
        """Renews the lease of rows that were taken with ``lease_s``: it lasts ``lease_s`` seconds from now on.

        The rows that were taken by the same call are renewed with them, also those that are not named.

        Args:
            rows: As for :meth:`ack`, with the consumer that has them.
            lease_s: Seconds.

        Raises:
            WrongStateError: This client does not hold them any more, for example because the lease was over. Nothing
                was changed.
        """
        self._takes.renew(rows, lease_s, timeout_s, consumer=consumer)

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        generation: Any = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Changes the priorities of rows.

        Args:
            index: A sampled batch, or row numbers.
            priority: At least 0; one per row, or one for all. If a row occurs twice, the last one counts.
            generation: Generation of each row, if ``index`` is not a batch: rows that were overwritten since are
                skipped. None: all rows must be live.
            return_early: True returns a future at once; the arguments are copied before.

        Returns:
            The number of rows that were skipped, because they were overwritten or deleted since, or a future of it.

        Raises:
            InvalidRequestError: A priority is negative or not finite, or the table has no priorities. Nothing was
                changed.
            SelectionError: A row is out of range, or not live. Nothing was changed.
        """
        check_real("writing priorities", ROWS)
        return self._update_priority(index, priority, generation, timeout_s, return_early)

    @abstractmethod
    def _update_priority(
        self, index: Any, priority: Any, generation: Any, timeout_s: float | None, return_early: bool
    ) -> Any:
        """Changes the priorities of rows."""

    def get_priorities(self, index: Any, *, timeout_s: float | None = None) -> Any:
        """Returns the priorities of rows, float32 ``[n]``; this does not count as sampling.

        Args:
            index: Row numbers, or a sampled batch.

        Raises:
            InvalidRequestError: The table has no priorities.
            SelectionError: A row is out of range, or not live.
        """
        return self._get_priorities(index, timeout_s)

    @abstractmethod
    def _get_priorities(self, index: Any, timeout_s: float | None) -> Any:
        """Returns the priorities of rows, in the form that the client asks for."""

    def batches(
        self,
        num_rows: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        step: int | None = None,
        run: str | int | None = None,
        balance: Any = None,
        prefetch: int = 4,
        device: Any = None,
        pad: Pad = None,
        drop: float | None = None,
        require: Any = None,
        consumer: str = "",
        min_rows: int | None = None,
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        lease_s: float | None = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> _Batches | TakenBatches:
        """Returns an iterator over samples, which requests some of them while the caller works. It ends if the table is
        closed and fewer rows are left than a batch has.

        Args:
            num_rows: Rows of each batch.
            rank, world_size, run, balance: As in :meth:`sample`: each batch is the share of the next step.
            step: The first step; None continues after the last step that :meth:`sample` or an iterator has returned to
                this client, as :meth:`sample` does. A batch is counted when it is returned: those that were prefetched
                and not returned come again.
            prefetch: Batches under way or waiting, at most; several of them share one message. What was drawn when the
                iterator ends counts as sampled: for a limiter, and for ``max_times_sampled``, which deletes such rows.
                To hand out every row once, use ``create_queue``, or ``consumer``.
            device: Where batches are moved.
            pad: As in :meth:`sample`; each batch is as long as its own longest row.
            drop: Seconds: a batch that has waited longer is dropped, and replaced by a new one. None drops none. A rank
                drops none: the other ranks would keep theirs.
            require, consumer, group_by, group_size: As in :meth:`sample`. With a consumer, but without a rank, a batch
                counts as had when the next one is requested, and nothing is prefetched.
            min_rows, lease_s: As in :meth:`take`, with a consumer and without a rank.
            numpy: As in :meth:`sample`.
            max_lag: As in :meth:`sample`. Checked again when a batch is returned, which costs a message: a batch that
                became too old while it waited is dropped, and replaced by a new one. With ``rank`` it is kept.
            timeout_s: Seconds that one batch may take; after that the iterator raises DeadlineExceededError.
        """
        num_rows = check_num_rows(num_rows, device)
        deadline = self._make_deadline(timeout_s)
        conditions = Conditions(require, consumer, group_by, group_size, max_lag).adapt_to_take(
            num_rows, min_rows, lease_s
        )
        share = parse_share(rank, world_size, step, balance, run)
        if share is not None:
            share.check_balance(self, deadline)
        ahead = check_ahead(prefetch, drop, consumer, share, min_rows=min_rows, lease_s=lease_s)
        if share is not None and not share.is_named:
            share = share.move_to(self._get_step_count(share).next)
        if consumer and share is None:
            return self._takes.take_batches(num_rows, conditions, timeout_s, device=device, pad=pad, numpy=numpy)
        form = {"device": device, "pad": pad, "numpy": numpy}
        return self._draw_ahead(num_rows, conditions, share, deadline, ahead=ahead, timeout_s=timeout_s, **form)

    @abstractmethod
    def _draw_ahead(
        self,
        num_rows: int,
        conditions: Conditions,
        share: Share | None,
        deadline: Deadline,
        *,
        ahead: Ahead,
        timeout_s: float | None,
        **form: Any,
    ) -> _Batches:
        """Returns an iterator over samples.

        Args:
            share: The share of a rank in the first step; None: batches are for no rank.
            deadline: Until when what no batch can be is refused.
            ahead: What is drawn ahead.
            timeout_s: Seconds that one batch may take; None is the client's default.
            form: As in ``_sample``.
        """
