from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    KeyNotFoundError,
    LockedError,
    SpecMismatchError,
    StructureChangedError,
    WrongStateError,
)
from tdserve.messages.content import read_layout, select_spec
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import parse
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.restructured import Restructured
from tdserve.store.rows import restructuring
from tdserve.store.values.objects import Objects
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2
from tests.errors import raises
from tests.unit.server.world import Loop, World, columns_of, content_of

TD = TensorDict({"a": torch.zeros(4, dtype=torch.int64), "b": {"c": torch.zeros(4, 2)}}, [4])
NEW = TensorDict({"z": torch.arange(4), "b": {"d": torch.ones(4)}}, [4])


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A store of four rows of zeros."""
    return run(world.create("x", TD))


def adding(td: TensorDict = NEW, **fields: Any) -> control_pb2.AlterRequest:
    """Asks for new keys with content."""
    added = codec.encode(capture(td).spec)
    return control_pb2.AlterRequest(store="x", added=added, content=content_of(td), timeout_s=5.0, **fields)


def key(*parts: str) -> content_pb2.Path:
    return content_pb2.Path(parts=parts)


def alter(world: World, run: Loop, asked: control_pb2.AlterRequest, request: int = 1) -> control_pb2.Done:
    return run(world.alterations.alter(world.session(), request, asked))


def column(world: World, run: Loop, store: OpenedStore, name: str, *, timeout_s: float = 5.0) -> list[Any]:
    """What a read of everything brings."""
    asked = control_pb2.ReadRequest(store=store.name, timeout_s=timeout_s)

    async def read() -> control_pb2.Done | None:
        return await world.reads.read(world.session(), 1, store, asked, Deadline.after(timeout_s))

    done = run(read())
    assert done is not None
    layout = read_layout(select_spec(store.spec, parse(()), ()))
    found: list[Any] = columns_of(layout, done.inline)[name].tolist()
    return found


def test_alter_when_keys_come_then_they_are_read_and_survive_a_restart(
    world: World, run: Loop, store: OpenedStore
) -> None:
    assert alter(world, run, adding()).version == 1
    for _ in range(2):
        assert column(world, run, store, "z") == [0, 1, 2, 3]
        assert column(world, run, store, "d") == [1.0] * 4
        assert store.record.structure == 1
        assert store.generations is not None
        assert store.generations.structure == 1
        assert not (store.generations.values & 1).any()
        assert restructuring.list_leftovers(store.folder) == []
        assert world.db.scan("pending") == []
        world.reopen()
        store = world.stores.get("x")


def test_alter_when_only_zeros_come_then_no_content_is_needed(world: World, run: Loop, store: OpenedStore) -> None:
    asked = adding()
    asked.ClearField("content")
    alter(world, run, asked)
    assert column(world, run, store, "z") == [0] * 4


def test_alter_when_values_come_without_content_then_refused(world: World, run: Loop, store: OpenedStore) -> None:
    asked = adding(TensorDict({"s": "text"}, [4]))
    asked.ClearField("content")
    with raises(SpecMismatchError, key="s"):
        alter(world, run, asked)


def test_alter_when_keys_go_and_are_renamed_then_read_under_the_new_names(
    world: World, run: Loop, store: OpenedStore
) -> None:
    alter(world, run, adding())
    renamed = [control_pb2.Renamed(old_key=key("z"), new_key=key("b", "z"))]
    asked = control_pb2.AlterRequest(store="x", removed=[key("a")], renamed=renamed, timeout_s=5.0)
    alter(world, run, asked, 2)
    assert store.spec.keys(True, True) == [("b", "c"), ("b", "d"), ("b", "z")]
    assert column(world, run, store, "z") == [0, 1, 2, 3]
    assert sorted(path.name for path in (store.folder / "rows").iterdir()) == ["b", "meta.json"]


def test_alter_when_repeated_then_done_once(world: World, run: Loop, store: OpenedStore) -> None:
    session, asked = world.session(), adding()
    first = run(world.alterations.alter(session, 7, asked))
    seen = world.answers.find_answer(session.client_id, 7)
    assert seen is not None
    assert control_pb2.Done.FromString(seen) == first
    removing = control_pb2.AlterRequest(store="x", removed=[key("a")], timeout_s=5.0)
    done = run(world.alterations.alter(session, 7, removing))  # the first try had ended while this one was on its way
    assert done == first
    assert store.spec.keys()[0] == "a"


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (control_pb2.AlterRequest(store="x", removed=[key("q")]), KeyNotFoundError),
        (adding(TensorDict({"a": torch.zeros(4)}, [4])), StructureChangedError),
        (adding(TensorDict({"z": torch.zeros(5)}, [5])), SpecMismatchError),
        (control_pb2.AlterRequest(store="x", is_locked=True, removed=[key("a")]), InvalidRequestError),
    ],
)
def test_alter_when_it_does_not_fit_then_refused_and_nothing_changed(
    world: World, run: Loop, store: OpenedStore, asked: control_pb2.AlterRequest, error: type[Exception]
) -> None:
    with pytest.raises(error):
        alter(world, run, asked)
    assert (store.content_version, store.record.structure) == (0, 0)
    assert restructuring.list_leftovers(store.folder) == []


def test_alter_when_the_store_has_no_keys_of_its_own_then_refused(world: World, run: Loop) -> None:
    run(world.create("x", TensorDict(), kind=control_pb2.STORE_KIND_KEYED))
    with pytest.raises(WrongStateError, match="keyed"):
        alter(world, run, adding())


def test_write_when_of_the_structure_before_then_structure_changed_error(
    world: World, run: Loop, store: OpenedStore
) -> None:
    before = store.spec.fingerprint
    alter(world, run, adding())
    asked = control_pb2.WriteRequest(store="x", content=content_of(TD, before), timeout_s=5.0)
    with pytest.raises(StructureChangedError):
        run(world.writes.write(world.session(), 2, asked))


def test_alter_when_the_store_is_locked_then_refused_until_it_is_unlocked(
    world: World, run: Loop, store: OpenedStore
) -> None:
    before = store.get_generation_values().tolist()
    alter(world, run, control_pb2.AlterRequest(store="x", is_locked=True, timeout_s=5.0))
    assert store.spec.root.is_locked
    assert store.get_generation_values().tolist() == [*before[:-1], before[-1] + 2]  # rows keep their checksums
    for asked in (adding(), control_pb2.AlterRequest(store="x", removed=[key("a")], timeout_s=5.0)):
        with pytest.raises(LockedError, match="unlock_"):
            alter(world, run, asked, 2)
    alter(world, run, control_pb2.AlterRequest(store="x", is_locked=False, timeout_s=5.0), 3)
    alter(world, run, adding(), 4)
    assert column(world, run, store, "z") == [0, 1, 2, 3]


def test_alter_when_a_write_is_under_way_then_it_waits_for_that_and_new_writes_for_it(
    world: World, run: Loop, store: OpenedStore
) -> None:
    rows = RowSet.run(0, 2)

    async def writing() -> None:
        store.writes.append(rows)
        altering = asyncio.create_task(world.alterations.alter(world.session(), 1, adding()))
        while not store.write_lock.locked():  # noqa: ASYNC110 (a lock tells nobody that it was taken)
            await asyncio.sleep(0)
        assert not altering.done()
        store.writes.clear()
        store.waiters.wake()
        await altering

    run(writing())
    assert store.record.structure == 1
    store.writes.append(rows)
    asked = control_pb2.AlterRequest(store="x", removed=[key("z")], timeout_s=0.05)
    with pytest.raises(DeadlineExceededError, match="other writes"):
        alter(world, run, asked, 2)
    assert store.record.structure == 1


@pytest.mark.parametrize(
    ("step", "is_done"),
    [("files", False), ("files", True), ("values", False), ("values", True), ("rows", False), ("rows", True)],
)
def test_repair_when_a_crash_came_behind_the_record_then_finished(
    world: World, run: Loop, store: OpenedStore, step: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name = {
        "files": ("tdserve.server.tensordicts.alterations.restructuring", "carry_out"),
        "values": ("tdserve.server.processes.workers.DataWorker", "order_until_done"),
        "rows": ("tdserve.server.mutations.row_write_hold.RowWriteHold", "let_go"),
    }[step]
    do = getattr(resolve_name(where), name)
    is_coroutine = inspect.iscoroutinefunction(do)

    def crashing(*arguments: Any, **named: Any) -> Any:
        if step == "values" and not arguments[-1].HasField("move_values"):  # not yet the last step
            return do(*arguments, **named)
        if is_coroutine:
            return crash_in_turn(do(*arguments, **named) if is_done else None)
        if is_done:
            do(*arguments, **named)
        raise RuntimeError("kill -9")

    with monkeypatch.context() as patch:
        patch.setattr(f"{where}.{name}", crashing)
        with pytest.raises(RuntimeError, match="kill"):
            alter(world, run, adding(TensorDict({"z": torch.arange(4), "s": "text"}, [4])))
    assert len(Restructured.load(world.db)) == 1
    world.reopen()
    assert run(world.alterations.repair()) == 1
    store = world.stores.get("x")
    assert column(world, run, store, "z") == [0, 1, 2, 3]
    assert has_value(store, ("s",))
    assert not (store.get_generation_values() & 1).any()
    assert restructuring.list_leftovers(store.folder) == []
    assert world.db.scan("pending") == []


async def crash_in_turn(step: Awaitable[None] | None) -> None:
    """Ends as ``kill -9`` does, after a step or before it."""
    if step is not None:
        await step
    raise RuntimeError("kill -9")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_alter_when_the_last_step_finds_no_room_then_done_once_there_is_some(
    world: World, run: Loop, store: OpenedStore, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        del arguments
        raise CapacityError(what="the disk", asked=4096, free=0)

    monkeypatch.setattr("tdserve.server.tensordicts.alterations.RETRY_EVERY_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr("tdserve.server.tensordicts.alterations.restructuring.carry_out", full)
        assert alter(world, run, adding()).version == 1  # it is decided
        with pytest.raises(DeadlineExceededError):
            column(world, run, store, "z", timeout_s=0.05)
        if is_restarted:
            world.alterations.close()
            world.reopen()
            assert run(world.alterations.repair()) == 1
            store = world.stores.get("x")
    assert column(world, run, store, "z") == [0, 1, 2, 3]
    assert column(world, run, store, "d") == [1.0] * 4
    assert not (store.get_generation_values() & 1).any()
    run(folder_is_gone(store))
    assert world.db.scan("pending") == []


async def folder_is_gone(store: OpenedStore) -> None:
    """Returns when nothing of an alteration is left."""
    while restructuring.list_leftovers(store.folder):  # noqa: ASYNC110 (a thread removes it)
        await asyncio.sleep(0)


def test_repair_when_something_was_made_that_never_came_then_removed(
    world: World, run: Loop, store: OpenedStore
) -> None:
    (store.folder / f"{restructuring.PREFIX}x" / "rows").mkdir(parents=True)
    assert run(world.alterations.repair()) == 0
    assert restructuring.list_leftovers(store.folder) == []


def test_repair_when_values_wait_for_what_never_came_then_they_go(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crashing(*arguments: Any, **named: Any) -> None:
        del arguments, named
        raise RuntimeError("kill -9")

    made: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(world.stores.specs, "learn", crashing)
        patch.setattr(restructuring, "remove", lambda folder: made.append(folder.name))
        with pytest.raises(RuntimeError, match="kill"):
            alter(world, run, adding(TensorDict({"s": "text"}, [4])))
    assert has_value(store, (made[0], "s"))
    world.reopen()
    run(world.alterations.repair())
    store = world.stores.get("x")
    assert not has_value(store, (made[0], "s"))
    assert restructuring.list_leftovers(store.folder) == []


def has_value(store: OpenedStore, path: tuple[str, ...]) -> bool:
    """Whether a value lies under a key, also one under which it waits."""
    with Objects(store.folder / "objects") as objects:
        ((_, values),) = objects.get_many([(path, [0])])
    return list(values) != [None]
