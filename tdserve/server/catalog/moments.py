"""The moments at which what a catalog has of its stores was copied into their folders.

Each pass of the syncing process has a number, which the catalog has before the pass reads it, and the copies too. So a
copy whose number the catalog does not have was made of a later moment than the catalog's, or of another one that went
on from there: that store may not be served as the catalog has it. Between two passes the catalog continues, but a copy
whose number it has is never later.

Numbers follow the clock, so that those of two catalogs that continued from one differ. They only grow, also if the
clock is set back.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from tdserve.base.errors import TDServeError
from tdserve.store.database.catalog_db import CatalogDB, PinnedCatalog

_KEY = b"passes"
"""Key in the table of states, whose others are uids."""

MAX_RUNS = 64
"""Runs of servers that a catalog remembers."""


@dataclass(frozen=True)
class Moments:
    """The moments that a catalog has seen.

    Attributes:
        runs: Number of the first and the last pass of each run of a server, microseconds since the epoch; of the last
            ``MAX_RUNS`` runs.
    """

    runs: tuple[tuple[int, int], ...] = ()

    @property
    def last(self) -> int:
        """Number of the last pass; 0 before the first."""
        return self.runs[-1][1] if self.runs else 0

    def has(self, moment: int) -> bool:
        """Returns whether a copy of this number is of this catalog, as far as it knows; 0 is a copy without one."""
        if not moment or not self.runs or moment < self.runs[0][0]:
            return True  # of an earlier tdserve, or of a run that is forgotten
        return any(first <= moment <= last for first, last in self.runs)

    def go_on(self, *, begins_run: bool) -> Moments:
        """Returns them with one more pass, the first of a run or another one."""
        now = max(time.time_ns() // 1000, self.last + 1)
        if begins_run or not self.runs:
            return Moments((*self.runs, (now, now))[-MAX_RUNS:])
        return Moments((*self.runs[:-1], (self.runs[-1][0], now)))


def read_moments(catalog: CatalogDB | PinnedCatalog) -> Moments:
    """Returns the moments that a catalog has seen; none if the record of them is damaged, or of an earlier tdserve."""
    try:
        found = (
            catalog.get_many("states", [_KEY]).get(_KEY)
            if isinstance(catalog, PinnedCatalog)
            else catalog.get("states", _KEY)
        )
    except TDServeError:
        return Moments()
    return Moments(tuple((first, last) for first, last in json.loads(found))) if found else Moments()


def note_pass(db: CatalogDB, *, begins_run: bool) -> None:
    """Notes in the catalog that a pass is about to read it.

    Args:
        db: The catalog.
        begins_run: Whether it is the first pass of this server.
    """
    moments = read_moments(db).go_on(begins_run=begins_run)
    with db.begin_transaction(is_decided=True) as txn:
        txn.put("states", _KEY, json.dumps(moments.runs).encode())
