"""A structure as a list of its keys, each with type, shape and size: what commands and ``info`` show of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tdserve.structure.trees.nodes import Entry, Node, TensorLeaf
from tdserve.structure.trees.tree import Path, Spec


class Leaf(NamedTuple):
    """One key.

    Attributes:
        key: A name at the root, or the path of a nested key.
        type: A dtype, ``"value"``, ``"value per row"``, ``"tensordict"`` or the name of a tensorclass.
        shape: Shape of a tensor, or the batch size; -1 where rows differ.
        nbytes: Size of a tensor; None of what has no fixed size.
    """

    key: str | Path
    type: str
    shape: tuple[int, ...]
    nbytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """Returns the leaf's JSON object; a nested key is a list."""
        key = self.key if isinstance(self.key, str) else list(self.key)
        return {"key": key, "type": self.type, "shape": list(self.shape), "nbytes": self.nbytes}


def describe_leaves(spec: Spec, *, leaves_only: bool = False, sort: bool = False) -> list[Leaf]:
    """Lists every key of a structure, nested ones included."""
    keys = spec.keys(include_nested=True, leaves_only=leaves_only, sort=sort)
    return [describe_leaf(key, spec.find((key,) if isinstance(key, str) else key)) for key in keys]


def describe_leaf(key: str | Path, entry: Entry) -> Leaf:
    """Describes what is at one key."""
    if isinstance(entry, TensorLeaf):
        return Leaf(key, entry.dtype, entry.shape, entry.nbytes)
    if isinstance(entry, Node):
        return Leaf(key, entry.tensorclass or "tensordict", entry.shown_batch_size, None)
    if entry.ragged is not None and entry.ragged.dtype:
        return Leaf(key, entry.ragged.dtype, entry.batch_size + entry.ragged.shape, None)
    return Leaf(key, "value per row" if entry.per_row else "value", entry.batch_size, None)


def describe_spec(spec: Spec) -> dict[str, Any]:
    """Returns a structure's JSON object: ``batch_size``, and ``keys`` with one object like ``Leaf`` each."""
    return {"batch_size": list(spec.batch_size), "keys": [leaf.as_dict() for leaf in describe_leaves(spec)]}
