from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError, RemoteProtocolError, TransferAbortedError
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.data.values import drop_values, move_values, put_values, read_block, read_values
from tdserve.messages.row_numbers import encode_rows
from tdserve.messages.selection.selection import parse
from tdserve.store.values.objects import ObjectColumn
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, worker_pb2
from tdserve.values.value_columns import JoinedValues, ValueColumn, decode_block, encode_block
from tests.unit.worker.peer import StoredTensorDict

PATH = ("v",)


@pytest.fixture
def opened(tmp_path: Path) -> MappedStore:
    """A store of four rows with one non-tensor leaf."""
    store = StoredTensorDict(tmp_path / "store", TensorDict({"a": torch.zeros(4), "v": "text"}, [4]))
    stores = OpenStores(writes_values=True)
    stores.learn(store.ref.fingerprint, store.ref.spec)
    return stores.get(store.ref)


def put(store: MappedStore, values: list[bytes], *elements: int, per_row: bool = False, keys: Any = (PATH,)) -> None:
    """Writes values of the elements, of everything without any."""
    order = worker_pb2.PutValues(
        values=encode_block([ValueColumn(per_row, values)]),
        keys=[content_pb2.Path(parts=key) for key in keys],
    )
    if elements:
        order.elements = encode_rows(np.array(elements, np.int64))
    put_values(store, order)


def read(store: MappedStore, *elements: int) -> tuple[list[bytes], bool]:
    """Values and whether they are one per row."""
    chosen = np.array(elements, np.int64) if elements else None
    (column,) = decode_block(read_values(store, [PATH], chosen))
    return list(column.values), column.per_row


def test_values_when_one_for_all_then_one(opened: MappedStore) -> None:
    put(opened, [b"x"])
    assert read(opened) == ([b"x"], False)
    assert read(opened, 3, 1) == ([b"x"], False)


def test_values_when_single_rows_got_their_own_then_every_row_has_one(opened: MappedStore) -> None:
    put(opened, [b"x"])
    put(opened, [b"y", b"z"], 2, 0, per_row=True)
    assert read(opened) == ([b"z", b"x", b"y", b"x"], True)
    assert read(opened, 2, 2, 1) == ([b"y", b"y", b"x"], True)
    put(opened, [b"w"])
    assert read(opened) == ([b"w"], False)


def test_values_when_a_row_gets_that_of_all_then_it_stays_one(opened: MappedStore) -> None:
    put(opened, [b"x"])
    put(opened, [b"x"], 2)
    assert read(opened) == ([b"x"], False)


@pytest.mark.parametrize(
    ("values", "elements", "per_row", "keys"),
    [
        ([b"x", b"y"], (), False, (PATH,)),
        ([b"x"] * 3, (), True, (PATH,)),
        ([b"x"], (0, 1), True, (PATH,)),
        ([b"x"], (), False, ()),
    ],
)
def test_values_when_they_do_not_fit_then_refused_and_nothing_stored(
    opened: MappedStore, values: list[bytes], elements: tuple[int, ...], per_row: bool, keys: Any
) -> None:
    put(opened, [b"before"])
    with pytest.raises(RemoteProtocolError):
        put(opened, values, *elements, per_row=per_row, keys=keys)
    assert read(opened) == ([b"before"], False)


@pytest.mark.parametrize("index", [slice(1, 4, 2), [3, 1], [False, True, False, True]])
def test_values_when_a_selection_has_places_then_there(opened: MappedStore, index: Any) -> None:
    put(opened, [b"old"])
    order = worker_pb2.PutValues(keys=[content_pb2.Path(parts=PATH)], selection=parse(index).to_message())
    order.values = encode_block([ValueColumn(False, [b"new"])])
    put_values(opened, order)
    assert read(opened) == ([b"old", b"new", b"old", b"new"], True)


def test_values_when_of_ragged_tensors_then_their_shapes_come_apart_for_local_reads(tmp_path: Path) -> None:
    tokens = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    stored = StoredTensorDict(tmp_path / "ragged", TensorDict({"t": tokens, "v": "text"}, [2]))
    stores = OpenStores(writes_values=True)
    stores.learn(stored.ref.fingerprint, stored.ref.spec)
    store = stores.get(stored.ref)
    paths = [("t",), ("v",)]
    blobs = [np.array([size, *range(size)], "<i8").tobytes() for size in (3, 5)]
    order = worker_pb2.PutValues(
        values=encode_block([ValueColumn(True, blobs), ValueColumn(False, [b"text"])]),
        keys=[content_pb2.Path(parts=path) for path in paths],
    )
    put_values(store, order)
    block = dict(zip(paths, read_block(store, paths, np.array([1, 0])).columns, strict=True))
    ragged = block["t",].values
    assert isinstance(ragged, JoinedValues)
    assert np.frombuffer(ragged.heads, "<i8").tolist() == [5, 3]
    assert np.frombuffer(ragged.content, "<i8").tolist() == [*range(5), *range(3)]
    there = dict(zip(paths, decode_block(read_values(store, paths, np.array([1, 0]))), strict=True))
    assert {path: list(values) for path, (_, values) in there.items()} == {
        path: list(values) for path, (_, values) in block.items()
    }


