"""FakeTensorMode: reads and writes of a store under it fail, with an error that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode

import tdserve
from tdserve.base.errors import NotSupportedError
from tdserve.client.content.fake_modes import check_real, find_fake_mode

MAPPING_INSTEAD = r"client\.load_memmap\(name\)"
DESCRIPTION_INSTEAD = r"FakeTensorMode.*client\.describe\(name\)"


@pytest.fixture(params=["shm", "gloo"])
def store(request: pytest.FixtureRequest, server: tdserve.Server, name: str) -> Iterator[tdserve.StoreHandle]:
    """A store, as a client of either transport sees it."""
    with server.client(transport=request.param) as client:
        client.init_remote(TensorDict({"a": torch.ones(3, 2), "t": "text"}, [3]), name)
        yield client[name]


CALLS: dict[str, Callable[[tdserve.StoreHandle], object]] = {
    "key": lambda store: store["a"],
    "value": lambda store: store["t"],
    "rows": lambda store: store[1:],
    "get": lambda store: store.get("a"),
    "to_tensordict": lambda store: store.to_tensordict(),
    "view": lambda store: store.select("a").to_tensordict(),
    "set_at_": lambda store: store.set_at_("a", 0.0, 1),
    "load_memmap_": lambda store: store.load_memmap_("other"),
    "map": lambda store: store.map(),
}


def test_check_real_when_under_a_fake_mode_then_refused() -> None:
    check_real("reading")
    with FlopCounterMode(display=False):  # another mode
        check_real("reading")
    with FakeTensorMode() as mode:
        assert find_fake_mode() is mode
        with pytest.raises(NotSupportedError, match=r"reading under a FakeTensorMode.*load_memmap"):
            check_real("reading")
        with unset_fake_temporarily():
            check_real("reading")


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_handle_when_under_a_fake_mode_then_refused_by_what_to_call(store: tdserve.StoreHandle, call: str) -> None:
    with FakeTensorMode(), pytest.raises(NotSupportedError, match=f"FakeTensorMode.*{MAPPING_INSTEAD}"):
        CALLS[call](store)
    assert torch.equal(store["a"], torch.ones(3, 2))


def test_from_remote_init_when_under_a_fake_mode_then_refused_by_what_to_call(
    client: tdserve.Client, name: str
) -> None:
    client.init_remote(TensorDict({"a": torch.ones(3, 2)}, [3]), name)
    out = TensorDict({"a": torch.zeros(3, 2)}, [3])
    with FakeTensorMode():
        with pytest.raises(NotSupportedError, match=MAPPING_INSTEAD):
            client.from_remote_init(name)
        with pytest.raises(NotSupportedError, match=MAPPING_INSTEAD):
            client.from_remote_init(name, out=out)
        with pytest.raises(NotSupportedError, match=MAPPING_INSTEAD):
            client.recv(out, name)
    assert not out["a"].any()


TABLE_CALLS: dict[str, Callable[[Any], object]] = {
    "sample": lambda table: table.sample(1),
    "take": lambda table: table.take(1, consumer="c"),
    "rows": lambda table: table[:],
    "batches": lambda table: table.batches(1),
    "update_priority": lambda table: table.update_priority(0, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", TABLE_CALLS)
def test_table_when_under_a_fake_mode_then_refused_and_nothing_is_taken(
    client: tdserve.Client, name: str, call: str
) -> None:
    row = TensorDict({"a": torch.ones(2)})
    replay = client.create_replay(name, row, 4, sampler=tdserve.Prioritized(alpha=1.0, beta=1.0))
    replay.extend(row[None])
    with FakeTensorMode(), pytest.raises(NotSupportedError, match=DESCRIPTION_INSTEAD):
        TABLE_CALLS[call](replay)
    assert replay.take(1, consumer="c", ack=False, timeout_s=5.0)["a"].tolist() == [[1.0, 1.0]]


def test_queue_and_weights_when_under_a_fake_mode_then_refused_and_nothing_is_taken(
    client: tdserve.Client, name: str
) -> None:
    row = TensorDict({"a": torch.ones(2)})
    queue = client.create_queue(name, like=row, max_size=4)
    queue.extend(row[None])
    client.publish(f"{name}-w", row)
    calls: list[Callable[[], object]] = [
        lambda: queue.take(1, ack=False),
        lambda: queue.batches(1),
        lambda: client.latest(f"{name}-w"),
        lambda: client.latest(f"{name}-w", timeout_s=0, copy=False),
    ]
    for call in calls:
        with FakeTensorMode(), pytest.raises(NotSupportedError, match=DESCRIPTION_INSTEAD):
            call()
    assert len(queue.take(1, ack=False, timeout_s=5.0)) == 1
    weights = client.latest(f"{name}-w")
    assert weights is not None
    assert weights.data["a"].tolist() == [1.0, 1.0]


def test_batches_of_a_store_when_under_a_fake_mode_then_refused(store: tdserve.StoreHandle) -> None:
    for each in (store, store.select("a")):
        with FakeTensorMode(), pytest.raises(NotSupportedError, match="FakeTensorMode"):
            each.batches(2)
