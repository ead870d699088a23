"""One compose project for the tests of this folder, and single containers beside it: started, inspected, killed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
IMAGE = "tdserve:e2e"

COMMAND_TIMEOUT_S = 120.0
"""Timeout of one command to the engine on a busy machine."""


def docker(
    *arguments: str,
    stdin: str | None = None,
    check: bool = True,
    settings: dict[str, str] | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Runs ``docker`` in the top folder.

    Args:
        arguments: Arguments of ``docker``.
        stdin: Its standard input.
        check: Whether a failure of the command fails the test.
        settings: Environment variables.
        timeout_s: Time limit.
    """
    done = subprocess.run(
        ["docker", *arguments],
        cwd=REPOSITORY,
        env={**{name: value for name, value in os.environ.items() if name[:8] != "TDSERVE_"}, **(settings or {})},
        input="" if stdin is None else stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done


def inspect(container: str) -> dict[str, Any]:
    """Returns the engine's description of a container."""
    found: dict[str, Any] = json.loads(docker("inspect", container).stdout)[0]
    return found


def logs(container: str) -> str:
    """Returns everything that a container has printed, over all its restarts."""
    done = docker("logs", container)
    return done.stdout + done.stderr


class Stack:
    """A compose project.

    Args:
        name: Name of the project.
        files: Compose files, relative to the top folder.
        settings: Variables that the files read.
    """

    def __init__(self, name: str, *files: str, **settings: str) -> None:
        self.name = name
        self._files = [option for file in ("docker-compose.yml", *files) for option in ("-f", file)]
        self._settings = {"TDSERVE_IMAGE": IMAGE, "TDSERVE_HEALTH_INTERVAL": "1s", **settings}

    def compose(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``docker compose`` for this project."""
        command = ("compose", "--ansi", "never", "-p", self.name, *self._files, *arguments)
        return docker(*command, stdin=stdin, check=check, settings=self._settings, timeout_s=timeout_s)

    def container(self, service: str, number: int = 1) -> str:
        """Returns the name of a container, whether it runs or not."""
        return f"{self.name}-{service}-{number}"

    def info(self, store: str) -> dict[str, Any] | None:
        """Returns the server's description of a store; None if the server does not answer or has no such store."""
        done = self.compose("exec", "-T", "server", "tdserve", "info", store, "--json", check=False)
        found: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
        return found

    def version(self) -> int:
        """Returns the newest version of the policy; 0 while the server does not answer."""
        info = self.info("policy")
        return 0 if info is None else int(info["version"])

    def python(self, program: str, *, service: str = "actor", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a program in a container of its own, configured like those of a service."""
        return self.compose(
            "run", "--rm", "-T", "--no-deps", "--entrypoint", "python", service, "-", stdin=program, check=check
        )

    def kill(self, service: str, number: int = 1) -> None:
        """Sends SIGKILL to a container's first process, as the kernel does.

        ``docker kill`` counts as an order to stay away: no restart policy brings such a container back.
        """
        pid = inspect(self.container(service, number))["State"]["Pid"]
        kill = f"import os; os.kill({pid}, 9)"
        docker("run", "--rm", "--pid=host", "--user=0", "--network=none", "--entrypoint=python", IMAGE, "-c", kill)

    def down(self) -> None:
        """Removes containers, networks and volumes."""
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "2", check=False)