def test_values_when_they_were_lost_then_damage_is_reported(opened: MappedStore) -> None:
    with pytest.raises(CorruptDataError, match="a value of"):
        read(opened)
    put(opened, [b"y"], 2, per_row=True)
    with pytest.raises(CorruptDataError, match="row 0"):
        read(opened, 0)


def test_values_when_none_was_ever_stored_then_no_rows_have_none(tmp_path: Path) -> None:
    store = StoredTensorDict(tmp_path / "store", TensorDict({"a": torch.zeros(4), "v": "text"}, [4]))
    stores = OpenStores(writes_values=False)
    stores.learn(store.ref.fingerprint, store.ref.spec)
    never_extended = stores.get(store.ref)
    assert read_block(never_extended, [PATH], np.empty(0, np.int64)).columns == [ValueColumn(True, [])]
    with pytest.raises(CorruptDataError, match="row 2"):
        read_block(never_extended, [PATH], np.array([2]))


def test_values_when_there_are_no_leaves_then_none(opened: MappedStore) -> None:
    assert read_values(opened, [], None) == b""


def test_values_when_their_leaf_is_not_the_stores_yet_then_they_wait_until_they_are_moved(opened: MappedStore) -> None:
    put(opened, [b"old"])
    added = capture(TensorDict({"n": TensorDict({"w": "w", "x": "x"}, [4, 2])}, [4])).spec
    keys = [("n", "w"), ("n", "x")]
    order = worker_pb2.PutValues(
        values=encode_block([ValueColumn(False, [b"new"]), ValueColumn(True, [b"%d" % row for row in range(8)])]),
        keys=[content_pb2.Path(parts=key) for key in keys],
        spec=codec.encode(added),
        below="waiting",
    )
    put_values(opened, order)
    assert read(opened) == ([b"old"], False)
    waiting = [("waiting", *key) for key in keys]
    moving = worker_pb2.MoveValues(
        sources=[content_pb2.Path(parts=key) for key in waiting],
        targets=[content_pb2.Path(parts=PATH), content_pb2.Path(parts=("x",))],
        cleared=[content_pb2.Path(parts=key) for key in waiting],
    )
    move_values(opened, moving)
    assert read(opened) == ([b"new"], False)
    (found,) = opened.open_writable_objects().get_many([(("x",), range(8))])
    assert list(found.values) == [b"%d" % row for row in range(8)]


def test_values_when_their_key_has_gone_meanwhile_then_to_be_asked_for_again(tmp_path: Path) -> None:
    stored = StoredTensorDict(tmp_path / "store", TensorDict({"v": "text"}, [4]))
    stores = OpenStores(writes_values=True)
    stores.learn(stored.ref.fingerprint, stored.ref.spec)
    store = stores.get(stored.ref)
    put(store, [b"x"])
    move_values(store, worker_pb2.MoveValues(cleared=[content_pb2.Path(parts=PATH)]))
    with pytest.raises(CorruptDataError):
        read(store)
    stored.generations.move_structure(1)
    with pytest.raises(TransferAbortedError, match="altered"):
        read(store)


def test_drop_values_when_a_row_has_several_then_all_of_them_go(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(3), "v": "text", "n": TensorDict({"w": "text"}, [3, 2])}, [3])
    stored = StoredTensorDict(tmp_path / "store", td)
    stores = OpenStores(writes_values=True)
    stores.learn(stored.ref.fingerprint, stored.ref.spec)
    store = stores.get(stored.ref)
    rows = [ObjectColumn(("v",), range(3), [b"v"] * 3), ObjectColumn(("n", "w"), range(6), [b"w"] * 6)]
    store.open_writable_objects().put_many(rows)
    assert drop_values(store, np.array([0, 2])) == 2 + 4
    found = store.open_writable_objects().get_many([(("v",), range(3)), (("n", "w"), range(6))])
    assert [list(each.values) for each in found] == [[None, b"v", None], [None, None, b"w", b"w", None, None]]
