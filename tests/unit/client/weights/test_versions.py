from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve.errors import DeadlineExceededError, InvalidRequestError, SpecMismatchError


def test_publish_when_of_a_module_then_its_parameters_come_back(client: tdserve.Client, name: str) -> None:
    policy, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert client.publish(name, policy, metadata={"step": 10, "tags": ["a"]}) == 1
    found = client.latest(name)
    assert found is not None
    assert found.metadata == {"step": 10, "tags": ["a"]}
    found.data.to_module(other)
    assert torch.equal(other.weight, policy.weight)


@pytest.mark.parametrize("as_given", [dict, lambda state: state], ids=["dict", "OrderedDict"])
def test_publish_when_given_a_state_dict_then_refused_by_what_to_give(
    client: tdserve.Client, name: str, as_given: Callable[[Any], Any]
) -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    state = module.state_dict()
    with pytest.raises(InvalidRequestError, match=r"publish\(name, module\).*TensorDict\(state_dict\)"):
        client.publish(name, as_given(state))
    assert client.publish(name, TensorDict(state)) == 1
    found = client.latest(name)
    assert found is not None
    module.load_state_dict(found.data.to_dict())


def test_latest_when_into_a_module_then_filled_in_place(client: tdserve.Client, name: str) -> None:
    policy, other = nn.Linear(3, 2), nn.Linear(3, 2)
    client.publish(name, policy)
    parameters = TensorDict.from_module(other).data
    found = client.latest(name, out=parameters)
    assert found is not None
    assert found.data is parameters
    assert torch.equal(other.weight, policy.weight)


def test_latest_when_out_does_not_fit_then_refused_and_unchanged(client: tdserve.Client, name: str) -> None:
    client.publish(name, TensorDict({"w": torch.ones(3)}, []))
    out = TensorDict({"w": torch.zeros(4)}, [])
    with pytest.raises(SpecMismatchError, match=name):
        client.latest(name, out=out)
    assert not out["w"].any()


def test_publish_when_the_structure_changes_then_readers_get_the_new_one(client: tdserve.Client, name: str) -> None:
    client.publish(name, TensorDict({"w": torch.ones(3)}, []))
    assert client.latest(name) is not None
    client.publish(name, TensorDict({"v": torch.ones(4)}, []))
    found = client.latest(name)
    assert found is not None
    assert list(found.data.keys()) == ["v"]


def test_latest_when_there_is_none_in_time_then_deadline(client: tdserve.Client, name: str) -> None:
    assert client.latest(name, newer_than=0, timeout_s=0) is None
    with pytest.raises(DeadlineExceededError, match=name):
        client.latest(name, timeout_s=0.05)
