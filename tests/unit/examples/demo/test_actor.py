from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.examples.demo.actor import NUM_ENVS, STEPS_PER_VERSION, Actor
from tdserve.examples.demo.dqn import EXPLORED_ROWS, FINAL_EPSILONS, make_network
from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.stores import POLICY, open_stores


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Client]:
    with tdserve.Server(tmp_path_factory.mktemp("root")) as server, server.client() as opened:
        yield opened


def publish_always(client: tdserve.Client, action: int, *, num_transitions: int = EXPLORED_ROWS) -> int:
    """A policy that prefers one action whatever it sees."""
    network = make_network(4, 2)
    with torch.no_grad():
        weight, bias = list(network.parameters())[-2:]
        weight.zero_()
        bias.copy_(torch.arange(2) == action)
    parameters = TensorDict.from_module(network)
    version: int = client.publish(POLICY, parameters, metadata={"num_transitions": num_transitions})
    return version


def test_actor_when_it_acts_at_random_then_sends_its_steps_but_the_unfinished_ones(client: tdserve.Client) -> None:
    transitions = open_stores(client, "CartPole-v1").transitions
    before = transitions.info()["inserts"]
    Actor(client, DemoOptions()).act(exploration=1.0)
    num_steps = NUM_ENVS * STEPS_PER_VERSION
    assert num_steps - 2 * NUM_ENVS <= transitions.info()["inserts"] - before <= num_steps


def test_actor_when_a_policy_is_published_then_acts_by_it_and_says_its_version(client: tdserve.Client) -> None:
    stores = open_stores(client, "CartPole-v1")
    version = publish_always(client, 1)
    actor = Actor(client, DemoOptions(index=0))
    assert actor.follow_policy() == FINAL_EPSILONS[0]
    before = len(stores.transitions)
    for _ in range(3):
        actor.act(exploration=0.0)
    rows = stores.transitions[before:]
    assert set(rows["action"].tolist()) == {1}
    assert set(rows["policy_version"].tolist()) == {version}
    assert 8 <= stores.episodes[:]["episode_return"].max() <= 11  # always to the right falls over at once
