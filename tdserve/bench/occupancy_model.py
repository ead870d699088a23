"""How many sessions and stores a server has room for, calculated from what one more of them costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tdserve.bench.cost_model import PARTS
from tdserve.bench.figures import Figure
from tdserve.store.database.catalog_db import MAX_CATALOG_BYTES

SERVER_PARTS = PARTS[:2]

MEMORY_OF_MACHINE = 64 << 30
"""Bytes; what files take in the page cache is not counted."""

DESCRIPTORS_OF_PROCESS = 1 << 20
"""The usual hard limit, to which a server raises its own."""

ONE_MORE = "one more "
"""How the names of these figures begin."""


@dataclass(frozen=True)
class OneMore:
    """What one more session, tensordict or table costs a server.

    Attributes:
        kind: What it is.
        cpu_s: Seconds of CPU to make it, by part.
        nbytes: Memory, by part.
        descriptors: By part.
        catalog_nbytes: In the catalog.
        idle_s: Seconds of CPU in a second without calls, soon after: what was made is still written to the
            disk, so this limits nothing.
    """

    kind: str
    cpu_s: Mapping[str, float]
    nbytes: Mapping[str, float]
    descriptors: Mapping[str, float]
    catalog_nbytes: float
    idle_s: float

    def find_limits(self) -> dict[str, float]:
        """Returns how many of them each part of one server has room for, the least first. Parts that they do not need
        are left out."""
        demands = {
            "memory": sum(self.nbytes.values()) / MEMORY_OF_MACHINE,
            "catalog": self.catalog_nbytes / MAX_CATALOG_BYTES,
            **{f"descriptors of {part}": num / DESCRIPTORS_OF_PROCESS for part, num in self.descriptors.items()},
        }
        limits = {name: 1 / demand for name, demand in demands.items() if demand > 1e-12}
        return dict(sorted(limits.items(), key=lambda item: item[1]))


def read_occupancy(figures: Iterable[Figure]) -> list[OneMore]:
    """Returns what was measured of each kind."""
    return [
        OneMore(
            figure.name.removeprefix(ONE_MORE),
            {part: figure.details[f"{part} CPU"] / 1e6 for part in SERVER_PARTS},
            {part: max(figure.details[f"{part} KiB"], 0.0) * 1024 for part in SERVER_PARTS},
            {part: max(figure.details[f"{part} fds"], 0.0) for part in SERVER_PARTS},
            max(figure.details["catalog B"], 0.0),
            figure.details["idle CPU"] / 1e6,
        )
        for figure in figures
        if figure.name.startswith(ONE_MORE)
    ]
