"""The demo's roles, as containers run them: if one is killed, the others go on, and all end by themselves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tdserve
from tests.processes import REPOSITORY, START_TIMEOUT_S, quiet_port, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TOKEN = "a token of the test"


class Role:
    """``tdserve demo --role``, killed at the end of the block."""

    def __init__(self, folder: Path, name: str, role: str, port: int, *options: str) -> None:
        self._printed = folder / f"{name}.log"
        (folder / "token").write_text(f"{TOKEN}\n")
        ours = {"TDSERVE_TOKEN_FILE": str(folder / "token"), "TDSERVE_ROOT": str(folder / "root")}
        command = [sys.executable, "-m", "tdserve", "demo", "--role", role, "--address", f"localhost:{port}", *options]
        with self._printed.open("ab") as printed:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env={**os.environ, **ours}, stdout=printed, stderr=subprocess.STDOUT
            )

    @property
    def printed(self) -> str:
        """Returns what this role and its predecessors have printed."""
        return self._printed.read_text()

    def end(self, number: signal.Signals) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(START_TIMEOUT_S)

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def port() -> int:
    """The server's port, known before it starts."""
    return quiet_port()


@pytest.mark.full
def test_roles_when_server_and_learner_are_killed_and_started_again_then_the_run_goes_on_to_its_end(
    tmp_path: Path, port: int
) -> None:
    seconds = ("--max-seconds", "12", "--transport", "gloo")
    with (
        Role(tmp_path, "actor", "actor", port, *seconds, "--index", "0") as actor,
        Role(tmp_path, "server", "server", port) as first,
        tdserve.connect(f"localhost:{port}", token=TOKEN, timeout_s=60.0) as client,
    ):
        with Role(tmp_path, "learner", "learner", port, *seconds) as learner:
            policy = client.latest("policy", newer_than=5)
            assert policy is not None
            assert learner.end(signal.SIGKILL) == -signal.SIGKILL
        with Role(tmp_path, "learner", "learner", port, *seconds) as learner:
            wait_for(
                lambda: "continues from version" in learner.printed, "the second learner", timeout_s=START_TIMEOUT_S
            )
            client.latest("policy", newer_than=policy.version + 5)
            first.end(signal.SIGKILL)
            with Role(tmp_path, "server", "server", port) as second:
                assert learner.process.wait(60.0) == 0, learner.printed
                assert actor.process.wait(60.0) == 0, actor.printed
                newest = client.latest("policy")
                assert newest is not None
                num_rows = len(client.replay("transitions"))
                assert second.end(signal.SIGTERM) == 0, second.printed
    assert newest.metadata["is_over"]
    assert newest.version > policy.version + 5
    found = re.search(r"^data checksum: crc32 [0-9a-f]{8} over (\d+) rows$", learner.printed, re.MULTILINE)
    assert found is not None
    assert int(found[1]) == num_rows > 0
    assert "the learner says that it is over" in actor.printed
    assert "Traceback" not in learner.printed + actor.printed + first.printed


@pytest.mark.full
@pytest.mark.parametrize("role", ["actor", "server"])
def test_role_when_terminated_before_it_found_the_others_then_exit_code_0(tmp_path: Path, port: int, role: str) -> None:
    with Role(tmp_path, role, role, port) as alone:
        said = re.compile("connects to|ready at")
        wait_for(lambda: said.search(alone.printed), f"the {role}", timeout_s=START_TIMEOUT_S)
        assert alone.end(signal.SIGTERM) == 0, alone.printed
    assert "Traceback" not in alone.printed
