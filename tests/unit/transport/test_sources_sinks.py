from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tdserve.messages.layout import LARGE_LEAF_BYTES, Layout, LeafPart, Message, Trailing as Column
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tdserve.transport.sources_sinks import (
    FlatBuffer,
    IndexedSource,
    JoinedSource,
    LeafBuffers,
    RowBuffers,
    Source,
    TrailingColumns,
    view_rows,
)

SMALL = TensorLeaf("float32", (3, 2))
LARGE = TensorLeaf("uint8", (3, LARGE_LEAF_BYTES))
COUNT = Column("count", "int64", (1,))


def layout_of(*leaves: TensorLeaf, trailing: tuple[Column, ...] = ()) -> Layout:
    """Leaves of three rows, in this order."""
    entries = tuple((f"k{number}", leaf) for number, leaf in enumerate(leaves))
    return Layout.from_spec(Spec(Node((3,), None, None, None, entries)), trailing)


def filled(end: Any, message: Message) -> torch.Tensor:
    """A message's bytes as the source copies them together."""
    staging = torch.zeros(message.nbytes, dtype=torch.uint8)
    end.fill(message, staging)
    return staging


@pytest.mark.parametrize("kind", ["leaves", "joined", "indexed", "rows", "run of rows"])
def test_ends_when_filled_then_what_memory_held_between_the_parts_is_gone(kind: str) -> None:
    layout = layout_of(SMALL, TensorLeaf("uint8", (3, 0)), TensorLeaf("uint8", (3, 5)), trailing=(COUNT, COUNT))
    leaves = [torch.rand(3, 2), torch.zeros(3, 0, dtype=torch.uint8), torch.ones(3, 5, dtype=torch.uint8)]
    columns = [np.array([5]), np.array([6])]
    tables, contents = [view_rows(leaf) for leaf in leaves], [view_bytes(leaf).numpy() for leaf in leaves]
    ends: dict[str, Source] = {
        "leaves": LeafBuffers(leaves, TrailingColumns(layout, lambda: columns)),
        "joined": JoinedSource([[each] for each in (*contents, *(column.view(np.uint8) for column in columns))]),
        "indexed": IndexedSource(layout, lambda slot: leaves[slot], lambda: columns),
        "rows": RowBuffers(layout, tables, np.array([2, 0, 1]), lambda: columns),
        "run of rows": RowBuffers(layout, tables, np.array([0, 1, 2]), lambda: columns),
    }
    (message,) = layout.messages
    staging = torch.full((message.nbytes,), 0xAB, dtype=torch.uint8)
    ends[kind].fill(message, staging)
    assert message.gaps == ((24, 64), (79, 128), (136, 192))
    assert all(not staging[start:stop].any() for start, stop in message.gaps)
    assert staging[64:79].tolist() == [1] * 15


def test_leaf_end_when_something_lies_between_its_leaves_then_neither_sent_nor_received_over() -> None:
    storage = torch.arange(100, dtype=torch.float32)
    leaves = [storage[:6].view(3, 2), storage[16:22].view(3, 2)]  # 64 bytes apart, just as in the layout
    (message,) = layout_of(SMALL, SMALL).messages
    assert LeafBuffers(leaves).find_memory(message) is None
    content = filled(LeafBuffers([torch.zeros(3, 2), torch.zeros(3, 2)]), message)
    LeafBuffers(leaves).drain(message, content)
    assert torch.equal(storage[6:16], torch.arange(6.0, 16.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.float8_e5m2])
def test_as_bytes_when_viewed_then_shares_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2).to(dtype)
    raw = view_bytes(tensor)
    assert (raw.dtype, raw.shape, raw.data_ptr()) == (torch.uint8, (tensor.nbytes,), tensor.data_ptr())
    assert view_bytes(torch.tensor(1.5)).shape == (4,)


def test_leaf_end_when_a_message_is_one_leaf_then_its_own_memory() -> None:
    layout = layout_of(LARGE)
    leaf = torch.zeros(3, LARGE_LEAF_BYTES, dtype=torch.uint8)
    place = LeafBuffers([leaf]).find_memory(layout.messages[0])
    assert place is not None
    place.fill_(9)
    assert bool((leaf == 9).all())


