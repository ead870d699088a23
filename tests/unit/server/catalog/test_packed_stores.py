from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError, RemoteProtocolError, StoreExistsError
from tdserve.messages.content import MAX_PACKED_BYTES, MAX_PACKED_LEAVES, MAX_PACKED_VALUES, may_be_packed
from tdserve.server.catalog import descriptions, packed_stores
from tdserve.server.catalog.catalog_requests import CatalogRequests
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.store.values.objects import Objects
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tdserve.values.value_codec import encode_many
from tdserve.values.value_columns import ValueColumn, encode_block
from tests.unit.server.world import Loop, World, content_of, new_store

TD = TensorDict({"a": torch.arange(4), "b": {"c": torch.ones(4, 2), "shape": torch.arange(4.0)}}, [4])


def create(world: World, run: Loop, name: str = "x", td: TensorDict = TD, *, version: int = 1) -> None:
    """Creates a store as a client does that sends its content along."""
    asked = control_pb2.WriteRequest(store=name, new_store=new_store(name, td), content=content_of(td))
    assert run(world.writes.create(world.session(), 1, asked)).version == version


def files(world: World) -> list[Path]:
    """Everything in the folder of the stores."""
    return list((world.root.path / "stores").iterdir())


def check_content(world: World, name: str = "x", td: TensorDict = TD) -> None:
    """Checks that a store is as it was created; opens it."""
    store = world.stores.get(name)
    assert store.generations is not None
    assert store.generations.values.tolist() == [2] * (td.batch_size[0] + 1)
    stored = TensorDict.load_memmap(store.folder / "rows", allow_pickle=False)
    assert (stored["a"] == td["a"]).all()
    assert (stored["b", "c"] == td["b", "c"]).all()
    assert (store.folder / "extra" / "000000.memmap").read_bytes() == td["b", "shape"].numpy().tobytes()


@pytest.mark.parametrize(
    ("td", "is_small"),
    [
        (TD, True),
        (TensorDict({}, []), True),
        (TensorDict({"a": torch.zeros(MAX_PACKED_BYTES, dtype=torch.uint8)}, []), True),
        (TensorDict({"a": torch.zeros(MAX_PACKED_BYTES + 1, dtype=torch.uint8)}, []), False),
        (TensorDict({str(n): torch.zeros(()) for n in range(MAX_PACKED_LEAVES)}, []), True),
        (TensorDict({str(n): torch.zeros(()) for n in range(MAX_PACKED_LEAVES + 1)}, []), False),
        (TensorDict({"a": torch.zeros(3), "text": "value"}, []), True),
        (TensorDict({"text": NonTensorStack(*"x" * MAX_PACKED_VALUES)}, [MAX_PACKED_VALUES]), True),
        (TensorDict({"text": NonTensorStack(*"x" * (MAX_PACKED_VALUES + 1))}, [MAX_PACKED_VALUES + 1]), False),
    ],
)
def test_may_be_packed_when_small_then_true(td: TensorDict, is_small: bool) -> None:
    assert may_be_packed(capture(td).spec) is is_small


def test_create_when_small_then_no_file_is_made_before_it_is_used(world: World, run: Loop) -> None:
    create(world, run)
    assert files(world) == []
    assert world.stores.find_if_open("x") is None
    check_content(world)
    assert not world.stores.catalog.get("x").packed


def test_create_when_the_name_is_taken_then_error(world: World, run: Loop) -> None:
    create(world, run)
    with pytest.raises(StoreExistsError):
        create(world, run)


def test_describe_when_packed_then_as_when_it_has_files_and_no_file_is_made(world: World, run: Loop) -> None:
    create(world, run)
    record = run(world.stores.wait_visible("x", Deadline.after(0)))
    packed = descriptions.describe_packed(world.stores, record)
    requests = CatalogRequests(world.stores, AdmissionBudget(1 << 20))
    asked = control_pb2.ListKeysRequest(name="x", include_nested=True)
    keys = run(requests.list_keys(asked))
    assert files(world) == []
    assert descriptions.describe(world.stores, world.stores.get("x")) == packed
    assert keys == run(requests.list_keys(asked))


def test_values_when_first_used_then_stored_as_they_were_sent(world: World, run: Loop) -> None:
    td = TensorDict(
        {"a": torch.arange(3), "each": NonTensorStack("x", "y", "z"), "all": NonTensorData("c", batch_size=[3])}, [3]
    )
    create(world, run, td=td)
    world.reopen()
    assert files(world) == []
    entry = world.stores.get("x")
    with Objects(entry.folder / "objects") as objects:
        each, every = objects.get_many([(("each",), np.arange(3)), (("all",), np.arange(3))])
    assert list(each.values) == encode_many(["x", "y", "z"])
    assert (every.per_row, list(every.values)) == (False, encode_many(["c"]))


