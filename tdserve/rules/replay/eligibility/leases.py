"""Leases: rows that were handed out and are not acknowledged yet. The table decides what becomes of them.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError, WrongStateError
from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.rules.replay.eligibility.lease_ends import LeaseEnds

_NONE = 0

ACKNOWLEDGING = "acknowledging rows"
"""What an owner does with its rows, for errors; another is:"""

RENEWING = "renewing the lease of rows"

MAX_REMEMBERED = 1024
"""Leases of which it is remembered that their time was over, for the error of an acknowledgement that comes then."""


@dataclass
class _Lease:
    """Rows of one grant, in parts; rows that were taken or forgotten since are still listed, ``num_left`` are held."""

    owner: int
    request: int
    consumer: str
    parts: list[Rows]
    num_left: int


class Leases:
    """Records which owner holds which rows, separately for each consumer: several consumers may hold a row, with one
    owner each.

    Every operation is vectorised over the rows; a row that is named twice in one call counts once. Memory: for each
    consumer, 8 bytes per row of those parts of the table of which it ever held rows.

    Args:
        capacity: Number of rows. Room for all of them costs nothing before it is used; growing arrays are copied.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._numbers: dict[str, Rows] = {}
        self._leases: dict[int, _Lease] = {}
        self._of_owner: dict[int, dict[int, None]] = {}
        self._of_request: dict[tuple[int, int], int] = {}
        self._last = _NONE
        self._num_leased: Counter[str] = Counter()
        self._ends = LeaseEnds()
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()  # owner and request of leases that were over

    def __repr__(self) -> str:
        return f"<Leases of {self.num_leased} rows to {len(self._of_owner)} owners>"

    @property
    def num_leased(self) -> int:
        """Number of held rows, counted once for each consumer."""
        return self._num_leased.total()

    @property
    def next_end_s(self) -> float:
        """When the time of the next lease is over; infinite if all last as long as their owner."""
        return self._ends.next_s

    def count_leased(self, consumer: str) -> int:
        """Returns the number of rows that are held for a consumer."""
        return self._num_leased[consumer]

    def grant(self, owner: int, rows: Rows, consumer: str, *, request: int = 0) -> int:
        """Grants a lease of rows.

        Args:
            owner: The session that is responsible for them.
            rows: Row numbers.
            consumer: The consumer that gets them; ``""`` if there are no consumers.
            request: The owner's request that they answer, a part at a time if they are very many; 0: none by which the
                lease could be released.

        Returns:
            Number of the lease, of all parts the same; numbers count from 1.

        Raises:
            LocalProtocolError: A row is already held for this consumer. Nothing was changed.
        """
        rows = sort_unique(rows)
        if self._find_numbers(consumer, rows).any():
            raise LocalProtocolError(reason="a row that is held was handed out again")
        number = self._of_request.get((owner, request), _NONE)
        if number == _NONE:
            number = self._last = self._last + 1
        if len(rows):
            self._make_room(consumer, int(rows[-1]) + 1)
            self._numbers[consumer][rows] = number
            lease = self._leases.setdefault(number, _Lease(owner, request, consumer, [], 0))
            lease.parts.append(rows)
            lease.num_left += len(rows)
            if request:
                self._of_request[owner, request] = number
            self._of_owner.setdefault(owner, {})[number] = None
            self._num_leased[consumer] += len(rows)
        return number

    def take(self, owner: int, rows: Rows, consumer: str) -> Rows:
        """Ends the leases of these rows, which this owner acknowledges or gives back.

        Returns:
            The rows, sorted, each once.

        Raises:
            WrongStateError: The owner does not hold all of them: it never did, has already ended their leases, or they
                were forgotten. The error has their number. Nothing was changed.
        """
        rows = sort_unique(rows)
        is_held = self.find_held(owner, rows, consumer)
        if not is_held.all():
            raise make_not_held_error(int(np.count_nonzero(~is_held)), len(rows))
        self._end(consumer, rows)
        return rows

    def set_end(self, owner: int, request: int, end_s: float) -> None:
        """Has the lease that was granted for a request end at a time, if it is not over yet."""
        number = self._of_request.get((owner, request))
        if number is not None:
            self._ends.set(number, end_s)

    def renew(self, owner: int, rows: Rows, consumer: str, end_s: float) -> None:
        """Has the leases end at another time by which this owner holds some of these rows: each as a whole, with rows
        that are not named."""
        mine = self._of_owner.get(owner, {})
        for number in np.unique(self._find_numbers(consumer, rows)).tolist():
            if number in mine:
                self._ends.set(number, end_s)

    def release_over_in_pieces(self, now_s: float, *, piece_rows: int) -> Iterator[tuple[str, Rows]]:
        """Ends the leases whose time is over, a piece at a time; between two pieces no caller may acknowledge or renew
        any, and other calls may do anything.

        Args:
            now_s: The time; leases that end at it are over.
            piece_rows: As in ``release_in_pieces``, which yields the same.
        """
        while (number := self._ends.take_over(now_s)) is not None:
            lease = self._leases[number]
            self._over[lease.owner, lease.request] = None
            if len(self._over) > MAX_REMEMBERED:
                self._over.popitem(last=False)
            yield from self._release(number, piece_rows)

    def was_over(self, owner: int, request: int) -> bool:
        """Returns whether the lease of this request has ended because its time was over, as far as that is
        remembered."""
        return (owner, request) in self._over

    def release_in_pieces(self, owner: int, *, piece_rows: int, request: int = 0) -> Iterator[tuple[str, Rows]]:
        """Ends all leases of an owner that went away, or those of one request whose answer never reached it, a piece at
        a time: between two pieces other calls may do anything.

        Args:
            piece_rows: Most rows per piece.
            request: As in ``grant``; 0: all.

        Returns:
            Its rows and their consumer, in the order of their grants; sorted within a piece.
        """
        numbers = (self._of_request.get((owner, request), _NONE),) if request else tuple(self._of_owner.get(owner, ()))
        for number in numbers:
            yield from self._release(number, piece_rows)

    def _release(self, number: int, piece_rows: int) -> Iterator[tuple[str, Rows]]:
        lease = self._leases.get(number)
        if lease is None:  # it has ended in the meantime
            return
        for part in tuple(lease.parts):
            for start in range(0, len(part), piece_rows):
                rows = part[start : start + piece_rows]
                rows = rows[self._find_numbers(lease.consumer, rows) == number]
                self._end(lease.consumer, rows)
                yield lease.consumer, rows

    def forget(self, rows: Rows) -> None:
        """Ends all leases of rows that have gone; rows that are not held are ignored."""
        rows = sort_unique(rows)
        for consumer in self._numbers:
            self._end(consumer, rows[self.is_leased(rows, consumer)])

    def is_leased(self, rows: Rows, consumer: str | None = None) -> NDArray[np.bool_]:
        """Returns which of the rows are held for this consumer; ``None``: for any."""
        is_held = np.zeros(len(rows), np.bool_)
        for each in self._numbers if consumer is None else (consumer,):
            is_held |= self._find_numbers(each, rows) != _NONE
        return is_held

    def find_held(self, owner: int, rows: Rows, consumer: str, *, request: int = 0) -> NDArray[np.bool_]:
        """Returns which of the rows this owner holds for this consumer.

        Args:
            request: As in ``grant``, for rows of this lease only: the owner may hold others again by a later one; 0: of
                any.
        """
        found = self._find_numbers(consumer, rows)
        if request:
            number = self._of_request.get((owner, request))
            return np.zeros(len(rows), np.bool_) if number is None else np.equal(found, number)
        mine = self._of_owner.get(owner, {})
        if len(found) and int(np.count_nonzero(found == found[0])) == len(found):  # usually all are of one lease
            return np.full(len(found), int(found[0]) in mine)
        numbers, place = np.unique(found, return_inverse=True)
        is_mine = np.array([number in mine for number in numbers.tolist()], np.bool_)
        return is_mine[place]

    def _find_numbers(self, consumer: str, rows: Rows) -> Rows:
        """Returns the lease of each row, 0 if there is none."""
        numbers = self._numbers.get(consumer)
        if numbers is None or not len(rows):
            return np.zeros(len(rows), np.int64)
        self._make_room(consumer, int(rows.max()) + 1)
        return self._numbers[consumer][rows]

    def _make_room(self, consumer: str, num_rows: int) -> None:
        numbers = self._numbers.get(consumer, np.empty(0, np.int64))
        if num_rows > len(numbers):
            grown = np.zeros(max(num_rows, 2 * len(numbers), self._capacity), np.int64)
            grown[: len(numbers)] = numbers
            self._numbers[consumer] = grown

    def _end(self, consumer: str, rows: Rows) -> None:
        """Ends the leases of rows that are all held, each named once."""
        if not len(rows):
            return
        found = self._numbers[consumer][rows]
        if int(np.count_nonzero(found == found[0])) == len(found):
            ended, counts = found[:1], np.array([len(found)])
        else:
            ended, counts = np.unique(found, return_counts=True)
        self._numbers[consumer][rows] = _NONE
        self._num_leased[consumer] -= len(rows)
        for number, count in zip(ended.tolist(), counts.tolist(), strict=True):
            lease = self._leases[number]
            lease.num_left -= count
            if not lease.num_left:
                del self._leases[number]
                self._ends.drop(number)
                if self._of_request.get((lease.owner, lease.request)) == number:
                    del self._of_request[lease.owner, lease.request]
                del self._of_owner[lease.owner][number]
                if not self._of_owner[lease.owner]:
                    del self._of_owner[lease.owner]


def make_not_held_error(
    num_lost: int, num_rows: int, *, event: str = ACKNOWLEDGING, was_over: bool = False
) -> WrongStateError:
    """Returns the error for rows that their owner does not hold.

    Args:
        event: The refused operation, for the message.
        was_over: Whether it is known that the time of their lease was over.
    """
    lost = f"{num_lost} of these {num_rows} rows are not held by this owner"
    how = "after its lease_s, or with its session, as by a restart of the server"
    why = f"they were acknowledged before, or their lease has ended, {how}"
    if was_over:
        why = "their lease has ended, for they were neither acknowledged nor renewed within its lease_s"
    done = "renewed" if event == RENEWING else "acknowledged"
    go_on = f"they come again; none of these was {done}, continue with the rows that the next take returns"
    return WrongStateError(state=f"{lost}: {why}, and {go_on}", event=event)
