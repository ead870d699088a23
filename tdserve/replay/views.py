"""Which rows a sample may draw: one selector for each combination of conditions that somebody has asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.errors import CapacityError
from tdserve.replay.columns import Columns
from tdserve.replay.groups import GroupSelector
from tdserve.replay.leases import Leases
from tdserve.replay.live_rows import LiveRows, Rows
from tdserve.replay.selector import Selector
from tdserve.replay.settings import Settings
from tdserve.replay.staleness import Staleness
from tdserve.replay.written import Written

MAX_VIEWS = 32
"""Selectors of one table; the one that was not used for longest is dropped, and built again when it is asked for."""

MAX_CONSUMERS = 64
"""Of one table: one bit of a number per row for each."""

OWN = ""
"""The consumer of calls that name none: what it acknowledges leaves the table."""


class ViewKey(NamedTuple):
    """The conditions of a sample.

    Attributes:
        require: Numbers of the leaves that must have been written; None: all of a row.
        consumer: Rows that it has had, or that it holds on lease, are left out.
        group: Name of the column by whose values rows are grouped; "": the table's sampler draws.
        group_size: Rows of a whole group.
        max_lag: Only rows at most so many versions of the table's policy old; None: of any age.
    """

    require: tuple[int, ...] | None = None
    consumer: str = OWN
    group: str = ""
    group_size: int = 0
    max_lag: int | None = None

    def describe(self, *, has_partial_rows: bool = True) -> str:
        """What keeps rows out, for the error of a sample that waited for them.

        Args:
            has_partial_rows: Whether rows of the table may lack leaves.
        """
        told = []
        if self.group:
            told.append(f"are in whole groups of {self.group_size}")
        if self.require or (self.require is None and has_partial_rows):
            told.append("have all required keys" if self.require else "are whole")
        if self.consumer != OWN:
            told.append(f"consumer {self.consumer!r} has not had")
        if self.max_lag is not None:
            told.append(f"are at most {self.max_lag} versions old")
        return "too few " + (" and ".join(told) or "can be drawn now")


PLAIN = ViewKey()


class Views:
    """The selectors of one table, and what decides which rows are their members.

    Args:
        settings: Of the table.
        columns: Of the table.
        num_keys: Leaves of a row.
        consumers: Names of those that have had rows, in the order of their bits.
        has_partial_rows: Whether rows may lack leaves.
        staleness: Versions of the rows, where the table has a policy.
    """

    def __init__(
        self,
        settings: Settings,
        columns: Columns,
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
        self.consumers = list(consumers)
        self._written = Written(columns, num_keys) if has_partial_rows else None
        self.leases = Leases()
        self._members = LiveRows(columns.capacity)  # what any view may have
        self._selectors: OrderedDict[ViewKey, Selector] = OrderedDict()
        self._plain = self._selectors[PLAIN] = settings.sampler.selector(columns, columns.capacity)

    @property
    def has_partial_rows(self) -> bool:
        """Whether some row was ever written in part."""
        return self._written is not None

    def arrive(self, rows: Rows, keys: Sequence[int] | None) -> None:
        """Writes down what is known of rows before they are committed.

        Args:
            keys: Numbers of the leaves that were written; None: all.
        """
        if keys is not None and self._written is None:
            self._written = Written(self._columns, self._num_keys)
            self._written.reset(np.arange(self._columns.capacity), None)  # members or not: who is held comes back
        if self._written is not None:
            self._written.reset(rows, keys)
        if self.consumers:
            self._consumed[rows] = 0

    def enter(self, rows: Rows) -> None:
        """Rows may be drawn now."""
        self._members.add(rows)
        if self.staleness is not None:
            self.staleness.enter(rows)
        self._add(rows)

    def leave(self, rows: Rows) -> None:
        """Rows, each named once, may not be drawn any more; those that may not already are ignored."""
        if self.leases.num_leased:
            self.leases.forget(rows)
        self.suspend(rows)

    def update(self, rows: Rows) -> None:
        """The priorities of rows have changed."""
        for selector in self._selectors.values():
            selector.update(rows)

    def suspend(self, rows: Rows) -> None:
        """Rows may not be drawn for a while; whoever holds them on lease keeps them."""
        rows = rows[self._members.contains(rows)]
        self._members.remove(rows)
        if self.staleness is not None:
            self.staleness.leave(rows)
        for selector in self._selectors.values():
            selector.remove(rows)

    def resume(self, rows: Rows, keys: Sequence[int]) -> None:
        """Ends :meth:`suspend`: these leaves of the rows were written meanwhile."""
        if self._written is not None and len(keys):
            self._written.mark(rows, keys)
        self.enter(rows)

    def get(self, key: ViewKey) -> Selector:
        """The selector of some conditions, made when it is first asked for.

        Raises:
            CapacityError: There are too many consumers.
        """
        if key is PLAIN or key == PLAIN:
            return self._plain
        selector = self._selectors.get(key)
        if selector is None:
            self._learn_consumer(key.consumer)
            selector = self._selectors[key] = self._make(key)
            rows = self._candidates(key)
            selector.add(rows[self._fits(key, rows)])
            if len(self._selectors) > MAX_VIEWS:
                del self._selectors[next(each for each in self._selectors if each not in (PLAIN, key))]
        self._selectors.move_to_end(key)
        return selector

    def follow(self, uid: str, newest: int) -> None:
        """Takes over which version of the table's policy is the newest: rows that are too old now may not be drawn.

        Costs no more than the rows that become too old, nor, but for a sampler that remembers what it gave, than those
        that do not. Arguments as of :meth:`Staleness.follow`.
        """
        staleness = self.staleness
        if staleness is None or (staleness.uid, staleness.newest) == (uid, newest):
            return
        lags = [key.max_lag for key in self._selectors if key.max_lag is not None]
        before = {max_lag: staleness.floor(max_lag) for max_lag in lags}
        is_other = staleness.follow(uid, newest)
        for key, selector in list(self._selectors.items()):
            if key.max_lag is None:
                continue
            low, high = before[key.max_lag], staleness.floor(key.max_lag)
            if not is_other and not staleness.count(low, high):
                continue
            remembers = self._settings.sampler.kind == "without_replacement" and not key.group
            if is_other or (not remembers and staleness.count(low, high) > staleness.count(high)):
                del self._selectors[key]  # built again, of those that are left, when it is asked for
            else:
                selector.remove(staleness.between(low, high))

    def lease(self, owner: int, consumer: str, rows: Rows) -> None:
        """Hands rows to an owner: this consumer sees them no more."""
        self.leases.grant(owner, rows, consumer)
        self._drop_of(consumer, rows)

    def acknowledge(self, owner: int, consumer: str, rows: Rows) -> Rows:
        """The owner is done with rows of its lease, each named once; returns those that leave the table for good.

        Rows of a named consumer that were overwritten since are ignored, as long as it holds any.

        Raises:
            WrongStateError: It does not hold all of them. Nothing was changed.
        """
        if consumer != OWN:
            held = rows[self.leases.held_by(owner, rows, consumer)]
            rows = held if len(held) else rows
        rows = self.leases.take(owner, rows, consumer)
        if consumer == OWN:
            return rows
        self._consumed[rows] |= self._bit(consumer)
        return rows[:0]

    def give_back(self, owner: int, consumer: str, rows: Rows) -> None:
        """The owner will not use rows of its lease.

        Raises:
            WrongStateError: It does not hold all of them. Nothing was changed.
        """
        self._return_to(consumer, self.leases.take(owner, rows, consumer))

    def release(self, owner: int) -> bool:
        """All that an owner still holds goes back; returns whether that was anything."""
        returned = self.leases.release(owner)
        for consumer, rows in returned:
            self._return_to(consumer, rows)
        return bool(returned)

    def _add(self, rows: Rows) -> None:
        for key, selector in self._selectors.items():
            is_plain = key == PLAIN and self._written is None and not self.leases.num_leased
            chosen = rows if is_plain else rows[self._fits(key, rows)]
            if len(chosen):
                selector.add(chosen)

    def _return_to(self, consumer: str, rows: Rows) -> None:
        rows = rows[self._members.contains(rows)]
        for key, selector in self._selectors.items():
            if key.consumer == consumer:
                selector.add(rows[self._fits(key, rows)])

    def _drop_of(self, consumer: str, rows: Rows) -> None:
        for key, selector in self._selectors.items():
            if key.consumer == consumer:
                selector.remove(rows)

    def _fits(self, key: ViewKey, rows: Rows) -> NDArray[np.bool_]:
        fits = np.ones(len(rows), np.bool_)
        if key.require != () and self._written is not None:
            fits &= self._written.has(rows, range(self._num_keys) if key.require is None else key.require)
        if key.consumer != OWN:
            fits &= (self._consumed[rows] & self._bit(key.consumer)) == 0
        if key.max_lag is not None and self.staleness is not None:
            fits &= self.staleness.fits(rows, key.max_lag)
        if self.leases.num_leased:
            fits &= ~self.leases.holds(rows, key.consumer)
        return fits

    def _candidates(self, key: ViewKey) -> Rows:
        if key.max_lag is None or self.staleness is None:
            return self._members.rows()
        return self.staleness.between(self.staleness.floor(key.max_lag))

    def _make(self, key: ViewKey) -> Selector:
        if key.group:
            ids = self._columns.array(key.group, np.int64)
            return GroupSelector(self._columns, ids, key.group_size)
        return self._settings.sampler.selector(self._columns, self._columns.capacity)

    @property
    def _consumed(self) -> NDArray[np.uint64]:
        return self._columns.array("consumed", np.uint64)

    def _bit(self, consumer: str) -> NDArray[np.uint64]:
        return np.asarray(1 << self.consumers.index(consumer), np.uint64)

    def _learn_consumer(self, consumer: str) -> None:
        if consumer == OWN or consumer in self.consumers:
            return
        if len(self.consumers) >= MAX_CONSUMERS:
            raise CapacityError(what=f"consumer {consumer!r} of one table", asked=len(self.consumers) + 1, free=0)
        self.consumers.append(consumer)
        self._consumed[:] &= ~self._bit(consumer)  # left by one whose record a crash has cut off
