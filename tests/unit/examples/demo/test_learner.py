from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import ConnectError
from tdserve.examples.demo import learner
from tdserve.examples.demo.actor import Actor
from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.demo_stores import POLICY, compute_checksum
from tdserve.examples.demo.dqn import make_network
from tdserve.examples.demo.learner import Learner, learn_alone, update


def batch(num_rows: int = 64) -> TensorDict:
    """Action 1 earns 1, action 0 nothing; every episode is one step."""
    action = torch.randint(2, (num_rows,))
    following = {"observation": torch.zeros(num_rows, 4), "reward": action.float(), "discount": torch.zeros(num_rows)}
    return TensorDict({"observation": torch.randn(num_rows, 4), "action": action, "next": following}, [num_rows])


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Lets torch use one thread, as the learner does: on busy cores, threads wait longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_update_when_repeated_then_learns_what_actions_are_worth_and_the_target_follows() -> None:
    torch.manual_seed(0)
    network = make_network(4, 2)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    losses = [update(network, target, optimizer, batch=batch()) for _ in range(200)]
    assert losses[-1] < losses[0] / 10
    torch.testing.assert_close(target(torch.zeros(1, 4)), torch.tensor([[0.0, 1.0]]), atol=0.2, rtol=0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path / "root") as started:
        yield started


def options(server: tdserve.Server, **more: object) -> DemoOptions:
    said = {"role": "learner", "address": server.address, "max_seconds": 4.0, **more}
    return DemoOptions(**said)  # type: ignore[arg-type]


@pytest.mark.full
def test_learn_alone_when_the_time_is_up_then_publishes_the_end_and_writes_a_summary(
    server: tdserve.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server.client() as client:
        actor = Actor(client, options(server))
        for _ in range(16):
            actor.act(exploration=1.0)
        assert learn_alone(options(server, json_path=tmp_path / "new" / "figures.json")) == 0
        printed = capsys.readouterr().out
        policy = client.latest(POLICY)
        assert policy is not None
        assert policy.metadata["is_over"] is True
        assert policy.metadata["num_updates"] > 0
        assert f"data checksum: {compute_checksum(client.replay('transitions'))}" in printed
    assert re.search(r"ending +│ +time is up", printed)
    assert json.loads((tmp_path / "new" / "figures.json").read_text())["ending"] == "time is up"

    assert learn_alone(options(server, max_seconds=0.1)) == 0
    assert f"begins a new run with the policy of version {policy.version}" in capsys.readouterr().out
    with server.client() as client:
        newest = client.latest(POLICY)
        assert newest is not None
        assert newest.version > policy.version
        assert newest.metadata["num_updates"] >= policy.metadata["num_updates"]
        assert newest.metadata["first_episode"] == client.replay("episodes").info()["inserts"]


@pytest.mark.slow
def test_learn_alone_when_another_was_killed_in_the_run_then_goes_on_from_its_policy_and_its_time(
    server: tdserve.Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as client:
        killed = Learner(client, options(server, seed=7))
        killed.num_updates = 160
        version = killed.publish(is_over=False, seconds=100.0, first_episode=3)
        before = client.latest(POLICY)
        monkeypatch.setattr(learner, "QUIET_S", 0.0)
        assert learn_alone(options(server, max_seconds=101.0)) == 0
        after = client.latest(POLICY)
    printed = capsys.readouterr().out
    assert f"continues from version {version}, 100 s into the run" in printed
    assert "data checksum: crc32 00000000 over 0 rows" in printed, "it ends although nobody acts"
    assert before is not None
    assert after is not None
    assert (after.metadata["num_updates"], after.metadata["first_episode"]) == (160, 3)
    assert 101.0 <= after.metadata["seconds"] < 160.0
    for key in before.data.keys(True, True):
        torch.testing.assert_close(after.data[key], before.data[key])


def test_learn_alone_when_the_server_stays_away_then_raises(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "GONE_S", 0.5)
    asked = options(server)
    server.shutdown()
    with pytest.raises(ConnectError):
        learn_alone(asked)
