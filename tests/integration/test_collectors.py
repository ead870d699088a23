"""The collectors' example as a user runs it, in both ways; whatever ends it, nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import tdserve
from tests.integration.processes import REPOSITORY, wait_for

pytestmark = pytest.mark.integration

MARK = "COLLECTORS_TEST_MARK"
EXAMPLE = ("-m", "tdserve.examples.collectors")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
TIMEOUT_S = 60.0


class Job:
    """A run of the example; everything that it starts is marked in the environment. A context manager."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._mark = uuid.uuid4().hex
        self._printed = folder / "printed"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        with self._printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env={**os.environ, MARK: self._mark, "TMPDIR": str(self.temporary)},
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def wait_for_versions(self) -> None:
        wait_for(lambda: "version   2" in self.printed or self.process.poll(), "a version", timeout_s=TIMEOUT_S)

    def processes(self) -> dict[int, str]:
        """Command lines of its living processes, by id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it ended meanwhile
        return found

    def folders(self) -> list[str]:
        """What it left of temporary files, but for those that ``import tensordict`` makes in any process."""
        return [name for name in os.listdir(self.temporary) if "collectors" in name]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def test_collectors_when_a_server_is_given_then_follow_the_weights_and_leave_it_as_it_was(
    tmp_path: Path, server: tdserve.Server
) -> None:
    with server.client() as client:
        before = client.stores()
    with Job(tmp_path, *EXAMPLE, "--collectors=2", "--versions=12", f"--address={server.address}") as job:
        assert job.process.wait(TIMEOUT_S) == 0, job.printed
        assert not job.processes()
    lines = job.printed.splitlines()
    assert [line.split(":")[0] for line in lines[1:13]] == [f"version {number:3}" for number in range(2, 14)]
    for index, line in enumerate(lines[13:]):
        assert line.startswith(f"collector {index} (c")
        assert " 0 rows" not in line
    assert len(lines) == 15
    with server.client() as client:
        assert client.stores() == before


def test_collectors_when_interrupted_then_end_with_their_server(tmp_path: Path) -> None:
    with Job(tmp_path, *EXAMPLE, "--collectors=2", "--versions=1000000") as job:
        job.wait_for_versions()
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.process.wait(TIMEOUT_S) == 128 + signal.SIGINT, job.printed
        assert not job.processes()
    assert "Traceback" not in job.printed
    assert job.folders() == []


def test_collectors_when_torchrun_starts_them_then_rank_0_learns_and_the_others_collect(tmp_path: Path) -> None:
    with Job(tmp_path, *TORCHRUN, *EXAMPLE, "--versions=12") as job:
        assert job.process.wait(TIMEOUT_S) == 0, job.printed
        assert not job.processes()
    assert "version  13: " in job.printed
    assert "collector 0 (c" in job.printed
    assert "collector 1 (c" in job.printed
    assert job.folders() == []
