from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve.errors import InvalidRequestError


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
