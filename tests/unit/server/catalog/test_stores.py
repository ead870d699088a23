from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    DeadlineExceededError,
    StoreExistsError,
    StoreNotFoundError,
)
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.creation import find_or_refuse
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tests.unit.server.world import Loop, World

TD = TensorDict({"a": torch.zeros(4, 2)}, [4])
SPEC = capture(TD).spec
RECORD = StoreRecord(name="x", kind="tensordict", uid="", fingerprint=SPEC.fingerprint, num_rows=4)


def test_create_when_done_then_visible_with_files(world: World, run: Loop) -> None:
    store = run(world.stores.create(RECORD, SPEC))
    assert world.stores.get("x") is store
    assert (store.folder / "rows").is_dir()
    assert store.record.nbytes == 32
    assert world.stores.find_uid(store.record.uid) is store


def test_create_when_the_name_is_taken_then_error_and_the_first_stays(world: World, run: Loop) -> None:
    store = run(world.stores.create(RECORD, SPEC))
    with pytest.raises(StoreExistsError):
        run(world.stores.create(RECORD, SPEC))
    assert world.stores.get("x") is store
    assert store.folder.is_dir()


def test_create_when_the_disk_is_too_small_then_nothing_stays(world: World, run: Loop) -> None:
    huge = Spec(Node((1,), None, None, None, (("a", TensorLeaf("uint8", (1, 2**50))),)))
    with pytest.raises(CapacityError):
        run(world.stores.create(RECORD, huge))
    assert world.stores.find("x") is None
    assert list((world.root.path / "stores").glob("*")) == []
    run(world.stores.create(RECORD, SPEC))


def test_find_when_loading_then_hidden_but_its_session_has_it(world: World, run: Loop) -> None:
    store = run(world.stores.create(replace(RECORD, loading=True), SPEC, owner_session=3))
    assert world.stores.find("x") is None
    assert world.stores.loading.get("x", 3) is store
    assert world.stores.loading.list_of(3) == [store]
    with pytest.raises(StoreNotFoundError):
        world.stores.loading.get("x", 4)
    with world.db.begin_transaction() as txn:
        world.stores.publish_loaded(store, txn)
    assert world.stores.find("x") is store
    assert world.stores.loading.list_of(3) == []


def test_restore_when_restarted_then_stores_are_back_and_half_made_ones_gone(world: World, run: Loop) -> None:
    uid = run(world.stores.create(RECORD, SPEC)).record.uid
    half = run(world.stores.create(replace(RECORD, name="half", loading=True), SPEC, owner_session=3))
    world.reopen()
    assert [record.name for record in world.stores.catalog] == ["x"]
    assert world.stores.get("x").record.uid == uid
    assert not half.folder.exists()


def test_restore_when_killed_in_the_middle_of_a_delete_then_the_rest_is_removed(world: World) -> None:
    trash = world.root.path / "stores" / ".deleted-abc"
    trash.mkdir(parents=True)
    world.reopen()
    assert not trash.exists()


def test_delete_when_done_then_name_and_files_are_free(world: World, run: Loop) -> None:
    first = run(world.stores.create(RECORD, SPEC))
    run(world.stores.delete(first))
    assert world.stores.find("x") is None
    assert not first.folder.exists()
    assert run(world.stores.create(RECORD, SPEC)).record.uid != first.record.uid


@pytest.mark.parametrize("can_be_emptied", [True, False])
def test_delete_when_its_folder_cannot_be_moved_then_gone_all_the_same_and_its_name_is_free_once_its_files_are_gone(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch, can_be_emptied: bool
) -> None:
    store = run(world.stores.create(RECORD, SPEC))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == store.folder:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        if not can_be_emptied:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        run(world.stores.delete(store))
        assert world.stores.find("x") is None
        if can_be_emptied:
            run(world.stores.wait_settled("x", Deadline.after(20.0)))
            assert not store.folder.exists()
        else:
            for _ in range(2):
                with pytest.raises(StoreExistsError):
                    run(world.stores.create(RECORD, SPEC))
                world.reopen()
    world.reopen()
    assert not store.folder.exists()
    run(world.stores.create(RECORD, SPEC))


