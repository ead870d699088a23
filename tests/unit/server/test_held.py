from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.errors import SelectionError
from tdserve.replay.order import Fifo
from tdserve.server.entry import Entry
from tdserve.server.held import Held
from tdserve.server.journal import Journal
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import create, extend, path, rows, sample, writing
from tests.unit.server.world import Loop, World

PARTIAL = 2 + (1 << 44)
"""Generation of a row that was written once, and then once in part."""


@pytest.fixture
def replay(world: World, run: Loop) -> Entry:
    """Four whole rows and two that have ``a`` alone, oldest first."""
    made = create(world, run, sampler=Fifo())
    extend(world, run, made, rows(10, 4))
    extend(world, run, made, rows(20, 2).select("a"), request=2, keys=[path("a")])
    return made


def journal(entry: Entry, td: Any, index: Any, *keys: tuple[str, ...]) -> Journal:
    """Of a write that is on record."""
    return Journal(bytes(16), 7, control_pb2.Done(version=1), writing(entry, td, index, *keys), "")


def test_held_when_rows_of_a_replay_then_nobody_gets_them_until_let_go(world: World, run: Loop, replay: Entry) -> None:
    held = Held(replay, journal(replay, rows(0, 2), [1, 2]))
    assert replay.generation_values().tolist() == [2, 3, 3, 2, 2, 2, 0, 0, 0]
    assert sample(world, run, replay, 2)["a"] == [10, 13]
    held.let_go(is_written=True)
    assert replay.generation_values().tolist() == [2, PARTIAL, PARTIAL, 2, 2, 2, 0, 0, 0]
    assert sample(world, run, replay, 4)["a"] == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("keys", "is_written", "num_whole"),
    [
        ([("g",)], True, 4),
        ([("n",)], True, 4),
        ([("g",), ("n", "w")], True, 6),
        ([("g",), ("n", "w")], False, 4),
        ([], True, 6),
    ],
)
def test_let_go_when_leaves_were_written_then_the_rows_have_them(
    replay: Entry, keys: list[tuple[str, ...]], is_written: bool, num_whole: int
) -> None:
    held = Held(replay, journal(replay, rows(0, 2), [4, 5], *keys))
    held.let_go(is_written=is_written)
    plain = replay.replay_table().plan_sample(num_whole, rng=None)  # type: ignore[arg-type] # Fifo needs none
    assert plain is not None
    assert replay.replay_table().plan_sample(num_whole + 1, rng=None) is None  # type: ignore[arg-type]


def test_held_when_a_crash_has_cut_the_write_short_then_the_same_rows_again(
    world: World, run: Loop, replay: Entry
) -> None:
    written = journal(replay, rows(0, 2), [1, 2])
    world.db.put("pending", b"apply:" + replay.record.uid.encode(), written.to_bytes())
    replay.generation_values()[1] |= 1  # killed after the first
    world.reopen()
    again = world.stores.get("r")
    assert again.replay_table().info()["num_reserved"] == 1
    held = Held(again, written)
    assert again.generation_values()[:4].tolist() == [2, 3, 3, 2]
    held.let_go(is_written=True)
    assert again.generation_values()[:4].tolist() == [2, PARTIAL, PARTIAL, 2]
    assert sample(world, run, again, 4)["a"] == [10, 11, 12, 13]


def test_held_when_a_row_is_gone_then_refused_and_nothing_changes(replay: Entry) -> None:
    with pytest.raises(SelectionError):
        Held(replay, journal(replay, rows(0, 2), [1, 6]))
    assert replay.generation_values().tolist() == [2, 2, 2, 2, 2, 2, 0, 0, 0]


def test_held_when_rows_of_a_tensordict_then_they_and_the_stores_own_number(world: World, run: Loop) -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    entry = run(world.create("x", td))
    held = Held(entry, journal(entry, td[:1], [1]))
    assert entry.generation_values().tolist() == [0, 1, 0, 1]
    assert Held(entry, journal(entry, td[:1], [1]))  # once more, as after a crash
    assert entry.generation_values().tolist() == [0, 1, 0, 1]
    held.let_go(is_written=True)
    assert entry.generation_values().tolist() == [0, 2, 0, 2]
