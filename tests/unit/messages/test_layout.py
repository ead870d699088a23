from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from tdserve.messages.layout import (
    ALIGNMENT_BYTES,
    LARGE_LEAF_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PACKED_BYTES,
    Layout,
    Trailing,
    align,
)
from tdserve.store.weights.version_format import list_leaf_places
from tdserve.structure.trees import codec
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Entry, Node, Spec, TensorLeaf
from tdserve.v1 import spec_pb2

dtypes = st.sampled_from(sorted(ITEMSIZE))
sizes = st.sampled_from([0, 1, 2, 3, 64, 1000, LARGE_LEAF_BYTES // 4, MAX_MESSAGE_BYTES, 3 * MAX_MESSAGE_BYTES + 1])
shapes = st.lists(st.integers(0, 5), max_size=2).flatmap(lambda dims: sizes.map(lambda size: (*dims, size)))
leaves = st.tuples(dtypes, st.just(()) | shapes).map(lambda pair: TensorLeaf(*pair))
trailings = st.lists(st.tuples(dtypes, shapes), max_size=3).map(
    lambda columns: tuple(Trailing(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(columns))
)


def spec_of(*entries: Entry) -> Spec:
    """A flat structure."""
    return Spec(Node((), None, None, None, tuple((f"k{number}", entry) for number, entry in enumerate(entries))))


specs = st.lists(leaves, max_size=12).map(lambda found: spec_of(*found))


@pytest.mark.slow
@given(specs, trailings)
def test_slots_when_laid_out_then_aligned_and_apart(spec: Spec, trailing: tuple[Trailing, ...]) -> None:
    layout = Layout.from_spec(spec, trailing)
    leaves = {slot.path: TensorLeaf(slot.dtype, slot.shape) for slot in layout.slots[: layout.num_leaves]}
    assert leaves == dict(spec.tensors)
    assert all(slot.offset % ALIGNMENT_BYTES == 0 for slot in layout.slots)
    assert all(first.offset + first.nbytes <= second.offset for first, second in pairwise(layout.slots))
    end = max((slot.offset + slot.nbytes for slot in layout.slots), default=0)
    assert layout.nbytes == align(end)


@pytest.mark.slow
@given(specs, trailings, st.booleans())
def test_messages_when_cut_then_cover_every_byte_once(
    spec: Spec, trailing: tuple[Trailing, ...], is_packed: bool
) -> None:
    layout = Layout.from_spec(spec, trailing, is_packed=is_packed)
    parts = [part for message in layout.messages for part in message.parts]
    for number, slot in enumerate(layout.slots):
        spans = [(part.start, part.stop) for part in parts if part.slot == number]
        ends = [0, *(stop for _, stop in spans)]
        assert [start for start, _ in spans] == ends[:-1]
        assert ends[-1] == slot.nbytes
    assert all(part.stop > part.start for part in parts)


@pytest.mark.slow
@given(specs, trailings, st.booleans())
def test_parts_when_in_a_message_then_lie_where_the_flat_buffer_has_them(
    spec: Spec, trailing: tuple[Trailing, ...], is_packed: bool
) -> None:
    layout = Layout.from_spec(spec, trailing, is_packed=is_packed)
    for message in layout.messages:
        for part in message.parts:
            assert message.offset + part.offset == layout.slots[part.slot].offset + part.start
            assert part.offset + part.stop - part.start <= message.nbytes
    assert layout.message_nbytes == tuple(message.nbytes for message in layout.messages)


@pytest.mark.slow
@given(specs, trailings, st.booleans())
def test_gaps_when_added_to_the_parts_then_every_byte_of_a_message_once(
    spec: Spec, trailing: tuple[Trailing, ...], is_packed: bool
) -> None:
    for message in Layout.from_spec(spec, trailing, is_packed=is_packed).messages:
        spans = [(part.offset, part.offset + part.stop - part.start) for part in message.parts]
        covered = sorted([*spans, *message.gaps])
        assert [start for start, _ in covered] == [0, *(stop for _, stop in covered[:-1])]
        assert covered[-1][1] == message.nbytes


@pytest.mark.slow
@given(specs, trailings, st.booleans())
def test_messages_when_of_leaves_then_at_most_4_mib_and_large_leaves_alone(
    spec: Spec, trailing: tuple[Trailing, ...], is_packed: bool
) -> None:
    layout = Layout.from_spec(spec, trailing, is_packed=is_packed)
    for message in layout.messages:
        of_leaves = [part for part in message.parts if part.slot < layout.num_leaves]
        most = MAX_PACKED_BYTES if is_packed and len(of_leaves) > 1 else MAX_MESSAGE_BYTES
        assert sum(part.stop - part.start for part in of_leaves) <= most
        if any(layout.slots[part.slot].nbytes >= LARGE_LEAF_BYTES for part in of_leaves):
            assert len(message.parts) == 1


@pytest.mark.slow
@given(specs, trailings, st.booleans())
def test_trailing_when_there_is_any_then_all_of_it_is_in_the_last_message(
    spec: Spec, trailing: tuple[Trailing, ...], is_packed: bool
) -> None:
    layout = Layout.from_spec(spec, trailing, is_packed=is_packed)
    with_trailing = [
        message for message in layout.messages if any(part.slot >= layout.num_leaves for part in message.parts)
    ]
    assert with_trailing == ([layout.messages[-1]] if with_trailing else [])
    assert [slot.path for slot in layout.slots[layout.num_leaves :]] == [(column.name,) for column in trailing]


@pytest.mark.slow
@given(specs, trailings, st.booleans())
def test_layout_when_the_spec_crossed_the_wire_then_equal(
    spec: Spec, trailing: tuple[Trailing, ...], is_packed: bool
) -> None:
    theirs = codec.decode(spec_pb2.Spec.FromString(codec.encode(spec).SerializeToString()))
    assert Layout.from_spec(theirs, trailing, is_packed=is_packed) == Layout.from_spec(
        spec, trailing, is_packed=is_packed
    )
    assert (
        Layout.from_spec(theirs, trailing, is_packed=is_packed).messages
        == Layout.from_spec(spec, trailing, is_packed=is_packed).messages
    )


@pytest.mark.slow
@given(specs, trailings)
def test_packed_when_leaves_are_small_then_without_gaps_and_still_aligned_for_their_elements(
    spec: Spec, trailing: tuple[Trailing, ...]
) -> None:
    layout = Layout.from_spec(spec, trailing, is_packed=True)
    leaves = layout.slots[: layout.num_leaves]
    small = [slot for slot in leaves if slot.nbytes < LARGE_LEAF_BYTES]
    assert list(leaves[: len(small)]) == small
    assert [slot.offset for slot in small] == [sum(slot.nbytes for slot in small[:at]) for at in range(len(small))]
    assert all(slot.offset % ITEMSIZE[slot.dtype] == 0 for slot in small)
    assert all(slot.offset % ALIGNMENT_BYTES == 0 for slot in layout.slots[len(small) :])
    assert {slot.path: TensorLeaf(slot.dtype, slot.shape) for slot in leaves} == dict(spec.tensors)


def test_packed_when_all_leaves_are_small_then_in_the_order_of_a_versions_file() -> None:
    spec = spec_of(*(TensorLeaf(dtype, (3,)) for dtype in ("uint8", "float64", "bfloat16", "float32", "int64", "bool")))
    layout = Layout.from_spec(spec, is_packed=True)
    assert [(slot.path, slot.offset, slot.nbytes) for slot in layout.slots] == list_leaf_places(spec)


def test_packed_when_small_leaves_are_many_then_in_messages_that_stay_in_the_cache() -> None:
    spec = spec_of(*[TensorLeaf("float32", (8_388,))] * 1_000)
    assert max(Layout.from_spec(spec, is_packed=True).message_nbytes) <= MAX_PACKED_BYTES
    assert MAX_PACKED_BYTES < max(Layout.from_spec(spec).message_nbytes) <= MAX_MESSAGE_BYTES


def test_layout_when_asked_again_then_the_same_object() -> None:
    spec = spec_of(TensorLeaf("float32", (3,)))
    column = Trailing("t", "int64", (3,))
    assert Layout.from_spec(spec) is Layout.from_spec(spec)
    assert Layout.from_spec(spec) is not Layout.from_spec(spec, (column,))
    assert Layout.from_spec(spec) is not Layout.from_spec(spec, is_packed=True)


def test_large_leaf_when_cut_then_pieces_end_between_rows() -> None:
    (slot,) = Layout.from_spec(spec_of(TensorLeaf("uint8", (100, 84_001)))).slots
    messages = Layout.from_spec(spec_of(TensorLeaf("uint8", (100, 84_001)))).messages
    assert slot.row_nbytes == 84_001
    assert len(messages) == 3
    assert all(part.start % 84_001 == 0 for message in messages for part in message.parts)


def test_row_nbytes_when_there_is_no_row_then_the_whole_leaf() -> None:
    scalar, empty = Layout.from_spec(spec_of(TensorLeaf("float64", ()), TensorLeaf("float64", (0, 3)))).slots
    assert (scalar.row_nbytes, empty.row_nbytes) == (8, 0)
