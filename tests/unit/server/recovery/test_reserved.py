from __future__ import annotations

import numpy as np

from tdserve.messages.row_numbers import encode_rows
from tdserve.server.recovery.reserved import ReservedRows
from tests.unit.server.world import World


def reserved(*rows: int, uid: str = "u", lock_name: str = "lock", num: int = 1) -> ReservedRows:
    """A reservation of one writer."""
    return ReservedRows(uid, lock_name, num, encode_rows(np.array(rows, np.int64)))


def test_load_when_saved_then_those_of_the_store_as_they_were(world: World) -> None:
    made = [reserved(3, 1), reserved(4, num=2), reserved(9, lock_name="other")]
    for each in [*made, reserved(7, uid="another")]:
        each.save(world.db)
    world.reopen()
    found = ReservedRows.load(world.db, "u")
    assert sorted((each.lock_name, each.num, each.rows.tolist()) for each in found) == [
        ("lock", 1, [3, 1]),
        ("lock", 2, [4]),
        ("other", 1, [9]),
    ]
    assert {each.key for each in found} == {each.key for each in made}
    world.db.delete("pending", made[0].key)
    assert len(ReservedRows.load(world.db, "u")) == 2


def test_load_when_a_uid_is_the_beginning_of_another_then_only_its_own(world: World) -> None:
    reserved(1, uid="u1").save(world.db)
    assert ReservedRows.load(world.db, "u") == []