def test_leaf_end_when_a_message_has_several_leaves_then_copied_together() -> None:
    layout = layout_of(SMALL, SMALL)
    leaves = [torch.arange(6.0).view(3, 2), -torch.ones(3, 2)]
    (message,) = layout.messages
    assert LeafBuffers(leaves).find_memory(message) is None
    targets = [torch.zeros(3, 2), torch.zeros(3, 2)]
    LeafBuffers(targets).drain(message, filled(LeafBuffers(leaves), message))
    assert all(map(torch.equal, leaves, targets))


def test_leaf_end_when_bytes_are_known_then_takes_those_and_views_the_rest() -> None:
    layout = layout_of(SMALL, SMALL)
    leaves = [torch.arange(6.0).view(3, 2), -torch.ones(3, 2)]
    known = [view_bytes(torch.full((3, 2), 7.0)).numpy()]
    content = filled(LeafBuffers(leaves, contents=known), layout.messages[0])
    targets = [torch.zeros(3, 2), torch.zeros(3, 2)]
    LeafBuffers(targets).drain(layout.messages[0], content)
    assert [target[0, 0].item() for target in targets] == [7.0, -1.0]


def test_leaf_end_when_targets_are_known_then_copied_to_and_the_rest_all_the_same() -> None:
    layout = layout_of(SMALL, TensorLeaf("bool", (3, 0)), SMALL)
    leaves = [torch.arange(6.0).view(3, 2), torch.zeros(3, 0, dtype=torch.bool), -torch.ones(3, 2)]
    (message,) = layout.messages
    content = filled(LeafBuffers(leaves), message)
    targets, other = [torch.zeros_like(leaf) for leaf in leaves], torch.zeros(3, 2)
    end = LeafBuffers(targets, targets=[view_bytes(other).numpy().data])
    for _ in range(2):
        end.drain(message, content)
    assert torch.equal(other, leaves[0])
    assert [target.sum().item() for target in targets] == [0.0, 0, -6.0]


def test_flat_end_when_filled_and_drained_then_the_buffer_itself() -> None:
    layout = layout_of(SMALL, LARGE)
    first = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
    second = first.clone()
    for message in layout.messages:
        assert FlatBuffer(first).find_memory(message).data_ptr() == first[message.offset :].data_ptr()
        FlatBuffer(second).drain(message, filled(FlatBuffer(first), message))
    assert torch.equal(first, second)


def test_indexed_end_when_walked_then_each_leaf_is_taken_once() -> None:
    layout = layout_of(SMALL, TensorLeaf("uint8", (3, 4_000_000)))
    taken: list[int] = []

    def take(slot: int) -> torch.Tensor:
        taken.append(slot)
        return torch.zeros(layout.slots[slot].shape[::-1], dtype=torch.uint8 if slot else torch.float32).T

    end = IndexedSource(layout, take)
    pieces = [end.find_memory(message) for message in layout.messages]
    assert taken == [0, 1]
    assert [len(piece) for piece in pieces if piece is not None] == list(layout.message_nbytes)


def test_trailer_when_asked_for_then_once_and_after_the_leaves() -> None:
    layout = layout_of(SMALL, trailing=(COUNT, COUNT))
    calls: list[str] = []

    def take(slot: int) -> torch.Tensor:
        calls.append("leaf")
        return torch.ones(3, 2)

    def make_columns() -> list[NDArray[np.int64]]:
        calls.append("trailer")
        return [np.array([5]), np.array([6])]

    end = IndexedSource(layout, take, make_columns)
    assert end.find_memory(layout.messages[-1]) is None
    staging = filled(end, layout.messages[-1])
    assert calls == ["leaf", "trailer"]
    assert staging[64:72].view(torch.int64).item() == 5
    assert staging[128:136].view(torch.int64).item() == 6


@pytest.mark.parametrize(("shape", "table"), [((4, 3), (4, 6)), ((4,), (4, 2)), ((4, 0), (4, 0)), ((0, 3), (0, 0))])
def test_row_table_when_made_then_rows_of_bytes_in_the_same_memory(shape: Any, table: Any) -> None:
    leaf = torch.zeros(shape, dtype=torch.int16)
    found = view_rows(leaf)
    assert found.dtype == np.uint8
    assert found.shape == table
    found[...] = 1
    assert bool((leaf == 257).all())


