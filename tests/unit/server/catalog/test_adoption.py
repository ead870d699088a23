from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    InvalidRequestError,
    NotSupportedError,
    ReadOnlyError,
    StoreExistsError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.messages.selection.selection import parse
from tdserve.server.catalog import adoption
from tdserve.server.catalog.adoption import Adoption, encode_values
from tdserve.server.movers.permit_mover import read_values
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.rows.adoptable import read_folder
from tdserve.v1 import control_pb2
from tests.roots import make_quick_root
from tests.stored_root.unpacking import unpack_root
from tests.unit.server.local_peer import LocalPeer, mapped
from tests.unit.server.world import Loop, World, content_of, outbox

TD = TensorDict({"a": torch.arange(4), "t": NonTensorStack("a", "b", "c", "d"), "n": {"s": "x"}}, [4])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the user's."""
    TD.memmap(tmp_path / "data")
    return tmp_path / "data"


def ask(folder: Path, **fields: Any) -> control_pb2.AdoptRequest:
    """A request for a store "x"."""
    return control_pb2.AdoptRequest(**{"name": "x", "path": str(folder), **fields})


def adopt(world: World, run: Loop, folder: Path, **fields: Any) -> None:
    """Asked by a client that shares the root."""

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            await world.adoption.adopt(peer.session, 1, ask(folder, **fields))

    run(scenario())


def test_adopt_when_done_then_the_users_tensors_and_own_values(world: World, run: Loop, folder: Path) -> None:
    adopt(world, run, folder)
    store = world.stores.get("x")
    assert (store.record.adopted, store.record.read_only, store.content_version) == (str(folder), False, 1)
    mapped(store).leaves["a",][1] = 7
    assert TensorDict.load_memmap(folder)["a"].tolist() == [0, 7, 2, 3]
    paths = [path for path, _ in store.spec.values]
    values = run(read_values(world.worker, store, paths, np.arange(4)))
    assert values == encode_values(read_folder(str(folder), writable=False))


def test_adopt_when_asked_again_after_a_lost_answer_then_the_same_answer(world: World, run: Loop, folder: Path) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            await world.adoption.adopt(peer.session, 5, ask(folder))
            assert world.answers.find_answer(peer.session.client_id, 5) is not None

    run(scenario())


def test_adopt_when_restarted_then_there_and_checked_when_it_is_used(world: World, run: Loop, folder: Path) -> None:
    adopt(world, run, folder, read_only=True)
    world.reopen()
    assert world.stores.get("x").record.read_only
    world.reopen()
    (folder / "a.memmap").unlink()
    for _ in range(2):
        with pytest.raises(CorruptDataError, match=r"32 bytes at key 'a', found none"):
            world.stores.get("x")
    run(world.creation.delete("x"))
    assert "x" not in world.stores.catalog
    assert (folder / "meta.json").exists()
    assert not world.root.store_folder("x").exists()


def test_write_when_read_only_then_refused_before_anything(world: World, run: Loop, folder: Path) -> None:
    adopt(world, run, folder, read_only=True)
    store = world.stores.get("x")
    content = content_of(TD, store.spec.fingerprint)
    write = control_pb2.WriteRequest(store="x", content=content, selection=parse(...).to_message())
    with pytest.raises(ReadOnlyError, match=str(folder)):
        run(world.writes.write(world.session(), 1, write))
    assert store.content_version == 1


def test_adopt_when_the_session_does_not_share_the_root_then_refused(world: World, run: Loop, folder: Path) -> None:
    async def scenario() -> None:
        async with LocalPeer(world, is_read_only=True) as peer:
            for session in (peer.session, world.session(2)):
                for path in (folder, folder / "nothing"):
                    with pytest.raises(NotSupportedError, match="--adoptable"):
                        await world.adoption.adopt(session, 1, ask(path, read_only=True))

    run(scenario())
    assert "x" not in world.stores.catalog


def remotely(world: World, run: Loop, folder: Path, path: Path) -> ClientSession:
    """Asked by a client elsewhere, of a server that lets everybody adopt below a folder."""
    open_one = Adoption(world.stores, world.answers, values_worker=world.worker, folders=[str(folder)])
    session = world.session()
    run(open_one.adopt(session, 1, ask(path)))
    return session


