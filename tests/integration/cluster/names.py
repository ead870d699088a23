"""Names that no store has, and the function of a process that gets handles of stores."""

from __future__ import annotations

import itertools
import os

import tdserve
from tdserve.rules.placement import choose_owner

_numbers = itertools.count()


def next_name() -> str:
    """Returns a new name."""
    return f"store-{os.getpid()}-{next(_numbers)}"


def name_owned_by(server: int, num_servers: int) -> str:
    """Returns a new name that a certain server decides about."""
    return next(name for name in iter(next_name, None) if choose_owner(name, num_servers) == server)


def read_both(client: tdserve.ClusterClient, handle: tdserve.ShardedReplayHandle, name: str) -> None:
    """Reads a shared table by its handle, and a store of one server by its name; each has three rows."""
    assert len(handle) == 3
    assert client.from_remote_init(name)["number"].tolist() == [0, 1, 2]
