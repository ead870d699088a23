"""Python's operators for stores and views: each performs tensordict's own on a copy.

``==`` and the other comparisons compare element by element, as for tensordicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tdserve.base.errors import NotSupportedError

Operator = Callable[[Any, Any], Any]


def on_copy(*names: str) -> Iterator[Operator]:
    """Makes operators of two operands that run on a local copy: special methods, named without their underscores."""
    return (_make_binary(f"__{name}__") for name in names)


def on_copy_of_one(*names: str) -> Iterator[Callable[[Any], Any]]:
    """Makes operators of one operand that run on a local copy."""
    return (_make_unary(f"__{name}__") for name in names)


def on_copy_written_back(*names: str) -> Iterator[Operator]:
    """Makes operators that assign: each performs the in-place method of this name on a copy, and writes it back."""
    return (_make_assigning(name) for name in names)


def refuse_truth(_: object) -> bool:
    """Refuses to be true or false: both how many rows there are and what they hold may be meant."""
    raise NotSupportedError(
        feature="the truth value of a store",
        reason="use len(store.keys()) to test for keys, is_empty() for leaves, (a == b).all() to compare",
    )


def _make_binary(name: str) -> Operator:
    def operate(self: Any, other: Any) -> Any:
        return self._perform(name, other)

    operate.__name__ = name
    return operate


def _make_unary(name: str) -> Callable[[Any], Any]:
    def operate(self: Any) -> Any:
        return self._perform(name)

    operate.__name__ = name
    return operate


def _make_assigning(name: str) -> Operator:
    def operate(self: Any, other: Any) -> Any:
        return self._rewrite(name, other)

    return operate
