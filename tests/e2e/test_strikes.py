"""Containers of a running job are killed, cut off, starved and stopped: the others go on, and nothing is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.e2e import programs
from tests.e2e.conftest import MakeStack
from tests.e2e.stack import Stack, docker, inspect, logs
from tests.processes import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SERVICES = (("server", 1), ("learner", 1), ("actor", 1), ("actor", 2))
CUT_S = 15.0
START_TIMEOUT_S = 90.0
"""Start of containers that import torch while others compute."""


def goes_on(stack: Stack) -> None:
    """Waits until new rows are written and new policies published."""
    command = ("exec", "-T", "server", "python", "-")

    def has_gone_on() -> bool:
        return stack.compose(*command, stdin=programs.PROGRESS, check=False).returncode == 0

    wait_for(has_gone_on, "progress", timeout_s=START_TIMEOUT_S)


def acts(stack: Stack, name: str) -> None:
    """Waits until an actor has sent the end of another episode."""
    index = re.findall(r"actor (\d+): connects", logs(name))[-1]
    stack.python(programs.EPISODE.replace("INDEX", index))


@pytest.fixture(scope="module")
def running(make_stack: MakeStack) -> Stack:
    """Starts two actors and a learner that do not end by themselves."""
    stack = make_stack(TDSERVE_DEMO_SECONDS="900", TDSERVE_DEMO_TARGET="1000")
    stack.compose("up", "-d", "--no-build", "--scale", "actor=2")
    return stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """The running job."""
    goes_on(running)
    return running


@pytest.fixture
def writer(stack: Stack) -> Iterator[str]:
    """Starts a container that writes one number after the other."""
    name = f"{stack.name}-writer"
    stack.compose(
        "run", "-d", "--no-deps", "--name", name, "--entrypoint", "python", "actor", "-c", programs.WRITE_NUMBERS
    )
    wait_for(lambda: last_acknowledged(name) > 0, "a first number", timeout_s=START_TIMEOUT_S)
    yield name
    docker("rm", "-f", "-v", name)


def last_acknowledged(writer: str) -> int:
    """Returns how many numbers the server has acknowledged to the writer."""
    lines = re.findall(r"acknowledged (\d+)\n", docker("logs", "--tail", "2", writer, check=False).stdout)
    return int(lines[-1]) if lines else 0


def restarts(stack: Stack) -> list[int]:
    """Returns how often the engine has restarted each container."""
    return [int(inspect(stack.container(*service))["RestartCount"]) for service in SERVICES]


def test_data_worker_when_killed_then_another_takes_over_and_no_process_is_left(stack: Stack) -> None:
    before = restarts(stack)
    killed = stack.compose("exec", "-T", "server", "python", "-", stdin=programs.KILL_WORKERS).stdout
    assert killed.count("killed") == 1
    goes_on(stack)
    assert stack.compose("exec", "-T", "server", "python", "-", stdin=programs.COUNT_ZOMBIES).stdout == "0\n"
    assert restarts(stack) == before


def test_actor_when_killed_then_started_again_and_acts(stack: Stack) -> None:
    name = stack.container("actor", 2)
    before = inspect(name)["RestartCount"]
    stack.kill("actor", 2)
    wait_for(lambda: inspect(name)["RestartCount"] > before, "a restart")
    acts(stack, name)


def test_learner_when_killed_then_goes_on_from_its_last_policy(stack: Stack) -> None:
    name = stack.container("learner")
    stack.kill("learner")
    found = wait_for(
        lambda: re.search(r"continues from version (\d+)", logs(name)), "the second learner", timeout_s=START_TIMEOUT_S
    )
    goes_on(stack)
    assert stack.version() > int(found[1]) > 1


def test_server_when_killed_then_started_again_with_every_acknowledged_row(stack: Stack, writer: str) -> None:
    name = stack.container("server")
    before = inspect(name)["RestartCount"]
    stack.kill("server")
    num_rows = last_acknowledged(writer)
    wait_for(lambda: inspect(name)["RestartCount"] > before, "a restart")
    wait_for(lambda: last_acknowledged(writer) > num_rows, "a row after it", timeout_s=START_TIMEOUT_S)
    docker("kill", writer)
    num_acknowledged = last_acknowledged(writer)
    num_found, is_gapless = stack.python(programs.READ_NUMBERS).stdout.split()
    assert is_gapless == "True"
    assert int(num_found) - num_acknowledged in (0, 8), "each once; the last ones may not have been acknowledged yet"
    goes_on(stack)


def test_actor_when_its_network_is_cut_for_15_s_then_acts_on(stack: Stack) -> None:
    name, network = stack.container("actor", 2), f"{stack.name}_default"
    before = restarts(stack)
    docker("network", "disconnect", network, name)
    cut_s = time.monotonic()
    goes_on(stack)
    wait_for(lambda: time.monotonic() > cut_s + CUT_S, "the end of the cut")
    docker("network", "connect", network, name)
    acts(stack, name)
    assert restarts(stack) == before


def test_client_when_its_memory_limit_is_hit_then_what_it_had_is_given_back_and_the_others_go_on(stack: Stack) -> None:
    before = restarts(stack)
    name = f"{stack.name}-glutton"
    glutton = Stack(stack.name, TDSERVE_CLIENT_MEMORY="400m")
    glutton.compose(
        "run", "-d", "--no-deps", "--name", name, "--entrypoint", "python", "actor", "-c", programs.TAKE_AND_EAT
    )
    assert docker("wait", name).stdout == "137\n", logs(name)
    assert inspect(name)["State"]["OOMKilled"]
    assert "has them" in logs(name)
    docker("rm", "-v", name)
    assert stack.python(programs.TAKE).stdout == "8\n"
    goes_on(stack)
    assert restarts(stack) == before


def test_stop_when_all_are_at_work_then_all_end_with_0_within_the_grace_period_and_start_again(stack: Stack) -> None:
    stack.compose("stop")
    ended = [inspect(stack.container(*service))["State"] for service in SERVICES]
    assert [state["ExitCode"] for state in ended] == [0] * len(SERVICES)
    stack.compose("start")
    goes_on(stack)
