from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.messages.row_sets import RowSet
from tdserve.server.recovery.lost_rows import LOST_WRITER, POWER_LOSS, LostRows, Overwrite
from tdserve.structure.trees.tree import Path
from tests.unit.server.world import World

A, NB = ("a",), ("n", "b")


def rows_of(*numbers: int) -> RowSet:
    """Returns a set of these rows."""
    return RowSet.from_rows(np.array(numbers, np.int64))


def overwrite(*rows: int, keys: tuple[Path, ...] = (), request: int = 1, uid: str = "u") -> Overwrite:
    """Returns the record of an interrupted write."""
    return Overwrite(uid, "lock", request, RowSet.from_rows(np.array(rows, np.int64)), keys)


def record(changes: dict[bytes, bytes | None], world: World) -> None:
    """Records what has changed."""
    with world.db.begin_transaction() as txn:
        txn.update("pending", changes)


@pytest.mark.slow
def test_load_when_saved_then_those_of_the_store_as_they_were(world: World) -> None:
    overwrite(3, 1, keys=(A, NB), request=2**40).save(world.db)
    overwrite(5).save(world.db)
    overwrite(7, uid="other").save(world.db)
    found = sorted(Overwrite.load(world.db, "u"), key=lambda each: each.request)
    assert [(each.lock_name, each.request, each.rows.rows.tolist(), each.keys) for each in found] == [
        ("lock", 1, [5], ()),
        ("lock", 2**40, [1, 3], (A, NB)),
    ]
    world.db.delete("pending", found[0].key)
    assert [each.request for each in Overwrite.load(world.db, "u")] == [2**40]


def test_load_when_a_uid_is_the_beginning_of_another_then_only_its_own(world: World) -> None:
    overwrite(1, uid="u1").save(world.db)
    assert Overwrite.load(world.db, "u") == []


@pytest.mark.parametrize("lock_name", ["lock", POWER_LOSS])
def test_from_moved_when_given_what_moves_then_the_rows_and_keys_without_the_lock(lock_name: str) -> None:
    before = Overwrite("u", lock_name, 7, rows_of(1, 3), (A, NB))
    found = Overwrite.from_moved(before.moved, "v", 2, 4)
    assert (found.uid, found.request, found.rows.rows.tolist(), found.keys) == ("v", 2, [1, 3], (A, NB))
    assert found.lock_name == (POWER_LOSS if lock_name == POWER_LOSS else LOST_WRITER)
    with pytest.raises(CorruptDataError, match="rows below 3"):
        Overwrite.from_moved(before.moved, "v", 2, 3)
    with pytest.raises(CorruptDataError, match="cause"):
        Overwrite.from_moved(b"../lock" + before.moved[before.moved.index(b"\n") :], "v", 2, 4)


def test_check_when_a_lost_row_is_asked_for_then_error_names_it_and_else_not() -> None:
    lost = LostRows([overwrite(4, 2), overwrite(2, 9)])
    with pytest.raises(CorruptDataError, match=r"store 'x', rows 2, 4: .*write them again") as raised:
        lost.check(rows_of(4, 0, 2, 2), store="x")
    assert raised.value.actual.endswith("write them again")
    lost.check(rows_of(0, 1, 3), store="x")
    LostRows().check(rows_of(4), store="x")


def test_check_when_many_rows_are_lost_then_the_message_stays_short() -> None:
    with pytest.raises(CorruptDataError, match=r"rows 0, 1, 2, 3, 4, 5, 6, 7, \.\.\."):
        LostRows([overwrite(*range(1000))]).check(RowSet.run(0, 1000), store="x")


def test_rows_when_several_writes_were_cut_short_then_of_all() -> None:
    assert not LostRows()
    assert LostRows().row_set.rows.tolist() == []
    lost = LostRows([overwrite(4, 2), overwrite(2, 9)])
    assert lost
    assert lost.row_set.rows.tolist() == [2, 4, 9]


def test_is_grace_over_when_writers_are_left_then_only_after_the_time_has_changed() -> None:
    lost = LostRows([overwrite(4, 2)], rewrite_grace_until_s=10.0)
    assert not lost.is_grace_over(rows_of(4), 10.0)
    assert lost.is_grace_over(rows_of(3), 10.0), "nobody has lost this row"
    lost.rewrite_grace_until_s = 20.0
    assert lost.is_grace_over(rows_of(4), 10.0)


def test_find_writers_when_rows_are_given_then_locks_of_writers_that_have_left_them() -> None:
    other = Overwrite("u", "other lock", 1, rows_of(2, 9), ())
    lost = LostRows([overwrite(4, 2), other])
    assert lost.find_writers(rows_of(4)) == ["lock"]
    assert lost.find_writers(rows_of(2, 3)) == ["lock", "other lock"]
    assert lost.find_writers(rows_of(3)) == []


@pytest.mark.parametrize(
    ("keys", "written", "is_whole"),
    [
        ((), (), True),
        ((A,), (), True),
        ((A, NB), (("n",), A), True),
        ((NB,), (("n",),), True),
        ((("n",),), (NB,), False),
        ((A, NB), (A,), False),
        ((), (A,), False),
    ],
)
def test_written_when_all_that_was_lost_is_whole_again_then_not_lost_any_more(
    world: World, keys: tuple[Path, ...], written: tuple[Path, ...], is_whole: bool
) -> None:
    cut_short = overwrite(4, 2, 7, keys=keys)
    cut_short.save(world.db)
    lost = LostRows([cut_short])
    record(lost.replace_written(rows_of(2, 3), written), world)
    left = [4, 7] if is_whole else [2, 4, 7]
    assert lost.row_set.rows.tolist() == left
    assert [each.rows.rows.tolist() for each in Overwrite.load(world.db, "u")] == [left]
    record(lost.replace_written(rows_of(7, 4), written), world)
    assert bool(lost) is not is_whole
    assert len(Overwrite.load(world.db, "u")) == (0 if is_whole else 1)
