from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    InvalidSpecError,
    SpecMismatchError,
    StoreExistsError,
    StructureChangedError,
    WrongStateError,
)
from tdserve.messages.content import make_rows_layout
from tdserve.messages.row_numbers import decode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import parse
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.restructured import Restructured
from tdserve.store.rows import restructuring
from tdserve.store.rows.generations import Generations
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2
from tests.unit.server.world import Loop, World, columns_of, content_of, new_store

CAPACITY = 4
MOVE_FILES = "tdserve.server.tables.added_leaves.restructuring.carry_out"


def rows(start: int, num_rows: int, **more: torch.Tensor) -> TensorDict:
    """Rows that show their number; ``more`` are the leaves that come later."""
    number = torch.arange(start, start + num_rows)
    return TensorDict({"a": number, "n": {"b": number.float(), **more}}, [num_rows])


def late(*numbers: int) -> torch.Tensor:
    """Content of the leaf that comes later."""
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A ring of four rows, three of which are written."""
    made = run(world.create_replay("r", rows(0, 1)[0], CAPACITY))
    extend(world, run, rows(10, 3))
    return made


def adding(**fields: Any) -> control_pb2.AlterRequest:
    """Asks for the later leaf of the rows."""
    added = capture(rows(0, 1, z=late(0))[0]).spec.select([("n", "z")])
    return control_pb2.AlterRequest(store="r", added=codec.encode(added), timeout_s=5.0, **fields)


def alter(world: World, run: Loop, asked: control_pb2.AlterRequest, request: int = 1) -> control_pb2.Done:
    return run(world.alterations.alter(world.session(), request, asked))


def ask(
    store: OpenedStore, td: TensorDict, *keys: tuple[str, ...], timeout_s: float = 5.0
) -> control_pb2.ExtendRequest:
    """A request to extend a table by rows that have these keys."""
    asked = control_pb2.ExtendRequest(store="r", num_rows=len(td), timeout_s=timeout_s)
    asked.content.CopyFrom(content_of(td, store.spec.fingerprint))
    asked.keys.extend(content_pb2.Path(parts=key) for key in keys)
    return asked


def extend(world: World, run: Loop, td: TensorDict, *keys: tuple[str, ...]) -> list[int]:
    """Row numbers of rows of the structure of now."""
    done = run(world.extends.extend(world.session(), 2, ask(world.stores.get("r"), td, *keys)))
    return [int(number) for number in decode_rows(done.indices)]


def read(world: World, run: Loop) -> dict[str, list[Any]]:
    """The columns of all live rows."""
    store = world.stores.get("r")
    fingerprint = store.spec.fingerprint
    asked = control_pb2.ReadRequest(store="r", selection=parse(()).to_message(), fingerprint=fingerprint)
    done = run(world.row_reads.read(world.session(), 1, asked))
    assert done is not None
    columns = columns_of(make_rows_layout(store.spec, len(store.get_table())), done.inline)
    return {name: column.tolist() for name, column in columns.items()}


def check_nothing_is_left(world: World, store: OpenedStore) -> None:
    assert restructuring.list_leftovers(store.folder) == []
    assert Restructured.load(world.db) == []


def test_leaves_when_they_come_then_rows_have_zeros_also_past_a_restart(
    world: World, run: Loop, store: OpenedStore
) -> None:
    before = read(world, run)
    alter(world, run, adding())
    for _ in range(2):
        found = read(world, run)
        assert found.pop("z") == [0, 0, 0]
        assert {name: column for name, column in found.items() if name != "status"} == {
            name: column for name, column in before.items() if name != "status"
        }
        now = world.stores.get("r")
        assert now.generations is not None
        assert (now.record.structure, now.generations.structure) == (1, 1)
        check_nothing_is_left(world, now)
        world.reopen()
    assert extend(world, run, rows(20, 3, z=late(1, 2, 3))) == [3, 0, 1]
    assert (read(world, run)["a"], read(world, run)["z"]) == ([21, 22, 12, 20], [2, 3, 0, 1])


def test_rows_when_they_lack_a_leaf_that_came_later_then_it_is_zero_and_they_are_whole(
    world: World, run: Loop, store: OpenedStore
) -> None:
    alter(world, run, adding())
    extend(world, run, rows(20, 4, z=late(1, 2, 3, 4)))
    extend(world, run, rows(30, 2), ("a",), ("n", "b"))
    assert sorted(read(world, run)["z"]) == [0, 0, 3, 4]
    table = world.stores.get("r").get_table()
    assert table.selectors.num_incomplete == 0
    extend(world, run, rows(40, 1, z=late(5)).select("a", ("n", "z")), ("a",), ("n", "z"))
    assert table.selectors.num_incomplete == 1
    alter(world, run, adding_another())
    assert table.selectors.num_incomplete == 1


def adding_another() -> control_pb2.AlterRequest:
    """Asks for one more leaf, in front of the others."""
    added = codec.encode(capture(TensorDict({"0": torch.zeros(2)}, [])).spec)
    return control_pb2.AlterRequest(store="r", added=added, timeout_s=5.0)


def test_table_when_it_has_got_leaves_then_found_again_by_the_row_of_before_and_by_that_of_now(
    world: World, run: Loop, store: OpenedStore
) -> None:
    alter(world, run, adding())
    fields = {"kind": control_pb2.STORE_KIND_REPLAY, "capacity": CAPACITY, "settings": store.record.settings}
    now = world.stores.get("r")
    for row in (rows(0, 1)[0], rows(0, 1, z=late(0))[0]):
        answer = run(world.creation.create(new_store("r", row, exists_ok=True, **fields)))
        assert codec.decode(answer.description.spec) == now.row_spec
    for row in (rows(0, 1)[0].exclude("a"), rows(0, 1, z=torch.zeros(1))[0], rows(0, 1, y=late(0))[0]):
        with pytest.raises(StoreExistsError, match="differs"):
            run(world.creation.create(new_store("r", row, exists_ok=True, **fields)))


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (control_pb2.AlterRequest(store="r", removed=[content_pb2.Path(parts=["a"])]), InvalidRequestError),
        (control_pb2.AlterRequest(store="r", is_locked=True), InvalidRequestError),
        (adding(replaces=[content_pb2.Path(parts=["n", "z"])]), InvalidRequestError),
        (
            control_pb2.AlterRequest(store="r", added=codec.encode(capture(rows(0, 1)[0].select("a")).spec)),
            StructureChangedError,
        ),
        (
            control_pb2.AlterRequest(store="r", added=codec.encode(capture(rows(0, 1, z=late(0))).spec)),
            SpecMismatchError,
        ),
        (
            control_pb2.AlterRequest(
                store="r", added=codec.encode(capture(TensorDict({"index": torch.tensor(0)}, [])).spec)
            ),
            InvalidSpecError,
        ),
    ],
)
def test_alter_when_it_does_not_only_add_leaves_that_fit_then_refused_and_nothing_changed(
    world: World, run: Loop, store: OpenedStore, asked: control_pb2.AlterRequest, error: type[Exception]
) -> None:
    with pytest.raises(error):
        alter(world, run, asked)
    assert world.stores.get("r") is store
    assert store.record.structure == 0
    check_nothing_is_left(world, store)


def test_leaves_when_repeated_then_added_once_and_refused_to_others(
    world: World, run: Loop, store: OpenedStore
) -> None:
    session = world.session()
    done = run(world.alterations.alter(session, 7, adding()))
    seen = world.answers.find_answer(session.client_id, 7)
    assert seen is not None
    assert control_pb2.Done.FromString(seen) == done
    with pytest.raises(StructureChangedError, match="'z'"):
        alter(world, run, adding(), 8)
    assert world.stores.get("r").record.structure == 1


def test_leaves_when_two_add_the_same_at_once_then_one_is_refused(world: World, run: Loop, store: OpenedStore) -> None:
    async def add_twice() -> list[Any]:
        adds = [world.alterations.alter(world.session(number), 1, adding()) for number in (1, 2)]
        return await asyncio.gather(*adds, return_exceptions=True)

    found = run(add_twice())
    assert sorted(type(each).__name__ for each in found) == ["Done", "StructureChangedError"]
    assert world.stores.get("r").record.structure == 1
    check_nothing_is_left(world, store)


def test_leaves_when_an_overwrite_is_under_way_then_wait_for_it(world: World, run: Loop, store: OpenedStore) -> None:
    store.writes.append(RowSet.run(0, 2))
    asked = adding()
    asked.timeout_s = 0.05
    with pytest.raises(DeadlineExceededError, match="other writes"):
        alter(world, run, asked)
    store.writes.clear()
    alter(world, run, asked, 2)
    assert world.stores.get("r").record.structure == 1


def test_leaves_when_rows_were_reserved_before_then_these_are_stored_with_zeros(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = world.session()
    move, has_begun, may_end = session.movers.writes.put_rows, asyncio.Event(), asyncio.Event()

    async def put_rows(*arguments: Any) -> Any:
        has_begun.set()
        await may_end.wait()
        return await move(*arguments)

    monkeypatch.setattr(session.movers.writes, "put_rows", put_rows)

    async def overlap() -> None:
        extending = asyncio.create_task(world.extends.extend(session, 2, ask(store, rows(20, 2))))
        await has_begun.wait()
        await world.alterations.alter(world.session(2), 1, adding())
        assert world.stores.get("r") is not store
        may_end.set()
        await extending

    run(overlap())
    assert (read(world, run)["a"], read(world, run)["z"]) == ([21, 11, 12, 20], [0, 0, 0, 0])


def test_leaves_when_a_writer_waits_for_room_then_it_is_refused_and_its_rows_are_free(
    world: World, run: Loop, store: OpenedStore
) -> None:
    table = store.get_table()
    held = table.arrivals.reserve(CAPACITY)
    assert held is not None

    async def wait_across() -> None:
        extending = asyncio.create_task(world.extends.extend(world.session(), 2, ask(store, rows(20, 2))))
        while not store.waiters.num_waiting:  # noqa: ASYNC110 (waiting tells nobody that it begins)
            await asyncio.sleep(0)
        await world.alterations.alter(world.session(2), 1, adding())
        table.ring.abort(held)
        store.waiters.wake()
        with pytest.raises(StructureChangedError):
            await extending

    run(wait_across())
    assert table.ring.num_reserved == 0
    extend(world, run, rows(30, 4, z=late(1, 2, 3, 4)))
    assert sorted(read(world, run)["z"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("step", ["files", "number"])
def test_repair_when_a_crash_came_behind_the_record_then_finished(
    world: World, run: Loop, store: OpenedStore, step: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = restructuring.carry_out if step == "files" else Generations.move_structure

    def crash(*arguments: Any) -> None:
        if is_done:
            do(*arguments)
        raise RuntimeError("kill -9")

    with monkeypatch.context() as patch:
        if step == "files":
            patch.setattr(MOVE_FILES, crash)
        else:
            patch.setattr(Generations, "move_structure", crash)
        with pytest.raises(RuntimeError, match="kill"):
            alter(world, run, adding())
    assert len(Restructured.load(world.db)) == 1
    world.reopen()
    assert run(world.alterations.repair()) == 1
    assert read(world, run)["z"] == [0, 0, 0]
    assert extend(world, run, rows(20, 1, z=late(7))) == [3]
    assert read(world, run)["z"] == [0, 0, 0, 7]
    check_nothing_is_left(world, store)


def test_repair_when_a_crash_came_before_the_record_then_nothing_is_left(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise RuntimeError("kill -9")

    with monkeypatch.context() as patch:
        patch.setattr(world.stores.specs, "learn", crash)
        patch.setattr(restructuring, "remove", lambda _: None)
        with pytest.raises(RuntimeError, match="kill"):
            alter(world, run, adding())
    assert restructuring.list_leftovers(store.folder)
    world.reopen()
    assert run(world.alterations.repair()) == 0
    check_nothing_is_left(world, store)
    assert "z" not in read(world, run)
    alter(world, run, adding())
    assert read(world, run)["z"] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True])
def test_leaves_when_the_last_step_finds_no_room_then_they_come_once_there_is_some(
    world: World, run: Loop, store: OpenedStore, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise CapacityError(what="the disk", asked=4096, free=0)

    async def wait_for_room() -> None:
        adding_them = asyncio.create_task(world.alterations.alter(world.session(2), 1, adding()))
        while not Restructured.load(world.db):  # noqa: ASYNC110 (a record tells nobody that it is there)
            await asyncio.sleep(0)
        await world.extends.extend(world.session(), 2, ask(store, rows(20, 1)))  # under the old structure
        if is_restarted:
            world.alterations.close()
        else:
            monkeypatch.undo()
        await adding_them

    monkeypatch.setattr("tdserve.server.tables.added_leaves.RETRY_EVERY_S", 0.01)
    monkeypatch.setattr(MOVE_FILES, refuse)
    run(wait_for_room())
    if is_restarted:
        world.reopen()
        assert run(world.alterations.repair()) == 1  # still no room
        monkeypatch.undo()
        run(leaves_are_there(world))
    assert (read(world, run)["a"], read(world, run)["z"]) == ([10, 11, 12, 20], [0, 0, 0, 0])
    assert Restructured.load(world.db) == []


async def leaves_are_there(world: World) -> None:
    """Returns when an alteration that was retried is over."""
    while Restructured.load(world.db):  # noqa: ASYNC110 (a record tells nobody that it has gone)
        await asyncio.sleep(0)


def test_alter_when_it_has_content_or_means_another_kind_of_store_then_refused(
    world: World, run: Loop, store: OpenedStore
) -> None:
    late_rows = rows(0, CAPACITY, z=late(*range(CAPACITY))).select(("n", "z"))
    with_content = adding(content=content_of(late_rows, b""))
    with pytest.raises(InvalidRequestError, match="without content"):
        alter(world, run, with_content)
    with pytest.raises(WrongStateError, match="needs a tensordict store"):
        alter(world, run, adding(kind=control_pb2.STORE_KIND_TENSORDICT))
    assert world.stores.get("r").spec == store.spec
    alter(world, run, adding(kind=control_pb2.STORE_KIND_REPLAY))
    assert world.stores.get("r").spec != store.spec
