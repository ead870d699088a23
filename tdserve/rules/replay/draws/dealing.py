"""Deals the rows of one draw to ranks: each gets the same number, and as equal a share of their sizes as can be."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows

_MAX_SWAPS_PER_RANK = 8


def deal(num_units: int, world_size: int, sizes: NDArray[np.int64] | None = None) -> Rows:
    """Returns which units each rank gets, a row of the result per rank, in their order in the draw.

    Without sizes they are dealt in turn, like cards. With sizes the largest comes first, and each goes to the rank that
    has least of those that still lack units; then units of the fullest and the emptiest rank change places while that
    helps.

    Args:
        num_units: A multiple of ``world_size``.
        world_size: Number of ranks.
        sizes: Size of each unit.
    """
    if sizes is None or world_size == 1:
        in_turn: Rows = np.arange(num_units).reshape(-1, world_size).T
        return in_turn
    num_each = num_units // world_size
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    totals = [(0, rank) for rank in range(world_size)]
    for unit in np.argsort(-sizes, kind="stable").tolist():
        total, rank = heapq.heappop(totals)
        dealt[rank].append(unit)
        if len(dealt[rank]) < num_each:
            heapq.heappush(totals, (total + int(sizes[unit]), rank))
    shares = np.array(dealt, np.int64)
    for _ in range(_MAX_SWAPS_PER_RANK * world_size):
        if not _swap(shares, sizes):
            break
    shares.sort(axis=1)
    return shares


def _swap(shares: Rows, sizes: NDArray[np.int64]) -> bool:
    """Exchanges the two units of the fullest and the emptiest rank that bring these nearest to each other; returns
    False if no exchange does."""
    totals = sizes[shares].sum(axis=1)
    most, least = int(np.argmax(totals)), int(np.argmin(totals))
    gap = int(totals[most] - totals[least])
    order = np.argsort(sizes[shares[least]], kind="stable")
    smaller, larger = sizes[shares[least]][order], sizes[shares[most]]
    # The best partner of a unit is smaller by half of the gap: the last that is not above that, or the one behind it.
    behind = np.searchsorted(smaller, larger - gap / 2, side="right")
    partners = np.stack((np.maximum(behind - 1, 0), np.minimum(behind, len(smaller) - 1)))
    left = np.abs(gap - 2 * (larger - smaller[partners]))
    which, unit = np.unravel_index(np.argmin(left), left.shape)
    if left[which, unit] >= gap:
        return False
    partner = order[partners[which, unit]]
    shares[most, unit], shares[least, partner] = shares[least, partner], shares[most, unit]
    return True
