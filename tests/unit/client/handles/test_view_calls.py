"""Every call makes a view with tensordict's own arguments. test_view.py tests what views read."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tdserve.client.handles.view import StoreView
from tdserve.client.handles.view_calls import ViewCalls, is_view_call, rename_argument
from tdserve.client.handles.view_steps import KEY_STEPS, SHAPE_STEPS
from tests.sameness import assert_same

CUTS = {"split", "chunk", "tensor_split", "unbind", "narrow"}


@pytest.fixture
def store(local_client: tdserve.Client, name: str) -> Any:
    """Four rows of three."""
    return local_client.memmap(TensorDict({"a": torch.zeros(4, 3)}, [4, 3]), name)


@pytest.mark.parametrize("name", sorted(KEY_STEPS | SHAPE_STEPS | CUTS))
def test_call_when_declared_then_takes_the_arguments_of_tensordict(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(each, name)).parameters for each in (ViewCalls, TensorDict))
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in ours.values()):
        assert list(ours) == list(theirs)


def test_split_when_of_views_then_each_has_its_rows(store: Any) -> None:
    parts = store.split(3)
    assert [type(part) for part in parts] == [StoreView, StoreView]
    assert [part.batch_size for part in parts] == [(3, 3), (1, 3)]
    assert [part.batch_size for part in store.unbind(1)] == [(4,)] * 3
    assert [part.batch_size for part in store.permute(1, 0).chunk(2)] == [(2, 4), (1, 4)]


def test_call_when_it_cannot_be_lazy_then_a_local_tensordict(store: Any) -> None:
    assert isinstance(store.flatten_keys(is_leaf=lambda kind: True), TensorDict)
    assert store.view(torch.int32)["a"].dtype == torch.int32
    with pytest.raises(tdserve.NotSupportedError, match="update_"):
        store.flatten_keys(".", True, lambda kind: True)


def unlike(dim: int) -> Any:
    """Members of different keys, stacked along dimension ``dim`` of two."""
    return lazy_stack(
        [TensorDict({"x": torch.ones(3, 2) * number, f"x{number}": torch.ones(3)}, [3]) for number in range(3)], dim
    )


CALLS_OF_STACKS: dict[str, Any] = {
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "unflatten": lambda td: td.unflatten(1, (3, 1)),
    "expand": lambda td: td.expand(2, 3, 3),
    "unbind": lambda td: td.unbind(1)[2],
    "split": lambda td: td.split(2, 1)[1],
    "chunk": lambda td: td.chunk(2, -1)[0],
    "narrow": lambda td: td.narrow(1, 1, 2),
    "rows": lambda td: td.unbind(0)[1],
    "part": lambda td: td.select("x")[0, 1],
    "column": lambda td: td.select("x")[..., 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name_of_call", CALLS_OF_STACKS)
def test_call_when_only_elements_have_a_dimension_then_as_of_a_local_tensordict(
    client: tdserve.Client, name: str, dim: int, name_of_call: str
) -> None:
    store: Any = client.memmap(unlike(dim), name)
    found = CALLS_OF_STACKS[name_of_call](store)
    found = found.to_tensordict() if isinstance(found, StoreView) else found
    assert_same(found, CALLS_OF_STACKS[name_of_call](unlike(dim)))


def test_function_of_torch_when_it_gives_a_view_then_known_with_the_names_of_its_arguments() -> None:
    assert all(is_view_call(name) for name in ("unsqueeze", "split", "movedim"))
    assert not any(is_view_call(name) for name in ("sum", "__doc__", "cat"))
    assert [rename_argument(name) for name in ("split_size_or_sections", "dim")] == ["split_size", "dim"]
