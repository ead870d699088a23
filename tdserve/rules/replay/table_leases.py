"""Rows of a table on lease: their owners acknowledge them, keep them for longer, or give them back.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import WrongStateError
from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.rules.replay.eligibility.conditions import OWN
from tdserve.rules.replay.eligibility.leases import ACKNOWLEDGING, RENEWING, make_not_held_error
from tdserve.rules.replay.table_state import TableState


class TableLeases:
    """Decides about rows of a table that their owners hold on lease.

    Args:
        state: State of the table, which its parts share.
    """

    def __init__(self, state: TableState) -> None:
        self._state = state

    def find_acknowledged_in_parts(
        self,
        owner: int,
        consumer: str,
        rows: Rows,
        generations: NDArray[np.uint32] | None,
        *,
        request: int = 0,
        event: str = ACKNOWLEDGING,
    ) -> Iterator[Rows]:
        """Yields the rows of an owner's lease among these, a part at a time: those that it may acknowledge. Between two
        parts rows may come and go, but the owner may not give any back, and no lease whose time is over may end.

        Args:
            generations: Lower halves, as in the lease: a row that has another one now is not the row that was leased.
            request: As in ``Leases.find_held``.
            event: What the owner does with them, for errors.

        Raises:
            WrongStateError: After the last part: it does not hold all of them (of a named consumer: any of them).
        """
        state = self._state
        num_same = num_held = 0
        for same in state.iter_same_rows(rows, generations):
            is_held = state.selectors.leases.find_held(owner, same, consumer, request=request)
            num_same += len(same)
            num_held += int(np.count_nonzero(is_held))
            yield same[is_held]
        was_over = request > 0 and state.selectors.leases.was_over(owner, request)
        if consumer == OWN and num_same < len(rows):
            why = "after their lease had ended" if was_over else "perhaps acknowledged before"
            gone = f"{len(rows) - num_same} of these {len(rows)} rows have left the table, {why}"
            raise WrongStateError(state=gone, event=event)
        if not num_same:
            ended = ", and their lease has ended" if was_over else ""
            raise WrongStateError(state=f"none of these rows is held{ended}", event=event)
        if num_held < (num_same if consumer == OWN else 1):
            raise make_not_held_error(num_same - num_held, num_same, event=event, was_over=was_over)

    def renew_in_parts(
        self,
        owner: int,
        consumer: str,
        rows: Rows,
        generations: NDArray[np.uint32] | None,
        end_s: float,
        *,
        request: int = 0,
    ) -> Iterator[int]:
        """Has the leases of these rows end at another time, a part at a time, and yields how many rows each part has;
        arguments and errors as in :meth:`find_acknowledged_in_parts`. In an error nothing was changed."""
        state = self._state
        for _ in self.find_acknowledged_in_parts(owner, consumer, rows, generations, request=request, event=RENEWING):
            yield 0
        for same in state.iter_same_rows(rows, generations):
            held = same[state.selectors.leases.find_held(owner, same, consumer, request=request)]
            state.selectors.leases.renew(owner, held, consumer, end_s)
            yield len(held)

    def give_back_in_parts(
        self,
        owner: int,
        consumer: str,
        rows: Rows,
        generations: NDArray[np.uint32] | None,
        *,
        request: int = 0,
        uncounts: bool = False,
    ) -> Iterator[int]:
        """Gives rows of an owner's lease back, a part at a time: they are available to others again. Rows that it does
        not hold (any more), such as overwritten ones, are ignored. Between two parts rows may come and go.

        Args:
            request: As in ``Leases.find_held``.
            uncounts: Whether they do not count as sampled any more.

        Raises:
            SelectionError: A number is not that of a row. Nothing was changed.
        """
        state = self._state
        for _ in state.iter_same_rows(rows, generations):
            yield 0
        for same in state.iter_same_rows(rows, generations):
            named = sort_unique(same)
            held = named[state.selectors.leases.find_held(owner, named, consumer, request=request)]
            state.selectors.give_back(owner, consumer, held)
            state.totals.uncount_samples(len(held) * uncounts)
            yield len(named)
