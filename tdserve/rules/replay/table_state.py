"""The rows of a table, and all state that is kept with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import SelectionError
from tdserve.messages.row_numbers import NO_ROWS, PIECE_ROWS, TREE_PIECE_ROWS, Rows
from tdserve.rules.replay.allocation.claims import WriterClaim
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.allocation.ring import Ring
from tdserve.rules.replay.allocation.shared_numbers import SharedNumbers
from tdserve.rules.replay.draws.drawing import Drawing
from tdserve.rules.replay.draws.kept_draws import KeptDraws
from tdserve.rules.replay.eligibility.conditional_selectors import ConditionalSelectors
from tdserve.rules.replay.eligibility.staleness import Staleness
from tdserve.rules.replay.limiter import Limiter, LimiterCounts
from tdserve.rules.replay.plans import SamplePlan
from tdserve.rules.replay.row_ages import RowAges
from tdserve.rules.replay.row_indexes.columns import MakeColumn, RowColumns, make_in_memory
from tdserve.rules.replay.row_indexes.row_mask import RowMask
from tdserve.rules.replay.row_indexes.row_order import RowOrder, to_last_sequence
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.replay.samplers.trajectories import Trajectories
from tdserve.rules.replay.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

_WALKED_ROWS = 1 << 17
"""Rows that walks from rows all over the table visit at a time: the search for slices that go with a row takes about 25
ns for each row of a slice."""


class TableState:
    """The rows of one table: where they lie, which can be read, which a sample may draw. Has everything a restart
    needs.

    Args:
        name: Name of the store, for errors.
        capacity: Number of rows.
        generations: One int64 per row, written in place.
        settings: Sampler, remover and limiter.
        make_column: Returns arrays of one entry per row that outlive the process.
        num_keys: Leaves per row.
        shared: Numbers that all processes share; by default they are in this one only.

    Attributes:
        ring: Decides which rows writers fill.
        columns: Columns of the rows.
        selectors: Decide which rows a sample may draw.
        is_closed: Whether the table accepts no more rows.
        num_coming: Rows whose commit is on record, and which are not visible yet.
        claims: Claims of the writers that take rows by themselves.
        draws: Draws for data-parallel readers.
        shared: Numbers that all processes share.
        ages: When rows have come, and the rows of the newest sample.
        order: In which order rows were committed, and which of them continue others.

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
        self._is_reserving = False  # for one writer, in several turns: no other writer gets rows meanwhile
        self._is_drawing = False  # different rows for one sample, in several turns: no other sample gets such meanwhile
        self.num_coming = 0
        self.num_spared = 0  # rows that were too old, and were kept, when the last were discarded
        self.ages = RowAges(self.shared.num_drawn)
        self._under_way: set[SamplePlan] = set()  # samples, or parts of them, whose spent rows have not left yet
        self._arriving: list[tuple[int, int]] = []  # first, and end less 1, of sequences not on record
        self._generations: Rows = np.asarray(generations)
        # The record is of the last write; the shared number may be older, after a loss of power.
        self.shared.num_sampled = max(self.shared.num_sampled, int(state.get("samples", 0)))
        self._cleared = (int(state.get("cleared_inserts", 0)), int(state.get("cleared_samples", 0)))
        self._num_clears = 0
        self.order = RowOrder(self.columns, int(state.get("last_sequence", to_last_sequence(ring.inserts))))
        self._reset_inserts = int(state.get("reset_inserts", 0))
        self._changed_settings = str(state.get("settings", ""))
        self._highest = float(state.get("highest_priority", 1.0))
        self._uses_priority, self._counts_samples = settings.uses_priority, settings.counts_samples
        self._evictor = settings.remover.make_evictor(self.columns, ring.capacity)
        live = ring.list_live_rows()
        if self._uses_priority and len(live):  # updates are only in the column, not on record
            self._highest = max(self._highest, float(self.columns.priority[live].max()))
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
        self._live = RowMask(ring.capacity)
        self._drawing = Drawing(settings, self.columns, self.selectors)
        were_live = np.unique(held[self._generations[held] & 1 == 1])
        self._live.add(np.union1d(live, were_live))
        self.selectors.suspended.add(were_live)  # a write to them was cut short
        if settings.max_times_sampled:  # rows of an interrupted sample can be sampled once more
            times = self.columns.times_sampled
            times[live] = np.minimum(times[live], settings.max_times_sampled - 1)
        self._enter(live[np.argsort(self.columns.sequence[live], kind="stable")])
        self.shared.note_committed(self.shared.read_mark())  # what was filled before is found when it is opened
        self._permit_readers()

    def __len__(self) -> int:
        """Returns the number of rows, without those that leave as soon as their draw is forgotten."""
        return len(self.ring) - self.draws.num_spent

    def __repr__(self) -> str:
        return f"<Table {self.name!r} {self.ring!r}>"

    @property
    def counts(self) -> LimiterCounts:
        """Returns the counts for the limiter."""
        inserts, samples = self._cleared
        return LimiterCounts(
            num_rows=len(self),
            inserts=self.ring.inserts - inserts,
            samples=self.num_samples - samples,
            capacity=self.ring.capacity,
            reserved=self.ring.num_reserved,
            num_spent=self.draws.num_spent,
        )

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

    def list_live_rows(self) -> Rows:
        """Returns the numbers of the rows that may be read, sorted; including rows that are being written."""
        return self._live.get_rows()

    @property
    def num_samples(self) -> int:
        """Rows ever sampled."""
        return self.shared.num_sampled + self.shared.num_drawn

    def _permit_readers(self) -> None:
        """Tells all processes what they may read without a request."""
        settings = self.settings
        min_live = 0 if self.selectors.has_partial_rows else settings.min_drawable
        reads = not settings.max_times_sampled
        self.shared.permit(reads=reads, min_live=min_live, is_queue=settings.is_queue)

    @property
    def inserts(self) -> int:
        """Rows ever committed, or since the counts were last reset."""
        return self.ring.inserts - self._reset_inserts

    def is_live(self, rows: Rows | slice) -> NDArray[np.bool_]:
        """Returns which of these rows may be read; including rows that are being written."""
        return self._live.contains(rows)

    def check_live(self, rows: Rows) -> None:
        """Raises SelectionError unless all of these are numbers of live rows."""
        self.check_numbers(rows)
        is_live = self._live.contains(rows)
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
        self._refuse_others(rows, self._is_same(rows, generations))

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

    def _is_same(self, rows: Rows, generations: NDArray[np.uint32] | None) -> NDArray[np.bool_]:
        if generations is None:
            return np.ones(len(rows), np.bool_)
        return np.asarray(self.ring.get_row_ids(rows).astype(np.uint32) == generations)

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
        if self._evictor is not None:
            self._evictor.remove(rows)
        return rows

    def show(self, rows: Rows, keys: Sequence[int]) -> None:
        """Ends :meth:`Ring.hide`: these leaves of the rows are written; for rows that have left in the meantime,
        nothing is."""
        self.selectors.note_written(rows[self.ring.is_held(rows)], keys)  # first: an even row must show this
        self._permit_readers()
        self.ring.show(rows)

    def show_untouched(self, rows: Rows) -> None:
        """Ends :meth:`Ring.hide` of rows of which nothing was written; for those that have left in the meantime, it
        does nothing."""
        self._permit_readers()
        self.ring.show(rows, num_parts=0)

    def let_go(self, rows: Rows) -> None:
        """Ends :meth:`hold`: samples may have those of the rows that have not left."""
        self._enter(self.ring.let_go(rows))

    def remove(self, rows: Rows) -> None:
        """Removes live rows, each named once, from the table; the next writers get them. A write to one of them that is
        under way may finish."""
        if self.claims:
            self.take_back_claims()
            rows = self._live.select_members(rows)  # others were claimed at this moment
        self._leave(rows)
        self.ring.free(rows)

    def take_back_claims(self) -> None:
        """Ends the claims of writers: before generations change, or the rules of who may write."""
        for claim in tuple(self.claims):
            claim.take_back()

    def claim(self, num_rows: int) -> Reservation:
        """Like :meth:`Ring.claim`. The rows are left out of every sample from now on."""
        rows = self.ring.get_next_rows(num_rows)
        return self._leave_evicted(self.ring.claim(rows, self._live.select_members(rows)))

    def claim_promised(self, rows: Rows) -> Reservation:
        """Like :meth:`Ring.claim_promised`, and as :meth:`claim`."""
        return self._leave_evicted(self.ring.claim_promised(rows, self._live.select_members(rows)))

    def _leave_evicted(self, reservation: Reservation) -> Reservation:
        if len(reservation.evicted):
            self._leave(reservation.evicted)
        return reservation

    def close(self) -> None:
        """Closes the table: it accepts no more rows; those that are here can still be taken."""
        self.take_back_claims()
        self.is_closed = True

    def set_limiter(self, limiter: Limiter) -> None:
        """Replaces the limiter.

        Raises:
            InvalidRequestError: It could never let any row through. Nothing was changed.
        """
        self._change_settings(self.settings.with_limiter(limiter))

    def set_sampler(self, sampler: Sampler) -> None:
        """Replaces parameters of the sampler.

        Raises:
            InvalidRequestError: It is another sampler, or has a parameter that cannot change. Nothing was changed.
        """
        self._change_settings(self.settings.with_sampler(sampler))
        self.selectors.set_sampler(self.settings)

    def _change_settings(self, settings: Settings) -> None:
        settings.check(self.ring.capacity)
        self.take_back_claims()
        self.settings = settings
        self._permit_readers()
        self._changed_settings = settings.to_json()

    def info(self) -> dict[str, int | str]:
        """Returns figures for users and statistics."""
        return {
            "num_rows": len(self),
            "capacity": self.ring.capacity,
            "num_held": self.ring.num_held,
            "num_reserved": self.ring.num_reserved,
            "num_holes": self.ring.num_holes,
            "num_leased": self.selectors.leases.num_leased,
            "cursor": self.ring.cursor,
            "inserts": self.inserts,
            "samples": self.num_samples,
            "settings": self.settings.to_json(),
        }

    def get_state(self) -> dict[str, Any]:
        """Returns the state that generations and columns do not have and that :meth:`restore` needs."""
        inserts, samples = self._cleared
        changed: dict[str, Any] = {"settings": self._changed_settings} if self._changed_settings else {}
        staleness = self.selectors.staleness
        if staleness is not None:
            changed |= staleness.get_state()
        return {
            **self.ring.get_state(),
            **changed,
            "inserts": self.ring.inserts + self.num_coming,
            "last_sequence": self.order.last_sequence,
            **({"arriving": self._arriving} if self._arriving else {}),
            **({"runs": self.draws.horizons} if self.draws.horizons else {}),
            "samples": self.shared.num_sampled,
            "cleared_inserts": inserts,
            "cleared_samples": samples,
            "reset_inserts": self._reset_inserts,
            "highest_priority": self._highest,
            "is_closed": self.is_closed,
            "consumers": self.selectors.consumers,
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
        if self.selectors.is_plain and self.columns.trajectories is None and self._evictor is None:
            return PIECE_ROWS
        has_ids = bool(self.settings.sampler.trajectory_keys) and not self.settings.sampler.marks_ends
        is_slow = has_ids or self._evictor is not None
        return max((TREE_PIECE_ROWS if is_slow else PIECE_ROWS // 4) // len(self.selectors), 64)

    def _enter(self, rows: Rows) -> None:
        self.selectors.enter(rows)
        if self._evictor is not None:
            self._evictor.add(rows[~self.ring.pins.contains(rows)] if self.ring.pins else rows)

    def _leave(self, rows: Rows) -> None:
        self._live.remove(rows)
        self.selectors.leave(rows)
        if self._evictor is not None:
            self._evictor.remove(rows)
        if self.columns.trajectories is not None:
            self.columns.trajectories.remove(rows)
