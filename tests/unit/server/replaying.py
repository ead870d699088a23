"""A replay table in a world; rows are written and read inline."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tdserve.messages.content import make_rows_layout
from tdserve.messages.row_numbers import decode_rows, encode_rows
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.settings import Settings
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.v1 import content_pb2, control_pb2
from tests.unit.server.world import Loop, World, columns_of, content_of


def rows(start: int, num_rows: int = 3) -> TensorDict:
    """Returns rows whose content shows their number: ``a`` counts, ``g`` is equal for two neighbours, ``w`` is wide."""
    count = torch.arange(start, start + num_rows)
    wide = (count // 2)[:, None].expand(-1, 3).clone()
    return TensorDict({"a": count, "g": (count // 2).to(torch.int32), "n": {"w": wide}}, [num_rows])


def path(*parts: str) -> content_pb2.Path:
    """Encodes a key as in messages."""
    return content_pb2.Path(parts=parts)


def numbers(*found: int) -> bytes:
    """Encodes row numbers as in messages."""
    return encode_rows(np.array(found, np.int64))


def create(world: World, run: Loop, capacity: int = 8, **parts: Any) -> OpenedStore:
    """Creates a replay table named ``r`` for such rows."""
    kind, settings = control_pb2.STORE_KIND_REPLAY, Settings(**parts).to_json()
    return run(world.create("r", rows(0)[0], kind=kind, capacity=capacity, settings=settings))


def extending(store: OpenedStore, td: Any, **fields: Any) -> control_pb2.ExtendRequest:
    """Returns a request to extend by these rows; ``keys`` if some are missing."""
    content = content_of(td, store.spec.fingerprint)
    common = {"store": store.name, "num_rows": len(td), "content": content, "timeout_s": 0.05}
    return control_pb2.ExtendRequest(**{**common, **fields})


def extend(world: World, run: Loop, store: OpenedStore, td: Any, *, request: int = 1, **fields: Any) -> list[int]:
    """Extends the table; returns the row numbers."""
    done = run(world.extends.extend(world.session(), request, extending(store, td, **fields)))
    return [int(number) for number in decode_rows(done.indices)]


def sampling(num_rows: int, **fields: Any) -> control_pb2.SampleRequest:
    """Returns a request for a sample."""
    return control_pb2.SampleRequest(**{"store": "r", "num_rows": num_rows, "timeout_s": 0.05, **fields})


def content(store: OpenedStore, done: control_pb2.Done | None) -> dict[str, list[Any]]:
    """Returns the content of a sample or read, by last key."""
    assert done is not None
    added = store.get_table().settings.list_added_columns()
    layout = make_rows_layout(store.spec, done.accepted.num_rows, added)
    return {key: column.tolist() for key, column in columns_of(layout, done.inline).items()}


def sample(
    world: World, run: Loop, store: OpenedStore, num_rows: int, session: ClientSession | None = None, **fields: Any
) -> dict[str, list[Any]]:
    """Returns the content of a new sample, by last key."""
    asked = sampling(num_rows, **fields)
    return content(store, run(world.samples.sample(session or world.session(), 1, asked)))


def write(world: World, run: Loop, store: OpenedStore, td: Any, index: Any, *keys: tuple[str, ...]) -> None:
    """Writes as ``set_at_`` does."""
    run(world.writes.write(world.session(), 1, writing(store, td, index, *keys)))


def writing(store: OpenedStore, td: Any, index: Any, *keys: tuple[str, ...]) -> control_pb2.WriteRequest:
    """Returns a request to overwrite existing rows."""
    return control_pb2.WriteRequest(
        store=store.name,
        selection=parse(index).to_message(),
        keys=[path(*key) for key in keys],
        content=content_of(td, store.spec.fingerprint),
        timeout_s=5.0,
    )


async def in_line(store: OpenedStore, num_callers: int = 1) -> None:
    """Lets the event loop run until this many callers wait for rows of the store."""
    for _ in range(10_000):
        if store.waiters.num_waiting >= num_callers:
            return
        await asyncio.sleep(0)
    raise AssertionError("nobody waits")
