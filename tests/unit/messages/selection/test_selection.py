from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import RemoteProtocolError, SelectionError
from tdserve.messages.selection import selection
from tdserve.messages.selection.selection import Selection
from tdserve.v1 import content_pb2


@pytest.mark.parametrize(
    ("index", "items"),
    [
        (-1, (4,)),
        (slice(None), ()),
        (..., ()),
        ((), ()),
        (slice(-3, None), (slice(2, 5, 1),)),
        (slice(0, 99), ()),
        (slice(4, 2), (slice(0, 0, 1),)),
        (slice(None, None, -1), (slice(4, None, -1),)),
        (slice(1, None, 2**63 - 1), (slice(1, 5, 5),)),
        (slice(None, None, -(2**63)), (slice(4, None, -5),)),
        (slice(3, 0, -2), (slice(3, 0, -2),)),
        ([0, -1], (np.array([0, 4]),)),
        (range(3, 0, -1), (np.array([3, 2, 1]),)),
        (True, (np.array(True),)),
        ((..., None), (slice(None), None)),
        (slice(None, 10**30), ()),
    ],
)
def test_encode_when_one_dimension_then_canonical(index: Any, items: tuple[Any, ...]) -> None:
    assert selection.encode(index, batch_size=(5,)) == Selection(items)


def test_encode_when_ellipsis_stands_between_then_written_out_and_the_end_left_out() -> None:
    found = selection.encode((-1, ..., slice(0, 4)), batch_size=(2, 3, 4, 4))
    assert found == Selection((1,))
    found = selection.encode((None, ..., -1), batch_size=(2, 3))
    assert found == Selection((None, slice(None), 2))


@pytest.mark.parametrize("index", [slice(None), ..., (), slice(0, 5), slice(-9, None), slice(None, None, 1)])
def test_is_everything_when_all_is_selected_in_place_then_true(index: Any) -> None:
    assert selection.encode(index, batch_size=(5,)).is_everything


@pytest.mark.parametrize("index", [slice(0, 4), slice(None, None, -1), None, True, [0, 1, 2, 3, 4], 0])
def test_is_everything_when_less_or_another_shape_then_false(index: Any) -> None:
    assert not selection.encode(index, batch_size=(5,)).is_everything


@pytest.mark.parametrize(
    ("index", "batch_size", "reason"),
    [
        (5, (5,), "index 5 is out of range for dimension 0 of size 5"),
        (-6, (5,), "index -6"),
        ((0, 3), (2, 3), "dimension 1 of size 3"),
        ([0, 5], (5,), "index 5"),
        ([0, -6], (5,), "index -6"),
        ([0], (0,), "size 0"),
        ((0, 0), (5,), "it indexes 2 dimensions, there are 1"),
        (0, (), "it indexes 1 dimensions, there are 0"),
        (slice(None), (), "there are 0"),
        ((..., ...), (5,), "one ellipsis"),
        (slice(None, None, 0), (5,), "cannot be 0"),
        ([True, False], (5,), r"a mask of shape \[2\] stands at dimensions of size \[5\]"),
        (np.ones((5, 2), bool), (5,), "it indexes 2 dimensions"),
        (([0, 1], [0, 1, 2]), (5, 5), r"\[\[2\], \[3\]\] do not broadcast"),
        ((np.ones(5, bool), [0, 1]), (5, 5), "do not broadcast"),
    ],
)
def test_encode_when_it_does_not_fit_then_selection_error_has_the_reason(
    index: Any, batch_size: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(SelectionError, match=reason) as caught:
        selection.encode(index, batch_size=batch_size, store="frames")
    assert "'frames'" in caught.value.reason
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("index", ["obs", 1.5, {1}, [[1, 2], [3]], ("obs", 0), [0.5], object(), 10**30, [10**30]])
def test_parse_when_it_is_no_index_then_selection_error(index: Any) -> None:
    with pytest.raises(SelectionError):
        selection.parse(index)


def test_check_when_it_fits_then_silent_else_raises() -> None:
    chosen = selection.parse(-3)
    chosen.check((3,), "s")
    with pytest.raises(SelectionError, match="'s'"):
        chosen.check((2,), "s")


def test_canonical_when_applied_twice_then_changes_nothing() -> None:
    for index in (-1, slice(-2, None), [-1, 0], (None, ..., [1])):
        once = selection.encode(index, batch_size=(5,))
        assert once.canonicalise((5,)) == once


@pytest.mark.parametrize(
    ("index", "batch_size", "rows"),
    [
        ((), (), [0]),
        (None, (), [0]),
        (-1, (4,), [3]),
        (slice(None, None, -2), (5,), [0, 2, 4]),
        ([3, 0, -1, 3], (4,), [0, 3]),
        ((None, [1]), (4,), [1]),
        (np.eye(3, dtype=bool)[[0, 2]].T, (3, 2), [0, 2]),
        ((..., 0), (3, 2), [0, 1, 2]),
        ((slice(1, 3), []), (4, 2), []),
        (False, (4,), []),
    ],
)
def test_rows_when_selected_then_sorted_and_each_once(index: Any, batch_size: tuple[int, ...], rows: list[int]) -> None:
    assert selection.parse(index).compute_rows(batch_size).tolist() == rows
    found = selection.encode(index, batch_size=batch_size).compute_rows(batch_size)
    assert found.tolist() == rows
    assert found.dtype == np.int64


def test_result_batch_size_when_arrays_would_be_huge_then_nothing_is_allocated() -> None:
    wide = np.zeros(1 << 20, np.int64)
    chosen = selection.encode((wide[:, None], wide[None, :]), batch_size=(1, 1))
    assert chosen.compute_batch_size((1, 1)) == (1 << 20, 1 << 20)


def test_equality_when_items_differ_in_kind_then_unequal() -> None:
    assert Selection((1,)) != Selection((np.array([1]),))
    assert Selection((np.array([1, 0]),)) != Selection((np.array([True, False]),))
    assert Selection((np.array([1, 0]),)) == Selection((np.array([1, 0]),))
    assert Selection((None,)) != Selection((None, None))
    assert hash(Selection((slice(1, 2),))) == hash(Selection((slice(1, 2),)))
    assert Selection() != ()


def test_repr_when_long_then_short_and_as_typed() -> None:
    assert repr(selection.parse((1, slice(None, 3), None, ..., [1, 2]))) == "[1, :3, None, ..., [1, 2]]"
    assert repr(selection.parse(np.zeros((100, 2), np.int64))) == "[<int64 array [100, 2]>]"
    assert len(repr(Selection((None,) * 64))) <= 120


def test_from_message_when_items_are_too_many_then_protocol_error() -> None:
    message = content_pb2.Selection(items=[content_pb2.IndexItem(newaxis=True)] * 65)
    with pytest.raises(RemoteProtocolError):
        selection.from_message(message)


def test_without_negative_steps_when_alone_then_only_that_item_changes() -> None:
    chosen = selection.encode((1, slice(None, None, -1), slice(0, 2)), batch_size=(2, 3, 4))
    assert chosen.replace_negative_steps((2, 3, 4)) == Selection((1, np.array([2, 1, 0]), slice(0, 2, 1)))


def test_without_negative_steps_when_there_is_none_then_itself() -> None:
    chosen = selection.encode((1, slice(0, 2)), batch_size=(2, 3))
    assert chosen.replace_negative_steps((2, 3)) is chosen
