"""Reads worked out once per expression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import KeyNotFoundError, SelectionError
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.data.read_plans import MAX_KEPT_BYTES, MAX_KEPT_PLANS, plan_read
from tdserve.messages.content import ReadStatus, read_layout, select_spec
from tdserve.messages.selection.selection import parse
from tdserve.transport.sources_sinks import FlatBuffer
from tdserve.transport.stream import pack, unpack
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tests.unit.worker.peer import StoredTensorDict


@pytest.fixture
def opened(store: StoredTensorDict) -> MappedStore:
    """The store, mapped."""
    stores = OpenStores(writes_values=True)
    stores.learn(store.ref.fingerprint, store.ref.spec)
    return stores.get(store.ref)


def make_request(known: StoredTensorDict, index: Any = (), *keys: str) -> control_pb2.ReadRequest:
    """A request for what an index and keys select, by default of the small leaf."""
    paths = [content_pb2.Path(parts=[key]) for key in keys or ("small",)]
    selection = parse(index).to_message()
    return control_pb2.ReadRequest(store="store", selection=selection, keys=paths, fingerprint=known.spec.fingerprint)


def columns(store: StoredTensorDict, index: Any, content: bytes) -> tuple[list[int], list[int]]:
    """The small leaf, flat, and the status."""
    layout = read_layout(select_spec(store.spec, parse(index), [("small",)]))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    unpack(content, layout.messages, FlatBuffer(buffer))
    small, status = (buffer[slot.offset : slot.offset + slot.nbytes].view(torch.int64) for slot in layout.slots)
    return small.tolist(), status.tolist()


def test_plan_when_asked_for_again_then_the_same(opened: MappedStore, store: StoredTensorDict) -> None:
    read = make_request(store, [1, 2])
    order = worker_pb2.SendSelection(selection=read.selection, keys=read.keys)
    plan = plan_read(opened, read)
    assert plan_read(opened, order) is plan
    assert plan_read(opened, make_request(store, [1, 3])) is not plan
    assert plan_read(opened, make_request(store, [1, 2], "n")) is not plan


def test_plan_when_made_then_watches_the_rows_or_the_store_as_a_whole(
    opened: MappedStore, store: StoredTensorDict
) -> None:
    def watched(index: Any) -> list[int]:
        positions = np.arange(len(opened.generations.values))
        found: list[int] = positions[plan_read(opened, make_request(store, index)).watched].tolist()
        return found

    assert watched(()) == [6]
    assert watched([4, 1, 4]) == [4, 1, 4]
    assert watched(np.array([False, True, False, False, True, False])) == [1, 4]
    assert watched(slice(None, 3)) == [0, 1, 2]


@pytest.mark.parametrize(("index", "keys", "error"), [(6, "small", SelectionError), ((), "no", KeyNotFoundError)])
def test_plan_when_it_does_not_fit_then_error_and_not_kept(
    opened: MappedStore, store: StoredTensorDict, index: Any, keys: str, error: type[Exception]
) -> None:
    for _ in range(2):
        with pytest.raises(error):
            plan_read(opened, make_request(store, index, keys))
    assert opened.plans == {}


def test_plans_when_there_are_many_or_they_are_long_then_only_so_much_is_kept(
    opened: MappedStore, store: StoredTensorDict
) -> None:
    long = make_request(store, [0] * MAX_KEPT_BYTES)
    assert plan_read(opened, long) is not plan_read(opened, long)
    assert opened.plans == {}
    for number in range(3 * MAX_KEPT_PLANS):
        plan_read(opened, make_request(store, [number % 6, number // 6 % 6, number // 36 % 6, number // 216]))
        assert 1 <= len(opened.plans) <= MAX_KEPT_PLANS


@pytest.mark.parametrize(("row", "status"), [(1, ReadStatus.TORN), (0, ReadStatus.WHOLE)])
def test_trailer_when_a_row_has_moved_since_then_has_the_status(
    opened: MappedStore, store: StoredTensorDict, row: int, status: ReadStatus
) -> None:
    plan = plan_read(opened, make_request(store, [1, 2]))
    before = opened.generations.values[plan.watched].copy()
    source = plan.make_source(opened, plan.make_trailer(opened, before))
    store.generations.values[row] += 1
    assert columns(store, [1, 2], pack(plan.layout.messages, source)) == ([1, 2], [status, 1, 0, 0, 0, 0, 0, 0])


def test_plans_when_of_slices_of_a_long_store_then_hold_little(tmp_path: Path) -> None:
    small = torch.zeros(1_000_000, dtype=torch.uint8)
    td = StoredTensorDict(tmp_path / "store", TensorDict({"small": small}, [len(small)]))
    stores = OpenStores(writes_values=True)
    stores.learn(td.ref.fingerprint, td.ref.spec)
    opened = stores.get(td.ref)
    for start in range(1, 11):
        plan_read(opened, make_request(td, slice(start, None)))
        plan_read(opened, make_request(td, slice(start, start + 10)))
    assert len(opened.plans) == 10
