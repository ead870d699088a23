from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdserve.base.errors import KeyNotFoundError, PeerLostError
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.server.dispatch import services
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import MAX_REPORTED_BYTES
from tdserve.server.tables.rule_keys import RuleKeys, name_group_column, to_bools, to_ids
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import content, create, extend, extending, path, rows, sampling, writing
from tests.unit.server.world import Loop, World, outside

GROUPED: dict[str, Any] = {"group_by": path("g"), "group_size": 2, "timeout_s": 5.0}


class Interrupted(RuleKeys):
    """Something else happens once: after a look into rows, and before its result is used."""

    def __init__(self, then: Callable[[], Awaitable[Any]]) -> None:
        self._then: list[Callable[[], Awaitable[Any]]] = [then]

    async def read(self, store: OpenedStore, path: Any, rows: Any, session: ClientSession) -> bytes:
        found = await super().read(store, path, rows, session)
        if self._then:
            await self._then.pop()()
        return found


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """Six rows in three pairs."""
    made = create(world, run, sampler=Fifo())
    extend(world, run, made, rows(10, 6))
    return made


def column(store: OpenedStore, *key: str) -> list[int]:
    """What rows are grouped by."""
    found: list[int] = store.get_table().columns.get_array(name_group_column(key), np.int64).tolist()
    return found


def pairs(found: dict[str, list[Any]]) -> list[tuple[int, int]]:
    """Groups of two, sorted."""
    return sorted(zip(found["a"][::2], found["a"][1::2], strict=True))


PAIRS = [(10, 11), (12, 13), (14, 15)]


def test_learn_when_rows_are_there_then_equal_values_get_equal_numbers(
    world: World, run: Loop, store: OpenedStore
) -> None:
    for key in (("g",), ("n", "w")):
        assert run(RuleKeys().learn_group(store, key, world.session())) == name_group_column(key)
        found = column(store, *key)
        assert found[0:6:2] == found[1:6:2]
        assert len(set(found[:6])) == 3
    assert store.group_keys == [("g",), ("n", "w")]
    assert store.rule_keys == (("g",), ("n", "w"))


def test_learn_when_known_already_then_no_row_is_looked_at(world: World, run: Loop, store: OpenedStore) -> None:
    run(RuleKeys().learn_group(store, ("g",), world.session()))
    store.get_table().columns.get_array(name_group_column(("g",)), np.int64)[:] = 77
    run(RuleKeys().learn_group(store, ("g",), world.session()))
    assert column(store, "g") == [77] * 8


def test_learn_when_rows_come_later_then_they_bring_theirs(world: World, run: Loop, store: OpenedStore) -> None:
    run(RuleKeys().learn_group(store, ("g",), world.session()))
    extend(world, run, store, rows(16, 4), request=2)  # overwrites the first two
    assert column(store, "g") == [9, 9, 6, 6, 7, 7, 8, 8]


@pytest.mark.parametrize("key", [("no",), ("n",), ()])
def test_learn_when_there_is_no_such_leaf_then_error_and_nothing_is_kept(
    world: World, run: Loop, store: OpenedStore, key: tuple[str, ...]
) -> None:
    with pytest.raises(KeyNotFoundError):
        run(RuleKeys().learn_group(store, key, world.session()))
    assert store.group_keys == []


def test_learn_when_the_leaf_is_no_tensor_then_by_value(world: World, run: Loop) -> None:
    def row(number: int) -> TensorDict:
        return TensorDict({"a": torch.tensor(number), "v": NonTensorData(f"prompt {number // 2}")}, [])

    made = run(world.create_replay("v", row(0), 8))
    batch: Any = torch.stack([row(number) for number in range(4)])
    extend(world, run, made, batch)
    run(RuleKeys().learn_group(made, ("v",), world.session()))
    extend(world, run, made, batch, request=2)
    found = column(made, "v")
    assert found[0] == found[1] != found[2] == found[3]
    assert found[4:] == found[:4]


def test_learn_when_there_are_no_rows_yet_then_the_first_bring_theirs(world: World, run: Loop) -> None:
    made = create(world, run)
    run(RuleKeys().learn_group(made, ("g",), world.session()))
    run(RuleKeys().learn_group(made, ("n", "w"), world.session()))
    extend(world, run, made, rows(10, 2))
    assert column(made, "g")[:2] == [5, 5]


def test_learn_when_two_ask_at_once_then_neither_sees_half_of_it(world: World, run: Loop, store: OpenedStore) -> None:
    async def scenario() -> list[control_pb2.Done | None]:
        asks = (world.samples.sample(world.session(n), 1, sampling(6, **GROUPED)) for n in (1, 2))
        return await asyncio.gather(*asks)

    for done in run(scenario()):
        assert pairs(content(store, done)) == PAIRS


