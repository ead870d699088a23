"""The collectors' example as a user runs it, in both ways; whatever ends it, nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import tdserve
from tests.integration.marked import MarkedProgram
from tests.processes import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

EXAMPLE = ("-m", "tdserve.examples.collectors")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
TIMEOUT_S = 100.0


class Job(MarkedProgram):
    """A run of the example. A context manager, which leaves nothing of it."""

    def wait_for_versions(self) -> None:
        wait_for(lambda: "version   2" in self.printed or self.process.poll(), "a version", timeout_s=TIMEOUT_S)

    def folders(self) -> list[str]:
        """Returns the temporary files that it left, except those that ``import tensordict`` makes in any process."""
        return [name for name in os.listdir(self.temporary) if "collectors" in name]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@pytest.mark.full
def test_collectors_when_a_server_is_given_then_follow_the_weights_and_leave_it_as_it_was(
    tmp_path: Path, server: tdserve.Server
) -> None:
    with server.client() as client:
        before = client.stores()
    with Job(tmp_path, *EXAMPLE, "--collectors=2", "--versions=30", f"--address={server.address}") as job:
        assert job.process.wait(TIMEOUT_S) == 0, job.printed
        job.wait_gone()
    lines = job.printed.splitlines()
    assert [line.split(":")[0] for line in lines[1:31]] == [f"version {number:3}" for number in range(2, 32)]
    for index, line in enumerate(lines[31:]):
        assert line.startswith(f"collector {index} (c")
        assert " 0 rows" not in line
    assert len(lines) == 33
    with server.client() as client:
        assert client.stores() == before


@pytest.mark.full
def test_collectors_when_interrupted_then_end_with_their_server(tmp_path: Path) -> None:
    with Job(tmp_path, *EXAMPLE, "--collectors=2", "--versions=1000000") as job:
        job.wait_for_versions()
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.process.wait(TIMEOUT_S) == 128 + signal.SIGINT, job.printed
        job.wait_gone()
    assert "Traceback" not in job.printed
    assert job.folders() == []


@pytest.mark.full
def test_collectors_when_torchrun_starts_them_then_rank_0_learns_and_the_others_collect(tmp_path: Path) -> None:
    with Job(tmp_path, *TORCHRUN, *EXAMPLE, "--versions=4") as job:
        assert job.process.wait(TIMEOUT_S) == 0, job.printed
        job.wait_gone()
    assert "version   5: " in job.printed
    assert "collector 0 (c" in job.printed
    assert "collector 1 (c" in job.printed
    assert job.folders() == []
