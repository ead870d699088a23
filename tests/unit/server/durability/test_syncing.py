"""When the content of stores is synced to the disk, and which requests wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import ClosedError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.durability import syncing
from tdserve.server.durability.sync_process import SyncProcess
from tdserve.server.durability.syncing import Syncing
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.durability.sync_pass import COPY_FILE, Pass
from tdserve.store.durability.watermark import FILE_NAME, SyncedStore
from tdserve.store.weights.version_marks import find_whole_versions
from tdserve.structure.captures.capture import capture
from tests.unit.server.world import Loop, World


def _nothing() -> None:
    pass


def _make(world: World, run: Loop, name: str = "rows") -> OpenedStore:
    spec = capture(TensorDict({"x": torch.zeros(3)}, [3]), store=name).spec
    record = StoreRecord(name, "tensordict", "", fingerprint=spec.fingerprint, num_rows=3)
    return run(world.stores.create(record, spec))


def _changing_keys_of(world: World, describe: Callable[..., SyncedStore]) -> Callable[..., SyncedStore]:
    """Lets the keys of a store change in the middle of each pass."""

    def changed(*arguments: Any, **named: Any) -> SyncedStore:
        store = describe(*arguments, **named)
        record = world.stores.catalog.get("rows")
        world.stores.catalog.replace(replace(record, structure=record.structure + 1))
        return store

    return changed


def test_sync_when_started_then_there_is_a_copy_of_the_catalog_at_once(world: World, run: Loop) -> None:
    async def sync() -> None:
        syncing = Syncing(world.stores, interval_s=0.0, before=_nothing)
        await syncing.start()
        assert (world.stores.root.synced_folder / COPY_FILE).exists()
        assert await syncing.stop(60.0)

    run(sync())


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["waited for", "due", "stopped"])
def test_sync_when_waited_for_or_due_or_stopped_then_notes_the_rows(world: World, run: Loop, ending: str) -> None:
    store = _make(world, run)
    noted = store.folder / FILE_NAME

    async def sync() -> None:
        begun: asyncio.Queue[bool] = asyncio.Queue()
        interval_s = 0.01 if ending == "due" else 0.0
        syncing = Syncing(world.stores, interval_s=interval_s, before=lambda: begun.put_nowait(noted.exists()))
        await syncing.start()
        if ending == "waited for":
            await syncing.wait_synced(store.record.uid)
            assert noted.exists()
        if ending == "due":
            assert [await begun.get(), await begun.get()] == [False, True]
        assert await syncing.stop(60.0)
        assert noted.exists()
        with pytest.raises(ClosedError):
            await syncing.wait_synced(store.record.uid)

    run(sync())


@pytest.mark.slow
def test_wait_when_several_wait_and_the_process_is_killed_then_all_return_after_the_retry(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = _make(world, run), list[SyncProcess]()

    def make_process(lock_fd: int, **options: bool) -> SyncProcess:
        made.append(SyncProcess(lock_fd, **options))
        return made[-1]

    monkeypatch.setattr(syncing, "SyncProcess", make_process)

    async def sync() -> None:
        syncing = Syncing(world.stores, interval_s=0.0, before=_nothing)
        await syncing.start()
        await syncing.wait_synced(store.record.uid)
        made[0].end()
        await asyncio.gather(*(syncing.wait_synced(store.record.uid) for _ in range(3)))
        assert await syncing.stop(60.0)

    run(sync())


@pytest.mark.slow
def test_wait_when_another_store_cannot_be_synced_then_returns_and_that_one_is_counted(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncing, "RETRY_S", 0.01)
    whole, damaged = _make(world, run), _make(world, run, "damaged")
    content = damaged.folder / "rows/x.memmap"
    hidden = content.rename(content.with_name("hidden"))

    async def sync() -> None:
        made = Syncing(world.stores, interval_s=0.0, before=_nothing)
        await made.start()
        waiting = asyncio.create_task(made.wait_synced(damaged.record.uid))
        for _ in range(3):
            await asyncio.wait_for(made.wait_synced(whole.record.uid), 20.0)
        assert not waiting.done()
        assert made.unsynced == {damaged.record.uid}
        hidden.rename(content)
        await asyncio.wait_for(waiting, 20.0)
        assert (made.unsynced, made.age_s) == (set(), None)
        assert await made.stop(60.0)

    run(sync())


@pytest.mark.slow
@pytest.mark.parametrize("is_changing", [False, True])
def test_wait_when_the_store_cannot_be_synced_then_goes_on_until_it_can(
    world: World, run: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_changing: bool
) -> None:
    monkeypatch.setattr(syncing, "RETRY_S", 0.01)
    store = _make(world, run)
    if is_changing:
        monkeypatch.setattr(SyncedStore, "from_spec", _changing_keys_of(world, SyncedStore.from_spec))
    hidden = store.folder / "rows/hidden"
    (store.folder / "rows/x.memmap").rename(hidden)

    async def sync() -> None:
        passes: asyncio.Queue[None] = asyncio.Queue()
        made = Syncing(world.stores, interval_s=0.0, before=lambda: passes.put_nowait(None))
        await made.start()
        waiting = asyncio.create_task(made.wait_synced(store.record.uid))
        for _ in range(3):
            await asyncio.wait_for(passes.get(), 20.0)
        assert not waiting.done()
        hidden.rename(store.folder / "rows/x.memmap")
        if is_changing:
            monkeypatch.undo()
            while not passes.empty():
                passes.get_nowait()
            await asyncio.wait_for(passes.get(), 20.0)  # a pass that changes no keys; the one before is over
            world.stores.catalog.replace(store.record)
        await waiting
        assert (store.folder / FILE_NAME).exists()
        assert await made.stop(60.0)

    run(sync())
    assert ("x.memmap" in caplog.text) == (not is_changing)  # no wonder then, and nothing to be alarmed about
    assert "bug" not in caplog.text


@pytest.mark.slow
def test_regular_pass_when_syncs_are_always_requested_then_comes_at_its_time(world: World, run: Loop) -> None:
    busy, other = _make(world, run), _make(world, run, "other")

    async def sync() -> None:
        made = Syncing(world.stores, interval_s=0.1, before=_nothing)
        await made.start()

        async def request() -> None:
            while not (other.folder / FILE_NAME).exists():
                await made.wait_synced(busy.record.uid)

        await asyncio.wait_for(asyncio.gather(request(), request()), 20.0)
        assert await made.stop(60.0)

    run(sync())


@pytest.mark.slow
def test_sync_when_a_store_fails_again_and_again_then_pauses_grow(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncing, "RETRY_S", 0.02)
    store = _make(world, run)
    (store.folder / "rows/x.memmap").unlink()

    async def sync() -> list[float]:
        passes: asyncio.Queue[float] = asyncio.Queue()
        made = Syncing(world.stores, interval_s=0.0, before=lambda: passes.put_nowait(time.monotonic()))
        await made.start()
        waiting = asyncio.create_task(made.wait_synced(store.record.uid))
        begun_s = [await asyncio.wait_for(passes.get(), 20.0) for _ in range(6)]
        assert not await made.stop(60.0)
        with pytest.raises(ClosedError):
            await waiting
        return begun_s

    for number, (before_s, after_s) in enumerate(pairwise(run(sync()))):
        assert after_s - before_s >= 0.02 * 2**number


@pytest.mark.slow
def test_stores_when_deleted_then_the_process_that_syncs_forgets_them(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten, num_stores = list[str](), 12

    class Process(SyncProcess):
        def run(self, wanted: Pass, *, gone: Sequence[str] = ()) -> dict[str, str]:
            forgotten.extend(gone)
            return super().run(wanted, gone=gone)

    monkeypatch.setattr(syncing, "SyncProcess", Process)
    kept = _make(world, run, "kept")

    async def sync() -> None:
        made = Syncing(world.stores, interval_s=0.0, before=_nothing)
        await made.start()
        uids = []
        for _ in range(num_stores):
            store = await world.stores.create(replace(kept.record, name="other"), kept.spec)
            uids.append(store.record.uid)
            await made.wait_synced(store.record.uid)
            await made.wait_synced(kept.record.uid)
            await world.stores.delete(store)
        assert forgotten == uids[: len(forgotten)]
        assert len(forgotten) >= num_stores - 2
        assert await made.stop(60.0)

    run(sync())


@pytest.mark.slow
def test_version_when_synced_then_its_file_stays_until_a_newer_one_is(tmp_path: Path) -> None:
    """Through a server: versions are published quicker than they are synced."""
    with tdserve.Server(tmp_path / "root", sync_interval_s=0) as own:
        versions = tmp_path / "root/stores/w/versions"
        with own.client() as client:
            client.publish("w", TensorDict({"a": torch.zeros(10)}, []))
            uid = client.describe("w").uid
        own.shutdown()
        own.start()
        with own.client() as client:
            for number in range(5):
                client.publish("w", TensorDict({"a": torch.full((10,), float(number))}, []))
            assert list(find_whole_versions(versions, uid=uid)) == [1]
        own.shutdown()
        assert list(find_whole_versions(versions, uid=uid)) == [5, 6]
        assert not (versions / "1.safetensors").exists()