def test_delete_when_another_of_its_name_was_made_since_then_that_one_stays(world: World, run: Loop) -> None:
    old = run(world.create("x", TD))
    run(world.stores.delete(old))
    new = run(world.create("x", TD))
    run(world.stores.delete(old))
    assert world.stores.get("x") is new
    assert list(new.folder.iterdir()) != []


def test_find_when_files_are_damaged_then_error_and_other_stores_go_on(world: World, run: Loop) -> None:
    folder = run(world.stores.create(RECORD, SPEC)).folder
    run(world.stores.create(replace(RECORD, name="y"), SPEC))
    (path,) = folder.glob("gen*")
    path.write_bytes(b"short")
    world.reopen()
    with pytest.raises(CorruptDataError, match=path.name):
        world.stores.find("x")
    assert world.stores.get("y").name == "y"


def test_wait_when_the_store_comes_then_returned(world: World, run: Loop) -> None:
    async def scenario() -> bool:
        waiting = asyncio.create_task(world.stores.wait("x", Deadline.after(20.0)))
        await asyncio.sleep(0)
        created = await world.stores.create(RECORD, SPEC)
        return await waiting is created

    assert run(scenario())


def test_wait_when_it_does_not_come_then_error_by_the_way_of_asking(world: World, run: Loop) -> None:
    with pytest.raises(StoreNotFoundError):
        run(world.stores.wait("x", Deadline.after(0)))
    with pytest.raises(DeadlineExceededError, match="store 'x'"):
        run(world.stores.wait("x", Deadline.after(0.01)))


def test_existing_when_asked_for_then_only_if_it_fits(world: World, run: Loop) -> None:
    assert find_or_refuse(world.stores, RECORD, SPEC, exists_ok=True) is None
    store = run(world.stores.create(RECORD, SPEC))
    assert find_or_refuse(world.stores, RECORD, SPEC, exists_ok=True) is store
    with pytest.raises(StoreExistsError):
        find_or_refuse(world.stores, RECORD, SPEC, exists_ok=False)
    other = capture(TensorDict({**TD, "more": torch.zeros(4)}, TD.batch_size)).spec
    with pytest.raises(StoreExistsError, match="'more': it has no such key, asked is float32"):
        find_or_refuse(world.stores, replace(RECORD, fingerprint=other.fingerprint), other, exists_ok=True)


def test_existing_when_weights_of_another_structure_are_asked_for_then_they_fit(world: World, run: Loop) -> None:
    weights = replace(RECORD, kind="weights")
    store = run(world.stores.create(weights, SPEC))
    other = capture(TensorDict({"other": torch.zeros(4)}, [])).spec
    assert find_or_refuse(world.stores, replace(weights, fingerprint=other.fingerprint), other, exists_ok=True) is store


def test_create_when_specs_differ_in_the_order_of_keys_then_each_keeps_its_own_also_after_a_restart(
    world: World, run: Loop
) -> None:
    ab, ba = (
        Spec(Node((4,), None, None, None, tuple((key, TensorLeaf("int64", (4,))) for key in keys)))
        for keys in ("ab", "ba")
    )
    assert ab.fingerprint == ba.fingerprint
    record = replace(RECORD, fingerprint=ab.fingerprint)
    for name, spec in (("x", ab), ("y", ba), ("z", ab)):
        assert run(world.stores.create(replace(record, name=name), spec)).spec == spec
    world.reopen()
    run(world.stores.create(replace(record, name="w"), ba))  # before any of the others was opened
    world.reopen()
    assert [world.stores.get(name).spec for name in "xyzw"] == [ab, ba, ab, ba]
    assert [bool(world.stores.get(name).record.order) for name in "xyzw"] == [False, True, False, True]


def test_restore_when_the_catalog_has_no_store_and_folders_of_some_exist_then_refused(world: World, run: Loop) -> None:
    store = run(world.stores.create(RECORD, SPEC))
    world.db.delete("stores", b"x")
    with pytest.raises(CorruptDataError, match=str(world.root.path)):
        world.stores.restore()
    assert store.folder.is_dir()
