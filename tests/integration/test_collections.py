"""Garbage collections that begin inside calls: neither new tensors nor values set one off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.base.config import TransportName
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

NUM_LEAVES = 2_000

NUM_HELD = 100_000
"""Tensors of a large process. To collect all its objects takes most of a second."""


def make(number: int) -> TensorDict:
    """New tensors."""
    return TensorDict({f"k{key}": torch.full((16,), float(number)) for key in range(NUM_LEAVES)}, [])


@contextmanager
def count_collections() -> Iterator[list[int]]:
    """Yields the generations of the collections that begin."""
    begun: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield begun
    finally:
        gc.callbacks.remove(note)


@pytest.fixture
def client(server: tdserve.Server, transport: TransportName) -> Iterator[tdserve.Client]:
    with server.client(transport=transport, timeout_s=60.0) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, port=0) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_publish_when_the_tensors_are_new_then_not_even_a_collection_of_the_youngest_begins(
    client: tdserve.Client, transport: str
) -> None:
    name = f"new-{transport}"
    for number in range(3):
        client.publish(name, make(number))
    for number in range(3, 6):
        td = make(number)
        gc.collect()  # the next collection is that of the youngest, after 700 objects
        with count_collections() as begun:
            version = client.publish(name, td)
        assert begun == []
    found = client.latest(name)
    assert found is not None
    assert found.version == version
    assert float(found.data[f"k{NUM_LEAVES - 1}"][0]) == number


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_latest_when_it_fills_new_tensors_then_not_even_a_collection_of_the_youngest_begins(
    client: tdserve.Client, transport: str
) -> None:
    name = f"filled-{transport}"
    for number in range(1, 4):
        client.publish(name, make(number))
        out = make(0)
        gc.collect()
        with count_collections() as begun:
            client.latest(name, out=out)
        assert begun == [] or number == 1, "the first one learns the structure"
        assert float(out[f"k{NUM_LEAVES - 1}"][0]) == number


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_publish_and_latest_when_of_a_module_of_many_then_not_even_a_collection_of_the_youngest_begins(
    client: tdserve.Client, transport: str
) -> None:
    name = f"module-{transport}"
    module, into = (torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(NUM_LEAVES // 2))) for _ in range(2))
    bias, filled = module.get_parameter("7.bias"), into.get_parameter("7.bias")
    for number in range(1, 6):
        bias.data.fill_(number)
        gc.collect()
        with count_collections() as begun:
            client.publish(name, module)
            client.latest(name, into=into)
        assert begun == [] or number <= 3, "its tensors are remembered when they come again"
        assert filled.tolist() == [number, number]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_reads_when_values_are_decoded_then_nothing_is_left_for_the_collector(
    client: tdserve.Client, transport: str
) -> None:
    like = TensorDict({"messages": NonTensorData([{"role": "user"}]), "number": torch.tensor(0)}, [])
    replay = client.create_replay(f"values-{transport}", like=like, capacity=64)
    messages = [[{"role": "user", "content": str(number)}] for number in range(64)]
    replay.extend(TensorDict({"messages": NonTensorStack(*messages), "number": torch.arange(64)}, [64]))
    for _ in range(3):
        assert replay[torch.arange(64)].get("messages").tolist() == messages
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            assert replay[torch.arange(64)].get("messages").tolist() == messages
        num_left = gc.collect()
    finally:
        gc.enable()
    assert num_left < 10, "less than one object of each read"


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_publish_when_the_process_holds_many_tensors_then_no_full_collection_begins_in_it(
    client: tdserve.Client, transport: str
) -> None:
    name = f"many-{transport}"
    held = [torch.zeros(()) for _ in range(NUM_HELD)]
    client.publish(name, make(0))
    gc.collect()
    begun: list[int] = []
    with count_collections() as all_begun:
        for number in range(200):
            td = make(number)
            before = len(all_begun)
            client.publish(name, td)
            begun += all_begun[before:]
    assert 2 in all_begun, "the process itself makes enough for it"
    assert 2 not in begun
    assert len(held) == NUM_HELD
