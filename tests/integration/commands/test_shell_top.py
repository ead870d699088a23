"""``tdserve top`` on a terminal, and ``tdserve sessions``."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.main import main
from tdserve.cli.shell.exit_codes import INTERRUPTED, NO_ANSWER
from tests.integration.shell import Shell
from tests.integration.terminal import run_on_terminal
from tests.processes import quiet_port, wait_for
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

NASTY = "<script>\u20282J\u202eevil[bold]"
"""Markup of pages and of rich, a control sequence, and an override of the direction."""


def rows(num_rows: int) -> TensorDict:
    """Some rows."""
    return TensorDict({"x": torch.arange(num_rows)}, [num_rows])


@pytest.mark.slow
def test_top_when_on_a_terminal_then_follows_the_server_until_q(server: tdserve.Server, client: tdserve.Client) -> None:
    table = client.create_replay("transitions", like=rows(1)[0], capacity=1000)
    table.extend(rows(7))
    with run_on_terminal("top", "--interval", "0.1", "--address", server.address) as terminal:
        terminal.wait_for(r"transitions +replay +7 ")
        terminal.wait_for("worker-0")
        assert not terminal.is_as_usual
        table.extend(rows(300))
        terminal.wait_for(r"transitions +replay +307 +\S+ \S+ +[1-9]")  # and a rate
        terminal.type("xq")
        assert terminal.process.wait(timeout=30) == 0
        assert terminal.is_as_usual
        assert "\x1b[?1049l" in terminal.read()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 143)])
def test_top_when_it_is_ended_by_a_signal_then_the_terminal_is_as_before(
    server: tdserve.Server, number: signal.Signals, code: int
) -> None:
    with run_on_terminal("top", "--interval", "0.1", "--address", server.address) as terminal:
        terminal.wait_for("worker-0")
        terminal.process.send_signal(number)
        assert terminal.process.wait(timeout=30) == code
        assert terminal.is_as_usual
        terminal.wait_for(re.escape("\x1b[?1049l"))


@pytest.mark.slow
def test_top_when_the_server_goes_and_comes_back_then_goes_on() -> None:
    with make_quick_root() as root:
        first = tdserve.Server(root, port=0).start()
        port = int(first.address.rpartition(":")[2])
        with run_on_terminal("top", "--interval", "0.1", "--address", first.address) as terminal:
            terminal.wait_for("worker-0")
            first.shutdown()
            terminal.wait_for("no answer for")
            with tdserve.Server(root, port=port) as second:
                terminal.wait_for(rf"worker-0 +{find_worker(second)} ")
                terminal.type("q")
                assert terminal.process.wait(timeout=30) == 0


def find_worker(server: tdserve.Server) -> int:
    """Waits for its data worker, and returns the process id."""
    with tdserve.connect(server.address) as client:
        pid: int = wait_for(lambda: client.stats()["workers"][0]["pid"] or None, "a data worker")
    return pid


@pytest.mark.slow
def test_top_when_a_name_is_nasty_then_the_terminal_is_not_harmed(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    client.init_remote(rows(3), NASTY)
    client[NASTY][0]
    with run_on_terminal("top", "--interval", "0.1", "--address", server.address) as terminal:
        terminal.wait_for(re.escape(r"<script>\u20282J\u202eevil[bold]"))
        assert "\u2028" not in terminal.text
        assert "\u202e" not in terminal.text


def test_top_when_there_is_no_terminal_or_json_then_one_look(
    server: tdserve.Server, client: tdserve.Client, shell: Shell
) -> None:
    client.create_replay("transitions", like=rows(1)[0], capacity=1000).extend(rows(7))
    assert any(line.split()[:3] == ["transitions", "replay", "7"] for line in shell.lines("top"))
    (found,) = shell.json("top", "--once")
    assert [(each["process"], each["pid"]) for each in found["processes"]][:1] == [("control", server.pid)]
    (table,) = found["stores"]
    assert (table["name"], table["kind"], table["num_rows"]) == ("transitions", "replay", 7)
    stats = shell.json("stats")
    equal = ("server_id", "version", "num_stores")
    assert [found[name] for name in equal] == [stats[name] for name in equal]
    assert {"num_sessions", "root_free_bytes", "workers", "transports", "sessions"} <= stats.keys() & found.keys()
    assert found["kinds"] == {"replay": 1}
    assert {"session", "host", "transport", "num_requests"} <= found["sessions"][0].keys()
    assert {each["call"]: each["num_calls"] for each in found["calls"] if each["side"] == "control"}["extend"] >= 1


def test_sessions_when_clients_are_connected_then_one_line_each(
    server: tdserve.Server, client: tdserve.Client, shell: Shell
) -> None:
    client.create_replay("transitions", like=rows(1)[0], capacity=1000).extend(rows(7))
    with tdserve.connect(server.address, transport="gloo") as other:
        other.replay("transitions").sample(3)
        found = {each["session"]: each for each in shell.json("sessions")}
        mine, theirs = found[client.stats()["session"]], found[other.stats()["session"]]
        assert (mine["transport"], theirs["transport"]) == ("shm", "gloo")
        assert mine["pid"] == theirs["pid"] == os.getpid()
        assert theirs["num_requests"] > 0
        header, *lines = shell.lines("sessions")
        assert header.split()[:5] == ["session", "host", "pid", "transport", "worker"]
        assert {int(line.split()[0]) for line in lines} == found.keys()
        assert len(shell.lines("sessions", "--limit", "1")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "has_all"), [(60, False), (200, True)])
def test_sessions_when_the_terminal_is_narrow_then_each_is_one_line_of_fewer_columns(
    server: tdserve.Server, client: tdserve.Client, columns: int, *, has_all: bool
) -> None:
    with run_on_terminal("sessions", "--address", server.address, columns=columns) as terminal:
        assert terminal.process.wait(timeout=30) == 0
        terminal.wait_for(rf"\n *{client.stats()['session']} ")
        header, *_ = lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text).strip().splitlines()
        assert max(map(len, lines)) <= columns
        assert ("under way" in header) == has_all
        assert {"session", "host", "requests"} <= set(header.split())


@pytest.mark.slow
def test_figures_when_several_servers_then_of_each_and_lost_ones_are_named(
    server: tdserve.Server, client: tdserve.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.init_remote(rows(3), "plain")
    both = f"{server.address},127.0.0.1:{quiet_port()}"
    assert main(["sessions", "--address", both]) == NO_ANSWER
    shown = capsys.readouterr()
    assert shown.out.split()[0] == "server"
    assert "server 1 does not answer: no connection" in shown.err
    assert main(["top", "--address", both, "--json"]) == NO_ANSWER
    first, second = json.loads(capsys.readouterr().out)
    assert first["num_sessions"] > 0
    assert "no connection" in second["fault"]
    assert main(["top", "--address", both]) == NO_ANSWER
    assert "server 1 does not answer: no connection" in capsys.readouterr().out
    assert main(["sessions", "--address", f"127.0.0.1:{quiet_port()}"]) == NO_ANSWER
