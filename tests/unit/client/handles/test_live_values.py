from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.client.handles.live_stores import StoreSource, expand_ellipsis, show_stored, with_live_leaves
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensordicts.entries import get_entry
from tdserve.structure.tensordicts.live_values import LiveNonTensorData, LiveNonTensorStack


class LocalStore:
    """A tensordict in this process as a store.

    Attributes:
        content: Its content.
        spec: Its structure.
        indices: With which it was asked, in order.
    """

    def __init__(self, content: TensorDict) -> None:
        self.content = content
        self.spec = capture(content).spec
        self.indices: list[Any] = []

    def snapshot_at(self, key: tuple[str, ...], index: Any) -> Any:
        """A copy of rows of a leaf."""
        self.indices.append(index)
        return get_entry(self.content, key)[index].clone()

    def set_at_(self, key: tuple[str, ...], value: Any, index: Any) -> None:
        """Writes rows of a leaf."""
        self.snapshot_at(key, index)
        stack = get_entry(self.content, key).maybe_to_stack()
        stack[index] = value
        self.content.set(key, stack)


@pytest.fixture
def store() -> LocalStore:
    """Two rows of a stack "a", "b", and of stacks of three below."""
    rows: list[Any] = [["c", "d", "e"], ["f", "g", "h"]]
    below = NonTensorStack.from_list(rows)
    one = NonTensorData("one", batch_size=[2])
    return LocalStore(TensorDict({"s": NonTensorStack("a", "b"), "n": TensorDict({"t": below}, [2, 3]), "o": one}, [2]))


def test_source_when_whole_then_reads_and_writes_all_rows(store: LocalStore) -> None:
    source = StoreSource(store, ("s",), (2,))
    assert source.read().tolist() == ["a", "b"]
    source.write(["y", "z"])
    assert store.content["s"] == ["y", "z"]


def test_source_when_indexed_again_and_again_then_asks_for_those_rows_only(store: LocalStore) -> None:
    source = StoreSource(store, ("s",), (2,)).select(slice(1, None)).select(0)
    assert source.read().data == "b"
    source.write("z")
    assert store.content["s"] == ["a", "z"]
    assert store.indices == [(1,), (1,)]


def test_source_when_beyond_its_rows_then_index_error(store: LocalStore) -> None:
    with pytest.raises(IndexError):
        StoreSource(store, ("s",), (2,)).select(2)


@pytest.mark.parametrize(
    ("index", "expected"),
    [((1, 2), "h"), ((1, slice(1, None)), ["g", "h"]), ((slice(None), 0), ["c", "f"]), ((..., 1), ["d", "g"])],
)
def test_source_when_below_the_rows_of_the_store_then_reads_and_writes_that_part(
    store: LocalStore, index: Any, expected: Any
) -> None:
    source = StoreSource(store, ("n", "t"), (2, 3)).select(index)
    assert source.read().tolist() == expected
    before = [list(row) for row in store.content["n", "t"]]
    source.write("z" if isinstance(expected, str) else ["z"] * len(expected))
    assert store.content["n", "t"] == [["z" if value in expected else value for value in row] for row in before]


def test_live_leaves_when_shown_then_of_the_rows_that_were_read(store: LocalStore) -> None:
    row = with_live_leaves(store.content[1].clone(), store, 1)
    assert type(row.get("s")) is LiveNonTensorData
    assert type(row.get(("n", "t"))) is LiveNonTensorStack
    store.content["s"] = ["y", "z"]
    row["n"].get("t").update_(NonTensorStack("1", "2", "3"))
    assert row["s"] == "z"
    assert store.content["n", "t"] == [["c", "d", "e"], ["1", "2", "3"]]


def test_live_leaves_when_the_index_copies_then_plain(store: LocalStore) -> None:
    rows = with_live_leaves(store.content[[0, 1]].clone(), store, [0, 1])
    assert type(rows.get("s")) is NonTensorStack


def test_live_leaves_when_shown_in_the_callers_own_tensordict_then_it_is_locked(store: LocalStore) -> None:
    td = store.content.clone().lock_()
    assert show_stored(td, store, is_live=True) is td
    assert td.is_locked
    td.set_at_("s", "z", 0)
    assert (store.content["s"], td["s"]) == (["z", "b"], ["z", "b"])


def test_tensors_when_the_store_is_mapped_then_are_its_memory() -> None:
    store = LocalStore(TensorDict({"x": torch.arange(2), "s": NonTensorStack("a", "b")}, [2]))
    td = show_stored(store.content.clone(), store, mapped=store.content, is_live=False)
    assert td.is_locked
    assert type(td.get("s")) is NonTensorStack
    store.content["x"][1] = 7
    assert td["x"].tolist() == [0, 7]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((1,), (1,)),
        ((..., 1), (slice(None), slice(None), 1)),
        ((1, ...), (1, slice(None), slice(None))),
        ((...,), (slice(None),) * 3),
    ],
)
def test_expanded_when_an_ellipsis_is_there_then_whole_dimensions_take_its_place(items: Any, expected: Any) -> None:
    assert expand_ellipsis(items, 3) == expected


def test_tensors_when_leaves_are_live_then_untouched() -> None:
    store = LocalStore(TensorDict({"x": torch.arange(2), "s": NonTensorStack("a", "b")}, [2]))
    td = store.content.clone()
    x = td["x"]
    assert with_live_leaves(td, store)["x"] is x
