from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.messages.selection.items import (
    count_covered,
    decode_item,
    describe,
    encode_item,
    is_same,
    parse_item,
    split_index,
)
from tdserve.v1 import content_pb2


class _Tensor:
    """What a torch tensor looks like to a process without torch."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)

    def detach(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def numpy(self) -> Any:
        return self._array


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.int16(3), 3),
        (np.array(3), 3),
        (_Tensor(3), 3),
        (_Tensor(True), np.array(True)),
        (_Tensor([1, 2]), np.array([1, 2])),
        (np.array([1, 2], np.int32), np.array([1, 2])),
        (np.array([2, 0], np.uint8), np.array([True, False])),
        ([np.uint8(2), 1], np.array([2, 1])),
        (np.array([2, -1], np.int16), np.array([2, -1])),
        (np.array([[2, 1]], np.uint64), np.array([[2, 1]])),
        ([False, True], np.array([False, True])),
        ([], np.empty(0, np.int64)),
        ([[]], np.empty((1, 0), np.int64)),
        (range(5, 0, -2), np.array([5, 3, 1])),
        (slice(np.int64(1), None, True), slice(1, None, 1)),
        (slice(-(10**30), 10**30), slice(-(2**63), 2**63 - 1, None)),
    ],
)
def test_parse_when_it_is_an_index_then_as_torch_takes_it(given: Any, expected: Any) -> None:
    assert is_same(parse_item(given), expected)


@pytest.mark.parametrize("given", ["a", b"a", 1.0, np.bool_(True), np.float32(1), np.array([1.0])])
def test_parse_when_torch_would_refuse_then_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="not an index"):
        parse_item(given)


@pytest.mark.parametrize(
    "item",
    [
        -(2**63),
        2**63 - 1,
        slice(None),
        slice(0, -1, -3),
        None,
        ...,
        np.array([[1, -2], [3, 4]]),
        np.empty((0, 3), np.int64),
        np.array([[True, False]]),
        np.array(False),
    ],
)
def test_message_when_read_back_then_the_same(item: Any) -> None:
    sent = encode_item(item).SerializeToString()
    assert is_same(decode_item(content_pb2.IndexItem.FromString(sent)), item)


@pytest.mark.parametrize(
    "message",
    [
        content_pb2.IndexItem(),
        content_pb2.IndexItem(newaxis=False),
        content_pb2.IndexItem(ellipsis=False),
        content_pb2.IndexItem(positions=content_pb2.IntArray(shape=[2], data=b"\0" * 8)),
        content_pb2.IndexItem(positions=content_pb2.IntArray(shape=[-1], data=b"")),
        content_pb2.IndexItem(positions=content_pb2.IntArray(shape=[-1, -1], data=b"\0" * 8)),
        content_pb2.IndexItem(positions=content_pb2.IntArray(shape=[1 << 62, 0], data=b"")),
        content_pb2.IndexItem(positions=content_pb2.IntArray(shape=[1] * 65, data=b"\0" * 8)),
        content_pb2.IndexItem(mask=content_pb2.BoolArray(shape=[1], data=b"\2")),
        content_pb2.IndexItem(mask=content_pb2.BoolArray(shape=[3], data=b"\1")),
    ],
)
def test_message_when_it_contradicts_itself_then_protocol_error(message: content_pb2.IndexItem) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_item(message)


def test_num_covered_when_mask_then_its_dimensions_else_one_or_none() -> None:
    assert [count_covered(item) for item in (0, slice(None), np.array([1]), np.ones((2, 2), bool), None, ...)] == [
        1,
        1,
        1,
        2,
        0,
        0,
    ]


def test_describe_when_strange_then_short() -> None:
    assert describe({1, 2}) == "<set>"
    assert describe(slice(None, None, -1)) == "::-1"


@pytest.mark.parametrize(
    ("index", "num_dims", "expected"),
    [
        (1, 1, (1, None)),
        ((1, 2), 2, ((1, 2), None)),
        ((1, 2), 1, ((1,), (2,))),
        ((slice(1, 3), 0, 2), 2, ((slice(1, 3), 0), (slice(None), 2))),
        (..., 0, ((), None)),
        ((), 0, ((), None)),
        (3, 0, ((), 3)),
        ((..., 0), 1, ((..., 0), None)),
        ((None, 0), 1, ((None, 0), None)),
        ((True, 0), 1, ((True, 0), None)),
    ],
)
def test_split_index_when_it_goes_beyond_then_the_rest_is_for_what_was_selected(
    index: Any, num_dims: int, expected: Any
) -> None:
    assert split_index(index, num_dims) == expected


INDICES: tuple[Any, ...] = (
    (..., 0),
    (..., [0, 1]),
    (0, ..., 1),
    ([1, 0], ...),
    ([2, 0], [1, 2]),
    ([[2, 0]], [[1], [2]], 0),
    (np.array([True, False, True, False]), 1),
    (None, 1),
    (None, 1, 0, 1),
    (slice(1, 3), [0, 2], 1),
    (1, [0, 2], [1, 0]),
    np.arange(12).reshape(4, 3) % 2 == 0,
    (torch.tensor([3, 1]), torch.tensor([0, 2]), ..., 1),
    (torch.arange(4) > 1, ..., 0),
    (..., slice(None)),
    (1, slice(None), slice(None)),
)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("num_dims", [1, 2])
def test_split_index_when_applied_one_after_the_other_then_as_at_once(index: Any, num_dims: int) -> None:
    tensor = torch.arange(24).reshape(4, 3, 2)
    first, below = split_index(index, num_dims, 3)
    found = tensor[first]
    assert (found if below is None else found[below]).equal(tensor[index])


@pytest.mark.parametrize("rows", [[2, 0], torch.tensor([2, 0]), np.array([True, False, True, False])])
def test_split_index_when_rows_are_given_with_more_then_only_they_are_selected(rows: Any) -> None:
    (positions,), _ = split_index((rows, 1), 1, 3)
    assert sorted(positions.tolist()) == [0, 2]