def test_adopt_when_below_an_adoptable_folder_then_for_every_session(world: World, run: Loop, folder: Path) -> None:
    session = remotely(world, run, folder.parent, folder)
    assert not outbox(session).messages
    assert world.stores.get("x").record.adopted == str(folder)


def test_adopt_when_a_symlink_leads_out_of_it_then_refused(
    world: World, run: Loop, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open/link").symlink_to(folder)
    for path in (tmp_path / "open/link", tmp_path / "open/../data"):
        with pytest.raises(NotSupportedError, match="--adoptable"):
            remotely(world, run, tmp_path / "open", path)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": ""}, InvalidRequestError),
        ({"name": "../x"}, InvalidRequestError),
        ({"path": ""}, InvalidRequestError),
        ({"path": "data"}, InvalidRequestError),
        ({"path": "/nowhere"}, InvalidRequestError),
        ({"path": "/"}, InvalidRequestError),
    ],
)
def test_adopt_when_it_cannot_be_then_error_and_nothing_is_left(
    world: World, run: Loop, folder: Path, fields: dict[str, Any], error: type[TDServeError]
) -> None:
    with pytest.raises(error):
        adopt(world, run, folder, **fields)
    assert not list(world.stores.catalog)
    assert not list((world.root.path / "stores").iterdir())


def test_adopt_when_it_is_the_root_or_around_it_then_refused(world: World, run: Loop) -> None:
    TD.memmap(world.root.path / "stores" / "planted")
    for path in (world.root.path, world.root.path / "stores/planted", world.root.path.parent):
        with pytest.raises(InvalidRequestError, match="server's own"):
            adopt(world, run, path, read_only=True)


def test_adopt_when_the_values_find_no_room_then_nothing_stays(
    world: World, run: Loop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "MAX_META_BYTES", 10)
    with pytest.raises(CapacityError, match=str(folder)):
        adopt(world, run, folder)
    assert not list(world.stores.catalog)


def test_adopt_when_storing_the_values_fails_then_nothing_stays(
    world: World, run: Loop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "encode_values", lambda found: b"\xff")
    with pytest.raises(TDServeError):
        adopt(world, run, folder)
    assert not list(world.stores.catalog)
    assert not world.root.store_folder("x").exists()
    assert (folder / "meta.json").exists()
    monkeypatch.undo()
    adopt(world, run, folder)


def test_adopt_when_it_exists_then_as_asked(world: World, run: Loop, folder: Path) -> None:
    run(world.create("own", TD))
    with pytest.raises(StoreExistsError, match="not adopted"):
        adopt(world, run, folder, name="own", exists_ok=True)
    adopt(world, run, folder)
    adopt(world, run, folder, exists_ok=True)
    for fields in ({}, {"exists_ok": True, "read_only": True}):
        with pytest.raises(StoreExistsError):
            adopt(world, run, folder, **fields)


def test_adopt_when_two_do_so_at_once_then_one_store(world: World, run: Loop, folder: Path) -> None:
    async def scenario() -> list[Any]:
        async with LocalPeer(world) as peer:
            both = (world.adoption.adopt(peer.session, number, ask(folder, name=f"x{number}")) for number in (1, 2))
            return await asyncio.gather(*both, return_exceptions=True)

    answers = run(scenario())
    assert sorted(type(answer).__name__ for answer in answers) == ["Done", "StoreExistsError"]
    assert len(list(world.stores.catalog)) == 1


def test_adopt_when_two_names_wait_for_their_creation_then_only_one_gets_the_folder(
    world: World, run: Loop, folder: Path
) -> None:
    async def scenario() -> list[Any]:
        async with LocalPeer(world) as peer:
            adopting = [world.adoption.adopt(peer.session, number, ask(folder, name=f"x{number}")) for number in (1, 2)]
            with world.stores.seals.hold_creations():
                tasks = [asyncio.create_task(each) for each in adopting]
                await asyncio.wait(tasks, timeout=0.5)  # both get as far as they can
            return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(scenario())
    assert [type(each) for each in results if isinstance(each, Exception)] == [StoreExistsError]
    assert len(world.stores.catalog) == 1


