from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, UnbatchedTensor, lazy_stack

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import KeyNotFoundError, NotSupportedError, SelectionError, SpecMismatchError
from tdserve.client.handles.overwriting import overwrite
from tdserve.structure.trees.tree import Path
from tdserve.v1 import control_pb2
from tests.sameness import difference

ROWS = TensorDict({"a": torch.arange(4.0), "n": {"b": torch.zeros(4, 2), "text": "before"}}, [4])


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A ring of eight rows, four of them live."""
    made: tdserve.ReplayHandle = client.create_replay(name, ROWS[0], 8)
    made.extend(ROWS)
    return made


def write(client: tdserve.Client, replay: tdserve.ReplayHandle, index: Any, value: Any, at: Path) -> None:
    """Overwrites a part of some rows."""
    stored = replay.spec.prepend((replay.capacity,))
    kind, deadline = control_pb2.STORE_KIND_REPLAY, Deadline.after(20.0)
    overwrite(client, replay.name, stored, index, value, at=at, kind=kind, deadline=deadline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "value", "content"),
    [
        ([1, 3], torch.tensor([8.0, 9.0]), [0, 8, 2, 9]),
        (torch.tensor([3, 0]), 5.0, [5, 1, 2, 5]),
        (2, torch.tensor(7.0), [0, 1, 7, 3]),
        ([], torch.empty(0), [0, 1, 2, 3]),
    ],
)
def test_overwrite_when_of_one_leaf_then_as_an_assignment_would(
    client: tdserve.Client, replay: tdserve.ReplayHandle, index: Any, value: Any, content: list[float]
) -> None:
    write(client, replay, index, value, ("a",))
    assert replay[:]["a"].tolist() == content
    assert replay[:]["n", "b"].sum() == 0


def test_overwrite_when_of_a_nested_part_then_all_of_it(client: tdserve.Client, replay: tdserve.ReplayHandle) -> None:
    part = TensorDict({"b": torch.ones(2, 2), "text": "after"}, [2])
    write(client, replay, [0, 2], part, ("n",))
    assert replay[:]["n", "b"][:, 0].tolist() == [1, 0, 1, 0]
    assert [replay[row]["n", "text"] for row in range(4)] == ["after", "before", "after", "before"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "value", "at", "error"),
    [
        ([0, 5], 1.0, ("a",), SelectionError),
        ([0, 8], 1.0, ("a",), SelectionError),
        ([0], 1.0, ("c",), KeyNotFoundError),
        ([0], 1.0, ("n", "c"), KeyNotFoundError),
        ([0, 1], torch.zeros(3), ("a",), SpecMismatchError),
        ([0], torch.zeros(1, dtype=torch.int64), ("a",), SpecMismatchError),
        ([0], TensorDict({"b": torch.ones(1, 2)}, [1]), ("n",), SpecMismatchError),
    ],
)
def test_overwrite_when_it_does_not_fit_then_error_and_nothing_was_written(
    client: tdserve.Client, replay: tdserve.ReplayHandle, index: Any, value: Any, at: Path, error: type[Exception]
) -> None:
    before = replay.info()
    with pytest.raises(error):
        write(client, replay, index, value, at)
    assert replay.info() == before
    assert replay[:]["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dim", [1, 2])
def test_overwrite_when_kept_in_one_piece_then_whole_or_refused_with_what_to_do(
    client: tdserve.Client, name: str, dim: int
) -> None:
    parts = [TensorDict({"a": torch.ones(2, 3)}, [2, 3]), TensorDict({"b": torch.zeros(2, 3)}, [2, 3])]
    td = lazy_stack(parts, dim)
    store: Any = client.memmap(td, name)
    for index in (0, -1, slice(0, 1), (slice(None), 0), [0], torch.tensor([True, False]), (0, ...)):
        with pytest.raises(NotSupportedError, match=r"writing a part of store .*store\[\.\.\.\] = td"):
            store[index] = td[index]
    with pytest.raises(NotSupportedError, match="writing a part"):
        store.set_at_("a", 0.0, 0)
    assert difference(td, store.to_tensordict()) is None
    for whole in (..., slice(None), (slice(None), slice(None)), (slice(None), ...)):
        parts[0]["a"] += 1
        store[whole] = td
        assert difference(td, store.to_tensordict()) is None


def test_overwrite_when_a_part_of_a_row_that_is_kept_in_one_piece_then_refused_with_what_to_do(
    client: tdserve.Client, name: str
) -> None:
    td = lazy_stack([TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"b": torch.zeros(2)}, [2])])
    store: Any = client.memmap(td, name)
    with pytest.raises(NotSupportedError, match=r"writing a part of a row .*write it to store\[row\]"):
        store[0, 1] = td[0, 1]
    assert difference(td, store.to_tensordict()) is None


@pytest.mark.parametrize("index", [(..., 0), (0, 1), ([0, 1], [1, 0]), torch.ones(4, 2, dtype=torch.bool)])
def test_overwrite_when_the_index_goes_on_behind_the_rows_then_refused_with_what_to_do(
    client: tdserve.Client, name: str, index: Any
) -> None:
    store: Any = client.memmap(ROWS.clone(), name)
    for target in (store, store.select("n")):
        with pytest.raises(NotSupportedError, match=r"a part of a row .*\('n', 'b'\).*write it to store\[row\]"):
            target.set_at_(("n", "b"), 1.0, index)
    assert difference(ROWS, store.to_tensordict()) is None
    assert store.get_at(("n", "b"), index).shape == ROWS.get_at(("n", "b"), index).shape


def test_overwrite_when_some_rows_would_share_another_tensor_then_refused_with_what_to_do(
    client: tdserve.Client, name: str
) -> None:
    make: Any = UnbatchedTensor
    td, other = (TensorDict({"t": make(torch.full((2,), number)), "a": torch.zeros(3)}, [3]) for number in (1.0, 2.0))
    store: Any = client.memmap(td, name)
    writes: Any = (lambda: store.__setitem__(0, other[0]), lambda: store.set_at_("t", other["t"], [0, 1]))
    for write in writes:
        with pytest.raises(NotSupportedError, match=r"at key 't' for a part of the rows .*store\.set\(key, tensor\)"):
            write()
    store[0] = td[0]
    assert difference(td, store.to_tensordict()) is None
    store[:3] = other
    assert difference(other, store.to_tensordict()) is None
    store.set("t", td["t"])
    assert difference(td, store.to_tensordict()) is None
