from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from tdserve.examples.demo.dqn import make_network
from tdserve.examples.demo.learner import update


def batch(num_rows: int = 64) -> TensorDict:
    """Action 1 earns 1, action 0 nothing; every episode is one step."""
    action = torch.randint(2, (num_rows,))
    following = {"observation": torch.zeros(num_rows, 4), "reward": action.float(), "discount": torch.zeros(num_rows)}
    return TensorDict({"observation": torch.randn(num_rows, 4), "action": action, "next": following}, [num_rows])


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """As the learner has it: on busy cores, threads wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_update_when_repeated_then_learns_what_actions_are_worth_and_the_target_follows() -> None:
    torch.manual_seed(0)
    network = make_network(4, 2)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    losses = [update(network, target, optimizer, batch=batch()) for _ in range(200)]
    assert losses[-1] < losses[0] / 10
    torch.testing.assert_close(target(torch.zeros(1, 4)), torch.tensor([[0.0, 1.0]]), atol=0.2, rtol=0.0)
