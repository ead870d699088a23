from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotSupportedError, StoreNotFoundError
from tdserve.client.handles.mapped_leaves import map_store
from tdserve.structure.captures.capture import capture

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"t": "text"}}, [3])
SPEC = capture(TD).spec


def mapped(client: tdserve.Client, name: str, *, writable: bool = False) -> TensorDict:
    """Returns the store's mapped tensors."""
    td: TensorDict = map_store(client, name, SPEC, writable=writable, deadline=Deadline.after(20.0))
    return td


def test_map_when_others_write_then_it_shows_and_its_values_are_there(local_client: tdserve.Client, name: str) -> None:
    local_client.init_remote(TD, name)
    td = mapped(local_client, name)
    assert torch.equal(td["a"], TD["a"])
    assert td["n", "t"] == "text"
    assert td.is_locked
    local_client[name].set_at_("a", torch.tensor([8.0, 9.0]), 1)
    assert td["a"][1].tolist() == [8, 9]


def test_map_when_the_user_writes_then_it_stays_with_him_unless_he_asked_otherwise(
    local_client: tdserve.Client, name: str
) -> None:
    local_client.init_remote(TD, name)
    private, shared = mapped(local_client, name), mapped(local_client, name, writable=True)
    private["a"][0] = -1
    assert torch.equal(local_client[name]["a"], TD["a"])
    shared["a"][2] = 7
    assert local_client[name]["a"][2].tolist() == [7, 7]
    assert private["a"][0].tolist() == [-1, -1]


def test_map_when_the_store_is_deleted_then_the_last_content_stays(local_client: tdserve.Client, name: str) -> None:
    local_client.init_remote(TD, name)
    td = mapped(local_client, name)
    local_client.delete(name)
    assert torch.equal(td["a"], TD["a"])
    with pytest.raises(StoreNotFoundError):
        map_store(local_client, name, SPEC, writable=False, deadline=Deadline.after(0))


def test_map_when_the_client_is_not_local_then_refused_with_the_reason(
    remote_client: tdserve.Client, name: str
) -> None:
    remote_client.init_remote(TD, name)
    with pytest.raises(NotSupportedError, match="set to use gloo"):
        mapped(remote_client, name)
