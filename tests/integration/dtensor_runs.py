"""Runs roles of ``dtensor_roles`` and ``dtensor_loop_roles`` in all ranks of a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.forked_clients import Child, ForkedClients

ROLES = ("tests.integration.dtensor_roles", "tests.integration.dtensor_loop_roles")


def start(
    ranks: ForkedClients, role: str, address: str, name: str, folder: Path, size: int, **arguments: Any
) -> list[Child]:
    """Starts ranks of one process group in a role."""
    place = folder / role
    place.mkdir(parents=True, exist_ok=True)
    return [
        ranks.start(role, address, name, folder=str(place), rank=rank, size=size, **arguments) for rank in range(size)
    ]


def finish(children: list[Child]) -> list[list[list[str]]]:
    """Waits for the end of ranks; returns the words of each one's lines."""
    return [[line.split() for line in child.rest()] or [[]] for child in children]


def run(
    ranks: ForkedClients, role: str, address: str, name: str, folder: Path, size: int, **arguments: Any
) -> list[list[list[str]]]:
    """Runs a role in ranks of one process group to its end; returns the words of each rank's lines."""
    return finish(start(ranks, role, address, name, folder, size, **arguments))
