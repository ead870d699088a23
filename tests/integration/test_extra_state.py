"""Modules whose state_dict has more than parameters and buffers: all of it is published, or nothing."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.client.weights.publication import MIN_ANNOUNCED_LEAVES

pytestmark = pytest.mark.integration


class Scaled(nn.Module):
    """A module with extra state, as modules of fp8 training have."""

    def __init__(self, state: Any, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        """Returns what torch saves."""
        return self.state

    def set_extra_state(self, state: Any) -> None:
        """Takes what torch loads."""
        self.state = state


def model(state: Any, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), Scaled(state, width))


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize: Any = torch.ao.quantization.quantize_dynamic
        return quantize(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8)


def state_of(module: nn.Module) -> Any:
    return module.get_submodule("1").get_extra_state()


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return (
            type(left) is type(right) and left.keys() == right.keys() and all(is_same(left[k], right[k]) for k in left)
        )
    return type(left) is type(right) and bool(left == right)


STATES: dict[str, Any] = {
    "tensor": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, dtype=torch.uint8),
    "parameter": torch.ones(3).requires_grad_(),
    "value": {"num_steps": 4, "names": ["a"]},
    "none": None,
    "no keys": {},
    "dict": {"amax": torch.tensor([7.0]), "inner": {"scale": torch.ones(2, 2), "names": ["a"]}, "none": {}, "at": 3},
}


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("width", [4, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_latest_when_a_module_with_extra_state_was_published_then_another_has_all_of_it(
    client: tdserve.Client, name: str, state: Any, width: int, transport: Any
) -> None:
    source, target = model(state, width), model("other", width)
    with tdserve.connect(client.address, transport=transport) as reader:
        for number in range(3):  # the leaves that have not changed are sent once
            with torch.no_grad():
                source.get_parameter("0.weight").fill_(number)
            client.publish(name, source)
            reader.latest(name, into=target)
            assert is_same(state_of(target), state)
            parts = zip(source.named_parameters(), target.named_parameters(), strict=True)
            assert all(torch.equal(own, other) for (_, own), (_, other) in parts)


def test_latest_when_the_extra_state_is_kept_then_the_next_read_does_not_change_it(
    client: tdserve.Client, name: str
) -> None:
    source, target = model(torch.zeros(3)), model(None)
    client.publish(name, source)
    client.latest(name, into=target)
    kept = state_of(target)
    source.get_submodule("1").set_extra_state(torch.ones(5))
    client.publish(name, source)
    client.latest(name, into=target)
    assert kept.tolist() == [0.0] * 3
    assert state_of(target).tolist() == [1.0] * 5


def test_publish_when_a_module_has_extra_state_then_the_names_are_those_of_its_state_dict(
    client: tdserve.Client, name: str
) -> None:
    source = model(torch.ones(2))
    client.publish(name, source)
    found = client.latest(name)
    assert found is not None
    assert is_same(dict(found.data.flatten_keys(".").items()), dict(source.state_dict()))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_publish_when_the_extra_state_changes_its_shape_then_the_session_stays(
    client: tdserve.Client, name: str, transport: Any
) -> None:
    layers = [nn.Linear(100, 100) for _ in range(MIN_ANNOUNCED_LEAVES)]
    source = nn.Sequential(nn.Linear(2, 2), Scaled(torch.zeros(1)), *layers)
    with tdserve.connect(client.address, transport=transport) as writer:
        writer.publish(name, source)
        session = writer.session(writer.make_deadline(None))
        for number in range(2, 5):
            source.get_submodule("1").set_extra_state(torch.full((number,), float(number)))
            writer.publish(name, source)
            found = client.latest(name)
            assert found is not None
            assert found.data["1", "_extra_state"].tolist() == [float(number)] * number
        assert writer.session(writer.make_deadline(None)) is session


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (quantized, r"'1\.scale'"),
        (lambda: model(OrderedDict(a=torch.ones(1))), r"\('1', '_extra_state'\)"),
        (lambda: model([torch.ones(1)]), r"\('1', '_extra_state'\)"),
        (lambda: model(object()), r"\('1', '_extra_state'\)"),
    ],
    ids=["quantized", "OrderedDict", "list of tensors", "object"],
)
def test_publish_when_a_module_has_state_that_cannot_be_sent_then_refused_by_its_key(
    client: tdserve.Client, name: str, make: Callable[[], nn.Module], key: str
) -> None:
    with pytest.raises(NotSupportedError, match=key):
        client.publish(name, make())
    assert name not in client.stores()


def test_latest_when_the_version_lacks_the_extra_state_then_it_stays_as_it_is(
    client: tdserve.Client, name: str
) -> None:
    source, target = model(torch.ones(2)), model("mine")
    client.publish(name, TensorDict.from_module(source))
    client.latest(name, into=target)
    assert torch.equal(target.get_parameter("0.weight"), source.get_parameter("0.weight"))
    assert state_of(target) == "mine"


def test_publish_when_a_module_only_saves_extra_state_then_goes_without_it(client: tdserve.Client, name: str) -> None:
    class Saving(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"saved": 1}

    source, target = Saving(2, 2), Saving(2, 2)
    client.publish(name, source)
    client.latest(name, into=target)
    assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("width", [4, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("state", [STATES["tensor"], STATES["dict"], STATES["value"], STATES["no keys"]])
def test_latest_when_out_is_of_a_module_without_its_extra_state_then_all_else_is_filled(
    client: tdserve.Client, name: str, state: Any, width: int, transport: Any
) -> None:
    source, target = model(state, width), model("other", width)
    with tdserve.connect(client.address, transport=transport) as reader:
        for number in range(3):
            with torch.no_grad():
                source.get_parameter("0.weight").fill_(number)
            client.publish(name, source)
            whole: Any = reader.latest(name)
            reader.latest(name, out=TensorDict.from_module(target).data)
            parts = zip(source.named_parameters(), target.named_parameters(), strict=True)
            assert all(torch.equal(own, other) for (_, own), (_, other) in parts)
            assert state_of(target) == "other"
            whole.data["0", "weight"].fill_(-1)
            reader.latest(name, out=whole.data)
            assert (whole.data["0", "weight"] == number).all()


def test_latest_when_out_lacks_more_than_extra_state_or_has_another_then_error_and_nothing_is_written(
    client: tdserve.Client, name: str
) -> None:
    client.publish(name, model({"scale": torch.ones(2)}))
    lacking = TensorDict.from_module(model(None)).data.exclude(("1", "linear", "bias"))
    other: Any = client.latest(name)
    other.data["1", "_extra_state", "scale"] = torch.zeros(3)
    for out, key in ((lacking, "bias"), (other.data, "scale")):
        out["0", "weight"].fill_(-1)
        with pytest.raises(SpecMismatchError, match=key):
            client.latest(name, out=out)
        assert (out["0", "weight"] == -1).all()


def test_latest_when_the_module_has_no_extra_state_then_error_names_it(client: tdserve.Client, name: str) -> None:
    client.publish(name, Scaled(torch.ones(2)))
    target = nn.Module()
    target.linear = nn.Linear(4, 2)
    with pytest.raises(SpecMismatchError, match=r"'_extra_state'.*no parameter or buffer of this name"):
        client.latest(name, into=target)


def test_publish_when_a_module_is_on_the_meta_device_then_error_has_its_name_and_the_remedy(
    client: tdserve.Client, name: str
) -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(NotSupportedError, match=r"publishing '0\.weight' of a module .*module\.to_empty"):
        client.publish(name, module)
    client.publish(name, module.to_empty(device="cpu"))
