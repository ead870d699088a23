from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictParams
from torch._subclasses.fake_tensor import FakeTensorMode

import tdserve
from tdserve.base.errors import ClosedError, KeyNotFoundError, NotSupportedError, StoreNotFoundError
from tdserve.client.handles.mapped_leaves import read_small_leaf
from tdserve.client.local.local_reads import MAX_CLONED_BYTES
from tdserve.data.mapped_stores import MappedStore

CONTENT: dict[str, Any] = {
    "scalar": torch.tensor(1.5),
    "flags": torch.tensor([True, False]),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
    "none": torch.zeros(0, 3),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "n": {"deep": torch.arange(3)},
}
OTHER: dict[str, Any] = {
    "wide": torch.rand(MAX_CLONED_BYTES),
    "grad": torch.ones(2, requires_grad=True),
    "text": "text",
}


def opened(client: tdserve.Client, handle: tdserve.StoreHandle) -> MappedStore:
    """What the handle's client has mapped, once it was let."""
    handle.to_tensordict()
    movers = client.movers
    assert movers is not None
    store = movers.reads.find_known(handle.name, handle.spec)
    assert store is not None
    return store


def read(client: tdserve.Client, handle: tdserve.StoreHandle, *path: str) -> torch.Tensor | None:
    """Without asking anybody."""
    return read_small_leaf(client, handle.name, handle.spec, path)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits."""
    is_alike = found.dtype is expected.dtype and found.shape == expected.shape
    return is_alike and found.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("is_locked", [False, True])
def test_leaf_when_small_and_plain_then_a_copy_of_it_and_no_other_one(
    local_client: tdserve.Client, name: str, is_locked: bool
) -> None:
    td = TensorDict({**CONTENT, **OTHER}, [])
    handle = local_client.memmap(td.lock_() if is_locked else td, name)
    assert read(local_client, handle, "scalar") is None  # this client may not read it yet
    store = opened(local_client, handle)
    for path, _ in handle.spec.tensors:
        found = read(local_client, handle, *path)
        assert (found is None) == (path[0] in OTHER)
        for each in (handle[path], handle.get(path), *([] if found is None else [found])):
            assert same(each.detach(), td[path].detach())
            assert each.requires_grad == td[path].requires_grad
            each.detach().zero_()
        assert same(store.leaves[path], td[path].detach())
    assert [read(local_client, handle, key) for key in ("text", "n", "unknown")] == [None] * 3


@pytest.mark.parametrize(
    "td",
    [
        lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.ones(2)})]),
        TensorDictParams(TensorDict({"a": torch.zeros(2)}, [])),
        TensorDict({"a": torch.zeros(2, device="meta")}, [], device="meta"),
        TensorDict({"a": torch.zeros(2), "t": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)}, []),
    ],
)
def test_leaf_when_it_comes_back_as_more_than_its_content_then_is_left_to_others(
    local_client: tdserve.Client, name: str, td: Any
) -> None:
    handle = local_client.memmap(td, name)
    opened(local_client, handle)
    assert read(local_client, handle, "a") is None
    found, expected = handle["a"], local_client.load_memmap(name)["a"]
    assert (type(found), found.device, found.shape) == (type(expected), expected.device, expected.shape)


class Moving(torch.Tensor):
    """Lets something happen while it is copied."""

    happens: Callable[[], None]

    def clone(self, **_: Any) -> torch.Tensor:
        found = self.as_subclass(torch.Tensor).clone()
        Moving.happens()
        return found


@pytest.mark.parametrize("way", ["write", "begin to write", "alter", "delete"])
def test_leaf_when_it_moves_while_it_is_copied_then_none(local_client: tdserve.Client, name: str, way: str) -> None:
    handle = local_client.memmap(TensorDict(CONTENT, []), name)
    store = opened(local_client, handle)
    generations = store.map_writable_generations()

    def happens() -> None:
        if way == "delete":
            local_client.delete(name)
        elif way == "alter":
            local_client[name]["new"] = torch.ones(1)
        else:
            generations[-1] += 1 + (way == "write")

    Moving.happens = staticmethod(happens)
    store.leaves["scalar",] = store.leaves["scalar",].as_subclass(Moving)
    assert read(local_client, handle, "scalar") is None
    if way == "begin to write":
        assert read(local_client, handle, "flags") is None
        generations[-1] += 1
    if way in ("write", "begin to write"):
        assert same(handle["flags"], CONTENT["flags"])


def test_key_when_the_store_goes_or_changes_then_as_of_any_read(local_client: tdserve.Client, name: str) -> None:
    handle = local_client.memmap(TensorDict(CONTENT, []), name)
    other = local_client[name]
    assert handle["scalar"] == handle["scalar"] == 1.5
    other["scalar"] = torch.tensor(2.5)
    assert handle["scalar"] == 2.5
    other.rename_key_("scalar", "renamed")
    assert handle["renamed"] == 2.5
    assert handle.get("scalar") is None
    with pytest.raises(KeyNotFoundError):
        handle["scalar"]
    other["scalar"] = torch.zeros(2, 2)
    assert handle["scalar"].shape == (2, 2)
    local_client.delete(name)
    for _ in range(2):
        with pytest.raises(StoreNotFoundError):
            handle["scalar"]
    local_client.init_remote(TensorDict({"scalar": torch.tensor(7)}), name)
    assert handle["scalar"] == handle["scalar"] == 7


def test_key_when_the_client_is_closed_or_a_fake_mode_is_on_then_refused(server: tdserve.Server, name: str) -> None:
    with server.client(transport="shm") as client:
        handle = client.memmap(TensorDict(CONTENT, []), name)
        assert handle["scalar"] == 1.5
        with FakeTensorMode(), pytest.raises(NotSupportedError, match="FakeTensorMode"):
            handle["scalar"]
    with pytest.raises(ClosedError):
        handle["scalar"]
    with pytest.raises(ClosedError):
        handle.get("scalar")
