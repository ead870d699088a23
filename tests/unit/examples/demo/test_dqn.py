from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tdserve.examples.demo.dqn import (
    EXPLORED_ROWS,
    FINAL_EPSILONS,
    TARGET_RATE,
    compute_epsilon,
    follow,
    loss,
    make_network,
)


def linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
    return layer


def one_row(*, reward: float, discount: float) -> TensorDict:
    following = {
        "observation": torch.ones(1, 1),
        "reward": torch.tensor([reward]),
        "discount": torch.tensor([discount]),
    }
    return TensorDict({"observation": torch.ones(1, 1), "action": torch.tensor([1]), "next": following}, [1])


def test_network_gives_one_value_per_action() -> None:
    assert make_network(4, 3)(torch.zeros(5, 4)).shape == (5, 3)


def test_loss_takes_the_next_action_from_the_network_and_its_value_from_the_target() -> None:
    network = linear([[2.0], [1.0]])  # chooses action 0, and values the taken action 1 at 1
    target = linear([[10.0], [50.0]])  # values action 0 at 10; its own choice would be 50
    error = loss(network, target, one_row(reward=1.0, discount=0.5))
    assert error.item() == pytest.approx((1.0 + 0.5 * 10.0) - 1.0 - 0.5)  # Huber beyond 1: |difference| - 1/2


def test_loss_of_a_terminated_row_ignores_the_target() -> None:
    network = linear([[0.0], [3.0]])
    error = loss(network, linear([[1e6], [1e6]]), one_row(reward=3.0, discount=0.0))
    assert error.item() == 0.0


def test_loss_gives_the_target_no_gradient() -> None:
    target = linear([[1.0], [1.0]])
    loss(linear([[0.0], [3.0]]), target, one_row(reward=1.0, discount=1.0)).backward()  # type: ignore[no-untyped-call]
    assert target.weight.grad is None


def test_follow_moves_every_parameter_by_the_rate() -> None:
    network = make_network(2, 2)
    target = copy.deepcopy(network)
    for parameter in network.parameters():
        parameter.data += 1.0
    before = [parameter.clone() for parameter in target.parameters()]
    follow(target, network)
    for old, new in zip(before, target.parameters(), strict=True):
        torch.testing.assert_close(new, old + TARGET_RATE)


@pytest.mark.parametrize("actor", [0, 1, 2])
def test_epsilon_falls_from_one_to_the_actors_own_end(actor: int) -> None:
    final = FINAL_EPSILONS[actor % 2]
    assert compute_epsilon(0, actor) == 1.0
    assert compute_epsilon(EXPLORED_ROWS // 2, actor) == pytest.approx((1.0 + final) / 2)
    assert compute_epsilon(10 * EXPLORED_ROWS, actor) == final
