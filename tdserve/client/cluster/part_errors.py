"""Errors of a part of a shared store, as those of the store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tdserve.base.errors import Field, StoreMovedError, TDServeError, TransportError
from tdserve.rules.placement import find_whole


@contextmanager
def convert_part_errors(name: str) -> Iterator[None]:
    """Makes errors that a block raises about a part of a store name the store, which is what the user knows.

    Args:
        name: Name of the store.
    """
    try:
        yield
    except (StoreMovedError, TransportError):  # of the part alone, and who follows it goes by its name
        raise
    except TDServeError as error:
        fields = {field: _name_whole(value, name) for field, value in error.fields.items()}
        if fields == error.fields:
            raise
        raise error.with_fields(**fields) from error


def note_elsewhere(failure: TDServeError, done: str) -> TDServeError:
    """Returns the failure of one of several steps with what became of others, if it has room for that; else as it is.

    Args:
        done: What became of them; "" if there is nothing to add.
    """
    field = next((field for field in ("elsewhere", "reason", "state", "what") if field in failure.fields), None)
    if not done or field is None:
        return failure
    before = failure.fields[field]
    both = f"{before} ({done})" if field == "what" else f"{before}; {done}"
    noted = failure.with_fields(**{field: both if before else done})
    noted.__cause__ = failure
    return noted


def _name_whole(value: Field, name: str) -> Field:
    """Returns the field of an error: the name of a part, or a text with such names."""
    if not isinstance(value, str) or f"{name}#" not in value:
        return value
    if find_whole(value) == name:
        return name
    part = rf"'{re.escape(name)}#(\d+)'"
    return re.sub(part, repr(name), re.sub(f"store {part}", rf"shard \1 of store {name!r}", value))
