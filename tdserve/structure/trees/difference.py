"""The first key at which two structures differ, with the entries of both."""

from __future__ import annotations

from typing import Any, NamedTuple

from tdserve.base.errors import SpecMismatchError
from tdserve.structure.trees.matching import check_node, describe_only, quote, show
from tdserve.structure.trees.nodes import Entry, Node, Path

_OF_CONTENT = frozenset({"entries", "members"})
"""Fields of nodes that hold their content."""


class Difference(NamedTuple):
    """A difference between two structures.

    Attributes:
        key: Key of the part, as errors show it; "" is the root.
        one: Entry of the first structure.
        other: Entry of the second.
    """

    key: str
    one: str
    other: str


def find_difference(one: Node, other: Node) -> Difference | None:
    """Returns the first difference, with keys, shapes and dtypes before anything else; None if there is none.

    The order of keys does not count.
    """
    for left, right, is_turned in ((one, other, False), (other, one, True)):
        try:
            check_node(left, right, (), "", advise=describe_only)  # free sizes match any other, so check both ways
        except SpecMismatchError as error:
            found = Difference(error.key, error.expected, error.actual)
            return found._replace(one=found.other, other=found.one) if is_turned else found
    return _find_detail(one, other, ())


def _find_detail(one: Entry, other: Entry, path: Path) -> Difference | None:
    """Returns the first difference besides content: names of dimensions, devices, locks, and so on."""
    if type(one) is not type(other):
        return _make_difference(path, type(one).__name__, type(other).__name__)
    for field in one._fields:
        mine, theirs = getattr(one, field), getattr(other, field)
        if field not in _OF_CONTENT and mine != theirs:
            return _make_difference(path, _describe_field(field, mine), _describe_field(field, theirs))
    if not isinstance(one, Node) or not isinstance(other, Node):
        return None
    entries = dict(other.entries)
    for key, entry in one.entries:
        there = entries.pop(key, None)
        if there is None:
            return _make_difference((*path, key), "a key", "no such key")
        found = _find_detail(entry, there, (*path, key))
        if found is not None:
            return found
    if entries:
        return _make_difference((*path, next(iter(entries))), "no such key", "a key")
    if one.members != other.members:
        return _make_difference(path, "rows of some structures", "rows of others")
    return None


def _describe_field(field: str, value: Any) -> str:
    return f"{field}={value}"


def _make_difference(path: Path, one: str, other: str) -> Difference:
    return Difference(show(path) if path else "", one, other)


def describe_difference(one: Node, other: Node) -> str:
    """Describes in a sentence how an existing structure differs from a requested one."""
    found = find_difference(one, other)
    if found is None:
        return "its structure differs"
    where = f"at key {quote((found.key,))}" if found.key else "as a whole"
    return f"its structure differs {where}: it has {found.one}, asked is {found.other}"
