"""Containers that cannot do their job: one clear line, an exit code, and no storm of restarts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from tdserve.cli.shell.exit_codes import FAILED, NO_ANSWER, REFUSED
from tests.e2e import programs
from tests.e2e.conftest import MakeStack
from tests.e2e.stack import docker, inspect
from tests.processes import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

INSECURE = ("-e", "TDSERVE_INSECURE=1")
AT_ONCE = ("-e", "TDSERVE_FAIL_DELAY_S=0")
"""Without the image's pause after a failure."""

FAIL_DELAY_S = 3.0
"""The image's."""

MakeVolume = Callable[..., str]
"""``make_volume(*options)``: its name."""


@pytest.fixture
def make_volume() -> Iterator[MakeVolume]:
    """Makes volumes that are gone after the test."""
    made: list[str] = []

    def make(*options: str) -> str:
        made.append(f"tdserve-e2e-{uuid.uuid4().hex[:8]}")
        docker("volume", "create", *options, made[-1])
        return made[-1]

    yield make
    for name in made:
        docker("volume", "rm", "-f", name, check=False)


@pytest.fixture
def name(make_volume: MakeVolume) -> Iterator[str]:
    """The name of a container that is removed after the test, before the volumes that it uses."""
    own = f"tdserve-e2e-{uuid.uuid4().hex[:8]}"
    yield own
    docker("rm", "-f", "-v", own, check=False)


def tmpfs(size: str) -> tuple[str, ...]:
    """Options of a volume that is soon full; its owner is the image's user."""
    return ("--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", f"o=size={size},uid=10001,gid=10001")


def check_refused(said: str, *arguments: str, code: int = FAILED) -> None:
    """Runs a container that ends with an error and one line, which says this, behind one about a wait if it waits."""
    done = docker("run", "--rm", *AT_ONCE, *arguments, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    assert said in printed
    assert len([line for line in printed.splitlines() if " yet: " not in line]) == 1, printed


@pytest.mark.parametrize(
    ("options", "command", "said", "code"),
    [
        ((), ("serve",), "'0.0.0.0' is reachable by others", FAILED),
        ((*INSECURE, "--user", "12345"), ("serve",), "/data", FAILED),
        ((*INSECURE, "-e", "TDSERVE_TOKEN_FILE=/nowhere"), ("serve",), "/nowhere", FAILED),
        ((), ("ls", "--address", "no-such-server:7707"), "no-such-server", NO_ANSWER),
        ((), ("health", "--address", "no-such-server:7707"), "no-such-server", FAILED),
    ],
)
def test_container_when_a_setting_is_invalid_then_the_error_names_it(
    image: str, options: tuple[str, ...], command: tuple[str, ...], said: str, code: int
) -> None:
    check_refused(said, *options, image, *command, code=code)


def test_server_when_its_volume_is_full_then_ends_with_a_capacity_error(image: str, make_volume: MakeVolume) -> None:
    check_refused("no room for /data", *INSECURE, "-v", f"{make_volume(*tmpfs('4k'))}:/data", image)


def test_server_when_its_volume_fills_up_then_refuses_what_has_no_room_and_goes_on(
    image: str, make_volume: MakeVolume, name: str
) -> None:
    docker("run", "-d", "--name", name, *INSECURE, "-v", f"{make_volume(*tmpfs('32m'))}:/data", image)
    wait_for(lambda: inspect(name)["State"]["Health"]["Status"] == "healthy", "a healthy server", timeout_s=60.0)
    printed = docker("exec", "-i", "-e", "TDSERVE_TRANSPORT=gloo", name, "python", "-", stdin=programs.FILL).stdout
    lines = printed.splitlines()
    assert lines[0].startswith("no room for /data/stores/block-")
    assert lines[1:] == ["True True", "True"]


def test_server_when_its_volume_is_of_a_newer_version_then_leaves_it_alone(image: str, make_volume: MakeVolume) -> None:
    volume = f"{make_volume()}:/data"
    newer = '{"format_version": 99, "server_id": "x"}'
    write = f"printf '{newer}' > /data/tdserve.json"
    docker("run", "--rm", "-v", volume, "--entrypoint", "sh", image, "-c", write)
    check_refused("written by a newer tdserve", *INSECURE, "-v", volume, image)
    left = docker("run", "--rm", "-v", volume, "--entrypoint", "cat", image, "/data/tdserve.json").stdout
    assert left == newer


def test_server_when_its_port_is_taken_then_ends_with_an_error_and_the_other_goes_on(image: str, name: str) -> None:
    docker("run", "-d", "--name", name, *INSECURE, image)
    wait_for(lambda: inspect(name)["State"]["Health"]["Status"] == "healthy", "a healthy server", timeout_s=60.0)
    check_refused("0.0.0.0:7707 cannot be listened on", *INSECURE, "--network", f"container:{name}", image)
    docker("exec", name, "tdserve", "health")


def test_server_when_another_has_its_volume_then_the_error_names_the_other(
    image: str, name: str, make_volume: MakeVolume
) -> None:
    volume = ("-v", f"{make_volume()}:/data")
    docker("run", "-d", "--name", name, "--hostname", "the-first", *INSECURE, *volume, image)
    wait_for(lambda: inspect(name)["State"]["Health"]["Status"] == "healthy", "a healthy server", timeout_s=60.0)
    check_refused("in use by process 1 on the-first", *INSECURE, *volume, image)


def test_clients_when_their_token_is_wrong_then_end_with_one_line(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.compose("up", "-d", "--wait", "--no-build", "server")
    client = ("run", "--rm", "-T", "--no-deps", *AT_ONCE)
    for token, fault in (("TDSERVE_TOKEN=wrong", "refused the token"), ("TDSERVE_TOKEN_FILE=", "needs a token")):
        for command, code in ((("actor", "ls"), REFUSED), (("learner",), FAILED)):
            done = stack.compose(*client, "-e", token, *command, check=False)
            assert done.returncode == code
            last = done.stderr.splitlines()[-1]
            assert last.startswith(f"tdserve: the server at server:7707 {fault}"), done.stderr


def test_container_when_it_fails_again_and_again_then_is_started_again_seldom(image: str, name: str) -> None:
    begin_s = time.monotonic()
    docker("run", "-d", "--name", name, "--restart", "on-failure", image)
    wait_for(lambda: inspect(name)["RestartCount"] >= 2, "two restarts", timeout_s=60.0)
    assert time.monotonic() - begin_s > 2 * FAIL_DELAY_S
    assert "is reachable by others" in docker("logs", name).stderr
    docker("stop", name)
