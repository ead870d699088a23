"""The demo's job as `docker compose up` runs it, to its end; and its content afterwards."""

from __future__ import annotations

import re

import pytest

from tests.e2e.conftest import MakeStack
from tests.e2e.programs import CHECKSUM
from tests.e2e.stack import docker, inspect

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SUM = re.compile(r"data checksum: crc32 [0-9a-f]{8} over [1-9]\d* rows")

BUILT = "tdserve:e2e-built"
"""Compose marks an image that it builds as one of its project. It takes every container of that image for one of the
project, also those that other tests start meanwhile."""

UP = ("up", "--no-color", "--exit-code-from", "learner", "--scale", "actor=2")


def test_job_when_run_to_its_end_then_summed_up_and_its_volume_survives_down_and_up(make_stack: MakeStack) -> None:
    stack = make_stack(TDSERVE_DEMO_SECONDS="12", TDSERVE_DEMO_TARGET="1000", TDSERVE_IMAGE=BUILT)
    printed = stack.compose(*UP, "--build", timeout_s=300.0).stdout
    assert "time is up" in printed
    assert re.search(r"moved +│ +gloo [\d.]+ MB", printed)
    found = SUM.search(printed)
    assert found is not None
    for name in (stack.container("server"), stack.container("actor", 1), stack.container("actor", 2)):
        ended = inspect(name)
        assert ended["State"]["ExitCode"] == 0, f"{name} did not end within the grace period"
        assert ended["RestartCount"] == 0
        assert ended["HostConfig"]["ReadonlyRootfs"]
        assert ended["HostConfig"]["CapDrop"] == ["ALL"]
        assert ended["Config"]["User"] == "10001:10001"
    stack.compose("down")
    stack.compose("up", "-d", "--wait", "--no-build", "server")
    assert SUM.findall(stack.python(CHECKSUM).stdout) == [found[0]]
    stack.down()
    docker("rmi", BUILT)


def test_job_when_containers_share_the_volume_then_nothing_is_moved(make_stack: MakeStack) -> None:
    stack = make_stack("deploy/compose.shared-volume.yml", TDSERVE_DEMO_SECONDS="5", TDSERVE_DEMO_TARGET="1000")
    printed = stack.compose(*UP, "--no-build", timeout_s=300.0).stdout
    assert re.search(r"moved +│ +nothing: all in shared memory", printed)
    assert SUM.search(printed) is not None
