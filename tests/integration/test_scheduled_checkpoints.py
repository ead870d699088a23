"""Checkpoints that a process of the server writes by schedule."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.serving.certs import make_authority, make_certificate
from tests.integration.logged_server import run_server
from tests.integration.token_files import TokenFile
from tests.processes import START_TIMEOUT_S, children_of, is_gone, wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])
TIMEOUT_S = 2 * START_TIMEOUT_S


def find_process(server_pid: int) -> int | None:
    """Returns the process id of a server's process that writes checkpoints."""
    for pid in children_of(server_pid):
        if b"tdserve.schedule" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def list_ids(place: Path) -> list[str]:
    """Returns the ids of the checkpoints of a place, which come and go meanwhile."""
    return sorted(path.stem for path in place.glob("checkpoints/*.json"))


def find_reported(client: tdserve.Client, *, after: str) -> dict[str, float] | None:
    stats = client.stats()
    return stats if stats["checkpoint"] > after else None


@pytest.mark.slow
def test_checkpoints_when_scheduled_then_written_kept_shown_and_resumed_after_the_process_is_killed(
    tmp_path: Path,
) -> None:
    place = tmp_path / "place"
    options = ("--checkpoint-every", "1s", "--checkpoint-to", str(place), "--checkpoint-keep", "2")
    with run_server(tmp_path / "log", *options) as server, tdserve.connect(server.address) as client:
        client.create_replay("table", ROW, 10).extend(ROW.expand(4))
        first = wait_for(lambda: list_ids(place) or None, "a checkpoint", timeout_s=TIMEOUT_S)[0]
        wait_for(lambda: first not in list_ids(place), "the end of the oldest", timeout_s=TIMEOUT_S)
        assert len(list_ids(place)) <= 3  # the one that is being written, before the oldest goes
        pid = find_process(server.process.pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: is_gone(pid), "the end of the process")
        last = list_ids(place)[-1]
        wait_for(lambda: list_ids(place)[-1] != last, "a checkpoint after it was killed", timeout_s=TIMEOUT_S)
        stats = wait_for(lambda: find_reported(client, after=last), "its report", timeout_s=TIMEOUT_S)
        assert 0.0 <= stats["checkpoint_age_s"] < TIMEOUT_S
        restarted = find_process(server.process.pid)
    assert restarted is not None
    assert is_gone(restarted)
    line = re.compile(rf"checkpoint {first}: 1 stores, \d+ bytes, \d+ of them new, [\d.]+ s, paused \d+ ms$")
    assert sum(bool(line.search(each)) for each in server.lines()) == 1
    assert not any("no checkpoint at" in each or "Traceback" in each for each in server.lines())


@pytest.mark.slow
def test_checkpoints_when_the_place_cannot_be_written_then_a_line_each_and_the_next_time_is_used(
    tmp_path: Path,
) -> None:
    place = tmp_path / "place"
    place.write_text("a file")
    options = ("--checkpoint-every", "0.5s", "--checkpoint-to", str(place))
    with run_server(tmp_path / "log", *options) as server, tdserve.connect(server.address) as client:
        client.create_replay("table", ROW, 10).extend(ROW.expand(4))

        def list_failures() -> list[str]:
            return [each for each in server.lines() if "no checkpoint at" in each]

        wait_for(lambda: len(list_failures()) >= 2 or None, "two attempts", timeout_s=TIMEOUT_S)
        assert len(client.replay("table")) == 4
        assert client.stats()["checkpoint"] == ""
        place.unlink()
        wait_for(lambda: list_ids(place) or None, "a checkpoint", timeout_s=TIMEOUT_S)
    assert not any("Traceback" in each for each in server.lines())


@pytest.mark.slow
@pytest.mark.parametrize("has_roles", [pytest.param(False, marks=pytest.mark.full), True])
def test_checkpoints_when_the_server_has_tls_and_tokens_then_written_too(tmp_path: Path, has_roles: bool) -> None:
    make_authority(tmp_path, 2)
    make_certificate(tmp_path, "server", ["127.0.0.1"], 2)
    if has_roles:
        token = TokenFile(tmp_path / "tokens.json").add("writer", "write")
        settings: dict[str, Any] = {"tokens_file": str(tmp_path / "tokens.json")}
    else:
        token = "a token of more than a few characters"
        (tmp_path / "token").write_text(token)
        settings = {"token_file": str(tmp_path / "token")}
    settings |= {
        "tls_cert": str(tmp_path / "server.pem"),
        "tls_key": str(tmp_path / "server.key"),
        "checkpoint_every_s": 0.5,
        "checkpoint_to": str(tmp_path / "place"),
    }
    with (
        tdserve.Server(tmp_path / "root", **settings) as server,
        server.client(token=token, tls=tdserve.TLS(ca=tmp_path / "ca.pem")) as client,
    ):
        client.create_replay("table", ROW, 10).extend(ROW.expand(4))
        wait_for(lambda: list_ids(tmp_path / "place") or None, "a checkpoint", timeout_s=TIMEOUT_S)


@pytest.mark.slow
def test_checkpoints_when_another_root_takes_the_place_then_those_of_the_first_stay(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with tdserve.Server(tmp_path / "lost") as lost, lost.client() as client:
        client.create_replay("table", ROW, 10).extend(ROW.expand(4))
        kept = client.checkpoint(place).id
    options = ("--checkpoint-every", "0.5s", "--checkpoint-to", str(place), "--checkpoint-keep", "1")
    with run_server(tmp_path / "log", *options) as server, tdserve.connect(server.address) as client:
        wait_for(
            lambda: any("no stores" in each for each in server.lines()), "a look at no stores", timeout_s=TIMEOUT_S
        )
        assert list_ids(place) == [kept]
        client.create_replay("another", ROW, 10)
        found = wait_for(lambda: list_ids(place)[1:] or None, "a checkpoint", timeout_s=TIMEOUT_S)
        wait_for(lambda: found[0] not in list_ids(place), "the end of the oldest of these", timeout_s=TIMEOUT_S)
        assert list_ids(place)[0] == kept
