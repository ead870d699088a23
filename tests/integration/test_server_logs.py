"""The log of a real server: its lines, and the ids that lead from a client's error to them."""

from __future__ import annotations

import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.logs import BURST
from tdserve.cli.main import main
from tdserve.control.connection import check_health
from tests.integration.logged_server import LoggedServer, run_server
from tests.processes import ready_worker, wait_for

pytestmark = pytest.mark.integration

SECRET = "a value that no log may have"
NASTY = "<script>\u20282J\u202eevil"


def rows(num_rows: int) -> TensorDict:
    """Some rows."""
    return TensorDict({"x": torch.arange(num_rows)}, [num_rows])


def find_entry(server: LoggedServer, request_id: str) -> dict[str, Any]:
    """The line of a request."""
    return wait_for(
        lambda: next((each for each in server.entries() if each.get("request_id") == request_id), None),
        f"a line of request {request_id}",
    )


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_error_when_a_caller_is_at_fault_then_its_id_is_in_the_log_without_a_traceback(
    tmp_path: Path, transport: Any
) -> None:
    with run_server(tmp_path / "log", "--log-format", "json", "--log-level", "debug") as server:
        with tdserve.connect(server.address, transport=transport) as client:
            table = client.create_replay("table", like=rows(1)[0], capacity=10)
            table.extend(rows(3))
            with pytest.raises(tdserve.SelectionError) as failed:
                table.delete([7])
            with pytest.raises(tdserve.StoreNotFoundError) as missing:
                client.catalog.describe_existing("nothing", client.make_deadline(5.0))
        session, calling = failed.value.request_id, missing.value.request_id
        assert re.fullmatch(r"\d+-\d+", session)
        assert calling
        assert pickle.loads(pickle.dumps(failed.value)).request_id == session
        entry = find_entry(server, session)
        assert (entry["level"], entry["process"]) == ("info", "tdserve")
        assert "OUT_OF_RANGE" in entry["message"]
        looked = find_entry(server, calling)
        assert "there is no store 'nothing'" in looked["message"]
        assert looked["level"] == "debug"
        assert all("exception" not in each for each in server.entries())


@pytest.mark.slow
def test_server_when_its_root_is_moved_away_then_does_not_serve_until_it_is_back(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    server = LoggedServer(str(root), tmp_path / "log", "--log-format", "json")
    try:
        root.rename(away)
        wait_for(lambda: not check_health(server.address, timeout_s=10.0), "the end of its health")
        assert any(
            each["level"] == "error" and f"{root} was deleted or moved away" in each["message"]
            for each in server.entries()
        )
        root.mkdir()  # another folder is not it
        root.rmdir()
        away.rename(root)
        wait_for(lambda: check_health(server.address, timeout_s=10.0), "its health")
    finally:
        server.close()


@pytest.mark.slow
def test_server_when_another_root_takes_the_place_of_its_root_then_it_ends_and_that_root_stays_whole(
    tmp_path: Path,
) -> None:
    root, options = tmp_path / "root", ("--sync-interval", "0.1")
    weights = TensorDict({"x": torch.zeros(4)}, [])
    first = LoggedServer(str(root), tmp_path / "first", *options)
    with tdserve.connect(first.address) as client:
        client.publish("w", weights)
    root.rename(tmp_path / "away")
    second = LoggedServer(str(root), tmp_path / "second", *options)
    try:
        with tdserve.connect(second.address) as client:
            for _ in range(3):
                client.publish("w", weights)
            assert first.process.wait(timeout=60) != 0
            assert any("another root has taken the place" in line for line in first.lines())
            assert client.publish("w", weights) == 4
    finally:
        second.close()
        first.process.kill()
        first.process.wait()
        assert first.process.stdout is not None
        first.process.stdout.close()
    assert main(["check", str(root)]) == 0


def test_lines_when_from_any_process_then_json_of_the_same_fields(tmp_path: Path) -> None:
    with run_server(tmp_path / "log", "--log-format", "json") as server:
        with tdserve.connect(server.address) as client:
            pid = ready_worker(client)["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: any("died after" in each["message"] for each in server.entries()), "a line about a death")
        fields = {"time", "level", "process", "pid", "logger", "message"}
        assert all(fields <= each.keys() for each in server.entries())
        assert server.entries()[0]["pid"] == server.process.pid


@pytest.mark.slow
@pytest.mark.parametrize("form", ["human", "json"])
def test_lines_when_names_and_values_are_nasty_then_printable_and_without_values(tmp_path: Path, form: str) -> None:
    with run_server(tmp_path / "log", "--log-format", form, "--log-level", "debug") as server:
        with tdserve.connect(server.address, timeout_s=5.0) as client:
            client.init_remote(TensorDict({"text": SECRET, "x": torch.arange(3)}, [3]), NASTY)
            for wrong in (
                lambda: client.create_replay(NASTY, like=rows(1)[0], capacity=3),
                lambda: client[NASTY + "?"],
                lambda: client.delete("x" * 100 + "\u202e"),
                lambda: client.version(NASTY, 3, timeout_s=0),
                lambda: client.kv(NASTY, timeout_s=0).get(SECRET),
            ):
                with pytest.raises(tdserve.TDServeError):
                    wrong()
        wait_for(lambda: any("has failed" in line for line in server.lines()), "a line about a failure")
    text = (tmp_path / "log").read_text()
    assert SECRET not in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\\u202e" in text
    if form == "human":
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ tdserve", line) for line in text.splitlines())


@pytest.mark.slow
def test_lines_when_a_caller_fails_again_and_again_then_few(tmp_path: Path) -> None:
    num_calls = 40 * BURST
    with run_server(tmp_path / "log", "--log-format", "json") as server:
        with tdserve.connect(server.address) as client:
            table = client.create_replay("table", like=rows(1)[0], capacity=10)
            table.extend(rows(3))
            for _ in range(num_calls):
                with pytest.raises(tdserve.SelectionError):
                    table.delete([7])
        failures = [each for each in server.entries() if "request_id" in each]
        assert BURST <= len(failures) < num_calls / 4
