"""Samples of a consumer while a server is started again: the consumer gets each row once, and no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import tdserve
from tdserve.client.cluster.tables import sharded_replay
from tdserve.client.tables.draws import taking
from tests.integration.cluster.losing import fill_each, join_addresses, rows
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Crashing

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0


@pytest.fixture(params=["shm", "gloo"])
def user(request: pytest.FixtureRequest, crashing: list[Crashing]) -> Iterator[tdserve.ClusterClient]:
    """A client of servers that can be started again."""
    with tdserve.connect(join_addresses(crashing), transport=request.param, timeout_s=TIMEOUT_S) as made:
        assert isinstance(made, tdserve.ClusterClient)
        yield made


def restart_before_acknowledgement(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, restart: Callable[[], None]
) -> None:
    """Has a server started again when the next rows are to be acknowledged."""
    acknowledge = module.acknowledge

    def strike(*arguments: Any) -> None:
        monkeypatch.setattr(module, "acknowledge", acknowledge)
        restart()
        acknowledge(*arguments)

    monkeypatch.setattr(module, "acknowledge", strike)


@pytest.mark.slow
def test_sample_when_the_server_is_started_again_before_the_acknowledgement_then_each_row_comes_once(
    user: tdserve.ClusterClient, crashing: list[Crashing], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next_name()
    table = user.create_replay(name, rows(1)[0], 100)
    table.extend(rows(30))
    restart_before_acknowledgement(monkeypatch, taking, crashing[user.find_server(name)].restart)
    had = [number for _ in range(3) for number in table.sample(10, consumer="trainer")["number"].tolist()]
    assert sorted(had) == list(range(30))
    user.delete(name)


@pytest.mark.slow
def test_sample_when_one_of_several_servers_is_started_again_before_the_acknowledgement_then_each_row_comes_once(
    user: tdserve.ClusterClient, crashing: list[Crashing], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next_name()
    table = user.create_replay(name, rows(1)[0], 300, shards=3)
    fill_each(table)
    restart_before_acknowledgement(monkeypatch, sharded_replay, crashing[1].restart)
    had = [number for _ in range(2) for number in table.sample(15, consumer="trainer")["number"].tolist()]
    assert sorted(had) == list(range(30))
    user.delete(name)


@pytest.mark.slow
def test_sample_when_a_server_is_killed_between_acknowledgements_then_the_error_has_the_acknowledged_rows(
    user: tdserve.ClusterClient, crashing: list[Crashing], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next_name()
    table = user.create_replay(name, rows(1)[0], 300, shards=3)
    fill_each(table)

    acknowledge, killed = taking.acknowledge, list[Crashing]()

    def kill_the_second(client: Any, *arguments: Any) -> None:
        monkeypatch.setattr(sharded_replay, "acknowledge", acknowledge)
        killed.extend(each for each in crashing if each.server.address == client.address)
        killed[0].kill()
        acknowledge(client, *arguments)

    def pass_the_first(*arguments: Any) -> None:
        monkeypatch.setattr(sharded_replay, "acknowledge", kill_the_second)
        acknowledge(*arguments)

    monkeypatch.setattr(sharded_replay, "acknowledge", pass_the_first)
    with pytest.raises(tdserve.TDServeError) as caught:
        table.sample(30, consumer="trainer", timeout_s=3.0)
    had = caught.value.values["number"].tolist()
    assert 0 < len(had) < 30
    killed[0].start()
    had += table.sample(30 - len(had), consumer="trainer", timeout_s=TIMEOUT_S)["number"].tolist()
    assert sorted(had) == list(range(30))
    user.delete(name)
