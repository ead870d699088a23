"""Keys as users write them."""

from __future__ import annotations

from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.structure.trees.tree import Path

NO_DEFAULT: Any = object()
"""Stands for a default that was not given."""


def to_path(index: Any) -> Path | None:
    """Returns a key as a path; None for what is no key. Tuples within a tuple are one path, as in tensordict."""
    if isinstance(index, str):
        return (index,)
    if not isinstance(index, tuple) or not index:
        return None
    if all(isinstance(part, str) for part in index):
        return index
    parts = [to_path(part) for part in index]
    return None if None in parts else tuple(key for part in parts if part is not None for key in part)


def check_path(key: Any, *, argument: str = "key") -> Path:
    """Returns a key as a path. Raises InvalidRequestError for what is no key."""
    path = to_path(key)
    if path is None:
        raise InvalidRequestError(argument=argument, reason=f"{key!r} is neither a str nor a tuple of str")
    return path


def list_paths(keys: Any, *, argument: str) -> list[Path]:
    """Returns a key, or each key of a list, as a path. Raises InvalidRequestError for what is no key."""
    if not isinstance(keys, (str, tuple, list)):
        raise InvalidRequestError(argument=argument, reason=f"{keys!r} is neither a key nor a list of keys")
    return [check_path(key, argument=argument) for key in (keys if isinstance(keys, list) else [keys])]
