"""Which way the content of a broadcast takes among the ranks. Pure.

Large content goes down a chain: every rank sends it on once, in pieces, while it still receives; so it takes about as
long as one transfer, however many ranks there are. Small content goes down a binomial tree, of fewer steps.
"""

from __future__ import annotations

from typing import NamedTuple

CHAIN_BYTES = 1024 * 1024
"""From this size on the chain's longer way costs less than to send the content several times."""


class Route(NamedTuple):
    """One rank's place: whom it receives from (None: it is the source), and whom it sends to, in order."""

    parent: int | None
    children: tuple[int, ...]


def route(rank: int, src: int, world_size: int, nbytes: int) -> Route:
    """A rank's place in a broadcast of ``nbytes`` bytes from rank ``src``."""
    place = (rank - src) % world_size
    parent, children = _chain(place, world_size) if nbytes >= CHAIN_BYTES else _tree(place, world_size)
    return Route(
        None if parent is None else (parent + src) % world_size,
        tuple((child + src) % world_size for child in children),
    )


def _chain(place: int, size: int) -> tuple[int | None, list[int]]:
    return (place - 1 if place else None), ([place + 1] if place + 1 < size else [])


def _tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Children lie a power of two away that is larger than the place: the nearest, first, has the most below it."""
    steps = [1 << bit for bit in range(size.bit_length())]
    children = [place + step for step in steps if step > place and place + step < size]
    parent = place - (1 << (place.bit_length() - 1)) if place else None
    return parent, children
