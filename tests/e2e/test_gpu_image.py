"""The image for GPUs, on a base without CUDA: its steps, its entry point, and its message without a GPU."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import BUILD_TIMEOUT_S
from tests.e2e.stack import docker, inspect, logs
from tests.processes import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

GPU_IMAGE = "tdserve:e2e-gpu"
BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
TORCH_INDEX_URL = "https://download.pytorch.org/whl/cpu"
"""A build without gigabytes of CUDA."""


@pytest.fixture(scope="module")
def gpu_image(image: str) -> str:
    """The image, built from this tree."""
    arguments = [f"--build-arg={each}" for each in (f"BASE_IMAGE={BASE_IMAGE}", f"TORCH_INDEX_URL={TORCH_INDEX_URL}")]
    docker("build", "-q", "-f", "deploy/Dockerfile.gpu", "-t", GPU_IMAGE, *arguments, ".", timeout_s=BUILD_TIMEOUT_S)
    return GPU_IMAGE


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a container that is removed after the test, with its volumes."""
    own = f"tdserve-e2e-{uuid.uuid4().hex[:8]}"
    yield own
    docker("rm", "-f", "-v", own, check=False)


def test_image_when_built_for_gpus_then_it_is_started_as_the_other_is(image: str, gpu_image: str) -> None:
    own, other = inspect(gpu_image)["Config"], inspect(image)["Config"]
    for setting in ("Entrypoint", "Cmd", "User", "Healthcheck", "ExposedPorts", "WorkingDir"):
        assert own[setting] == other[setting], setting
    added = set(own["Env"]) - set(other["Env"])
    assert {variable.partition("=")[0] for variable in added} == {
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
    }
    version = docker("run", "--rm", gpu_image, "--version").stdout
    assert version == docker("run", "--rm", image, "--version").stdout
    assert version.startswith("tdserve, version ")


def test_health_when_no_server_is_there_then_one_line_and_1(gpu_image: str) -> None:
    done = docker("run", "--rm", gpu_image, "health", check=False)
    assert done.returncode == 1
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith("127.0.0.1:7707 UNREACHABLE")


def test_server_when_its_gpu_is_missing_then_one_line_of_warning_and_it_serves_without(
    gpu_image: str, name: str
) -> None:
    hardened = ("--read-only", "--tmpfs", "/tmp", "-v", "/data", "--cap-drop", "ALL", "-e", "TDSERVE_INSECURE=1")
    docker("run", "-d", "--name", name, *hardened, gpu_image, "serve", "--device", "cuda:0")
    docker("exec", name, "tdserve", "health", "--wait", "60")
    wait_for(lambda: "no GPU" in logs(name), "the word of the data worker", timeout_s=90.0)
    docker("stop", name)
    assert inspect(name)["State"]["ExitCode"] == 0
    ready, warning = docker("logs", name).stdout.splitlines(), docker("logs", name).stderr.splitlines()
    assert ready == ["tdserve ready at 0.0.0.0:7707"]
    warned = [line for line in warning if " WARNING " in line]
    assert len(warned) == 1
    assert " WARNING tdserve: data worker 0 has no GPU: " in warned[0]
