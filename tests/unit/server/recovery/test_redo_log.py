from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.server.recovery.redo_log import RedoEntry
from tests.unit.server.world import Loop, World


def test_load_when_saved_twice_then_the_last(world: World) -> None:
    for uid, rows in (("first", [1]), ("second", [3, -1, 7])):
        with world.db.begin_transaction() as txn:
            RedoEntry(uid, np.array(rows, np.int64), np.array(rows, np.int64) * 2).save(txn)
    (found,) = RedoEntry.load(world.db)
    assert (found.uid, found.rows.tolist(), found.generations.tolist()) == ("second", [3, -1, 7], [6, -2, 14])


@pytest.mark.parametrize("generations", [[2] * 9, [2, 4] * 30_000, [2, 2**50] * 30_000, [512, 2, *[4] * 60_000], [6]])
def test_load_when_a_long_commit_gave_rows_other_generations_then_these(world: World, generations: list[int]) -> None:
    rows = np.arange(len(generations))
    redo = RedoEntry("uid", rows, np.array(generations, np.int64), is_long=True)
    assert len(redo.record) < 150_000 or 2**50 in generations
    with world.db.begin_transaction() as txn:
        redo.save(txn)
    (found,) = RedoEntry.load(world.db)
    assert (found.generations.tolist(), found.rows.tolist()) == (generations, rows.tolist())


def test_load_when_nothing_was_committed_then_nothing(world: World) -> None:
    assert RedoEntry.load(world.db) == []


def test_repair_when_rows_are_odd_then_even_and_others_untouched() -> None:
    values = np.array([1, 3, 6, 5, 0], np.int64)
    redo = RedoEntry("uid", np.array([1, 2, 3]), np.array([4, 6, 8]))
    # row 1 was left odd, row 2 was done, row 3 has been given to somebody else since
    assert redo.repair(values) == 1
    assert values.tolist() == [1, 4, 6, 5, 0]
    assert redo.repair(values) == 0
    first = RedoEntry("uid", np.array([0, 4]), np.array([700, 700]))  # row 0 had never been committed
    assert (first.repair(values), values.tolist()) == (1, [700, 4, 6, 5, 0])


@pytest.mark.parametrize("is_encoded", [False, True])
def test_record_when_rows_are_reserved_then_their_next_generations(world: World, run: Loop, is_encoded: bool) -> None:
    store = run(world.create_replay("r", TensorDict({"a": torch.zeros(2)}, []), 10))
    reservation = store.get_table().arrivals.reserve(3)
    assert reservation is not None
    encoded = reservation.encoded if is_encoded else b""
    generations = store.get_table().ring.compute_generations(reservation)
    redo = RedoEntry(store.record.uid, reservation.rows, generations, encoded)
    assert generations[0] % 2 == 0
    assert generations.tolist() == [generations[0]] * 3
    with world.db.begin_transaction() as txn:
        redo.save(txn)
    (found,) = RedoEntry.load(world.db)
    assert (found.uid, found.rows.tolist()) == (store.record.uid, [0, 1, 2])
    assert found.generations.tolist() == generations.tolist()


def test_restore_when_killed_between_record_and_generations_then_rows_are_live(world: World, run: Loop) -> None:
    store = run(world.create_replay("r", TensorDict({"a": torch.zeros(2)}, []), 10))
    table = store.get_table()
    reservation = table.arrivals.reserve(3)
    assert reservation is not None
    with world.db.begin_transaction() as txn:
        RedoEntry(store.record.uid, reservation.rows, table.ring.compute_generations(reservation)).save(txn)
        world.stores.save_state(store, txn, {**table.state.get_state(), "inserts": 3})
    world.reopen()
    restored = world.stores.get("r").get_table()
    assert (len(restored), restored.state.list_live_rows().tolist()) == (3, [0, 1, 2])