def test_adopt_at_start_when_it_is_there_already_then_left_alone(world: World, run: Loop, folder: Path) -> None:
    for _ in range(2):
        run(world.adoption.adopt_at_start("x", str(folder), read_only=True))
    with pytest.raises(StoreExistsError):
        run(world.adoption.adopt_at_start("x", str(folder), read_only=False))
    assert world.stores.get("x").record.read_only


def test_delete_when_it_cannot_be_opened_then_gone_all_the_same(world: World, run: Loop, folder: Path) -> None:
    adopt(world, run, folder)
    world.reopen()
    (world.root.store_folder("x") / "generation.memmap").unlink()
    with pytest.raises(CorruptDataError):
        world.stores.get("x")
    run(world.creation.delete("x"))
    with pytest.raises(StoreNotFoundError):
        world.stores.get("x")


@pytest.mark.parametrize(("first", "second"), [("", ""), ("", "n"), ("n", "")])
@pytest.mark.parametrize("read_only", [(False, False), (True, False), (False, True), (True, True)])
def test_adopt_when_folders_overlap_then_refused_unless_both_are_only_read(
    world: World, run: Loop, folder: Path, first: str, second: str, read_only: tuple[bool, bool]
) -> None:
    adopt(world, run, folder / first, read_only=read_only[0])
    expected: Any = nullcontext() if all(read_only) else pytest.raises(StoreExistsError, match="would share files")
    with expected:
        adopt(world, run, folder / second, name="y", read_only=read_only[1])
    assert ("y" in world.stores.catalog) is all(read_only)


def test_adopt_when_a_folder_lies_beside_another_then_both_are_stores(
    world: World, run: Loop, folder: Path, tmp_path: Path
) -> None:
    TD.memmap(tmp_path / "data 2")
    adopt(world, run, folder)
    adopt(world, run, tmp_path / "data 2", name="y")
    assert {record.name for record in world.stores.catalog} == {"x", "y"}


def unpack_store(name: str, target: Path) -> Path:
    """Brings the folder of a store of the stored root to another place; returns its rows."""
    with make_quick_root() as quick:
        shutil.copytree(unpack_root(quick / "root") / "stores" / name, target)
    return target / "rows"


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("no rows", "its non-tensor values"),
        ("queue", "its non-tensor values, order, priorities and settings .*, which 3 of its 10 rows have content"),
    ],
)
def test_adopt_when_it_is_the_rows_of_a_store_that_has_more_then_refused_until_they_lie_elsewhere(
    world: World, run: Loop, tmp_path: Path, name: str, lacking: str
) -> None:
    rows = unpack_store(name, tmp_path / "lost")
    with pytest.raises(NotSupportedError, match=f"would be served without {lacking}; if its tensors are all"):
        adopt(world, run, rows)
    adopt(world, run, rows.rename(tmp_path / "elsewhere"))
    assert world.stores.get("x").record.num_rows == (10 if name == "queue" else 1)


@pytest.mark.parametrize("file", ["pipe", "link", "empty", "other", "none"])
def test_adopt_when_a_folder_is_named_like_the_rows_of_a_store_then_served(
    world: World, run: Loop, folder: Path, file: str
) -> None:
    rows, path = folder.rename(folder.parent / "rows"), folder.parent / "generation.memmap"
    (folder.parent / "objects").mkdir()
    if file == "pipe":
        os.mkfifo(path)
    elif file == "link":
        path.symlink_to(path)
    elif file != "none":
        path.write_bytes(bytes(8192 if file == "other" else 0))
    adopt(world, run, rows)
    assert world.stores.get("x").record.num_rows == 4


@pytest.mark.parametrize("read_only", [False, True])
def test_adopt_when_a_file_has_holes_then_its_room_is_reserved_unless_read_only(
    world: World, run: Loop, tmp_path: Path, read_only: bool
) -> None:
    TensorDict({"a": torch.zeros(100_000)}, [100_000]).memmap_like(tmp_path / "data")
    adopt(world, run, tmp_path / "data", read_only=read_only)
    nbytes = (tmp_path / "data" / "a.memmap").stat().st_blocks * 512
    assert (nbytes >= 400_000) is not read_only
