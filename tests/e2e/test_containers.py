"""Single containers: the default /dev/shm, one published port, and a stop before they have begun."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Iterator

import pytest

from tests.e2e import programs
from tests.e2e.conftest import MakeStack
from tests.e2e.stack import docker, inspect
from tests.processes import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SHM_BYTES = 64 << 20
INSECURE = ("-e", "TDSERVE_INSECURE=1")

PUBLISH = """
try:
    client.publish("weights", TensorDict({"a": torch.zeros(SIZE)}, []))
    print("published")
except tdserve.ConnectError:
    pass
"""


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a container that is removed after the test, with its volumes."""
    own = f"tdserve-e2e-{uuid.uuid4().hex[:8]}"
    yield own
    docker("rm", "-f", "-v", own, check=False)


def start(name: str, image: str, *options: str) -> None:
    """Starts a server that needs no token, and waits until it is healthy."""
    docker("run", "-d", "--name", name, *INSECURE, *options, image)
    wait_for(lambda: inspect(name)["State"]["Health"]["Status"] == "healthy", "a healthy server", timeout_s=60.0)
    assert inspect(name)["HostConfig"]["ShmSize"] == SHM_BYTES


def test_content_when_larger_than_dev_shm_then_goes_to_and_fro(image: str, name: str) -> None:
    start(name, image)
    program = programs.ROUND_TRIP.replace("NUM_BYTES", str(2 * SHM_BYTES))
    assert docker("exec", "-i", name, "python", "-", stdin=program).stdout == "gloo equal\nshm equal\n"


def test_content_when_its_root_is_a_dev_shm_that_is_too_small_then_an_error_and_no_bus_error(
    image: str, name: str
) -> None:
    start(name, image, "-e", "TDSERVE_ROOT=/dev/shm/root")
    too_large = programs.REFUSED.replace("NUM_BYTES", str(2 * SHM_BYTES))
    small = programs.ROUND_TRIP.replace("NUM_BYTES", str(1 << 20))
    printed = docker("exec", "-i", name, "python", "-", stdin=too_large + small).stdout
    assert re.fullmatch(r"no room for /dev/shm/root/stores/too-large: .*\ngloo equal\nshm equal\n", printed), printed


def test_client_when_it_has_one_published_port_then_all_passes_by_grpc_and_the_error_of_gloo_names_the_setting(
    make_stack: MakeStack,
) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    stack = make_stack("deploy/compose.one-port.yml", TDSERVE_PUBLISH=port)
    stack.compose("up", "-d", "--wait", "--no-build", "server")
    outside = ("run", "--rm", "-T", "--entrypoint", "python", "outside", "-c")
    made = "client.init_remote(TensorDict({'a': torch.zeros(SIZE)}, []), 'from-outside')"
    patient = programs.CHECKSUM.partition("from tdserve.examples")[0]
    connect = patient.replace("timeout_s=60.0", "timeout_s=4.0")
    stack.compose(*outside, patient + made.replace("SIZE", "100"))
    assert stack.compose("run", "--rm", "-T", "outside", "ls").stdout == "from-outside\n"
    too_much = PUBLISH + made.replace("-outside", "-afar")
    assert "published" in stack.compose(*outside, patient + PUBLISH.replace("SIZE", "1_000_000")).stdout
    by_gloo = (*outside[:3], "-e", "TDSERVE_TRANSPORT=gloo", *outside[3:])
    done = stack.compose(*by_gloo, connect + too_much.replace("SIZE", "1_000_000"), check=False)
    assert done.returncode == 1
    assert "published" not in done.stdout
    expected = r"^tdserve\.[\w.]+\.ConnectError: .*one published port is not enough.*network_mode: host"
    assert re.search(expected, done.stderr, re.MULTILINE), "gloo itself may write a line after it"
    assert stack.compose("run", "--rm", "-T", "outside", "ls").stdout == "from-outside\nweights\n"


@pytest.mark.parametrize("command", [("serve",), ("demo", "--role", "actor", "--address", "server:7707")])
def test_container_when_stopped_while_python_starts_then_ends_with_0(
    image: str, name: str, command: tuple[str, ...]
) -> None:
    docker("run", "-d", "--name", name, *INSECURE, image, *command)
    wait_for(lambda: "python" in docker("top", name).stdout, "what comes behind `env`")
    docker("stop", name)
    assert inspect(name)["State"]["ExitCode"] == 0, "killed after the grace period"
