"""How many rows of a ring are promised to single writers, and when these promises end.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.allocation.ring import Ring

MAX_PROMISED_PART = 32
"""Promised rows are at most this part of the ring together: a row that fills what a promise has left lives shorter than
a full round, as one that fills a hole."""

MAX_BEHIND_PART = 16
"""The cursor is ahead of a promise by at most this part of the ring."""


def must_end(ring: Ring, num_rows: int) -> bool:
    """Returns whether promises must end before another writer gets that many rows: they would leave no room, or in the
    first round rows would go although others were never used."""
    is_early = _is_in_first_round(ring) and (_has_gone_round(ring) or ring.cursor + num_rows > ring.capacity)
    return ring.num_promised > 0 and (is_early or not ring.has_room(num_rows))


def count_promisable(ring: Ring, num_rows: int, *, num_writers: int) -> int:
    """Returns how many rows, up to ``num_rows``, may be promised to one of several writers. Promised rows are few, with
    a share for one writer more, and in the first round none lies behind the end of the ring."""
    if _is_in_first_round(ring):
        num_rows = 0 if _has_gone_round(ring) else min(num_rows, ring.capacity - ring.cursor)
    max_promised = ring.capacity // MAX_PROMISED_PART
    return min(num_rows, max_promised // (num_writers + 1), max(max_promised - ring.num_promised, 0))


def is_far_behind(ring: Ring, rows: Rows) -> bool:
    """Returns whether the cursor is so far ahead of promised rows that what fills them would soon be overwritten."""
    return bool(len(rows)) and (ring.cursor - int(rows[0])) % ring.capacity > ring.capacity // MAX_BEHIND_PART


def _is_in_first_round(ring: Ring) -> bool:
    """Returns whether there may be rows that were never used."""
    return ring.inserts < ring.capacity


def _has_gone_round(ring: Ring) -> bool:
    return ring.num_used == ring.capacity
