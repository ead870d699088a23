"""A selection means the same as the same expression on a TensorDict: the tests run both and compare."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict

from tdserve.base.errors import SelectionError
from tdserve.messages.selection import selection
from tdserve.messages.selection.dimension_names import select_names
from tdserve.messages.selection.items import count_covered
from tdserve.messages.selection.torch_selection import to_torch_index
from tdserve.v1 import content_pb2
from tests.tensordict_versions import IS_OLD

Shape = tuple[int, ...]


def _source(batch_size: Shape, *, named: bool = False) -> TensorDict:
    num = math.prod(batch_size)
    leaves = {
        "flat": torch.arange(num).reshape(batch_size),
        "deep": torch.arange(num * 6, dtype=torch.float32).reshape(*batch_size, 2, 3),
    }
    names: Any = [f"d{dim}" for dim in range(len(batch_size))] if named else None
    return TensorDict(leaves, batch_size=list(batch_size), names=names)


_batch_sizes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)
_bounds = st.none() | st.integers(-6, 6)


def _positions(draw: st.DrawFn, size: int) -> Any:
    shape = draw(st.sampled_from([(0,), (1,), (2,), (3,), (2, 2), (1, 3), (2, 1)]))
    low, high = (0, 0) if size == 0 else (-size, size - 1)
    flat = draw(st.lists(st.integers(low, high), min_size=math.prod(shape), max_size=math.prod(shape)))
    array = np.array(flat, np.int64).reshape(shape)
    makers: list[Any] = [
        np.ndarray.tolist,
        lambda a: a,
        torch.from_numpy,
        lambda a: torch.from_numpy(a.astype(np.int32)),
    ]
    return draw(st.sampled_from(makers))(array)


def _mask(draw: st.DrawFn, shape: Shape) -> Any:
    flat = draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    array = np.array(flat, np.bool_).reshape(shape)
    return draw(st.sampled_from([lambda a: a, torch.from_numpy]))(array)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Shape, Any]:
    """Draws a batch size and an expression over it, which mostly fits."""
    batch_size: Shape = draw(_batch_sizes)
    items: list[Any] = []
    dim = 0
    while dim < len(batch_size) and draw(st.integers(0, 4)):
        size = batch_size[dim]
        kind = draw(st.sampled_from(["int", "tensor0", "slice", "range", "positions", "mask", "wide", "none", "bool"]))
        if kind in ("int", "tensor0"):
            at = draw(st.integers(-size - 1, size))
            items.append(at if kind == "int" else torch.tensor(at))
        elif kind == "slice":
            items.append(slice(draw(_bounds), draw(_bounds), draw(st.none() | st.integers(1, 3))))
        elif kind == "range":
            items.append(range(size) if draw(st.booleans()) else range(size - 1, -1, -1))
        elif kind == "positions":
            items.append(_positions(draw, size))
        elif kind in ("mask", "wide"):
            width = 1 if kind == "mask" else draw(st.integers(1, len(batch_size) - dim))
            items.append(_mask(draw, batch_size[dim : dim + width]))
            dim += width - 1
        else:
            items.append(None if kind == "none" else draw(st.booleans()))
        dim += kind not in ("none", "bool")
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
    if dim == len(batch_size) and draw(st.integers(0, 9)) == 0:
        items.append(0)  # one too many
    return batch_size, items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


def _local(td: TensorDict, index: Any) -> TensorDict | None:
    """Returns tensordict's result, ``None`` if it refuses."""
    try:
        found = td[index]
    except (IndexError, RuntimeError, ValueError):
        return None
    return found if isinstance(found, TensorDict) else None


def _encode(index: Any, batch_size: Shape, expected: TensorDict) -> selection.Selection | None:
    """Encodes the selection; ``None`` where tdserve is stricter: torch checks no position of an index that selects
    nothing."""
    try:
        return selection.encode(index, batch_size=batch_size)
    except SelectionError:
        assert 0 in expected.batch_size
        return None


