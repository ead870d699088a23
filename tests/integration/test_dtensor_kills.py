"""Ranks, or a server, are killed in the middle of a publish: the version is whole, or not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tdserve
from tdserve import dtensor
from tests.integration.crashing import Crashing
from tests.integration.dtensor_roles import is_same, make_state
from tests.integration.dtensor_runs import ROLES, finish, run, start
from tests.integration.forked_clients import ForkedClients
from tests.processes import wait_for

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedClients]:
    with ForkedClients(*ROLES) as started:
        yield started


def read_number(client: tdserve.Client, name: str) -> int:
    """Reads the newest version; checks each bit of it."""
    into = {key: torch.zeros_like(full) for key, full in make_state(1).items()}
    found = dtensor.latest(client, name, into=into)
    assert found is not None
    assert all(is_same(into[key], full) for key, full in make_state(found.version).items())
    return found.version


@pytest.mark.parametrize(
    ("victim", "step", "expected"),
    [
        (0, "before _publish_part", 1),
        (1, "before _publish_part", 1),
        (0, "at version.filled", 1),
        (1, "at version.filled", 1),
        (0, "after _publish_part", 1),
        (1, "after _publish_part", 1),
        (0, "before _publish_index", 1),
        (0, "after _publish_index", 2),
    ],
)
def test_rank_when_killed_amid_a_publish_then_the_version_is_whole_or_not_there_and_the_next_one_comes(
    server: tdserve.Server, ranks: ForkedClients, name: str, tmp_path: Path, victim: int, step: str, expected: int
) -> None:
    lines = run(ranks, "die_amid", server.address, name, tmp_path, 2, victim=victim, step=step)
    assert lines[victim] == [["published", "1"]]
    assert lines[1 - victim] == [["published", "1"], ["noticed"]]
    with server.client(timeout_s=60.0) as client:
        assert read_number(client, name) == expected
        assert dtensor.publish(client, name, make_state(expected + 1)) == expected + 1
        assert read_number(client, name) == expected + 1
        dtensor.delete(client, name)


@pytest.mark.parametrize(
    "failpoint",
    [
        "publish.received:4",
        "publish.received:6",
        "publish.numbered:5",
        "publish.numbered:6",
        "publish.recorded:4",
        "publish.recorded:6",
    ],
)
def test_server_when_killed_amid_a_publish_then_readers_see_whole_versions_and_each_number_once(
    ranks: ForkedClients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failpoint: str
) -> None:
    """The second version is stored by the fourth to sixth publish: two parts and the index."""
    with monkeypatch.context() as patched:
        patched.setenv("TDSERVE_FAILPOINT", failpoint)
        crashing = Crashing(tmp_path / "root")
    with crashing:
        options = {"num_versions": 3, "keep": 3}
        children = start(ranks, "publish_numbers", crashing.server.address, "w", tmp_path / "ranks", 2, **options)
        wait_for(lambda: not crashing.server.is_alive, "the end of the server", timeout_s=60.0)
        crashing.start()
        with crashing.server.client(timeout_s=60.0) as client:
            for weights in dtensor.subscribe(client, "w", into={key: torch.zeros(11, 300) for key in "abc"}):
                assert all(bool((leaf == weights.version).all()) for leaf in weights.data.values())
                if weights.version == 3:
                    break
            assert finish(children) == [[["done", "3"]]] * 2
            assert [each.version for each in client.versions("w")] == [1, 2, 3]
            for number in (1, 2, 3):
                into = {key: torch.zeros(11, 300) for key in "abc"}
                dtensor.version(client, "w", number, into=into)
                assert all(bool((leaf == number).all()) for leaf in into.values())
