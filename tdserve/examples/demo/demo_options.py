"""The options of the demo, and how the parent hands them on to the processes that it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tdserve
from tdserve.base.config import TransportName
from tdserve.base.errors import InvalidRequestError

Role = Literal["server", "actor", "learner"]
ROLES: tuple[Role, ...] = ("server", "actor", "learner")

STDOUT = Path("-")
"""Instead of a file: standard output."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run of the demo.

    Attributes:
        seed: Fixes the randomness of environments, exploration and network. Two runs still differ, because messages of
            several processes arrive in another order, and because the server draws the samples.
        max_seconds: The demo ends after these seconds, solved or not. A learner that is a role of its own counts them
            over its restarts. An actor that is a role of its own ends a minute later, if the learner does not end it
            before.
        transport: How content travels.
        env: The name of a gymnasium environment with flat observations and discrete actions.
        num_actors: The number of actor processes.
        out: The folder for the figures; it is made when absent.
        root: The server's root, kept at the end. None means a temporary folder, removed at the end.
        json_path: The file for the figures as JSON; None means ``figures.json`` in ``out``, and ``STDOUT`` that they
            are printed too, and all else goes to standard error.
        png_path: The file for the learning curve; None means ``learning-curve.png`` in ``out``.
        role: Run only this part, with a server that runs elsewhere; None means the whole demo.
        address: ``host:port`` of that server; empty for the whole demo, which starts one.
        index: The number of this actor, from 0.
        token: The token of that server, kept out of ``repr``.
        local_root: Where this process sees that server's root, if elsewhere than the server does.
        target: The mean return of the last episodes that counts as solved; None means the environment's own.
        linger_s: How long an actor waits for another run when one is over; 0 ends it at once.
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
    address: str = ""
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
        if (self.role is None) != (not self.address):
            raise InvalidRequestError(argument="role", reason="a role needs an address, and an address a role")

    def connect(self, *, timeout_s: float) -> tdserve.Client:
        """Returns a client of that server. Its calls wait so long for a server that is away."""
        address, token, root = self.address, self.token, self.local_root
        return tdserve.connect(address, transport=self.transport, token=token, timeout_s=timeout_s, root=root)

    @property
    def title(self) -> str:
        """The name of the run, for people."""
        return f"{self.env}, seed {self.seed}"

    @property
    def figures_path(self) -> Path:
        """The path of the JSON file."""
        return self.out / "figures.json" if self.json_path is None or self.prints_json else self.json_path

    @property
    def prints_json(self) -> bool:
        """Whether the figures are printed as JSON."""
        return self.json_path == STDOUT

    @property
    def curve_path(self) -> Path:
        """The path of the PNG file."""
        return self.png_path or self.out / "learning-curve.png"

    def arguments(self, *, address: str, index: int) -> list[str]:
        """Returns the command line of an actor of this run; ``parse`` reads it."""
        shared = {name: getattr(self, name) for name in ("seed", "max_seconds", "transport", "env")}
        return [json.dumps({**shared, "address": address, "index": index})]


def parse(arguments: Sequence[str]) -> DemoOptions:
    """Reads the command line of ``python -m tdserve.examples.demo.actor``, written by ``arguments``."""
    (options,) = arguments
    return DemoOptions(role="actor", **json.loads(options))
