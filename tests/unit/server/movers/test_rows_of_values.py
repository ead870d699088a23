"""Local clients that extend stores whose rows have no tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdserve.base.errors import CapacityError
from tdserve.messages.row_numbers import decode_rows
from tdserve.server.movers.permit_mover import read_values
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.v1 import control_pb2
from tdserve.values.value_columns import decode_block
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.world import Loop, World, content_of


def here(store: OpenedStore, num_rows: int, *, values: bytes) -> control_pb2.ExtendRequest:
    """Returns a request of a local client."""
    found = control_pb2.Content(fingerprint=store.spec.fingerprint, values=values)
    return control_pb2.ExtendRequest(store=store.name, num_rows=num_rows, content=found, timeout_s=20.0)


def reserved(world: World, store: OpenedStore) -> list[list[int]]:
    """Returns the rows that are on record as being filled."""
    return [each.rows.tolist() for each in ReservedRows.load(world.db, store.record.uid)]


def only_value(value: Any) -> TensorDict:
    """A row without tensors."""
    return TensorDict({"v": NonTensorData(value)}, [])


def test_extend_when_rows_have_no_tensors_then_committed_without_asking_the_client(world: World, run: Loop) -> None:
    store = run(world.create_replay("v", only_value("x"), 4))
    batch: Any = torch.stack([only_value(f"value {number}") for number in range(3)])

    async def scenario() -> None:
        async with LocalPeer(world) as silent:
            done = await world.extends.extend(silent.session, 1, here(store, 3, values=content_of(batch).values))
            assert decode_rows(done.indices).tolist() == [0, 1, 2]

    run(scenario())
    assert reserved(world, store) == []
    assert len(store.get_table()) == 3
    (column,) = decode_block(run(read_values(world.worker, store, [("v",)], np.arange(3))))
    assert [value.endswith(b"value %d" % number) for number, value in enumerate(column.values)] == [True] * 3


def test_extend_when_rows_have_no_tensors_and_their_values_are_refused_then_the_rows_are_free(
    world: World, run: Loop
) -> None:
    like = only_value("x")
    store = run(world.create("v", like, kind=control_pb2.STORE_KIND_REPLAY, capacity=4, max_object_bytes=1 << 20))
    huge: Any = torch.stack([only_value("y" * (1 << 20)) for _ in range(3)])

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            with pytest.raises(CapacityError):
                await world.extends.extend(peer.session, 1, here(store, 3, values=content_of(huge).values))

    run(scenario())
    assert reserved(world, store) == []
    assert store.get_table().info()["num_reserved"] == 0
