"""Stores whose structures differ only in the order of their keys: each keeps its order, for all clients, always."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing
from tests.sameness import assert_same

pytestmark = pytest.mark.integration

ORDERS = {"up": ("a", "b", "n"), "down": ("n", "b", "a")}


def content(order: str) -> TensorDict:
    """Returns content with its keys, nested ones too, in this order."""
    leaves: dict[str, Any] = {"a": torch.arange(4.0), "b": torch.arange(4), "text": "text"}
    leaves["n"] = {key: leaves[key] for key in (*ORDERS[order], "text") if key != "n"}
    return TensorDict({key: leaves[key] for key in (*ORDERS[order], "text")}, [4])


def keys_of(td: Any) -> list[Any]:
    """Returns all keys in their order."""
    return list(td.keys(True))


def latest(client: tdserve.Client, name: str) -> list[Any]:
    """Returns the keys of the newest weights, in their order."""
    found = client.latest(name)
    assert found is not None
    return keys_of(found.data)


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """A server that has only these stores, and may be killed."""
    with Crashing(Path(tmp_path_factory.mktemp("orders"))) as started:
        yield started


def check(client: tdserve.Client, first: str, suffix: str) -> None:
    """Checks all stores by a client that has just connected."""
    for order in sorted(ORDERS, key=lambda each: each != first):
        expected, name = content(order), f"{order}{suffix}"
        handle = client[name]
        assert list(handle.keys(True)) == keys_of(expected)
        for found in (client.from_remote_init(name), handle.to_tensordict(), client[name][:2]):
            assert keys_of(found) == keys_of(expected)
        assert_same(handle.to_tensordict(), expected)
        assert keys_of(client[f"table-{name}"][:]) == keys_of(expected)
    assert latest(client, f"weights{suffix}") == keys_of(content("down"))
    changed = content("up")
    changed["b"] = changed.pop("b")
    assert keys_of(client[f"changed{suffix}"]) == keys_of(changed) == keys_of(client[f"changed{suffix}"][:])


@pytest.mark.slow
@pytest.mark.once("gloo")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_stores_when_only_the_order_of_keys_differs_then_each_keeps_its_own_also_after_a_restart(
    crashing: Crashing, transport: Literal["gloo", "shm"]
) -> None:
    suffix = f"-{transport}"
    with crashing.server.client(transport=transport, timeout_s=20.0) as client:
        for order in ORDERS:
            client.init_remote(content(order), f"{order}{suffix}")
            client.create_replay(f"table-{order}{suffix}", content(order)[0], 8).extend(content(order))
            client.publish(f"weights{suffix}", content(order))
            assert latest(client, f"weights{suffix}") == keys_of(content(order))
        client.init_remote(content("up"), f"changed{suffix}")
        changed = client[f"changed{suffix}"]
        del changed["b"]
        changed["b"] = content("up")["b"]
        check(client, "down", suffix)
    for first in ORDERS:
        with crashing.server.client(transport=transport, timeout_s=20.0) as client:
            check(client, first, suffix)
        crashing.restart()
        with crashing.server.client(transport=transport, timeout_s=20.0) as client:
            check(client, first, suffix)
