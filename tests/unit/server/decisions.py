"""Changes of every kind in a world, their results, and failures of the process or of the disk in the middle of them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CorruptDataError, StoreNotFoundError
from tdserve.base.ids import make_client_id
from tdserve.client.content.value_blocks import encode_values
from tdserve.client.local.local_writes import put_selection
from tdserve.data.values import read_columns
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.settings import Settings
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker, drop_store
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.database import catalog_db
from tdserve.store.disk.faults import lmdb_faults
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tests.unit.server import replaying
from tests.unit.server.local_peer import LocalPeer, mapped
from tests.unit.server.world import Loop, World, content_of, new_store

REQUEST = 7
"""Request number of the change."""

LOST = "lost"
"""Stands for the content of rows that were half overwritten."""

TEXTS = NonTensorStack("p", "q", "r", "s")
TD = TensorDict({"a": torch.zeros(4, dtype=torch.int64), "b": torch.zeros(4, 2), "s": TEXTS, "t": TEXTS}, [4])
ROW = TensorDict({"a": torch.tensor(5), "b": torch.full((2,), 5.0), "s": "v", "t": "w"}, [])
"""The row that overwrites one of the store."""


@dataclass(frozen=True)
class Kind:
    """One kind of change.

    Attributes:
        prepare: Creates what the change needs.
        change: Makes the change over a session, under the number ``REQUEST``.
        look: Returns what any client sees of it.
        is_answered: Whether its answer is kept for a retry.
        is_repeatable: Whether a second run of it does no harm, so that it may be visible before its answer is on
            record.
    """

    prepare: Callable[[World, Loop], object]
    change: Callable[[World, Loop, ClientSession], object]
    look: Callable[[World, Loop], object]
    is_answered: bool = True
    is_repeatable: bool = False


def _nothing(world: World, run: Loop) -> None:
    """Prepares nothing."""


def _store(world: World, run: Loop) -> None:
    _fill(world, run, session_of(world))


def _open(world: World, run: Loop, name: str) -> OpenedStore:
    async def find() -> OpenedStore:
        return world.stores.get(name)

    return run(find())


def _names(world: World, run: Loop) -> list[str]:
    names = [record.name for record in world.stores.catalog if not record.loading]
    return [_open(world, run, name).name for name in names]


def _keys(world: World, run: Loop) -> object:
    store = _open(world, run, "x")
    return [".".join(key) for key in store.spec.keys(True, True)], store.content_version, _numbers(world, run)


def _numbers(world: World, run: Loop) -> object:
    store = _open(world, run, "x")
    asked = control_pb2.ReadRequest(store="x", timeout_s=0.2)
    store.lost.rewrite_grace_until_s = 0.0
    try:
        done = run(world.reads.read(world.session(9), 1, store, asked, Deadline.after(0.2)))
    except CorruptDataError:
        return LOST
    assert done is not None
    assert not (store.get_generation_values() & 1).any()
    return done.inline, _texts(store, None)


def _texts(store: OpenedStore, rows: NDArray[np.int64] | None) -> object:
    """Returns the values of rows, or of all for None; a missing value is damaged data."""
    columns = read_columns(mapped(store), [path for path, _ in store.spec.values], rows)
    return [[bytes(value) for value in column.values] for column in columns]


def _create(world: World, run: Loop, session: ClientSession) -> None:
    run(world.create("x", TD))


def _delete(world: World, run: Loop, session: ClientSession) -> None:
    run(world.creation.delete("x"))


def _fill(world: World, run: Loop, session: ClientSession) -> None:
    asked = control_pb2.WriteRequest(store="x", new_store=new_store("x", TD), content=content_of(TD))
    run(world.writes.create(session, REQUEST, asked))


def _pack(world: World, run: Loop, session: ClientSession) -> None:
    td = TD.select("a", "b")
    asked = control_pb2.WriteRequest(store="x", new_store=new_store("x", td), content=content_of(td))
    run(world.writes.create(session, REQUEST, asked))


def _packed(world: World, run: Loop) -> None:
    _pack(world, run, session_of(world))


def _writing(name: str, content: control_pb2.Content) -> control_pb2.WriteRequest:
    return control_pb2.WriteRequest(store=name, selection=parse(1).to_message(), content=content, timeout_s=5.0)


def _overwrite(world: World, run: Loop, session: ClientSession, name: str = "x", row: TensorDict = ROW) -> None:
    content = content_of(row, world.stores.get(name).spec.fingerprint)
    run(world.writes.write(session, REQUEST, _writing(name, content)))


def _overwrite_in_place(
    world: World, run: Loop, session: ClientSession, name: str = "x", row: TensorDict = ROW
) -> None:
    async def scenario() -> None:
        store = world.stores.get(name)
        async with LocalPeer(world) as peer:
            peer.session.hello.client_id = session.client_id
            captured = capture(row)
            values = encode_values(captured.spec, captured.values, store=name)
            asked = _writing(name, control_pb2.Content(fingerprint=store.spec.fingerprint, values=values))
            write = asyncio.create_task(world.writes.write(peer.session, REQUEST, asked))
            answer = asyncio.create_task(peer.receive())
            await asyncio.wait({write, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                put_selection(mapped(store), parse(1), captured)
                peer.done(REQUEST)
            answer.cancel()
            await write

    run(scenario())


def _weights(number: int) -> TensorDict:
    return TensorDict({"w": torch.full((3,), float(number)), "s": f"text {number}"}, [])


def _publish(world: World, run: Loop, session: ClientSession) -> None:
    content = content_of(_weights(2), is_packed=True)
    spec = codec.encode(capture(_weights(2)).spec)
    asked = control_pb2.PublishRequest(store="x", spec=spec, content=content, metadata=b"m" * 100)
    run(world.publishing.publish(session, REQUEST, asked))


def _publish_others(world: World, run: Loop) -> None:
    for _ in range(4):  # from here on files are used again
        content = content_of(_weights(1), is_packed=True)
        spec = codec.encode(capture(_weights(1)).spec)
        run(
            world.publishing.publish(
                world.session(), 1, control_pb2.PublishRequest(store="x", spec=spec, content=content)
            )
        )


def _latest(world: World, run: Loop) -> object:
    try:
        asked = control_pb2.LatestRequest(store="x", timeout_s=0.0)
        done = run(world.publishing.send_latest(world.session(9), 1, asked))
    except StoreNotFoundError:
        return None
    assert done is not None
    assert done.accepted.values
    return done.accepted.version, done.inline, done.accepted.values


def _make_rows(start: int) -> TensorDict:
    """Returns rows of a table, with values."""
    td = replaying.rows(start)
    td["s"], td["t"] = (NonTensorStack(*(f"{name} {start + number}" for number in range(3))) for name in "st")
    return td


def _table(world: World, run: Loop) -> None:
    kind, settings = control_pb2.STORE_KIND_REPLAY, Settings().to_json()
    store = run(world.create("r", _make_rows(0)[0], kind=kind, capacity=8, settings=settings))
    replaying.extend(world, run, store, _make_rows(0))


def _extend(world: World, run: Loop, session: ClientSession) -> None:
    asked = replaying.extending(world.stores.get("r"), _make_rows(3))
    run(world.extends.extend(session, REQUEST, asked))


def _delete_rows(world: World, run: Loop, session: ClientSession) -> None:
    asked = control_pb2.ChangeRequest(store="r")
    asked.delete.data = replaying.numbers(0, 1)
    run(world.changes.change(session, REQUEST, asked))


def _clear(world: World, run: Loop, session: ClientSession) -> None:
    run(world.changes.change(session, REQUEST, control_pb2.ChangeRequest(store="r", clear=True)))


def _live_rows(world: World, run: Loop) -> object:
    store = _open(world, run, "r")
    table = store.get_table()
    return table.state.list_live_rows().tolist(), table.ring.inserts, _texts(store, table.state.list_live_rows())


def _overwrite_row(world: World, run: Loop, session: ClientSession) -> None:
    _overwrite(world, run, session, "r", _make_rows(8)[0])


def _overwrite_row_in_place(world: World, run: Loop, session: ClientSession) -> None:
    _overwrite_in_place(world, run, session, "r", _make_rows(8)[0])


def _rows(world: World, run: Loop) -> object:
    store = _open(world, run, "r")
    live = store.get_table().state.list_live_rows().tolist()
    is_lost = 1 not in live or store.get_generation_values()[1] & 1  # odd until its writer is proved gone
    return LOST if is_lost else (live, mapped(store).leaves["a",][live].tolist(), _texts(store, np.array(live)))


def _add_key(world: World, run: Loop, session: ClientSession) -> None:
    td = TensorDict({"z": torch.arange(4), "n": {"d": torch.ones(4), "u": TEXTS}}, [4])
    asked = control_pb2.AlterRequest(
        store="x", added=codec.encode(capture(td).spec), content=content_of(td), timeout_s=5.0
    )
    run(world.alterations.alter(session, REQUEST, asked))


def _rename_keys(world: World, run: Loop, session: ClientSession) -> None:
    path = content_pb2.Path
    renamed = [control_pb2.Renamed(old_key=path(parts=[key]), new_key=path(parts=["n", key])) for key in "as"]
    removed = [path(parts=[key]) for key in "bt"]
    asked = control_pb2.AlterRequest(store="x", removed=removed, renamed=renamed, timeout_s=5.0)
    run(world.alterations.alter(session, REQUEST, asked))


KINDS = {
    "create": Kind(_nothing, _create, _names, is_answered=False),
    "delete": Kind(_store, _delete, _names, is_answered=False),
    "fill": Kind(_nothing, _fill, _names),
    "create a small store": Kind(_nothing, _pack, _names),
    "delete a small store": Kind(_packed, _delete, _names, is_answered=False),
    "overwrite": Kind(_store, _overwrite, _numbers),
    "overwrite in place": Kind(_store, _overwrite_in_place, _numbers),
    "overwrite a row of a table": Kind(_table, _overwrite_row, _rows),
    "overwrite a row of a table in place": Kind(_table, _overwrite_row_in_place, _rows),
    "first publish": Kind(_nothing, _publish, _latest),
    "publish": Kind(_publish_others, _publish, _latest),
    "extend": Kind(_table, _extend, _live_rows),
    "clear": Kind(_table, _clear, _live_rows, is_repeatable=True),
    "delete rows": Kind(_table, _delete_rows, _live_rows, is_repeatable=True),
    "add keys": Kind(_store, _add_key, _keys),
    "rename keys": Kind(_store, _rename_keys, _keys),
}


class Killed:
    """A world as the next server finds it, after the current one was killed; a context manager."""

    def __init__(self, world: World, path: Path) -> None:
        self._path = path
        self._worker = world.worker
        # What is deleted goes in a thread, at any moment.
        shutil.copytree(world.root.path, path, ignore=shutil.ignore_patterns("lock.mdb", ".deleted-*"))

    def look(self, run: Loop, kind: Kind, client_id: bytes) -> tuple[object, bool]:
        """Returns what the next server shows after it has repaired the root, and whether it would answer a retry."""

        async def start() -> World:
            world = World(self._path, self._worker)
            await let_go(world)
            await world.alterations.repair()
            await world.writes.repair()
            return world

        world = run(start())
        found = kind.look(world, run), is_on_record(world, client_id)
        run(let_go(world))
        world.process_watch.close()
        world.close()
        shutil.rmtree(self._path)
        return found


async def let_go(world: World) -> None:
    """Makes the worker, which identifies stores by uid alone, open them again where they lie in this world."""
    for record in world.stores.catalog:
        await drop_store([world.worker], record.uid)


@contextmanager
def watching_others(monkeypatch: pytest.MonkeyPatch, on_step: Callable[[], None]) -> Iterator[None]:
    """Calls ``on_step`` before and after everything that the worker or a thread has to do in this block."""
    submit_order, to_thread = DataWorker.submit, asyncio.to_thread

    def submit(worker: DataWorker, *arguments: Any, **named: Any) -> asyncio.Future[worker_pb2.Worked]:
        on_step()
        done = submit_order(worker, *arguments, **named)
        done.add_done_callback(lambda _: on_step())
        return done

    async def in_thread(do: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        on_step()
        done = await to_thread(do, *arguments, **named)
        on_step()
        return done

    with monkeypatch.context() as patch:
        patch.setattr(DataWorker, "submit", submit)
        patch.setattr(asyncio, "to_thread", in_thread)
        yield


@contextmanager
def watching_writes(
    monkeypatch: pytest.MonkeyPatch, on_write: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Runs each transaction of the catalog in this block within ``on_write()``."""

    @contextmanager
    def watch(folder: Any, **limits: Any) -> Iterator[None]:
        is_write = "asked" in limits
        with on_write() if is_write else nullcontext(), lmdb_faults(folder, **limits):
            yield

    with monkeypatch.context() as patch:
        patch.setattr(catalog_db, "lmdb_faults", watch)
        yield


def session_of(world: World) -> ClientSession:
    """Returns the session that makes the change."""
    return world.session_of(control_pb2.Hello(client_id=make_client_id(), transport="gloo"), 1)


def is_on_record(world: World, client_id: bytes) -> bool:
    """Returns whether a retry of the change would be answered and not run again."""
    return world.answers.find_answer(client_id, REQUEST) is not None
