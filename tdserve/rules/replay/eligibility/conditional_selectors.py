"""Decides which rows a sample may draw: one selector for each combination of conditions that samples have requested.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import NO_ROWS, PIECE_ROWS, RUN_PIECE_ROWS, TREE_PIECE_ROWS, Rows
from tdserve.rules.replay.eligibility.conditions import OWN, PLAIN, SampleConditions
from tdserve.rules.replay.eligibility.consumers import Consumers
from tdserve.rules.replay.eligibility.group_selector import GroupSelector
from tdserve.rules.replay.eligibility.leases import Leases
from tdserve.rules.replay.eligibility.staleness import Staleness
from tdserve.rules.replay.eligibility.written_keys import WrittenKeys
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.row_mask import RowMask, SuspendedRows
from tdserve.rules.replay.samplers.selector import Selector
from tdserve.rules.replay.settings import Settings

MAX_SELECTORS = 32
"""Most selectors of one table; the least recently used is dropped, and rebuilt when it is requested."""

MAX_LOOKED_AT = 32_768
"""Most rows in which missing leaves are counted for an error: that takes a millisecond."""

MAX_NAMED = 4
"""Most leaves that an error names."""

GROWING_ROWS = TREE_PIECE_ROWS
"""Rows that are added to a selector at a time while others are served in between; groups take longest, a few ms."""


@dataclass(eq=False)
class _Growing:
    """A selector to which rows are added a piece at a time.

    Attributes:
        end: Rows from this number on were not visited yet: they are not its members, whatever becomes of them.
    """

    conditions: SampleConditions
    selector: Selector
    end: int = 0


class ConditionalSelectors:
    """The selectors of one table, and the conditions of their members.

    Args:
        settings: Settings of the table.
        columns: Columns of the table.
        num_keys: Leaves per row.
        consumers: Names of the consumers that have had rows, in the order of their bits.
        has_partial_rows: Whether rows may lack leaves.
        staleness: Versions of the rows, if the table has a policy.

    Attributes:
        consumers: What each of them has had.
        suspended: Rows that were members, and come back unless they leave.
        dropped: Selectors that are not needed any more: the caller frees them.
    """

    def __init__(
        self,
        settings: Settings,
        columns: RowColumns,
        *,
        num_keys: int,
        consumers: Sequence[str] = (),
        has_partial_rows: bool = False,
        staleness: Staleness | None = None,
    ) -> None:
        self.staleness = staleness
        self._settings = settings
        self._columns = columns
        self._num_keys = num_keys
        self.consumers = Consumers(columns, consumers or settings.consumers, leaving=settings.consumers)
        self._written = WrittenKeys(columns, num_keys) if has_partial_rows else None
        self.leases = Leases(columns.capacity)
        self._members = RowMask(columns.capacity)  # rows that any selector may have
        self.suspended = SuspendedRows(columns.capacity)
        self._selectors: OrderedDict[SampleConditions, Selector] = OrderedDict()
        self._growing: _Growing | None = None
        # Of selectors with members that are too old, the version from which on they may have some.
        self._oldest: dict[SampleConditions, int] = {}
        self._completable: dict[SampleConditions, int] = {}  # a piece of rows of which one lacks only leaves
        self.dropped: list[Selector] = []
        self._num_incomplete = 0  # members
        self._plain = self._selectors[PLAIN] = settings.sampler.make_selector(columns, columns.capacity)

    def __len__(self) -> int:
        """Returns the number of selectors."""
        return len(self._selectors)

    @property
    def has_partial_rows(self) -> bool:
        """Whether any row was ever written in part."""
        return self._written is not None

    @property
    def is_plain(self) -> bool:
        """Whether no sample has requested conditions."""
        return len(self._selectors) == 1 and self._growing is None

    @property
    def num_incomplete(self) -> int:
        """Rows that lack leaves, also while they are suspended."""
        return self._num_incomplete + self._count_incomplete(self.suspended.get_rows() if self.suspended else NO_ROWS)

    @property
    def longest_slice(self) -> int:
        """Returns the rows of the longest slices that are drawn; 1 if none are."""
        return max(selector.longest_slice for selector in self._selectors.values())

    def describe_missing(
        self, conditions: SampleConditions, names: Sequence[str], *, max_rows: int = MAX_LOOKED_AT
    ) -> str:
        """Returns which leaves that a sample requires are missing in how many rows; "" if none is.

        Args:
            names: Names of the leaves, by their numbers.
            max_rows: Most rows that are looked at.
        """
        if self._written is None or conditions.require == ():
            return ""
        rows = self._members.get_first_rows(max_rows)
        counts = self._written.count_missing(rows)
        wanted = range(self._num_keys) if conditions.require is None else conditions.require
        missing = sorted((number for number in wanted if counts[number]), key=lambda number: -counts[number])
        parts = [f"{names[number]} is missing in {counts[number]}" for number in missing[:MAX_NAMED]]
        if len(missing) > MAX_NAMED:
            num_others = len(missing) - MAX_NAMED
            parts.append("1 more leaf in others" if num_others == 1 else f"{num_others} more leaves in others")
        if parts and len(rows) == max_rows:
            parts.append(f"of {len(rows)} that were looked at")
        return ", ".join(parts)

    def set_sampler(self, settings: Settings) -> None:
        """Draws by these settings from now on, whose sampler has other parameters."""
        self._settings = settings
        for selector in self._selectors.values():
            selector.set_sampler(settings.sampler)
        if self._growing is not None:
            self._growing.selector.set_sampler(settings.sampler)

    def arrive(self, rows: Rows, keys: Sequence[int] | None) -> None:
        """Records the data of rows before they are committed.

        Args:
            keys: Numbers of the leaves that were written; None: all.
        """
        if keys is not None and self._written is None:
            self._written = WrittenKeys(self._columns, self._num_keys)
            self._written.mark_all()  # members or not: held rows come back
        if self._written is not None:
            self._written.reset(rows, keys)
        self.consumers.reset(rows)

    def enter(self, rows: Rows) -> None:
        """Adds rows: they may be drawn now."""
        self._members.add(rows)
        self.suspended.remove(rows)
        self._num_incomplete += self._count_incomplete(rows)
        if self.staleness is not None:
            self.staleness.enter(rows)
        self._add(rows)

    def leave(self, rows: Rows) -> None:
        """Removes rows, each named once: they may not be drawn any more. Rows that already may not are ignored."""
        if self.leases.num_leased:
            self.leases.forget(rows)
        self.suspended.remove(rows)
        self._remove(rows)

    def update(self, rows: Rows) -> None:
        """Notes that the priorities of rows have changed."""
        for _, selector, _ in self._iter_selectors(rows):
            selector.update(rows)

    def suspend(self, rows: Rows) -> None:
        """Suspends rows: they may not be drawn until they :meth:`enter` again. Leases of them continue, and they count
        as before."""
        self.suspended.add(self._remove(rows))

    def _remove(self, rows: Rows) -> Rows:
        """Removes those of the rows that are members, and returns them."""
        rows = self._members.select_members(rows)
        self._members.remove(rows)
        self._num_incomplete -= self._count_incomplete(rows)
        if self.staleness is not None:
            self.staleness.leave(rows)
        for _, selector, _ in self._iter_selectors(rows):
            selector.remove(rows)
        return rows

    def _count_incomplete(self, rows: Rows) -> int:
        if self._written is None or not len(rows):
            return 0
        return len(rows) - int(np.count_nonzero(self._written.has(rows, range(self._num_keys))))

    def note_written(self, rows: Rows, keys: Sequence[int]) -> None:
        """Notes that these leaves of live rows were written."""
        if self._written is not None and len(keys):
            self._written.mark(rows, keys)

    def lack_all(self, rows: Rows, keys: Sequence[int]) -> NDArray[np.bool_]:
        """Returns which rows have none of these leaves."""
        if self._written is None:
            return np.zeros(len(rows), np.bool_)
        return ~self._written.has_any(rows, keys)

    def contains(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of these rows a sample might draw."""
        return self._members.contains(rows)

    def get(self, conditions: SampleConditions) -> Selector:
        """Returns the selector of some conditions, made when it is first requested.

        Raises:
            CapacityError: There are too many consumers.
        """
        if conditions is PLAIN or conditions == PLAIN:
            return self._plain
        selector = self._selectors.get(conditions)
        if selector is None:
            list(self.consumers.learn(conditions.consumer))  # at once
            selector = self.make(conditions)
            selector.add(self.find_members(conditions))
            self._keep(conditions, selector)
        elif conditions in self._oldest:
            self._shed_all(conditions)
        self._selectors.move_to_end(conditions)
        return selector

    def find_members(self, conditions: SampleConditions) -> Rows:
        """Returns the rows that a sample may draw, which costs a pass over the table."""
        rows = self._find_candidates(conditions)
        return rows[self._is_eligible(conditions, rows)]

    def has(self, conditions: SampleConditions, num_rows: int = 0) -> bool:
        """Returns whether :meth:`get` has the selector ready, and it can draw a sample of this many rows at once."""
        selector = self._selectors.get(conditions)
        if selector is None or conditions in self._oldest:
            return False
        return not (num_rows and selector.is_unprepared(num_rows))

    def may_complete(self, conditions: SampleConditions) -> bool:
        """Returns whether rows lack only leaves to be drawn under some conditions: they may get these yet."""
        if self._written is None or not self._num_incomplete or conditions.require == ():
            return False
        starts = range(0, self._columns.capacity, RUN_PIECE_ROWS)
        if len(self._completable) > MAX_SELECTORS:
            self._completable.clear()
        found = self._completable.pop(conditions, 0)  # where there was one: usually there still is
        for start in (*starts[found:], *starts[:found]):
            rows = self._members.get_rows_of(range(start, start + RUN_PIECE_ROWS))
            rows = rows[~self._is_eligible(conditions, rows)]
            if self._is_eligible(conditions._replace(require=()), rows).any():
                self._completable[conditions] = start // RUN_PIECE_ROWS
                return True
        return False

    def grow_in_pieces(
        self, conditions: SampleConditions, selector: Selector, *, piece_rows: int = GROWING_ROWS
    ) -> Generator[None]:
        """Adds the rows of some conditions to their selector, a piece at a time; then :meth:`get` has it.

        Rows come, go and change meanwhile. Rows below ``_Growing.end`` get every later change; rows above it are read
        when their turn comes. Only one selector grows at a time. If the policy changes meanwhile, it is dropped, and
        :meth:`get` makes it.

        Args:
            conditions: Conditions of its samples.
            selector: From :meth:`make`.
            piece_rows: Rows that are visited in one step.

        Raises:
            CapacityError: There are too many consumers.
        """
        yield from self.consumers.learn(conditions.consumer)
        selector.set_sampler(self._settings.sampler)  # it may have changed since the selector was made
        growing = self._growing = _Growing(conditions, selector)
        try:
            for start in range(0, self._columns.capacity, piece_rows):
                if self._growing is not growing:
                    return
                rows = self._members.get_rows_of(range(start, start + piece_rows))
                rows = rows[self._is_eligible(conditions, rows)]
                if len(rows):
                    selector.add(rows)
                growing.end = start + piece_rows
                if len(rows) or not start % RUN_PIECE_ROWS:
                    yield
            self.dropped += self._keep(conditions, selector)
        finally:
            if self._growing is growing:
                self._growing = None

    def _keep(self, conditions: SampleConditions, selector: Selector) -> list[Selector]:
        """Takes a selector over; returns those that were dropped for it."""
        self._selectors[conditions] = selector
        if len(self._selectors) <= MAX_SELECTORS:
            return []
        oldest = next(each for each in self._selectors if each not in (PLAIN, conditions))
        self._oldest.pop(oldest, None)
        return [self._selectors.pop(oldest)]

    def follow(self, uid: str, newest: int, former: int = 0) -> None:
        """Takes over the newest version of the table's policy: rows that are too old now may not be drawn.

        Very many rows stay members until :meth:`shed_in_pieces`, and :meth:`has` denies their selector. Of another
        policy, all selectors that a lag limits are dropped. Arguments as in :meth:`Staleness.follow`.
        """
        staleness = self.staleness
        if staleness is None or (staleness.uid, staleness.newest) == (uid, newest):
            return
        limited = [conditions for conditions, _, _ in self._iter_selectors(NO_ROWS) if conditions.max_lag is not None]
        lows = [staleness.compute_floor(conditions.max_lag or 0) for conditions in limited]
        if staleness.follow(uid, newest, former):
            self.dropped += [self._selectors.pop(conditions) for conditions in limited if conditions in self._selectors]
            self._oldest.clear()
            if self._growing is not None and self._growing.conditions.max_lag is not None:
                self._growing = None
            return
        for conditions, low in zip(limited, lows, strict=True):
            num_rows = staleness.count(low, staleness.compute_floor(conditions.max_lag or 0))
            if num_rows:
                self._oldest.setdefault(conditions, low)
            if num_rows <= GROWING_ROWS and self._oldest.get(conditions) == low and conditions in self._selectors:
                self._shed_all(conditions)

    def shed_in_pieces(self, conditions: SampleConditions) -> Iterator[None]:
        """Removes the rows that have become too old for these conditions, a piece at a time; other calls may do
        anything in between."""
        while self.staleness is not None and conditions in self._oldest and conditions in self._selectors:
            low, high = self._oldest[conditions], self.staleness.compute_floor(conditions.max_lag or 0)
            if low >= high:
                del self._oldest[conditions]
                return
            for rows in self.staleness.iter_pieces(low, high, piece_rows=GROWING_ROWS):
                if conditions not in self._selectors:
                    return
                self._selectors[conditions].remove(rows)
                yield
            if conditions in self._oldest:
                self._oldest[conditions] = high

    def _shed_all(self, conditions: SampleConditions) -> None:
        for _ in self.shed_in_pieces(conditions):
            pass

    def lease(self, owner: int, consumer: str, rows: Rows, *, request: int = 0) -> None:
        """Grants rows to an owner, in answer to a request of it: this consumer does not get them again."""
        self.leases.grant(owner, rows, consumer, request=request)
        self._drop_of(consumer, rows)

    def acknowledge(self, owner: int, consumer: str, rows: Rows) -> None:
        """Marks rows, each named once, as acknowledged by a consumer, and ends this owner's leases of them."""
        self.leases.take(owner, rows[self.leases.find_held(owner, rows, consumer)], consumer)
        self.consume(consumer, rows)

    def consume(self, consumer: str, rows: Rows) -> None:
        """Marks rows, each named once, as acknowledged by a consumer without a lease."""
        self.consumers.record(consumer, rows)
        self._drop_of(consumer, rows)

    def count_backlog(self) -> dict[str, int]:
        """Returns how many rows each consumer has not had yet after which rows leave the table, also while they are
        suspended."""

        def contains(piece: slice) -> NDArray[np.bool_]:
            is_member = self._members.contains(piece)
            return is_member | self.suspended.contains(piece) if self.suspended else is_member

        return self.consumers.count_backlog(contains)

    def give_back(self, owner: int, consumer: str, rows: Rows) -> None:
        """Gives rows of the owner's lease back.

        Raises:
            WrongStateError: It does not hold all of them. Nothing was changed.
        """
        self._return_to(consumer, self.leases.take(owner, rows, consumer))

    def release_in_pieces(self, owner: int, *, request: int = 0) -> Iterator[int]:
        """Gives back all that an owner still holds, or what it was granted for one request, a piece at a time; other
        calls may do anything in between. Yields the number of rows per piece."""
        for consumer, rows in self.leases.release_in_pieces(owner, piece_rows=PIECE_ROWS // 4, request=request):
            self._return_to(consumer, rows)
            yield len(rows)

    def release_over_in_pieces(self, now_s: float) -> Iterator[int]:
        """Gives back the rows of leases whose time is over, as :meth:`release_in_pieces`; between two pieces no caller
        may acknowledge or renew any."""
        for consumer, rows in self.leases.release_over_in_pieces(now_s, piece_rows=PIECE_ROWS // 4):
            self._return_to(consumer, rows)
            yield len(rows)

    def _iter_selectors(self, rows: Rows) -> Iterator[tuple[SampleConditions, Selector, Rows]]:
        """Yields the selectors, and which of these rows each of them has visited."""
        for conditions, selector in self._selectors.items():
            yield conditions, selector, rows
        if self._growing is not None:
            yield self._growing.conditions, self._growing.selector, rows[rows < self._growing.end]

    def _add(self, rows: Rows) -> None:
        for conditions, selector, seen in self._iter_selectors(rows):
            is_plain = conditions == PLAIN and self._written is None and not self.leases.num_leased
            chosen = seen if is_plain else seen[self._is_eligible(conditions, seen)]
            if len(chosen):
                selector.add(chosen)

    def _return_to(self, consumer: str, rows: Rows) -> None:
        rows = self._members.select_members(rows)
        for conditions, selector, seen in self._iter_selectors(rows):
            if conditions.consumer == consumer:
                selector.add(seen[self._is_eligible(conditions, seen)])

    def _drop_of(self, consumer: str, rows: Rows) -> None:
        for conditions, selector, _ in self._iter_selectors(rows):
            if conditions.consumer == consumer:
                selector.remove(rows)

    def _is_eligible(self, conditions: SampleConditions, rows: Rows) -> NDArray[np.bool_]:
        fits = np.ones(len(rows), np.bool_)
        if conditions.require != () and self._written is not None:
            fits &= self._written.has(rows, range(self._num_keys) if conditions.require is None else conditions.require)
        if conditions.consumer != OWN:
            fits &= self.consumers.have_not_had(conditions.consumer, rows)
        if conditions.max_lag is not None and self.staleness is not None:
            fits &= self.staleness.is_fresh(rows, conditions.max_lag)
        if self.leases.num_leased:
            fits &= ~self.leases.is_leased(rows, conditions.consumer)
        return fits

    def _find_candidates(self, conditions: SampleConditions) -> Rows:
        if conditions.max_lag is None or self.staleness is None:
            return self._members.get_rows()
        return self.staleness.find_between(self.staleness.compute_floor(conditions.max_lag))

    def make(self, conditions: SampleConditions) -> Selector:
        """Returns an empty selector, and makes the columns that its conditions read; for very many rows, call it in a
        thread."""
        if conditions.consumer != OWN:
            self.consumers.prepare()
        if conditions.group:
            ids = self._columns.get_array(conditions.group, np.int64)
            return GroupSelector(self._columns, ids, conditions.group_size)
        return self._settings.sampler.make_selector(self._columns, self._columns.capacity)
