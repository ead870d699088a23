"""Rows that only one writer may fill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tdserve.base.errors import WrongStateError
from tdserve.messages.row_numbers import Rows, encode_many


@dataclass(frozen=True, eq=False)
class Reservation:
    """Rows that only one writer may fill.

    Attributes:
        num: Number of this reservation, counted since the start or restart of the ring.
        rows: Place of row i of the content. Their generations are odd from the reservation to the commit.
        evicted: Those of ``rows`` that were live, and are not any more.
    """

    num: int
    rows: Rows
    evicted: Rows

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def encoded(self) -> bytes:
        """The row numbers in the form of messages and the catalog."""
        return encode_many(self.rows)


class Reservations:
    """The reservations of one table, by number.

    Attributes:
        num_rows: Rows that are reserved, whether their writers are silent or not.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._open: dict[int, Reservation] = {}
        self._quarantined: dict[int, Reservation] = {}
        self._next_num = 1

    @property
    def quarantined(self) -> tuple[Reservation, ...]:
        """Those of writers that are silent and not proved gone, oldest first."""
        return tuple(self._quarantined.values())

    def open(self, rows: Rows, evicted: Rows) -> Reservation:
        """Makes a reservation of rows."""
        reservation = Reservation(self._next_num, rows, evicted)
        self._next_num += 1
        self._open[reservation.num] = reservation
        self.num_rows += len(rows)
        return reservation

    def close(self, reservation: Reservation, event: str) -> None:
        """Ends an open reservation.

        Args:
            event: What ends it, such as "committing", for the error.

        Raises:
            WrongStateError: It is not open. Nothing was changed.
        """
        if self._open.get(reservation.num) is not reservation:
            state = "quarantined" if reservation.num in self._quarantined else "closed"
            raise WrongStateError(state=f"reservation {reservation.num} is {state}", event=f"{event} it")
        del self._open[reservation.num]
        self.num_rows -= len(reservation.rows)

    def quarantine(self, reservation: Reservation) -> None:
        """Quarantines an open reservation. Raises WrongStateError."""
        self.close(reservation, "quarantining")
        self._quarantined[reservation.num] = reservation
        self.num_rows += len(reservation)

    def resume(self, reservation: Reservation) -> None:
        """Opens a quarantined reservation again. Raises WrongStateError."""
        self._leave_quarantine(reservation, "resuming")
        self._open[reservation.num] = reservation

    def release(self, reservation: Reservation) -> None:
        """Ends a quarantined reservation. Raises WrongStateError."""
        self._leave_quarantine(reservation, "releasing")
        self.num_rows -= len(reservation.rows)

    def _leave_quarantine(self, reservation: Reservation, event: str) -> None:
        if self._quarantined.get(reservation.num) is not reservation:
            raise WrongStateError(state=f"reservation {reservation.num} is not quarantined", event=f"{event} it")
        del self._quarantined[reservation.num]
