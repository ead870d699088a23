"""Keys as a list that has the set operations of ``TensorDict.keys()``."""

from __future__ import annotations

from collections.abc import Iterable, Set as AbstractSet
from typing import Any

Key = str | tuple[str, ...]


class KeyList(list[Key]):
    """Keys in order.

    ``keys & other``, ``|``, ``-`` and ``^`` return sets. It equals a list in the same order or an equal set.
    """

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AbstractSet):
            return set(self) == other
        return list.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as for every list

    def __and__(self, other: Iterable[Any]) -> set[Key]:
        return set(self).intersection(other)

    __rand__ = __and__

    def __or__(self, other: Iterable[Any]) -> set[Key]:
        return set(self).union(other)

    __ror__ = __or__

    def __xor__(self, other: Iterable[Any]) -> set[Key]:
        return set(self).symmetric_difference(other)

    __rxor__ = __xor__

    def __sub__(self, other: Iterable[Any]) -> set[Key]:
        return set(self).difference(other)

    def __rsub__(self, other: Iterable[Any]) -> set[Key]:
        return set(other).difference(self)

    def isdisjoint(self, other: Iterable[Any]) -> bool:
        """Returns whether no key is in both."""
        return set(self).isdisjoint(other)