def _leans_on_leaves(batch_size: Shape, index: Any) -> bool:
    """tensordict 0.15 still lets an index run past the batch dimensions into the leaves; 0.17 refuses, and so do we."""
    parsed = selection.parse(index)
    return sum(count_covered(item) for item in parsed.items) > len(batch_size)


def check_names(td: TensorDict, chosen: selection.Selection, expected: TensorDict) -> None:
    names = tuple(expected.names)
    if not IS_OLD:  # 0.14 loses the names behind an index array
        assert select_names(td.names, td.batch_size, chosen) == (None if set(names) <= {None} else names)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(_cases())
def test_read_when_expression_is_random_then_equals_tensordict(case: tuple[Shape, Any]) -> None:
    batch_size, index = case
    td = _source(batch_size, named=True)
    if _leans_on_leaves(batch_size, index):
        with pytest.raises(SelectionError):
            selection.encode(index, batch_size=batch_size)
        return
    expected = _local(td, index)
    if expected is None:
        with pytest.raises(SelectionError):
            selection.encode(index, batch_size=batch_size)
        return
    chosen = _encode(index, batch_size, expected)
    if chosen is None:
        return
    assert chosen.compute_batch_size(batch_size) == tuple(expected.batch_size)
    assert selection.parse(index).compute_batch_size(batch_size) == tuple(expected.batch_size)
    check_names(td, chosen, expected)
    assert chosen.compute_elements(batch_size).tolist() == expected["flat"].flatten().tolist()
    for key in ("flat", "deep"):
        torch.testing.assert_close(td[key][to_torch_index(chosen, batch_size)], expected[key], rtol=0, atol=0)


_EYE = np.eye(4, 3, dtype=np.bool_)


@pytest.mark.parametrize(
    "index",
    [
        (None, [0, 1], slice(None), [0, 1]),
        (None, [[0], [1]], slice(1, 3), [0, 1]),
        (slice(1, 3), [0, 1], None, [0, 1]),
        (..., [0, 2], None, [0, 1]),
        (None, [0, 1], ..., [0, 1]),
        (None, [0, 1], ..., [0, 1], 0),
        ([0, 1], 1, [0, 1]),
        (None, [0, 1], 1, [0, 1]),
        (0, slice(None), [0, 1]),
        ([[0], [1]], [0, 1], slice(None)),
        ([[0], [1]], slice(None), [0, 1]),
        (None, _EYE, None, [0, 1, 2]),
        (None, True, slice(None), [0, 1]),
        (slice(None), False, [1]),
        (_EYE, slice(None, None, 2)),
        (..., np.array([True, False, True, False, True])),
    ],
)
def test_read_when_arrays_stand_apart_or_together_then_equals_tensordict(index: Any) -> None:
    batch_size = (4, 3, 5)
    td = _source(batch_size, named=True)
    expected = td[index]
    chosen = selection.encode(index, batch_size=batch_size)
    assert chosen.compute_batch_size(batch_size) == tuple(expected.batch_size)
    check_names(td, chosen, expected)
    assert chosen.compute_elements(batch_size).tolist() == expected["flat"].flatten().tolist()
    assert td["deep"][to_torch_index(chosen, batch_size)].tolist() == expected["deep"].tolist()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(_cases())
def test_write_when_expression_is_random_then_equals_tensordict(case: tuple[Shape, Any]) -> None:
    batch_size, index = case
    expected = _source(batch_size)
    if _leans_on_leaves(batch_size, index) or (part := _local(expected, index)) is None:
        return
    actual = _source(batch_size)
    value: Any = part.clone().apply(lambda leaf: torch.full_like(leaf, -1))
    chosen = _encode(index, batch_size, part)
    if chosen is None:
        return
    expected[index] = value
    for key in ("flat", "deep"):
        actual[key][to_torch_index(chosen, batch_size)] = value[key]
        torch.testing.assert_close(actual[key], expected[key], rtol=0, atol=0)
    if batch_size:
        changed = (actual["flat"] == -1).reshape(batch_size[0], math.prod(batch_size[1:])).any(-1)
        assert chosen.compute_rows(batch_size).tolist() == torch.nonzero(changed).flatten().tolist()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(_cases())
