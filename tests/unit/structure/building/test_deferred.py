"""Stacks that are made at the first look: they behave like plain ones in every use."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack
from torch.utils import _pytree as pytree

from tdserve.structure.building.deferred import Deferred, defer_stack, defer_values, materialise
from tests.ragged import check_same, rows

ROWS = rows(2, 3)


def plain_values() -> Any:
    return NonTensorStack("a", "b", "c")


def plain_rows() -> Any:
    return lazy_stack([row.clone() for row in ROWS])


def values() -> Any:
    return defer_values(plain_values, torch.Size([3]))


def stack() -> Any:
    return defer_stack(plain_rows, torch.Size([2]), 0)


def unsized() -> Any:
    return defer_stack(plain_rows, None, 0)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "one": lambda it: it[1],
    "some": lambda it: it[0:2],
    "chosen": lambda it: it[torch.tensor([1, 0])],
    "clone": lambda it: it.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
    "to": lambda it: it.to("cpu"),
    "stack": lambda it: torch.stack([it, it]),
    "lazy_stack": lambda it: lazy_stack([it, it]),
    "cat": lambda it: LazyStackedTensorDict.maybe_dense_stack([it, it]),
    "unbind": lambda it: it.unbind(0),
    "unsqueeze": lambda it: it.unsqueeze(0),
    "lock": lambda it: it.lock_(),
    "within": lambda it: TensorDict({"it": it}, it.batch_size)[0],
    "dict": lambda it: TensorDict({"it": it}, it.batch_size).to_dict()["it"],
    "tolist": lambda it: it.tolist(),
    "apply": lambda it: it.apply(lambda tensor: tensor + 1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("later", "plain"), [(values, plain_values), (stack, plain_rows), (unsized, plain_rows)])
def test_later_when_something_is_done_with_it_then_as_with_a_plain_one(
    later: Callable[[], Any], plain: Callable[[], Any], operation: str
) -> None:
    try:
        expected = OPERATIONS[operation](plain())
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            OPERATIONS[operation](later())
        return
    found = OPERATIONS[operation](later())
    if isinstance(expected, (list, tuple, dict)):
        assert str(found) == str(expected)
    else:
        check_same(expected, found)


def test_later_when_compared_then_equal() -> None:
    assert bool((stack() == plain_rows())["r"].all())
    assert values().tolist() == ["a", "b", "c"]


def test_later_when_never_read_then_it_is_not_made() -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return plain_values()

    later = defer_values(make, torch.Size([3]))
    td = TensorDict._new_unsafe({"s": later}, batch_size=torch.Size([3]))
    assert (later.batch_size, isinstance(later, NonTensorStack)) == (torch.Size([3]), True)
    assert list(td.keys()) == ["s"]
    assert not calls
    assert td["s"] == ["a", "b", "c"]
    assert type(later) is NonTensorStack
    assert materialise(later) is later
    assert calls == [1]


def test_later_when_an_attribute_is_set_then_it_stays() -> None:
    later = stack()
    later.names = ["rows"]
    assert later.names == ["rows"]
    assert type(later) is LazyStackedTensorDict


def test_later_when_torch_walks_a_tree_then_it_sees_the_rows() -> None:
    found = pytree.tree_map(lambda leaf: leaf * 0 if isinstance(leaf, torch.Tensor) else leaf, stack())
    assert found["r"].sum() == 0


def test_deferred_when_looked_at_then_decoded_once() -> None:
    calls: list[int] = []

    def decode(blobs: Any) -> list[Any]:
        calls.append(len(blobs))
        return [blob.decode() for blob in blobs]

    later = Deferred([b"a", b"b", b"c"], decode)
    assert len(later) == 3
    part = later[1:]
    assert not calls
    assert (list(later), later[0], later[1:]) == (["a", "b", "c"], "a", ["b", "c"])
    later[0] = "z"
    assert list(later) == ["z", "b", "c"]
    assert calls == [3]
    assert list(part) == ["b", "c"]


def test_values_when_only_listed_then_no_row_is_made_for_them() -> None:
    values = Deferred([b"a", b"b"], lambda blobs: [blob.decode() for blob in blobs])

    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return NonTensorStack(*values)

    later = defer_values(make, torch.Size([2]), values)
    listed = later.tolist()
    assert (listed, later.tolist(convert_nodes=False), len(calls)) == (["a", "b"], ["a", "b"], 0)
    listed.append("c")
    assert later.tolist() == ["a", "b"]
    later.tolist(as_linked_list=True)[0] = "new"
    assert (later.tolist(), later[0].data, len(calls)) == (["new", "b"], "new", 1)
