from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import ConnectError
from tdserve.examples.demo import actor
from tdserve.examples.demo.actor import NUM_ENVS, STEPS_PER_VERSION, Actor, act
from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.demo_stores import MIN_ROWS, PATIENCE_S, POLICY, open_stores
from tdserve.examples.demo.dqn import EXPLORED_ROWS, FINAL_EPSILONS, make_network
from tdserve.examples.demo.learner import Learner
from tests.processes import wait_for


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Client]:
    with tdserve.Server(tmp_path_factory.mktemp("root")) as server, server.client() as opened:
        yield opened


def publish_always(client: tdserve.Client, action: int, *, num_transitions: int = EXPLORED_ROWS) -> int:
    """A policy that prefers one action for every observation."""
    network = make_network(4, 2)
    with torch.no_grad():
        weight, bias = list(network.parameters())[-2:]
        weight.zero_()
        bias.copy_(torch.arange(2) == action)
    parameters = TensorDict.from_module(network)
    version: int = client.publish(POLICY, parameters, metadata={"num_transitions": num_transitions})
    return version


@pytest.mark.slow
def test_actor_when_it_acts_at_random_then_sends_its_steps_but_the_unfinished_ones(client: tdserve.Client) -> None:
    transitions = open_stores(client, "CartPole-v1").transitions
    before = transitions.info()["inserts"]
    Actor(client, DemoOptions()).act(exploration=1.0)
    num_steps = NUM_ENVS * STEPS_PER_VERSION
    assert num_steps - 2 * NUM_ENVS <= transitions.info()["inserts"] - before <= num_steps


def test_actor_when_a_policy_is_published_then_acts_by_it_and_writes_its_version(client: tdserve.Client) -> None:
    stores = open_stores(client, "CartPole-v1")
    version = publish_always(client, 1)
    actor = Actor(client, DemoOptions(index=0))
    assert actor.follow_policy(PATIENCE_S) == FINAL_EPSILONS[0]
    before = len(stores.transitions)
    for _ in range(3):
        actor.act(exploration=0.0)
    rows = stores.transitions[before:]
    assert set(rows["action"].tolist()) == {1}
    assert set(rows["policy_version"].tolist()) == {version}
    assert 8 <= stores.episodes[:]["episode_return"].max() <= 11  # always to the right falls over at once


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path / "root") as started:
        yield started


def options(server: tdserve.Server, **more: object) -> DemoOptions:
    return DemoOptions(**{"role": "actor", "address": server.address, "index": 5, **more})  # type: ignore[arg-type]


@pytest.mark.slow
def test_act_when_the_learner_has_ended_then_ends(server: tdserve.Server, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    acting = Thread(target=lambda: codes.append(act(options(server))))
    acting.start()
    with server.client() as client:
        learner = Learner(client, options(server))
        learner.stores.transitions.sample(1)  # it waits for the actor
        learner.publish(is_over=False)
        learner.publish(is_over=True)
        acting.join(60.0)
        assert not acting.is_alive()
        num_rows = open_stores(client, "CartPole-v1").transitions.info()["inserts"]
    assert codes == [0]
    assert num_rows >= MIN_ROWS
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"actor 5: the learner says that it is over; {num_rows:,} transitions sent, policy version")


@pytest.mark.slow
def test_act_when_lingering_and_another_run_begins_then_takes_part_and_ends_when_none_does(
    server: tdserve.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    acting = Thread(target=lambda: codes.append(act(options(server, linger_s=5.0))))
    with server.client() as client:
        learner = Learner(client, options(server))
        learner.publish(is_over=False)
        acting.start()
        transitions = open_stores(client, "CartPole-v1").transitions
        transitions.sample(1)
        learner.publish(is_over=True)
        wait_for(lambda: "stays 5 s for another one" in capsys.readouterr().out, "the end of the first run")
        num_rows = transitions.info()["inserts"]
        learner.publish(is_over=False)
        wait_for(lambda: transitions.info()["inserts"] > num_rows, "rows of the second run")
        learner.publish(is_over=True)
        acting.join(60.0)
    assert codes == [0]


@pytest.mark.slow
def test_act_when_an_earlier_run_is_over_and_no_other_begins_then_ends_without_a_row(
    server: tdserve.Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "PATIENCE_S", 0.2)
    with server.client() as client:
        Learner(client, options(server)).publish(is_over=True)
        assert act(options(server)) == 0
        assert open_stores(client, "CartPole-v1").transitions.info()["inserts"] == 0
    assert "no other run has begun" in capsys.readouterr().out


@pytest.mark.slow
def test_act_when_the_time_and_a_minute_are_up_then_ends(
    server: tdserve.Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as client:
        Learner(client, options(server)).publish(is_over=False)
    monkeypatch.setattr(actor, "PATIENCE_S", 1.0)
    assert act(options(server, max_seconds=0.1)) == 0
    assert "the time is up" in capsys.readouterr().out


@pytest.mark.slow
def test_act_when_the_server_stays_away_then_raises(server: tdserve.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "GONE_S", 0.5)
    asked = options(server)
    server.shutdown()
    with pytest.raises(ConnectError):
        act(asked)
