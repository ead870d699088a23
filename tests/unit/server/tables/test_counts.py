from __future__ import annotations

from tdserve.server.open_store.counts import find_lost, make_counts
from tests.unit.rules.replay.tables import clear
from tests.unit.server.replaying import create, extend, rows
from tests.unit.server.world import Loop, World


def test_counts_when_rows_come_and_go_then_live_ones_and_all_that_came(world: World, run: Loop) -> None:
    store = create(world, run)
    extend(world, run, store, rows(10, 4))
    assert (make_counts(store).rows, make_counts(store).inserts, len(find_lost(store))) == (4, 4, 0)
    assert (make_counts(store, num_coming=2).rows, make_counts(store, num_coming=2).inserts) == (6, 6)
    table = store.get_table()
    clear(table)
    assert (make_counts(store).rows, make_counts(store).inserts) == (0, 4)
    extend(world, run, store, rows(20, 3), request=2)
    clear(table, resets_counts=True)
    assert (make_counts(store).rows, make_counts(store).inserts) == (0, 0)


def test_counts_when_live_rows_are_reserved_then_they_are_overwritten_and_new_or_deleted_ones_are_not(
    world: World, run: Loop
) -> None:
    store = create(world, run, capacity=8)
    table = store.get_table()

    def count() -> tuple[int, int]:
        counts = make_counts(store)
        return counts.rows, counts.overwritten

    extend(world, run, store, rows(10, 6))
    assert count() == (6, 0)
    reservation = table.arrivals.reserve(4)
    assert reservation is not None
    assert count() == (4, 2), "two rows were never used before"
    coming = make_counts(store, num_coming=4)
    assert (coming.rows, coming.overwritten) == (8, 0)
    table.ring.abort(reservation)
    clear(table)
    assert count() == (0, 0)
    assert table.arrivals.reserve(3) is not None
    assert count() == (0, 0)
