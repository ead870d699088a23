"""The moments at which a catalog's records of stores were copied into the stores' folders."""

from __future__ import annotations

from pathlib import Path

from tdserve.server.catalog.moments import MAX_RUNS, Moments, note_pass, read_moments
from tdserve.store.database.catalog_db import CatalogDB

LATE = 1 << 62
"""A pass of a clock that was far ahead, microseconds since the epoch."""


def test_moments_when_a_run_goes_on_then_its_passes_are_known_and_those_of_others_are_not() -> None:
    before = Moments().go_on(begins_run=True)
    one, other = (before.go_on(begins_run=True).go_on(begins_run=False) for _ in range(2))
    assert [len(each.runs) for each in (before, one, other)] == [1, 2, 2]
    assert one.has(before.last)
    assert one.has(one.runs[1][0])
    assert one.last > one.runs[1][0] > before.last
    assert not before.has(one.last)
    later = other.go_on(begins_run=True)
    assert later.has(other.last)
    assert not later.has(other.last + 1)
    assert not later.has(later.last + 1)


def test_moments_when_unknown_or_forgotten_then_taken_for_the_catalogs() -> None:
    assert Moments().has(7)
    assert Moments(((10, 20),)).has(0)
    assert Moments(((10, 20),)).has(9)
    found = Moments(((10, 20), (30, 40)))
    assert not found.has(25)
    for _ in range(MAX_RUNS):
        found = found.go_on(begins_run=True)
    assert len(found.runs) == MAX_RUNS
    assert found.has(25)


def test_moments_when_the_clock_is_set_back_then_grow() -> None:
    found = Moments(((LATE, LATE),)).go_on(begins_run=False).go_on(begins_run=True)
    assert found.runs == ((LATE, LATE + 1), (LATE + 2, LATE + 2))


def test_catalog_when_a_pass_is_noted_then_has_it_also_as_of_a_moment_before(tmp_path: Path) -> None:
    with CatalogDB(tmp_path) as db:
        assert read_moments(db) == Moments()
        note_pass(db, begins_run=True)
        first, pinned = read_moments(db), db.pin()
        note_pass(db, begins_run=False)
        assert read_moments(pinned) == first
        pinned.close()
        assert read_moments(db).runs[0][0] == first.last < read_moments(db).last
        note_pass(db, begins_run=True)
        assert len(read_moments(db).runs) == 2
