"""Parts of versions of weights: ``select``."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch import nn

import tdserve
from tests.errors import raises
from tests.processes import START_TIMEOUT_S
from tests.sameness import difference

pytestmark = pytest.mark.integration

both_sizes = pytest.mark.parametrize("size", [4, 40_000])
"""Numbers per leaf: these parts are in messages, or go over the channel."""


def make_weights(number: float, size: int = 4, **more: Any) -> TensorDict:
    """Four layers, whose numbers show layer and version."""
    layers: dict[str, Any] = {f"layer{at}": {"weight": torch.full((size,), number + at / 10)} for at in range(4)}
    return TensorDict({**layers, "scale": torch.tensor(float(number)), **more}, [])


def latest(client: tdserve.Client, name: str, **arguments: Any) -> tdserve.Weights:
    """The newest version, which must be there."""
    found = client.latest(name, **arguments)
    assert found is not None
    return found


def lies_in_file(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of a tensor is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.split()[4] != "0"
    raise AssertionError("it lies nowhere")


@pytest.fixture
def fresh(client: tdserve.Client, server: tdserve.Server) -> Any:
    """A client that knows no structure yet."""
    with server.client(transport=client.transport, timeout_s=START_TIMEOUT_S) as connected:
        yield connected


@both_sizes
@pytest.mark.parametrize(
    ("select", "keys"),
    [
        ("scale", ["scale"]),
        (("layer1", "weight"), [("layer1", "weight")]),
        (["layer3", ("layer0", "weight"), "layer3"], [("layer0", "weight"), ("layer3", "weight")]),
    ],
)
def test_latest_when_keys_are_selected_then_just_these(
    client: tdserve.Client, fresh: tdserve.Client, name: str, size: int, select: Any, keys: list[Any]
) -> None:
    client.publish(name, make_weights(1, size))
    client.publish(name, make_weights(2, size), metadata={"step": 2})
    expected = make_weights(2, size).select(*keys)
    for _ in range(2):  # without the structure, and with it
        found = latest(fresh, name, select=select)
        assert (found.version, found.metadata) == (2, {"step": 2})
        assert difference(expected, found.data) is None
    assert difference(make_weights(1, size).select(*keys), fresh.version(name, 1, select=select).data) is None
    assert difference(make_weights(2, size), latest(fresh, name).data) is None


@both_sizes
def test_latest_when_a_part_goes_to_a_place_then_filled(client: tdserve.Client, name: str, size: int) -> None:
    client.publish(name, make_weights(1, size))
    out = make_weights(0, size).select("layer1", "layer2")
    assert latest(client, name, select=["layer1", "layer2"], out=out).data is out
    assert difference(make_weights(1, size).select("layer1", "layer2"), out) is None
    half = latest(client, name, select="layer3", dtype=torch.bfloat16).data
    assert half["layer3", "weight"].dtype is torch.bfloat16
    assert half["layer3", "weight"].float().mean() == pytest.approx(1.3, rel=0.01)
    module = nn.ModuleDict({"layer1": nn.Module()})
    module["layer1"].weight = nn.Parameter(torch.zeros(size))
    latest(client, name, select="layer1", into=module)
    assert (module["layer1"].weight == 1.1).all()
    with pytest.raises(tdserve.SpecMismatchError):
        latest(client, name, select="layer1", out=out)
    assert difference(make_weights(1, size).select("layer1", "layer2"), out) is None


def test_latest_when_a_key_is_missing_then_named_and_the_next_call_works(
    client: tdserve.Client, fresh: tdserve.Client, name: str
) -> None:
    client.publish(name, make_weights(1))
    for _ in range(2):
        with raises(tdserve.KeyNotFoundError, key="layer9"):
            latest(fresh, name, select=["scale", "layer9"])
    for wrong in (3, ["scale", 3]):
        with pytest.raises(tdserve.InvalidRequestError) as caught:
            latest(fresh, name, select=wrong)
        assert caught.value.argument == "select"
    assert latest(fresh, name, select="scale").data["scale"] == 1


def test_latest_when_the_structure_changes_then_the_part_of_the_new_one(client: tdserve.Client, name: str) -> None:
    client.publish(name, make_weights(1))
    assert latest(client, name, select="scale").data["scale"] == 1
    client.publish(name, make_weights(2, before=torch.zeros(3), zeta=torch.ones(2)))
    assert difference(TensorDict({"scale": torch.tensor(2.0)}, []), latest(client, name, select="scale").data) is None
    client.publish(name, make_weights(3))
    client.publish(name, make_weights(4, zeta=torch.full((2,), 7.0)))
    assert (latest(client, name, select=["zeta"]).data["zeta"] == 7).all()
    assert (client.version(name, 3, select="layer2").data["layer2", "weight"] == 3.2).all()


def test_latest_when_weights_have_values_then_those_that_are_selected(client: tdserve.Client, name: str) -> None:
    client.publish(name, make_weights(1, tokenizer=NonTensorData({"bos": 1}), config=NonTensorData("small")))
    assert list(latest(client, name, select="scale").data.keys()) == ["scale"]
    found = latest(client, name, select=["config", "layer0"]).data
    assert sorted(found.keys()) == ["config", "layer0"]
    assert found["config"] == "small"
    assert latest(client, name, select="config").data["config"] == "small"


def test_subscribe_when_keys_are_selected_then_each_version_in_part(client: tdserve.Client, name: str) -> None:
    client.publish(name, make_weights(1))
    with client.subscribe(name, select="layer1", timeout_s=20.0) as versions:
        for number in (1, 2, 3):
            found = next(versions)
            assert (found.version, list(found.data.keys())) == (number, ["layer1"])
            client.publish(name, make_weights(number + 1))


@pytest.mark.parametrize("client", ["shm"], indirect=True)
def test_latest_when_a_part_is_mapped_then_nothing_is_copied(client: tdserve.Client, name: str) -> None:
    client.publish(name, make_weights(1, 40_000))
    part = latest(client, name, select="layer2", copy=False).data
    assert list(part.keys()) == ["layer2"]
    assert (part["layer2", "weight"] == 1.2).all()
    assert lies_in_file(part["layer2", "weight"])
    assert not lies_in_file(latest(client, name, select="layer2").data["layer2", "weight"])


@pytest.mark.parametrize("value", ["small", "x" * 3_000_000])
def test_latest_when_values_are_not_selected_then_they_neither_come_nor_need_a_place(
    client: tdserve.Client, name: str, value: str
) -> None:
    client.publish(name, make_weights(1, tokenizer=NonTensorData(value), layer9={"note": NonTensorData("n")}))
    out = make_weights(0).select("layer1")
    latest(client, name, select="layer1", out=out)
    assert difference(make_weights(1).select("layer1"), out) is None
    module = nn.ModuleDict({"layer1": nn.Module()})
    module["layer1"].weight = nn.Parameter(torch.zeros(4))
    latest(client, name, select="layer1", into=module)
    assert (module["layer1"].weight == 1.1).all()
    assert latest(client, name, select=("layer9", "note")).data["layer9", "note"] == "n"
    assert latest(client, name).data["tokenizer"] == value
    client.publish(name, make_weights(2, 400_000, tokenizer=NonTensorData(value)))
    assert latest(client, name).data["tokenizer"] == value  # behind the leaves
    client.publish(name, make_weights(2, 400_000, tokenizer=NonTensorData(value)).set("scale", torch.tensor(3.0)))
    found = latest(client, name).data  # of which only one leaf has changed
    assert (found["tokenizer"], found["scale"], found["layer1", "weight"][0]) == (value, 3, torch.tensor(2.1))


def test_subscribe_when_each_version_has_another_structure_then_parts_come_all_the_same(
    client: tdserve.Client, name: str
) -> None:
    is_over = Event()

    def publish() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            client.publish(name, make_weights(number).set(f"extra{number % 50}", torch.zeros(2)))

    writer = Thread(target=publish)
    writer.start()
    try:
        with client.subscribe(name, select="scale", timeout_s=30.0) as versions:
            for found in islice(versions, 20):
                assert found.data["scale"] == found.version
    finally:
        is_over.set()
        writer.join()
