"""Rings for tests, with the generations that they write."""

from __future__ import annotations

from typing import Any

import numpy as np

from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.allocation.ring import Ring


def make_ring(capacity: int = 4) -> tuple[Ring, Any]:
    """Returns a ring of rows that were never written, and their generations."""
    generations = np.zeros(capacity, np.int64)
    return Ring(capacity, generations), generations


def reserve(ring: Ring, num_rows: int) -> Reservation:
    """Reserves so many rows, which must be possible."""
    reservation = ring.reserve(num_rows)
    assert reservation is not None
    return reservation