def test_learn_when_the_worker_dies_then_forgotten_and_learnt_by_the_next(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def die() -> None:
        raise PeerLostError(peer="the worker")

    with pytest.raises(PeerLostError):
        run(Interrupted(die).learn_group(store, ("g",), world.session()))
    assert store.group_keys == []
    done = run(world.samples.sample(world.session(), 1, sampling(6, **GROUPED)))
    assert pairs(content(store, done)) == PAIRS


def test_learn_when_other_leaves_are_written_meanwhile_then_those_rows_are_grouped_too(
    world: World, run: Loop, store: OpenedStore
) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def write() -> None:
        asked = writing(store, rows(0, 2).select("a"), [0, 3], ("a",))
        tasks.append(asyncio.create_task(world.writes.write(world.session(2), 1, asked)))
        if not store.write_lock.locked():  # nothing keeps it from being done meanwhile
            await tasks[0]

    async def scenario() -> None:
        await Interrupted(write).learn_group(store, ("g",), world.session())
        await tasks[0]

    run(scenario())
    assert column(store, "g")[:6] == [5, 5, 6, 6, 7, 7]


def test_learn_when_rows_are_overwritten_meanwhile_then_they_keep_what_they_brought(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def overwrite() -> None:
        await world.extends.extend(world.session(2), 1, extending(store, rows(30, 4)))

    run(Interrupted(overwrite).learn_group(store, ("g",), world.session()))
    assert column(store, "g") == [16, 16, 6, 6, 7, 7, 15, 15]


def test_extend_when_groups_are_learnt_while_its_rows_come_then_it_brings_them_all_the_same(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        await asyncio.gather(
            world.extends.extend(world.session(1), 1, extending(store, rows(16, 2))),
            RuleKeys().learn_group(store, ("g",), world.session(2)),
        )

    run(scenario())
    assert column(store, "g") == [5, 5, 6, 6, 7, 7, 8, 8]


def test_extend_when_two_keys_are_learnt_while_its_rows_come_then_it_brings_both(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def learn_another() -> None:
        await RuleKeys().learn_group(store, ("a",), world.session(3))

    monkeypatch.setattr(services, "RuleKeys", partial(Interrupted, learn_another))
    world.reopen()
    store = world.stores.get(store.name)

    async def scenario() -> None:
        await asyncio.gather(
            world.extends.extend(world.session(1), 1, extending(store, rows(16, 2))),
            RuleKeys().learn_group(store, ("g",), world.session(2)),
        )

    run(scenario())
    assert column(store, "g")[6:] == [8, 8]
    assert column(store, "a") == [10, 11, 12, 13, 14, 15, 16, 17]


def test_learn_when_killed_in_the_middle_then_the_next_server_looks_at_the_rows(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def commit_and_be_killed() -> None:
        await world.extends.extend(world.session(2), 1, extending(store, rows(16, 1)))
        raise PeerLostError(peer="the server")  # nothing more of it reaches the disk

    with pytest.raises(PeerLostError):
        run(Interrupted(commit_and_be_killed).learn_group(store, ("g",), world.session()))
    world.reopen()
    again = world.stores.get("r")
    done = run(world.samples.sample(world.session(), 1, sampling(6, **GROUPED)))
    assert pairs(content(again, done)) == PAIRS


def test_learn_when_the_server_restarts_then_still_known(world: World, run: Loop, store: OpenedStore) -> None:
    run(RuleKeys().learn_group(store, ("g",), world.session()))
    extend(world, run, store, rows(16, 1), request=2)
    run(world.changes.change(world.session(), 3, control_pb2.ChangeRequest(store="r", close=True)))
    world.reopen()
    again = world.stores.get("r")
    assert again.group_keys == [("g",)]
    done = run(world.samples.sample(world.session(), 1, sampling(6, **GROUPED)))
    assert pairs(content(again, done)) == PAIRS


def test_extend_when_it_has_more_rows_than_one_report_then_they_are_read_a_part_at_a_time(
    world: World, run: Loop
) -> None:
    num_rows = MAX_REPORTED_BYTES // 8 + 10
    store = create(world, run, num_rows, sampler=Slices(slice_len=2, trajectory_key="a"))
    extend(world, run, store, TensorDict({**rows(0, num_rows), "a": torch.arange(num_rows) // 2}, [num_rows]))
    links = store.get_table().columns.trajectories
    assert links.after[:-1].reshape(-1, 2).tolist() == [[row + 1, -1] for row in range(0, num_rows, 2)]


def test_group_column_when_keys_differ_then_its_name_does_and_is_a_file_name() -> None:
    names = {name_group_column(key) for key in (("a", "b"), ("ab",), ("a.b",), ("a/b",), ("\udcff",))}
    assert len(names) == 5
    assert all(name.replace("-", "").isalnum() for name in names)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([0, 3, 0], "u1"), [False, True, False]),
        (np.array([[0, 0], [0, 1], [0, 0]], "<f4"), [False, True, False]),
        (np.array([True, False]), [True, False]),
        (np.zeros((2, 0), "u1"), [False, False]),
    ],
)
def test_as_bools_when_any_byte_is_set_then_true(values: Any, expected: list[bool]) -> None:
    assert to_bools(values.tobytes(), len(expected)).tolist() == expected


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<i4", "<i8", "<f8"])
def test_as_ids_when_values_are_narrow_then_different_ones_never_meet(dtype: str) -> None:
    values = np.array([0, 1, 2, 3, 1, 0, 255], "u1").view("u1").astype(dtype)
    found = to_ids(values.tobytes(), len(values))
    assert found.dtype == np.int64
    assert (found[:, None] == found[None]).tolist() == (values[:, None] == values[None]).tolist()


def test_as_ids_when_values_are_wide_then_equal_rows_alone_meet() -> None:
    values = np.zeros((4, 5), "<i8")
    values[1, 4] = values[3, 4] = 1
    found = to_ids(values.tobytes(), 4)
    assert found[0] == found[2] != found[1] == found[3]
    assert to_ids(b"", 0).tolist() == []


def test_sample_when_it_came_by_mail_then_groups_are_learnt_in_a_task_all_the_same(
    world: World, run: Loop, store: OpenedStore
) -> None:
    session = world.session(91)
    found: list[control_pb2.Done | None] = []

    async def serve() -> None:
        found.append(await world.samples.sample(session, 1, sampling(6, **GROUPED)))

    async def scenario() -> None:
        await outside(lambda: session.run_at_once(serve(), 1))
        await session.finish(20.0)

    run(scenario())
    assert pairs(content(store, found[0])) == PAIRS
