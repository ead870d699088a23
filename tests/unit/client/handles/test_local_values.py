from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.handles.local_values import keep_keys, read_remote, to_local
from tests.sameness import difference

TD = TensorDict({"a": torch.arange(3.0), "b": torch.arange(3)}, [3])


@pytest.fixture
def store(client: tdserve.Client, name: str) -> Any:
    """A store that holds ``TD``."""
    return client.memmap(TD, name)


@pytest.mark.parametrize("timeout_s", [None, 20.0])
def test_to_local_when_handles_and_views_are_anywhere_then_they_are_read(store: Any, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else Deadline.after(timeout_s)
    found = to_local({"list": [store, 1], "tuple": (store.select("a"),), "text": "x"}, deadline)
    assert difference(found["list"][0], TD) is None
    assert difference(found["tuple"][0], TD.select("a")) is None
    assert (found["list"][1], found["text"]) == (1, "x")


def test_read_remote_when_a_list_has_a_handle_then_it_is_left(store: Any) -> None:
    given = [store]
    assert read_remote(given) is given
    assert difference(read_remote(store), TD) is None


def test_keep_keys_when_of_a_handle_then_those_that_exist(store: Any) -> None:
    assert list(keep_keys(store, ["b", "c"], Deadline.after(20.0)).keys()) == ["b"]