@pytest.mark.parametrize("values", [b"", b"no block", encode_block([ValueColumn(True, [b"a"])])])
def test_create_when_the_values_do_not_fit_then_nothing_is_created(world: World, run: Loop, values: bytes) -> None:
    td = TensorDict({"text": NonTensorStack("x", "y")}, [2])
    content = content_of(td)
    content.values = values
    asked = control_pb2.WriteRequest(store="x", new_store=new_store("x", td), content=content)
    with pytest.raises(RemoteProtocolError):
        run(world.writes.create(world.session(), 1, asked))
    assert "x" not in world.stores.catalog


def test_create_when_the_catalog_is_full_of_content_then_files_are_made_at_once(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_stores, "MAX_PACKED_TOTAL_BYTES", 0)
    create(world, run, "first")
    create(world, run, "second")
    assert "second" in [path.name for path in files(world)]
    check_content(world, "second")


def test_reopen_when_packed_then_still_so_with_its_content(world: World, run: Loop) -> None:
    create(world, run)
    world.reopen()
    assert files(world) == []
    check_content(world)
    world.reopen()
    check_content(world)


def test_delete_when_packed_then_nothing_is_left(world: World, run: Loop) -> None:
    create(world, run)
    run(world.creation.delete("x"))
    assert files(world) == []
    assert [table for table in ("stores", "packed") if world.db.count_records(table)] == []
    create(world, run, version=2)
    check_content(world)
    assert world.stores.get("x").content_version == 2


@pytest.mark.parametrize("then", ["use", "delete"])
def test_restart_when_killed_while_files_are_made_then_they_are_made_again(world: World, run: Loop, then: str) -> None:
    create(world, run)
    left = world.root.path / "stores" / "x" / "rows"
    left.mkdir(parents=True)
    (left / "a.memmap").write_bytes(b"half")
    world.reopen()
    if then == "use":
        check_content(world)
    else:
        run(world.creation.delete("x"))
        assert files(world) == []


def test_use_when_the_disk_is_full_then_error_and_the_next_use_succeeds(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(world, run)

    def make_files(folder: Path, *args: Any, **options: Any) -> None:
        folder.mkdir()
        raise CapacityError(what=str(folder), asked=1, free=0)

    with monkeypatch.context() as full:
        full.setattr(packed_stores, "make_files", make_files)
        with pytest.raises(CapacityError):
            world.stores.find("x")
    assert files(world) == []
    check_content(world)


def test_forget_synced_when_its_files_are_on_the_disk_then_the_catalog_lets_its_content_go(
    world: World, run: Loop
) -> None:
    create(world, run)
    create(world, run, "y")
    uid = world.stores.get("x").record.uid
    world.reopen()  # it is known after a restart too
    world.stores.packed.forget_synced(uid)
    world.stores.packed.forget_synced(world.stores.catalog.get("y").uid)  # it has no files
    world.reopen()
    assert world.db.count_records("packed") == 1
    check_content(world)
    check_content(world, "y")


def test_restore_when_content_of_a_store_that_is_gone_is_left_then_removed(world: World, run: Loop) -> None:
    world.db.put("packed", b"gone", b"content")
    world.reopen()
    create(world, run)
    assert world.db.get("packed", b"gone") is None


def count_calls(run: Loop, work: Coroutine[Any, Any, object]) -> int:
    """Returns how many functions a piece of work calls."""
    num_calls = 0

    def count(_frame: object, event: str, _function: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run(work)
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.full
def test_create_and_delete_when_there_are_thousands_then_as_much_work_as_beside_none(world: World, run: Loop) -> None:
    session = world.session()

    async def create(first: int, last: int) -> None:
        for number in range(first, last):
            asked = control_pb2.WriteRequest(store=f"s{number}", content=content_of(TD))
            asked.new_store.CopyFrom(new_store(asked.store, TD))
            await world.writes.create(session, number, asked)
            world.answers.forget(session.client_id, control_pb2.Answered(below=number))

    def measure(first: int) -> tuple[float, float]:
        """Returns the usual number of calls of a creation and of a deletion."""
        created = [count_calls(run, create(number, number + 1)) for number in range(first, first + 7)]
        deleted = [count_calls(run, world.creation.delete(f"s{number}")) for number in range(first, first + 7)]
        return median(created), median(deleted)

    before = measure(1)
    run(create(10, 3000))
    after = measure(3000)
    assert after == pytest.approx(before, rel=0.02)
