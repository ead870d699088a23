"""The rows of a table, and all state that the parts of the table share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import SelectionError
from tdserve.messages.row_numbers import NO_ROWS, PIECE_ROWS, TREE_PIECE_ROWS, Rows
from tdserve.rules.replay.allocation.claims import WriterClaim
from tdserve.rules.replay.allocation.ring import Ring
from tdserve.rules.replay.allocation.shared_numbers import SharedNumbers
from tdserve.rules.replay.draws.kept_draws import KeptDraws
from tdserve.rules.replay.eligibility.conditional_selectors import ConditionalSelectors
from tdserve.rules.replay.eligibility.conditions import OWN
from tdserve.rules.replay.eligibility.staleness import Staleness
from tdserve.rules.replay.limiter import LimiterCounts
from tdserve.rules.replay.plans import SamplePlan
from tdserve.rules.replay.row_ages import RowAges
from tdserve.rules.replay.row_indexes.columns import MakeColumn, RowColumns, make_in_memory
from tdserve.rules.replay.row_indexes.row_mask import RowMask
from tdserve.rules.replay.row_indexes.row_order import RowOrder, to_last_sequence
from tdserve.rules.replay.row_totals import RowTotals
from tdserve.rules.replay.samplers.trajectories import Trajectories
from tdserve.rules.replay.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

_WALKED_ROWS = 1 << 17
"""Rows that walks from rows all over the table visit at a time: the search for slices that go with a row takes about 25
ns for each row of a slice."""


class TableState:
    """The rows of one table: where they lie, which can be read, which a sample may draw. Has everything a restart
    needs, and what each part of the table needs of the others.

    Args:
        name: Name of the store, for errors.
        capacity: Number of rows.
        generations: One int64 per row, written in place.
        settings: Sampler, remover and limiter.
        make_column: Returns arrays of one entry per row that outlive the process.
        num_keys: Leaves per row.
        shared: Numbers that all processes share; by default they are in this one only.

    Attributes:
        name, settings: As above; the settings may be changed.
        ring: Decides which rows writers fill.
        generations: As above.
        columns: Columns of the rows.
        live: The rows that may be read, including rows that are being written.
        selectors: Decide which rows a sample may draw.
        evictor: Decides which row makes room; None if the ring does.
        order: In which order rows were committed, and which of them continue others.
        claims: Claims of the writers that take rows by themselves.
        draws: Draws for data-parallel readers.
        totals: How many rows have come, and were sampled.
        ages: When rows have come, and the rows of the newest sample.
        shared: Numbers that all processes share.
        is_closed: Whether the table accepts no more rows.
        num_coming: Rows whose commit is on record, and which are not visible yet.
        arriving: First place, and end less 1, of rows in the order of commits that have arrived and are not on record.
        under_way: Samples, or parts of them, whose spent rows have not left yet.
        highest_priority: Highest priority of all rows that had one.

    Raises:
        InvalidRequestError: The capacity is below 1, or the settings would never let any row through.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        generations: Rows,
        settings: Settings,
        *,
        make_column: MakeColumn = make_in_memory,
        num_keys: int = 1,
        shared: SharedNumbers | None = None,
    ) -> None:
        self.shared = SharedNumbers() if shared is None else shared
        ring = Ring(capacity, generations, shared=self.shared)
        self._initialise(name, ring, generations, settings, {}, make_column, num_keys, NO_ROWS)

    @classmethod
    def restore(
        cls,
        name: str,
        generations: Rows,
        settings: Settings,
        state: Mapping[str, Any],
        *,
        now_reserved: Sequence[Rows] = (),
        held: Rows | None = None,
        make_column: MakeColumn = make_in_memory,
        num_keys: int = 1,
        first_generation: int = 2,
        shared: SharedNumbers | None = None,
    ) -> Self:
        """Restores a table. Arguments and errors as in :meth:`Ring.restore`; there is a row per generation."""
        table = cls.__new__(cls)
        table.shared = SharedNumbers() if shared is None else shared
        kept = NO_ROWS if held is None else held
        ring = Ring.restore(
            len(generations),
            generations,
            state,
            now_reserved=now_reserved,
            held=kept,
            first_generation=first_generation,
            shared=table.shared,
        )
        table._initialise(name, ring, generations, settings, state, make_column, num_keys, kept)
        return table

    def _initialise(
        self,
        name: str,
        ring: Ring,
        generations: Rows,
        settings: Settings,
        state: Mapping[str, Any],
        make_column: MakeColumn,
        num_keys: int,
        held: Rows,
    ) -> None:
        settings.check(ring.capacity)
        self.name, self.settings, self.ring = name, settings, ring
        self.columns = RowColumns(ring.capacity, make_column)
        self.claims: list[WriterClaim] = []
        self.draws = KeptDraws(name, horizons=state.get("runs", ()))
        self.is_closed = bool(state.get("is_closed", False))
        self.num_coming = 0
        self.ages = RowAges(self.shared.num_drawn)
        self.under_way: set[SamplePlan] = set()
        self.arriving: list[tuple[int, int]] = []
        self.generations: Rows = np.asarray(generations)
        self.totals = RowTotals(ring, self.shared, state)
        self.order = RowOrder(self.columns, int(state.get("last_sequence", to_last_sequence(ring.inserts))))
        self._changed_settings = str(state.get("settings", ""))
        self.highest_priority = float(state.get("highest_priority", 1.0))
        self.evictor = settings.remover.make_evictor(self.columns, ring.capacity)
        live = ring.list_live_rows()
        if settings.uses_priority and len(live):  # updates are only in the column, not on record
            self.highest_priority = max(self.highest_priority, float(self.columns.priority[live].max()))
        if settings.sampler.uses_trajectories:
            self.columns.trajectories = Trajectories(self.columns, ring.capacity)
            self.columns.trajectories.restore(np.union1d(live, held))
        self.selectors = ConditionalSelectors(
            settings,
            self.columns,
            num_keys=num_keys,
            consumers=state.get("consumers", ()),
            has_partial_rows=bool(state.get("has_partial_rows", False)),
            staleness=Staleness.restore(self.columns, state) if settings.policy else None,
        )
        self.live = RowMask(ring.capacity)
        were_live = np.unique(held[self.generations[held] & 1 == 1])
        self.live.add(np.union1d(live, were_live))
        self.selectors.suspended.add(were_live)  # a write to them was cut short
        if settings.max_times_sampled:  # rows of an interrupted sample can be sampled once more
            times = self.columns.times_sampled
            times[live] = np.minimum(times[live], settings.max_times_sampled - 1)
        self.enter(live[np.argsort(self.columns.sequence[live], kind="stable")])
        self.shared.note_committed(self.shared.read_mark())  # what was filled before is found when it is opened
        self.permit_readers()

    def __len__(self) -> int:
        """Returns the number of rows, without those that leave as soon as their draw is forgotten."""
        return len(self.ring) - self.draws.num_spent

    def __repr__(self) -> str:
        return f"<TableState {self.name!r} {self.ring!r}>"

    @property
    def counts(self) -> LimiterCounts:
        """Returns the counts for the limiter."""
        return self.totals.get_counts(self.draws.num_spent)

    def catch_up(self, writer: bytes = b"") -> None:
        """Commits the rows that writers have filled by themselves; with ``writer`` where this client may have some."""
        mark = self.shared.read_mark()  # claims that are settled have left nothing uncommitted
        are_live = [claim.catch_up() for claim in tuple(self.claims) if not writer or claim.may_hold(writer)]
        if all(are_live) and not writer:
            self.shared.note_committed(mark)

    def listen(self) -> None:
        """Makes these writers report every extend, because a call waits for the table."""
        for claim in tuple(self.claims):
            claim.listen()

    def take_back_claims(self) -> None:
        """Ends the claims of writers: before generations change, or the rules of who may write."""
        for claim in tuple(self.claims):
            claim.take_back()

    def list_live_rows(self) -> Rows:
        """Returns the numbers of the rows that may be read, sorted; including rows that are being written."""
        return self.live.get_rows()

    def is_live(self, rows: Rows | slice) -> NDArray[np.bool_]:
        """Returns which of these rows may be read; including rows that are being written."""
        return self.live.contains(rows)

    def check_live(self, rows: Rows) -> None:
        """Raises SelectionError unless all of these are numbers of live rows."""
        self.check_numbers(rows)
        is_live = self.live.contains(rows)
        if not is_live.all():
            bad = int(rows[int(np.argmin(is_live))])
            raise SelectionError(selection=str(bad), reason=f"this row of table {self.name!r} is not live now")

    def check_numbers(self, rows: Rows) -> None:
        """Raises SelectionError unless all of these are numbers of rows."""
        if not len(rows):
            return
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= self.ring.capacity:
            bad = low if low < 0 else high
            reason = f"table {self.name!r} has rows 0 to {self.ring.capacity - 1}"
            raise SelectionError(selection=str(bad), reason=reason)

    def check_same(self, rows: Rows, generations: NDArray[np.uint32]) -> None:
        """Raises SelectionError unless all of these rows are live, and still have these generations."""
        self.check_live(rows)
        self._refuse_others(rows, self.is_same(rows, generations))

    def check_unchanged(self, rows: Rows, stamps: NDArray[np.int64]) -> None:
        """Raises SelectionError unless all of these rows are live, and no part of one was written since it had this
        generation."""
        self.check_live(rows)
        self._refuse_others(rows, self.ring.get_stamps(rows) == stamps)

    def _refuse_others(self, rows: Rows, is_same: NDArray[np.bool_]) -> None:
        if not is_same.all():
            bad = int(rows[int(np.argmin(is_same))])
            reason = f"this row of table {self.name!r} was overwritten since it was read"
            raise SelectionError(selection=str(bad), reason=reason)

    def is_same(self, rows: Rows, generations: NDArray[np.uint32] | None) -> NDArray[np.bool_]:
        """Returns which of these rows still have these generations, of which the lower halves are given; None: all."""
        if generations is None:
            return np.ones(len(rows), np.bool_)
        return np.asarray(self.ring.get_row_ids(rows).astype(np.uint32) == generations)

    def get_row_ids(self, rows: Rows) -> Rows:
        """See :meth:`Ring.get_row_ids`."""
        return self.ring.get_row_ids(rows)

    def hold(self, rows: Rows) -> Rows:
        """Removes rows, each named once, from every sample, and keeps writers off them, while some of their leaves are
        to be written: between this and :meth:`let_go` come :meth:`Ring.hide` and :meth:`show`. They may still leave the
        table.

        Returns:
            Those that were not held before, as lost ones are.

        Raises:
            SelectionError: A row is not live. Nothing was changed.
        """
        self.take_back_claims()
        self.check_live(rows)
        is_held = self.ring.is_held(rows)
        if np.count_nonzero(is_held):
            rows = rows[~is_held]
        self.ring.hold(rows)
        self.selectors.suspend(rows)
        if self.evictor is not None:
            self.evictor.remove(rows)
        return rows

    def show(self, rows: Rows, keys: Sequence[int]) -> None:
        """Ends :meth:`Ring.hide`: these leaves of the rows are written; for rows that have left in the meantime,
        nothing is."""
        self.selectors.note_written(rows[self.ring.is_held(rows)], keys)  # first: an even row must show this
        self.permit_readers()
        self.ring.show(rows)

    def show_untouched(self, rows: Rows) -> None:
        """Ends :meth:`Ring.hide` of rows of which nothing was written; for those that have left in the meantime, it
        does nothing."""
        self.permit_readers()
        self.ring.show(rows, num_parts=0)

    def let_go(self, rows: Rows) -> None:
        """Ends :meth:`hold`: samples may have those of the rows that have not left."""
        self.enter(self.ring.let_go(rows))

    def remove(self, rows: Rows) -> None:
        """Removes live rows, each named once, from the table; the next writers get them. A write to one of them that is
        under way may finish."""
        if self.claims:
            self.take_back_claims()
            rows = self.live.select_members(rows)  # others were claimed at this moment
        self.leave(rows)
        self.ring.free(rows)

    def pin(self, rows: Rows) -> None:
        """Keeps live rows, each named once, from being overwritten until :meth:`unpin`; no claims of writers remain."""
        self.take_back_claims()
        self.ring.pins.add(rows)
        if self.evictor is not None:
            self.evictor.remove(rows)

    def unpin(self, rows: Rows) -> None:
        """Ends one :meth:`pin` of rows that have not left since. Those that all consumers have had leave."""
        loose = self.ring.pins.remove(rows)
        self.remove_had_by_all(loose)
        self.renew_evictable(self.live.select_members(loose))

    def renew_evictable(self, rows: Rows) -> None:
        """Lets live rows make room again, each named once, if nothing else keeps them; some may do so already."""
        if self.evictor is not None:
            self.evictor.remove(rows)
            self.evictor.add(rows[~(self.ring.pins.contains(rows) | self.ring.is_held(rows))])

    def spend(self, rows: Rows) -> None:
        """Makes rows unavailable that were sampled for the last time: they are on their way out."""
        self.live.remove(rows)
        self.selectors.leave(rows)
        self.columns.times_sampled[rows] = self.settings.max_times_sampled

    def consume(self, consumer: str, rows: Rows) -> None:
        """Notes that a named consumer has had rows, each named once."""
        if consumer != OWN:
            self.selectors.consume(consumer, rows)

    def remove_had_by_all(self, rows: Rows) -> None:
        """Removes those of the rows that all consumers have had; rows of kept draws leave with the last of these."""
        rows = self.live.select_members(self.selectors.consumers.select_had_by_all(rows))
        if self.ring.pins:
            rows = rows[~self.ring.pins.contains(rows)]
        if len(rows):
            self.remove(rows)

    def change_settings(self, settings: Settings) -> None:
        """Replaces the settings: those parts of them that may change.

        Raises:
            InvalidRequestError: They would never let any row through. Nothing was changed.
        """
        settings.check(self.ring.capacity)
        self.take_back_claims()
        self.settings = settings
        self.permit_readers()
        self._changed_settings = settings.to_json()

    def permit_readers(self) -> None:
        """Tells all processes what they may read without a request."""
        settings = self.settings
        min_live = 0 if self.selectors.has_partial_rows else settings.min_drawable
        reads = not settings.max_times_sampled
        self.shared.permit(reads=reads, min_live=min_live, is_queue=settings.is_queue)

    def get_state(self) -> dict[str, Any]:
        """Returns the state that generations and columns do not have and that :meth:`restore` needs."""
        changed: dict[str, Any] = {"settings": self._changed_settings} if self._changed_settings else {}
        staleness = self.selectors.staleness
        if staleness is not None:
            changed |= staleness.get_state()
        return {
            **self.ring.get_state(),
            **changed,
            "inserts": self.ring.inserts + self.num_coming,
            "last_sequence": self.order.last_sequence,
            **({"arriving": self.arriving} if self.arriving else {}),
            **({"runs": self.draws.horizons} if self.draws.horizons else {}),
            **self.totals.get_state(),
            "highest_priority": self.highest_priority,
            "is_closed": self.is_closed,
            "consumers": self.selectors.consumers.names,
            "has_partial_rows": self.selectors.has_partial_rows,
        }

    def iter_steps(self, pieces: Iterable[slice | Rows]) -> Iterator[Rows]:
        """Yields the numbers in pieces of rows, at most ``step_rows`` at a time; fewer if slices begin at many rows
        before each of them."""
        for piece in pieces:
            step_rows = self.step_rows  # selectors may have come
            if isinstance(piece, slice):
                numbers = np.arange(piece.start, piece.stop)
            else:
                numbers = piece
                step_rows = min(step_rows, max(_WALKED_ROWS // self.selectors.longest_slice, 64))
            for start in range(0, len(numbers), step_rows):
                yield numbers[start : start + step_rows]

    @property
    def step_rows(self) -> int:
        """Rows that come or leave at a time: they are added to and removed from each selector too, and groups take
        longest; each may be a trajectory of its own, and those that an evictor chooses lie all over its tree."""
        if self.selectors.is_plain and self.columns.trajectories is None and self.evictor is None:
            return PIECE_ROWS
        has_ids = bool(self.settings.sampler.trajectory_keys) and not self.settings.sampler.marks_ends
        is_slow = has_ids or self.evictor is not None
        return max((TREE_PIECE_ROWS if is_slow else PIECE_ROWS // 4) // len(self.selectors), 64)

    def iter_same_rows(
        self, rows: Rows, generations: NDArray[np.uint32] | None, *, ends_claims: bool = False
    ) -> Iterator[Rows]:
        """Yields those rows that still have their generation.

        Args:
            ends_claims: Whether claims of writers end before each part, so that it is known which rows they have
                filled.
        """
        # What a consumer has had is in a file: each of its rows may need a page that was written to the disk meanwhile.
        step_rows = self.step_rows if self.selectors.is_plain else self.step_rows // 2
        for start in range(0, max(len(rows), 1), step_rows):
            part = slice(start, start + step_rows)
            if ends_claims:
                self.take_back_claims()
            self.check_numbers(rows[part])
            yield rows[part][self.is_same(rows[part], None if generations is None else generations[part])]

    def enter(self, rows: Rows) -> None:
        """Lets samples draw live rows, and lets these make room."""
        self.selectors.enter(rows)
        if self.evictor is not None:
            self.evictor.add(rows[~self.ring.pins.contains(rows)] if self.ring.pins else rows)

    def leave(self, rows: Rows) -> None:
        """Removes rows from everything but the ring, which has freed them, or does so next."""
        self.live.remove(rows)
        self.selectors.leave(rows)
        if self.evictor is not None:
            self.evictor.remove(rows)
        if self.columns.trajectories is not None:
            self.columns.trajectories.remove(rows)
