"""What one may ask of the demo, and how the parent hands it on to the processes that it starts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tdserve
from tdserve.base.config import TransportName
from tdserve.base.errors import InvalidRequestError

Role = Literal["server", "actor", "learner"]
ROLES: tuple[Role, ...] = ("server", "actor", "learner")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run of the demo.

    Attributes:
        seed: Fixes the randomness of environments, exploration and network. Two runs still differ, because messages of
            several processes arrive in another order, and because the server draws the samples.
        max_seconds: The demo ends after these seconds, solved or not. As a role of its own a learner counts them over
            its restarts, and an actor ends a minute later if the learner has not said before that it is over.
        transport: How content travels.
        env: Name of a gymnasium environment with flat observations and discrete actions.
        num_actors: Actor processes.
        out: Folder for the figures; made when absent.
        root: The server's root, kept at the end; None is a temporary folder, removed at the end.
        json_path: The figures as JSON; None is ``figures.json`` in ``out``.
        png_path: The learning curve; None is ``learning-curve.png`` in ``out``.
        role: Be only this part, of a server that runs elsewhere; None is the whole demo.
        address: ``host:port`` of that server.
        index: Number of this actor, from 0.
        token: What opens that server, kept out of ``repr``.
        local_root: Where this process sees that server's root, if elsewhere than the server does.
        target: Mean return of the last episodes that counts as solved; None is the environment's own.
        linger_s: So long an actor waits for another run when one is over; 0 ends it at once.
    """

    seed: int = 0
    max_seconds: float = 180.0
    transport: TransportName = "gloo"
    env: str = "CartPole-v1"
    num_actors: int = 2
    out: Path = Path("tdserve-demo")
    root: Path | None = None
    json_path: Path | None = None
    png_path: Path | None = None
    role: Role | None = None
    address: str | None = None
    index: int = 0
    token: str | None = field(default=None, repr=False)
    local_root: str | None = None
    target: float | None = None
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        for name, is_fine, bound in (
            ("seed", self.seed >= 0, "at least 0"),
            ("max_seconds", self.max_seconds > 0, "above 0"),
            ("num_actors", self.num_actors >= 1, "at least 1"),
        ):
            if not is_fine:
                raise InvalidRequestError(argument=name, reason=f"{getattr(self, name)} is not {bound}")
        if (self.role is None) != (self.address is None):
            raise InvalidRequestError(argument="role", reason="a role needs an address, and an address a role")

    @property
    def server_address(self) -> str:
        """Where an actor or learner connects to.

        Raises:
            InvalidRequestError: These are the options of the whole demo, which starts a server of its own.
        """
        if self.address is None:
            raise InvalidRequestError(argument="address", reason="there is none")
        return self.address

    def connect(self, *, timeout_s: float = 30.0) -> tdserve.Client:
        """A client of that server."""
        return tdserve.connect(
            self.server_address,
            transport=self.transport,
            token=self.token,
            timeout_s=timeout_s,
            root=self.local_root,
        )

    @property
    def figures_path(self) -> Path:
        """Where the JSON file goes."""
        return self.json_path or self.out / "figures.json"

    @property
    def curve_path(self) -> Path:
        """Where the PNG file goes."""
        return self.png_path or self.out / "learning-curve.png"

    def arguments(self, *, address: str, index: int = 0) -> list[str]:
        """The command line of an actor or learner of this run; ``parse`` reads it."""
        shared = {name: getattr(self, name) for name in ("seed", "max_seconds", "transport", "env")}
        return [json.dumps({**shared, "address": address, "index": index})]


def index_of_host(hostname: str) -> int:
    """A number for an actor that was told none: the one at the end of ``actor-3``, one made of a container's id, or 0.

    Actors of one service in containers differ in nothing but this name, and are to explore differently.
    """
    numbered = re.fullmatch(r".*[-_.](\d{1,6})", hostname)
    if numbered:
        return int(numbered[1])
    return int(hostname, 16) % 10_000 if re.fullmatch(r"[0-9a-f]{12}", hostname) else 0


def parse(role: Role, arguments: Sequence[str] | None = None) -> DemoOptions:
    """Reads the command line of ``python -m tdserve.examples.demo.actor`` or ``.learner``, as a run has written it."""
    (options,) = sys.argv[1:] if arguments is None else arguments
    return DemoOptions(role=role, **json.loads(options))
