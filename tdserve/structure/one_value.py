"""One value for several elements of a table's row: stored with each of them, and put together again."""

from __future__ import annotations

from typing import Any, NamedTuple

from tdserve.messages.values.values import is_same
from tdserve.structure.elements import flat_elements
from tdserve.structure.tree import Path, Spec


class OneValue(NamedTuple):
    """In the place of a list of values: the one that all elements there share."""

    value: Any


def with_one_value(values: dict[Path, Any], spec: Spec, stored: Spec) -> dict[Path, Any]:
    """Values of rows of a table, with one for all elements of a row where that is what its structure says.

    Args:
        values: By path, of every leaf as ``spec`` says.
        spec: Of the rows.
        stored: Of the table: of rows that have one value for all of their elements in such a leaf.
    """
    paths: tuple[Path, ...] | None = stored.memo.get("one value")
    if paths is None:
        leaves = [(path, leaf) for path, leaf in stored.values if leaf.ragged is None and not leaf.is_unbatched]
        paths = tuple(path for path, leaf in leaves if not leaf.per_row and len(leaf.batch_size) > 1)
        stored.memo["one value"] = paths
    if not paths:
        return values
    found = dict(values)
    for path, leaf in spec.values:
        if path in paths and leaf.per_row:
            found[path] = [_one(row, len(leaf.batch_size) - 1) for row in values[path]]
    return found


def _one(row: Any, num_dims: int) -> Any:
    held = flat_elements(row, num_dims)
    is_one = bool(held) and all(is_same(value, held[0]) for value in held[1:])
    return OneValue(held[0]) if is_one else row
