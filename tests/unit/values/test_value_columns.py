"""Columns of serialised values: their bytes, and what hostile bytes lead to."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from tdserve.base.errors import RemoteProtocolError, TransferAbortedError
from tdserve.values.value_columns import (
    Buffer,
    JoinedValues,
    ValueColumn,
    decode_block,
    encode_block,
    encode_column,
    join,
    join_blocks,
    measure_sizes,
    split_rows,
)

VALUES = [b"", b"a", b"bc" * 700, b"", b"d" * 200]

columns = st.lists(
    st.one_of(
        st.builds(lambda values: ValueColumn(True, values), st.lists(st.binary(max_size=300), max_size=9)),
        st.builds(lambda value: ValueColumn(False, [value]), st.binary(max_size=300)),
    ),
    max_size=4,
)


@pytest.mark.slow
@given(columns)
@example([ValueColumn(True, [b"x" * 70_000] * 3), ValueColumn(True, [b""] * 200)])
def test_block_when_encoded_then_read_as_it_was(expected: list[ValueColumn]) -> None:
    content = encode_block(expected)
    assert [(per_row, list(values)) for per_row, values in decode_block(content)] == expected
    assert encode_block(decode_block(content)) == content
    twice = decode_block(content + content)
    assert [(per_row, list(values)) for per_row, values in twice] == expected * 2


def test_block_when_encoded_then_as_in_the_protocol_book() -> None:
    content = encode_block([ValueColumn(True, [b"a", b"", b"bc"]), ValueColumn(False, [b"d"])])
    per_row = [(number).to_bytes(4, "little") for number in (1, 3, 3, 0, 1, 0, 2)]
    common = [(number).to_bytes(4, "little") for number in (0, 1, 1, 0, 1)]
    assert content == b"".join([*per_row, b"abc", *common, b"d"])


@pytest.mark.slow
@given(columns, st.data())
def test_block_when_damaged_then_columns_or_the_senders_fault(
    given_columns: list[ValueColumn], data: st.DataObject
) -> None:
    content = bytearray(encode_block(given_columns))
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = decode_block(damaged)
    except RemoteProtocolError:
        return
    for _, values in found:
        assert sum(map(len, values)) <= len(damaged)


@given(st.binary(max_size=60))
@example(bytes(15))
@example(b"\1\0\0\0\xff\xff\xff\xff" + bytes(8))
@example(b"\1\0\0\0\1\0\0\0" + b"\xff" * 12)
def test_block_when_any_bytes_then_columns_or_the_senders_fault(content: bytes) -> None:
    try:
        for _, values in decode_block(content):
            assert len(list(values)) == len(values)
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize(
    ("head", "values"),
    [
        ((1, 2, 2, 1, 2), b"ab"),
        ((1, 1, 2, 1), b"ab"),
        ((1, 1, 2, 2), b"a"),
        ((1, 0, 2), b"ab"),
        ((2, 1, 1, 1), b"a"),
        ((0, 2, 2, 1, 1), b"ab"),
        ((0, 0, 0), b""),
    ],
)
def test_block_when_its_numbers_contradict_then_the_senders_fault(head: tuple[int, ...], values: bytes) -> None:
    content = struct.pack(f"<IIQ{len(head) - 3}I", *head) + values
    with pytest.raises(RemoteProtocolError):
        decode_block(content)


@pytest.mark.parametrize("head_nbytes", [0, 1])
def test_joined_when_looked_at_then_is_the_list_of_its_values(head_nbytes: int) -> None:
    values = [value + b"!" for value in VALUES]
    joined = join([memoryview(value) for value in values], head_nbytes=head_nbytes)
    assert joined.heads == b"".join(value[:head_nbytes] for value in values)
    assert joined == values
    assert list(joined) == values
    assert [joined[number] for number in range(-5, 5)] == [*values, *values]
    for part in (slice(1, 3), slice(2, None), slice(None, None, -1), slice(4, 1), slice(0, 5, 2)):
        assert list(joined[part]) == values[part]
    assert [len(view) for view in joined.get_views()] == [len(value) - head_nbytes for value in values]
    assert joined != values[:4]
    with pytest.raises(IndexError):
        joined[5]


def test_joined_when_a_part_is_taken_then_shares_the_content() -> None:
    joined = join(VALUES)
    part = joined[1:][1:3]
    assert isinstance(part, JoinedValues)
    assert part.content is joined.content
    assert list(part) == VALUES[2:4]
    assert join([b"ab", b"", b"c"]).get_first_bytes().tolist() == [ord("a"), ord("c")]
    assert joined[1:2].get_first_bytes().tolist() == [ord("a")]  # type: ignore[attr-defined]


def test_joined_when_values_lie_apart_in_the_buffer_then_only_they_are_in_it() -> None:
    values = [b"aa", b"", b"ccc"]
    apart = JoinedValues(b"-aa--ccc-", measure_sizes(values), begins=np.array([1, 3, 5]))
    assert apart == values
    assert (apart[0], apart[-1]) == (b"aa", b"ccc")
    for part in (slice(1, 3), slice(None, None, -1), slice(0, 3, 2), slice(2, 1)):
        found = apart[part]
        assert isinstance(found, JoinedValues)
        assert list(found) == values[part]
    assert apart.get_first_bytes().tolist() == [ord("a"), ord("c")]
    assert b"".join(apart.get_parts()) == b"aaccc"
    assert encode_block([ValueColumn(True, apart)]) == encode_block([ValueColumn(True, values)])


def test_parts_when_values_stand_one_after_the_other_then_one_that_is_no_copy() -> None:
    (part,) = join(VALUES)[1:4].get_parts()  # type: ignore[attr-defined]
    assert bytes(part) == b"".join(VALUES[1:4])
    assert isinstance(part, memoryview)


@pytest.mark.parametrize("shape", [(3, 2), (1, 1), (0, 2), (3, 0)])
def test_packed_rows_when_zeros_are_at_the_end_then_they_stay(shape: tuple[int, int]) -> None:
    table = np.arange(shape[0] * shape[1], dtype="<u4").reshape(shape)[::-1].copy()
    assert split_rows(table) == [row.tobytes() for row in table]


def test_join_when_a_value_is_shorter_than_a_head_then_none_has_one() -> None:
    joined = join([b"12345678rest", b"\x08\x01"], head_nbytes=8)
    assert (joined.heads, list(joined)) == (b"", [b"12345678rest", b"\x08\x01"])
    assert list(join([], head_nbytes=8)) == []


def test_views_when_values_are_large_then_are_no_copies() -> None:
    joined = join([b"a" * 5000, b"b" * 5000])
    assert all(isinstance(view, memoryview) and view.obj is joined.content for view in joined.get_views())


def test_column_when_parts_are_cut_anywhere_then_the_same_bytes() -> None:
    whole = b"".join(VALUES)
    cut: list[Buffer] = [whole[:3], memoryview(whole)[3:1000], b"", bytearray(whole[1000:])]
    assert b"".join(encode_column(True, measure_sizes(VALUES), cut)) == encode_block([ValueColumn(True, VALUES)])


def test_join_blocks_when_a_part_shares_a_value_then_each_element_has_it() -> None:
    own, shared = ValueColumn(True, [b"a", b"b", b"c", b"d"]), ValueColumn(False, [b"s"])
    blocks = [(2, encode_block([own, shared])), (1, encode_block([shared, shared]))]
    assert decode_block(join_blocks(blocks)) == [ValueColumn(True, [b"a", b"b", b"c", b"d", b"s", b"s"]), shared]


def test_join_blocks_when_the_shared_value_changes_then_to_be_read_again() -> None:
    blocks = [(1, encode_block([ValueColumn(False, [value])])) for value in (b"a", b"b")]
    with pytest.raises(TransferAbortedError, match="written while they were read"):
        join_blocks(blocks)
