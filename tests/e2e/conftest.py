"""The image of the tests of this folder, and compose projects that are gone when their test is over."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.stack import IMAGE, Stack, docker

MakeStack = Callable[..., Stack]
"""``make_stack(*files, **settings)``: a project of its own, nothing of it started."""

BUILD_TIMEOUT_S = 900.0
"""From nothing: everything is downloaded and unpacked."""


def engine_answers() -> bool:
    """Whether there is a docker engine with compose."""
    if shutil.which("docker") is None:
        return False
    asked = (["docker", "info"], ["docker", "compose", "version"])
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in asked)


@pytest.fixture(scope="session")
def image() -> str:
    """The image, built from this tree; the tests of this folder are skipped where there is no engine."""
    if not engine_answers():
        pytest.skip("no docker engine with compose answers here")
    base = os.environ.get("BASE_IMAGE")
    arguments = () if base is None else ("--build-arg", f"BASE_IMAGE={base}")
    docker("build", "-q", "-f", "deploy/Dockerfile", "-t", IMAGE, *arguments, ".", timeout_s=BUILD_TIMEOUT_S)
    return IMAGE


@pytest.fixture(scope="module")
def make_stack(image: str) -> Iterator[MakeStack]:
    """Makes projects; all of them are taken down with the module."""
    made: list[Stack] = []

    def make(*files: str, **settings: str) -> Stack:
        made.append(Stack(f"tdserve-e2e-{uuid.uuid4().hex[:8]}", *files, **settings))
        return made[-1]

    yield make
    for stack in made:
        stack.down()
