"""Version numbers that a policy has skipped: those between two versions of which one followed the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.rules.weights import STEP_AFTER_LOSS

MAX_GAPS = 64
"""Most gaps that are remembered: rows from before that many restores count as older than they are."""


class SkippedVersions:
    """The gaps in the numbers of one policy, as a table sees them.

    After a loss of power, and in what was restored from a checkpoint, numbers continue ``STEP_AFTER_LOSS`` higher. Rows
    that have a number within a gap were made by a version that was lost; they count as made by the last one before it.

    Args:
        gaps: From :attr:`gaps`.
    """

    def __init__(self, gaps: Sequence[Sequence[int]] = ()) -> None:
        self._gaps = [(int(last), int(num_skipped)) for last, num_skipped in gaps]

    def __repr__(self) -> str:
        return f"<SkippedVersions {self._gaps}>"

    def __bool__(self) -> bool:
        return bool(self._gaps)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """For each gap, ascending, the last version before it and how many numbers were skipped; for JSON."""
        return list(self._gaps)

    def follow(self, known: int, newest: int) -> None:
        """Notes that there is a newer version than the known one. Numbers are skipped in whole steps, and no policy has
        as many new versions between two looks of a table."""
        num_steps = max(newest - known, 0) // STEP_AFTER_LOSS
        if num_steps:
            self._gaps.append((known, num_steps * STEP_AFTER_LOSS))
            del self._gaps[:-MAX_GAPS]

    def skip_former(self, last: int) -> None:
        """Notes that the versions up to this one are of earlier policies of the name: they count as none."""
        self._gaps[:] = [(0, last)]

    def clear(self) -> None:
        """Forgets all gaps: it is another policy."""
        self._gaps.clear()

    def compute_places(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the places of versions in the order of those that there are: the difference of two is their lag."""
        places: NDArray[np.int64] = versions.copy()
        for last, num_skipped in self._gaps:
            places = places - np.clip(versions - last, 0, num_skipped)
        return places

    def compute_floor(self, newest: int, max_lag: int) -> int:
        """Returns the oldest version of at most this lag, at least 0."""
        place = newest - sum(min(max(newest - last, 0), num_skipped) for last, num_skipped in self._gaps)
        floor = place - max_lag
        for last, num_skipped in self._gaps:
            floor += num_skipped * (floor > last)
        return max(floor, 0)
