from __future__ import annotations

import numpy as np

from tdserve.messages.row_numbers import decode_rows
from tdserve.rules.replay.allocation.reservation import Reservation


def test_reservation_when_encoded_then_its_rows_once() -> None:
    reservation = Reservation(1, np.array([4, 5, 2]), np.array([5]))
    assert len(reservation) == 3
    assert decode_rows(reservation.encoded).tolist() == [4, 5, 2]
    assert reservation.encoded is reservation.encoded
