"""A structure as rows of a table and as JSON: the leaf of every key, in the order of the keys."""

from __future__ import annotations

from typing import NamedTuple

from tdserve.cli.render import format_key, format_nbytes
from tdserve.structure.nodes import Node, TensorLeaf
from tdserve.structure.tree import Path, Spec

COLUMNS = ("key", "type", "shape", "bytes")


class Leaf(NamedTuple):
    """One key. ``type`` is a dtype, "value", "tensordict" or a tensorclass; ``nbytes`` is None if it is not fixed."""

    key: str | Path
    type: str
    shape: tuple[int, ...]
    nbytes: int | None

    def make_cells(self) -> tuple[str, str, str, str]:
        """Returns the row of a table with ``COLUMNS``."""
        nbytes = "" if self.nbytes is None else format_nbytes(self.nbytes)
        return format_key(self.key), self.type, str(list(self.shape)), nbytes

    def as_dict(self) -> dict[str, object]:
        """Returns the leaf's JSON object; a nested key is a list."""
        return self._asdict()


def describe_leaves(spec: Spec, *, leaves_only: bool = False, sort: bool = False) -> list[Leaf]:
    """Lists every key of a structure, nested ones included."""
    return [_describe(spec, key) for key in spec.keys(include_nested=True, leaves_only=leaves_only, sort=sort)]


def _describe(spec: Spec, key: str | Path) -> Leaf:
    entry = spec.find((key,) if isinstance(key, str) else key)
    if isinstance(entry, TensorLeaf):
        return Leaf(key, entry.dtype, entry.shape, entry.nbytes)
    if isinstance(entry, Node):
        return Leaf(key, entry.tensorclass or "tensordict", entry.shown_batch_size, None)
    if entry.ragged is not None and entry.ragged.dtype:
        return Leaf(key, entry.ragged.dtype, entry.batch_size + entry.ragged.shape, None)
    return Leaf(key, "value per row" if entry.per_row else "value", entry.batch_size, None)
