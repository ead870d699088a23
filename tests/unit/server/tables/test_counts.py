from __future__ import annotations

from tdserve.server.tables.counts import counts_of, num_lost
from tests.unit.server.replaying import create, extend, rows
from tests.unit.server.world import Loop, World


def test_counts_when_rows_come_and_go_then_live_ones_and_all_that_came(world: World, run: Loop) -> None:
    entry = create(world, run)
    extend(world, run, entry, rows(10, 4))
    assert (counts_of(entry).rows, counts_of(entry).inserts, num_lost(entry)) == (4, 4, 0)
    assert (counts_of(entry, num_coming=2).rows, counts_of(entry, num_coming=2).inserts) == (6, 6)
    table = entry.replay_table()
    table.clear()
    assert (counts_of(entry).rows, counts_of(entry).inserts) == (0, 4)
    extend(world, run, entry, rows(20, 3), request=2)
    table.clear(resets_counts=True)
    assert (counts_of(entry).rows, counts_of(entry).inserts) == (0, 0)
