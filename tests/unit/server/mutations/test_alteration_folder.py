"""Work in the folders of stores that are deleted meanwhile, and made anew under the same name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CapacityError, StoreNotFoundError, TDServeError
from tdserve.server.mutations.alteration_folder import work_in_folder
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.rows import leaf_folders, restructuring
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2
from tests.unit.server.world import Loop, World

TD = TensorDict({"a": torch.zeros(4), "b": torch.zeros(4)}, [4])
WAIT_S = 20.0
"""Longest wait of one side for the other, seconds."""


class _Held:
    """Work of a thread that begins once it may."""

    def __init__(self, work: Any) -> None:
        self._work, self.begun, self._may_go_on = work, Event(), Event()

    def __call__(self, *arguments: Any) -> None:
        self.begun.set()
        assert self._may_go_on.wait(WAIT_S)
        self._work(*arguments)

    def go_on(self) -> None:
        self._may_go_on.set()


async def _wait_for(event: Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, WAIT_S)


def _list_tasks() -> list[asyncio.Task[Any]]:
    """The tasks that finish changes of keys in the background."""
    return [task for task in asyncio.all_tasks() if task.get_name().endswith("-x")]


def _make(world: World, run: Loop, kind: str) -> OpenedStore:
    return run(world.create_replay("x", TD[0], 4) if kind == "table" else world.create("x", TD))


async def _make_again(world: World, kind: str) -> OpenedStore:
    return await (world.create_replay("x", TD[0], 4) if kind == "table" else world.create("x", TD))


def _ask(kind: str) -> control_pb2.AlterRequest:
    if kind == "table":
        added = capture(TensorDict({"z": torch.zeros(())}, [])).spec
        return control_pb2.AlterRequest(store="x", added=codec.encode(added), timeout_s=WAIT_S)
    return control_pb2.AlterRequest(store="x", removed=[content_pb2.Path(parts=["a"])], timeout_s=WAIT_S)


def _list_files(store: OpenedStore) -> list[str]:
    return sorted(str(path.relative_to(store.folder)) for path in store.folder.rglob("*"))


def test_work_when_the_store_is_deleted_meanwhile_then_ends_in_its_folder_and_not_in_the_next_ones(
    world: World, run: Loop
) -> None:
    store = _make(world, run, "tensordict")

    async def scenario() -> OpenedStore:
        held = _Held(lambda path: (path / "late").write_bytes(b"content"))
        working = asyncio.create_task(work_in_folder(store, held))
        await _wait_for(held.begun)
        await world.stores.delete(store)
        following = await _make_again(world, "tensordict")
        held.go_on()
        with pytest.raises(StoreNotFoundError):
            await working
        with pytest.raises(StoreNotFoundError):
            await work_in_folder(store, held)
        return following

    assert "late" not in _list_files(run(scenario()))


@pytest.mark.parametrize("kind", ["tensordict", "table"])
@pytest.mark.parametrize("is_retried", [False, True])
def test_alter_when_the_store_is_deleted_before_its_files_move_then_the_next_one_of_its_name_keeps_its_own(
    world: World, run: Loop, kind: str, is_retried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, failed = _make(world, run, kind), Event()
    held = _Held(restructuring.carry_out)

    def refuse(*_: Any) -> None:
        failed.set()
        raise CapacityError(what="the disk", asked=4096, free=0)

    async def scenario() -> None:
        monkeypatch.setattr(restructuring, "carry_out", refuse if is_retried else held)
        altering = asyncio.create_task(world.alterations.alter(world.session(2), 1, _ask(kind)))
        await _wait_for(failed if is_retried else held.begun)
        monkeypatch.setattr(restructuring, "carry_out", held)
        await world.stores.delete(store)
        following = await _make_again(world, kind)
        files = _list_files(following)
        held.go_on()
        await asyncio.wait_for(asyncio.gather(altering, return_exceptions=True), WAIT_S)
        await asyncio.wait_for(asyncio.gather(*_list_tasks(), return_exceptions=True), WAIT_S)
        assert _list_files(following) == files

    for module in ("tensordicts.alterations", "tables.added_leaves"):
        monkeypatch.setattr(f"tdserve.server.{module}.RETRY_EVERY_S", 0.01)
    run(scenario())


def test_alter_when_the_store_is_deleted_before_its_new_files_are_made_then_no_folder_comes_again(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held = _make(world, run, "tensordict"), _Held(leaf_folders.create)

    async def scenario() -> None:
        monkeypatch.setattr(leaf_folders, "create", held)
        added = codec.encode(capture(TensorDict({"z": torch.zeros(4)}, [4])).spec)
        asked = control_pb2.AlterRequest(store="x", added=added, timeout_s=WAIT_S)
        altering = asyncio.create_task(world.alterations.alter(world.session(2), 1, asked))
        await _wait_for(held.begun)
        await world.stores.delete(store)
        held.go_on()
        with pytest.raises(StoreNotFoundError):
            await altering

    run(scenario())
    assert _list_names(world.root.path / "stores") == []


def _list_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def test_leaves_when_the_folder_above_is_gone_then_it_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(TDServeError):
        leaf_folders.create(tmp_path / "gone" / "altering-1", capture(TD).spec)
    assert _list_names(tmp_path) == []