def test_messages_when_sent_then_the_selection_is_the_same(case: tuple[Shape, Any]) -> None:
    _, index = case
    parsed = selection.parse(index)
    assert selection.from_message(parsed.to_message()) == parsed


@st.composite
def _numpy_cases(draw: st.DrawFn) -> tuple[Shape, tuple[Any, ...]]:
    """Draws expressions with negative steps, which only NumPy accepts, and without integers, which NumPy broadcasts."""
    batch_size: Shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    items: list[Any] = []
    for size in batch_size:
        kind = draw(st.sampled_from(["down", "slice", "positions", "mask", "none"]))
        if kind == "none":
            items.append(None)
        if kind == "positions":
            items.append(np.asarray(_positions(draw, size), np.int64))
        elif kind == "mask":
            items.append(np.asarray(_mask(draw, (size,))))
        else:
            step = draw(st.none() | st.integers(1, 3)) if kind == "slice" else draw(st.integers(-3, -1))
            items.append(slice(draw(_bounds), draw(_bounds), step))
    return batch_size, tuple(items)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(_numpy_cases())
def test_read_when_a_step_is_negative_then_equals_numpy(case: tuple[Shape, tuple[Any, ...]]) -> None:
    batch_size, index = case
    deep = _source(batch_size)["deep"]
    try:
        expected = deep.numpy()[index]
    except IndexError:  # arrays that do not broadcast
        with pytest.raises(SelectionError):
            selection.encode(index, batch_size=batch_size)
        return
    chosen = selection.encode(index, batch_size=batch_size)
    actual = deep[to_torch_index(chosen, batch_size)]
    np.testing.assert_array_equal(actual.numpy(), expected)
    assert chosen.compute_batch_size(batch_size) == expected.shape[: expected.ndim - 2]


@pytest.mark.parametrize(
    "index",
    [
        (False, slice(None, None, -1)),
        (True, slice(None, None, -1), slice(None, None, -1)),
        (None, slice(None, None, -1), [0, 1]),
        (None, [0, 1], slice(None, None, -1), [2, 0]),
        (_EYE, slice(None, None, -2)),
        (slice(None, None, -1), slice(None), slice(3, None, -3)),
    ],
)
def test_read_when_negative_steps_stand_beside_others_then_equals_numpy(index: Any) -> None:
    deep = _source((4, 3, 5))["deep"]
    expected = deep.numpy()[index]
    chosen = selection.encode(index, batch_size=(4, 3, 5))
    assert chosen.compute_batch_size((4, 3, 5)) == expected.shape[:-2]
    np.testing.assert_array_equal(deep[to_torch_index(chosen, (4, 3, 5))].numpy(), expected)


def test_index_when_a_slice_is_plain_then_reads_a_view() -> None:
    leaf = torch.zeros(5, 2)
    chosen = selection.encode(slice(1, 4, 2), batch_size=(5,))
    leaf[to_torch_index(chosen, (5,))].fill_(1)
    assert leaf.sum() == 4


def test_index_when_positions_came_in_a_message_then_torch_may_have_them() -> None:
    sent = selection.encode([3, 1], batch_size=(5,)).to_message().SerializeToString()
    message = content_pb2.Selection.FromString(sent)
    index = to_torch_index(selection.from_message(message), (5,))  # a warning of torch would fail this test
    assert torch.arange(5)[index].tolist() == [3, 1]


@pytest.mark.parametrize("index", [np.array([3])[::-1], np.arange(5)[::-2], np.broadcast_to(np.array([2]), (2,))])
def test_index_when_an_array_has_odd_strides_then_torch_may_have_it(index: Any) -> None:
    chosen = selection.encode(index, batch_size=(5,))
    assert torch.arange(5)[to_torch_index(chosen, (5,))].tolist() == index.tolist()


def test_index_when_it_does_not_fit_then_selection_error() -> None:
    with pytest.raises(SelectionError):
        to_torch_index(selection.parse(5), (5,))