def test_row_end_when_rows_are_a_run_then_direct_into_the_ring() -> None:
    layout = layout_of(LARGE)
    ring = torch.zeros(10, LARGE_LEAF_BYTES, dtype=torch.uint8)
    place = RowBuffers(layout, [view_rows(ring)], np.array([4, 5, 6])).find_memory(layout.messages[0])
    assert place is not None
    place.fill_(1)
    assert ring.sum(1).nonzero().flatten().tolist() == [4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[4, 6, 5], [9, 0, 1], [2, 2, 2], [4, 4, 6], [4, 9, 6]])
def test_row_end_when_rows_are_scattered_then_copied(rows: list[int]) -> None:
    layout = layout_of(SMALL, LARGE)
    rings = [torch.rand(10, 2), torch.randint(0, 256, (10, LARGE_LEAF_BYTES), dtype=torch.uint8)]
    end = RowBuffers(layout, [view_rows(ring) for ring in rings], np.array(rows))
    taken = [torch.zeros(3, 2), torch.zeros(3, LARGE_LEAF_BYTES, dtype=torch.uint8)]
    for message in layout.messages:
        assert len(message.parts) > 1 or end.find_memory(message) is None
        LeafBuffers(taken).drain(message, filled(end, message))
    assert all(torch.equal(ring[rows], leaf) for ring, leaf in zip(rings, taken, strict=True))


def test_row_end_when_rows_wrap_around_then_scattered_to_both_ends() -> None:
    layout = layout_of(SMALL)
    ring = torch.zeros(10, 2)
    content = torch.arange(1.0, 7.0).view(3, 2)
    message = layout.messages[0]
    RowBuffers(layout, [view_rows(ring)], np.array([8, 9, 0])).drain(message, view_bytes(content))
    assert torch.equal(ring[[8, 9, 0]], content)
    assert not ring[1:8].any()


def test_row_end_when_there_is_no_row_then_nothing_to_do() -> None:
    spec = Spec(Node((0,), None, None, None, (("a", TensorLeaf("float32", (0, 2))),)))
    RowBuffers(Layout.from_spec(spec), [view_rows(torch.zeros(10, 2))], np.empty(0, np.int64))
    assert Layout.from_spec(spec).messages == ()


def test_joined_when_pieces_fill_a_message_then_one_after_the_other() -> None:
    spec = Spec(Node((5,), None, None, None, (("a", TensorLeaf("uint8", (5, 3))), ("b", TensorLeaf("uint8", (5,))))))
    layout = Layout.from_spec(spec)
    whole = {"a": np.arange(15, dtype=np.uint8), "b": np.arange(100, 105, dtype=np.uint8)}
    pieces = [(whole["a"][:6], whole["a"][6:]), (whole["b"][:2], whole["b"][2:])]
    end = JoinedSource(pieces)
    (message,) = layout.messages
    assert end.find_memory(message) is None
    staging = torch.zeros(message.nbytes, dtype=torch.uint8)
    end.fill(message, staging)
    for part, name in zip(message.parts, ("a", "b"), strict=True):
        assert staging[part.offset : part.offset + part.stop].tolist() == whole[name].tolist()


def test_joined_when_a_message_lies_inside_one_piece_then_sent_from_its_place() -> None:
    pieces = [(np.arange(10, dtype=np.uint8), np.arange(10, 30, dtype=np.uint8))]
    inside = Message(0, 5, (LeafPart(0, 12, 17, 0),))
    across = Message(0, 5, (LeafPart(0, 8, 13, 0),))
    end = JoinedSource(pieces)
    direct = end.find_memory(inside)
    assert direct is not None
    assert direct.data_ptr() == pieces[0][1].ctypes.data + 2
    assert end.find_memory(across) is None
    staging = torch.zeros(5, dtype=torch.uint8)
    end.fill(across, staging)
    assert staging.tolist() == [8, 9, 10, 11, 12]
