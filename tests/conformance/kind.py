"""The table of kinds of tensordicts. The modules ``kinds_*`` fill it; ``kinds`` imports all of them.

An example is made anew by every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

ROWS = 4
"""Rows of every example that has rows."""


_HANDLING: list[bool] = []


@contextmanager
def by_tensordict() -> Iterator[None]:
    """Marks a block in which tensordict makes instances, so that no ``__post_init__`` counts: its own indexing runs it
    once more."""
    _HANDLING.append(True)
    try:
        yield
    finally:
        _HANDLING.pop()


def is_by_tensordict() -> bool:
    """Returns whether tensordict itself is making an instance from another one now."""
    return bool(_HANDLING)


def itself(td: Any) -> Any:
    """Returns its argument."""
    return td


class Kind(NamedTuple):
    """How one kind is tested.

    Attributes:
        make: Makes an example; equal ones at every call.
        expected: Returns what a read of a whole store returns if it was made of this example.
        has_rows: Whether its first batch dimension has ``ROWS`` rows.
        ragged: What is declared ragged, as in ``create_replay``.
        local: Converts an example to one that tensordict can index, where it cannot index the example.
    """

    make: Callable[[], Any]
    expected: Callable[[Any], Any] = itself
    has_rows: bool = True
    ragged: Any = None
    local: Callable[[Any, Any], Any] | None = None

    def rows(self, index: Any) -> Any:
        """Returns what a read of rows returns: the result of tensordict's own indexing, unlocked."""
        td = self.expected(self.make())
        if td.is_locked:
            td.unlock_()
        with by_tensordict():
            return td[index] if self.local is None else self.local(td, index)


KINDS: dict[str, Kind] = {}
"""Every kind by its name."""


def kind(
    name: str,
    *,
    expected: Callable[[Any], Any] = itself,
    has_rows: bool = True,
    ragged: Any = None,
    local: Callable[[Any, Any], Any] | None = None,
    into: dict[str, Kind] = KINDS,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Puts a function that makes an example into a table; other arguments as in ``Kind``."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        if name in into:
            raise KeyError(name)
        into[name] = Kind(make, expected, has_rows, ragged, local)
        return make

    return enter


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    """Returns numbers that are all different."""
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
