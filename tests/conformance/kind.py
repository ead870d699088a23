"""The table of kinds of tensordicts, which the modules ``kinds_*`` fill; ``kinds`` has all of it.

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
    """Whatever tensordict does in here to an instance runs no ``__post_init__``: its own indexing does, once more."""
    _HANDLING.append(True)
    try:
        yield
    finally:
        _HANDLING.pop()


def is_by_tensordict() -> bool:
    """Whether this is asked by an instance that tensordict itself makes of another."""
    return bool(_HANDLING)


def itself(td: Any) -> Any:
    """The same."""
    return td


class Kind(NamedTuple):
    """How one kind is tried.

    Attributes:
        make: Gives an example, equal ones at every call.
        expected: What a whole read of a store gives that was made of an example.
        has_rows: Whether its first batch dimension numbers ``ROWS`` rows.
        ragged: What is declared of such a row, as of ``create_replay``.
        local: Makes of an example what tensordict itself can index, where it cannot index the example.
    """

    make: Callable[[], Any]
    expected: Callable[[Any], Any] = itself
    has_rows: bool = True
    ragged: Any = None
    local: Callable[[Any, Any], Any] | None = None

    def rows(self, index: Any) -> Any:
        """What rows of a store are that was made of an example: as tensordict's own indexing gives them, unlocked."""
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
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Puts a function that makes an example into the table; arguments as of ``Kind``."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        if name in KINDS:
            raise KeyError(name)
        KINDS[name] = Kind(make, expected, has_rows, ragged, local)
        return make

    return enter


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    """Numbers that are all different."""
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
