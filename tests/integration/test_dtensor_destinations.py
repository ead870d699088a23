"""Destinations of sharded weights: what is filled, and what is refused first, with its key."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch import nn

import tdserve
from tdserve import dtensor
from tests.integration.dtensor_roles import Net

pytestmark = pytest.mark.integration


def test_state_when_it_does_not_fit_then_refused_by_key_and_untouched(client: tdserve.Client, name: str) -> None:
    state: dict[str, Any] = {"a": {"b": torch.ones(2, 3)}, "n": torch.ones(2, dtype=torch.int64), "lr": 0.5}
    dtensor.publish(client, name, state)
    zeros: dict[str, Any] = {"a.b": torch.zeros(2, 3), "n": torch.zeros(2, dtype=torch.int64), "lr": 1}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**zeros, "c": torch.zeros(1)}, "'c': expected nothing"),
        ({"n": zeros["n"], "lr": 1}, r"'a.b': expected float32\[2, 3\], which the version has, .*strict=False"),
        ({**zeros, "a.b": torch.zeros(3, 2)}, r"'a.b': expected float32\[2, 3\], got float32\[3, 2\]"),
        ({**zeros, "n": torch.zeros(2)}, r"'n': expected int64\[2\], got float32\[2\]"),
    ]
    for into, message in cases:
        with pytest.raises(tdserve.SpecMismatchError, match=message):
            dtensor.latest(client, name, into=into)
        assert all(not bool(each.any()) for each in into.values() if isinstance(each, torch.Tensor))
        assert into["lr"] == 1
    with pytest.raises(tdserve.NotSupportedError, match="meta device"):
        dtensor.latest(client, name, into=nn.Linear(2, 2, device="meta"))
    with pytest.raises(tdserve.NotSupportedError, match=r"key 'n'.*meta device"):
        dtensor.latest(client, name, into={**zeros, "n": zeros["n"].to("meta")})
    with pytest.raises(tdserve.InvalidRequestError, match="a list is no"):
        dtensor.latest(client, name, into=[])
    part = {"n": zeros["n"]}
    assert dtensor.latest(client, name, into=part, strict=False) is not None
    assert part["n"].tolist() == [1, 1]
    into = {"a": {"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, "n": zeros["n"], "lr": 1}
    assert dtensor.latest(client, name, into=TensorDict({**into, "lr": NonTensorData(1)})) is not None
    assert dtensor.latest(client, name, into=into) is not None
    assert bool((into["a"]["b"] == 1).all())
    assert into["lr"] == 0.5


def test_values_when_the_other_side_has_a_tensor_then_numbers_fill_scalars_and_others_are_refused_by_key(
    client: tdserve.Client, name: str
) -> None:
    values = {"step": 3, "lr": 0.5, "on": True, "kind": "adam", "big": 2**40, "scale": torch.tensor(2.0)}
    dtensor.publish(client, name, {"w": torch.ones(2), **values})
    filled: dict[str, Any] = {"w": torch.zeros(2), "scale": torch.tensor(0.0), "lr": torch.tensor(0.0)}
    filled.update(step=torch.tensor(0), on=torch.tensor(False), big=torch.tensor(0.0))
    assert dtensor.latest(client, name, into=filled) is not None
    expected = {"step": 3, "lr": 0.5, "on": True, "big": 2.0**40, "scale": 2.0}
    assert {key: filled[key].item() for key in expected} == expected
    cases: list[tuple[str, Any, str]] = [
        ("step", torch.zeros(2), r"a value of type int.* a number fills only .*got float32\[2\]"),
        ("kind", torch.tensor(0.0), r"a value of type str, which is no tensor.*got float32\[\]"),
        ("lr", torch.tensor(0), r"a value of type float.*got int64\[\]"),
        ("big", torch.tensor(0, dtype=torch.int32), r"a value of type int.*got int32\[\]"),
        ("scale", None, r"expected float32\[\], got a value of type NoneType"),
    ]
    for key, own, message in cases:
        for strict in (True, False):
            into = {"w": torch.zeros(2), "scale": torch.tensor(0.0), key: own}
            with pytest.raises(tdserve.SpecMismatchError, match=f"key '{key}': .*{message}"):
                dtensor.latest(client, name, into=into, strict=strict)
            assert into["w"].tolist() == [0.0, 0.0]


def test_module_when_only_one_side_has_a_name_then_refused_with_the_cause_and_the_remedy(
    client: tdserve.Client, name: str
) -> None:
    torch.manual_seed(1)
    net, other = Net(torch.float32, 2), Net(torch.float32, 2)
    dtensor.publish(client, name, net.state_dict())
    remedy = r"'ramp'.* non-persistent buffer.*publish the module itself.* or read into its state_dict\(\)"
    for strict in (True, False):
        with pytest.raises(tdserve.SpecMismatchError, match=remedy):
            dtensor.latest(client, name, into=other, strict=strict)
    assert dtensor.latest(client, name, into=other.state_dict()) is not None
    assert torch.equal(other.up.weight, net.up.weight)
    dtensor.publish(client, name, nn.ModuleDict({"_orig_mod": net}))  # the names of a module after torch.compile
    with pytest.raises(tdserve.SpecMismatchError, match=r"torch\.compile adds '_orig_mod' to names"):
        dtensor.latest(client, name, into=other)
    dtensor.publish(client, name, nn.ModuleDict({"more": nn.Linear(1, 1), **dict(net.named_children())}))
    with pytest.raises(tdserve.SpecMismatchError, match=r"'more.bias'.*strict=False leaves such leaves out"):
        dtensor.latest(client, name, into=nn.ModuleDict(dict(net.named_children())))


def test_module_in_a_dict_when_only_one_side_has_a_name_then_refused_with_a_remedy_that_fits(
    client: tdserve.Client, name: str
) -> None:
    net, other = Net(torch.float32, 2), Net(torch.float32, 2)
    dtensor.publish(client, name, {"nets": {"model": net.state_dict()}, "lr": torch.ones(1)})
    into = {"nets": {"model": other}, "lr": torch.zeros(1)}
    remedy = r"key 'nets\.model\.ramp'.* non-persistent buffer.*publish the module itself.* or read into its state_dict"
    with pytest.raises(tdserve.SpecMismatchError, match=remedy):
        dtensor.latest(client, name, into=into)
    assert dtensor.latest(client, name, into={**into, "nets": {"model": other.state_dict()}}) is not None
    assert torch.equal(other.up.weight, net.up.weight)
    with pytest.raises(
        tdserve.SpecMismatchError, match=r"'more': .*which into= has; leave it out there, or publish it"
    ):
        dtensor.latest(client, name, into={**into, "nets": {"model": other.state_dict()}, "more": torch.ones(1)})
    dtensor.publish(client, name, {"model": nn.ModuleDict({"_orig_mod": net})})
    with pytest.raises(tdserve.SpecMismatchError, match=r"'model\..*torch\.compile adds '_orig_mod' to names"):
        dtensor.latest(client, name, into={"model": other})
    dtensor.publish(client, name, nn.ModuleDict({"_orig_mod": net}).state_dict())
    with pytest.raises(tdserve.SpecMismatchError, match=r"has these names below '_orig_mod'"):
        dtensor.latest(client, name, into=other.state_dict())
    dtensor.publish(client, name, {"model": nn.Linear(2, 2)})
    with pytest.raises(
        tdserve.SpecMismatchError, match=r"'model\.bias'.*no parameter.*strict=False leaves such leaves"
    ):
        dtensor.latest(client, name, into={"model": nn.Linear(2, 2, bias=False)})


def test_names_when_one_side_has_them_below_a_key_then_the_remedy_is_to_read_there(
    client: tdserve.Client, name: str
) -> None:
    """The keys are those of a publish of ``{"model": model}``, or of a module in DistributedDataParallel."""
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    dtensor.publish(client, name, {"model": net})
    message = r"the version has these names below 'model', .* give into=\{'model': \.\.\.\}"
    for into in (other, other.state_dict()):
        with pytest.raises(tdserve.SpecMismatchError, match=message):
            dtensor.latest(client, name, into=into)
        assert dtensor.latest(client, name, into={"model": into}) is not None
    dtensor.publish(client, name, net)
    with pytest.raises(
        tdserve.SpecMismatchError, match="the names of the version below 'model': give what is there alone"
    ):
        dtensor.latest(client, name, into={"model": other})
    assert dtensor.latest(client, name, into=other) is not None
    assert torch.equal(other.weight, net.weight)


def test_destination_when_a_leaf_cannot_be_written_then_refused_by_key_and_others_stay(
    client: tdserve.Client, name: str
) -> None:
    dtensor.publish(client, name, MappingProxyType({"a": torch.ones(2), "w": torch.ones(4), "lr": 0.5}))
    locked = TensorDict({"a": torch.zeros(2), "w": torch.zeros(4), "lr": NonTensorData(1)}).lock_()
    cases: list[tuple[Any, str]] = [
        ({"a": torch.zeros(2), "w": torch.zeros(1).expand(4)}, "an expanded tensor .* at key 'w' .*give a clone"),
        (locked, "key 'lr' .*its TensorDict cannot be changed: give a dict, or an unlocked TensorDict"),
        (
            MappingProxyType({"a": torch.zeros(2), "w": torch.zeros(4), "lr": 1}),
            "key 'lr' .*its mappingproxy cannot be changed",
        ),
    ]
    for into, message in cases:
        with pytest.raises(tdserve.NotSupportedError, match=message):
            dtensor.latest(client, name, into=into)
        assert into["a"].tolist() == [0.0, 0.0]
    into = MappingProxyType({"a": torch.zeros(2), "w": torch.zeros(4)})
    assert dtensor.latest(client, name, into=into) is not None
    assert into["a"].tolist() == [1.0, 1.0]


def test_module_when_made_in_inference_mode_then_filled_in_any(client: tdserve.Client, name: str) -> None:
    net = nn.Linear(3, 2)
    dtensor.publish(client, name, net)
    with torch.inference_mode():
        made = nn.Linear(3, 2)
    other = nn.Linear(3, 2)
    output = other(torch.ones(1, 3, requires_grad=True)).sum()
    assert dtensor.latest(client, name, into=made) is not None
    with torch.inference_mode():
        assert dtensor.latest(client, name, into=nn.ModuleDict({"n": made})["n"]) is not None
    assert dtensor.latest(client, name, into=other) is not None
    assert all(map(torch.equal, made.parameters(), net.parameters()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()
