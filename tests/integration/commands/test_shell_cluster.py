"""Commands that ask several servers, all of them alive or not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.shell.exit_codes import FAILED, NO_ANSWER, NOT_FOUND
from tests.integration.crashing import Crashing
from tests.integration.shell import Shell
from tests.processes import REPOSITORY, quiet_port
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    """Two servers: a shared table, a queue, and a store on each."""
    with (
        make_quick_root() as first,
        make_quick_root() as second,
        tdserve.Server(first, port=0) as one,
        tdserve.Server(second, port=0) as other,
        tdserve.connect(f"{one.address},{other.address}") as client,
    ):
        for name in ("plain-0", "plain-1", "plain-2", "plain-3"):
            client.init_remote(TensorDict({"a": torch.arange(3)}, [3]), name)
        client.create_replay("shared", like=ROW, capacity=100, shards=2).extend(ROW.expand(8))
        client.create_queue("jobs", like=ROW, max_size=10)
        yield [one.address, other.address]


@pytest.fixture
def shell(addresses: list[str], capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell whose commands reach both."""
    return Shell(",".join(addresses), capsys)


@pytest.fixture
def lost(addresses: list[str]) -> str:
    """The address of both and of a third server that is away."""
    return ",".join([*addresses, f"127.0.0.1:{quiet_port()}"])


@pytest.fixture
def partial(lost: str, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell whose commands reach two of three servers."""
    return Shell(lost, capsys)


@pytest.mark.slow
def test_ls_when_long_then_shows_the_servers_of_each_store(shell: Shell, addresses: list[str]) -> None:
    listed = {each["name"]: each for each in shell.json("ls", "--long")}
    assert sorted(listed) == ["jobs", "plain-0", "plain-1", "plain-2", "plain-3", "shared"]
    for server, address in enumerate(addresses):
        with tdserve.connect(address) as client:
            here = [name for name in listed if listed[name]["servers"] == [server]]
            assert here == [name for name in client.stores() if "#" not in name and name != "shared"]
    assert sorted(listed["shared"]["servers"]) == [0, 1]
    assert (listed["shared"]["num_rows"], listed["shared"]["capacity"]) == (8, 100)
    assert shell.lines("ls", "-l")[0].split()[:3] == ["name", "server", "kind"]
    assert shell.lines("ls") == sorted(listed)
    kinds = {name: each["kind"] for name, each in listed.items()}
    assert shell.lines("ls", "--kind", kinds["shared"]) == [
        name for name in sorted(kinds) if kinds[name] == kinds["shared"]
    ]


def test_ls_when_a_table_is_a_queue_then_its_kind_is_queue(shell: Shell) -> None:
    assert {each["name"]: each["kind"] for each in shell.json("ls", "-l")}["jobs"] == "queue"


def test_info_when_a_store_is_shared_then_shows_its_servers(shell: Shell) -> None:
    found = shell.json("info", "shared")
    assert (sorted(found["servers"]), found["degraded"], found["num_rows"]) == ([0, 1], [], 8)
    assert found["spec"]["keys"][0]["key"] == "x"
    assert shell.lines("keys", "shared") == ["x"]


@pytest.mark.parametrize("command", ["info", "stats"])
def test_figures_when_of_several_servers_then_a_table_for_each(shell: Shell, command: str) -> None:
    lines = shell.lines(command)
    assert [line.split()[:2] for line in lines if line.startswith("server ")] == [["server", "0"], ["server", "1"]]
    assert sum(line.startswith("root ") for line in lines) == 2
    assert max(map(len, lines)) < 200
    assert sorted(shell.json(command)["servers"]) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [("ls",), ("ls", "--long"), ("info",), ("stats",)])
def test_command_when_a_server_is_lost_then_shows_the_rest_and_names_it(
    partial: Shell, lost: str, command: tuple[str, ...]
) -> None:
    out, err = partial.run(NO_ANSWER, *command)
    assert "plain-0" in out if command[0] == "ls" else "server 1" in out
    (line,) = err.splitlines()
    assert line.startswith("tdserve: server 2 does not answer: ")
    assert lost.rpartition(",")[2] in line
    json.loads(partial.run(NO_ANSWER, *command, "--json")[0])


def test_health_when_a_server_is_lost_then_a_line_for_each(partial: Shell, shell: Shell, lost: str) -> None:
    lines = partial.run(FAILED, "health")[0].splitlines()
    first, second, third = lost.split(",")
    assert lines[:2] == [f"{first} SERVING", f"{second} SERVING"]
    assert lines[2].startswith(f"{third} UNREACHABLE: ")
    found = json.loads(partial.run(FAILED, "health", "--json")[0])
    assert found["status"] == "UNREACHABLE"
    assert [each["status"] for each in found["servers"]] == ["SERVING", "SERVING", "UNREACHABLE"]
    assert len(shell.lines("health")) == 2


@pytest.mark.slow
def test_command_when_a_store_is_missing_then_names_similar_ones_of_all_servers(
    shell: Shell, addresses: list[str]
) -> None:
    for command in ("info", "keys", "head"):
        line = shell.error(NOT_FOUND, command, "plain-9")
        assert "there is no store 'plain-9', but 'plain-" in line
        assert "tdserve ls" in line
        assert "client.stores()" not in line
    with (
        tdserve.connect(",".join(addresses)) as client,
        pytest.raises(tdserve.StoreNotFoundError, match="'shared'"),
    ):
        client["shaerd"]


@pytest.mark.slow
def test_ls_when_of_several_servers_then_imports_no_torch(addresses: list[str]) -> None:
    code = "import sys; from tdserve.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    for command in ("ls", "info"):
        done = subprocess.run(
            [sys.executable, "-c", code, command, "--address", ",".join(addresses)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
def test_shared_store_when_the_server_with_its_record_is_killed_then_shown_without_its_part(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with Crashing(tmp_path / "0") as first, Crashing(tmp_path / "1") as second:
        servers = (first, second)
        address = ",".join(each.server.address for each in servers)
        with tdserve.connect(address) as client:
            assert isinstance(client, tdserve.ClusterClient)
            table = client.create_replay("shared", like=ROW, capacity=100, shards=2)
            for writer in range(20):
                table.extend(ROW.expand(1), writer=writer)
            owner = client.find_server("shared")
            shard = table.placement.servers.index(1 - owner)
            num_left = client.describe(f"shared#{shard}").num_rows
        servers[owner].kill()
        shell = Shell(address, capsys)
        assert shell.run(NO_ANSWER, "ls")[0].split() == ["shared"]
        described = json.loads(shell.run(NO_ANSWER, "info", "shared", "--json")[0])
        assert (described["num_rows"], described["degraded"]) == (num_left, [1 - shard])
        out, err = shell.run(NO_ANSWER, "tail", "shared", "-n", "30", "--json")
        assert (len(out.splitlines()), err.count(f"shards {1 - shard} of 'shared' are left out")) == (num_left, 1)
        out, err = shell.run(NO_ANSWER, "head", "shared", "-n", "2", "--json")
        assert (len(json.loads(out)["data"]["x"]), err.count("left out")) == (2, 1)
        assert shell.run(NO_ANSWER, "keys", "shared")[0].split() == ["x"]
        assert "do not answer" in shell.run(NO_ANSWER, "get", "shared", str(tmp_path / "out.npz"))[1]
        assert not (tmp_path / "out.npz").exists()
