"""Errors for versions that do not fit what is to be filled, with the remedy."""

from __future__ import annotations

from typing import Any

from torch import nn

from tdserve.base.errors import SpecMismatchError
from tdserve.client.weights.module_misfits import make_misfit_error
from tdserve.dtensor.sharded_index import IndexedLeaf, ShardedIndex
from tdserve.dtensor.state_leaves import StateLeaf, StateLeaves
from tdserve.structure.tree import TensorLeaf

SKIP = "strict=False leaves such leaves out"


def make_sharded_misfit_error(
    into: Any, name: str, index: ShardedIndex, state: StateLeaves, *, store: str
) -> SpecMismatchError:
    """Returns the error for a tensor that only the version has, or only what is to be filled.

    Args:
        into: What is to be filled.
        name: The name of the tensor.
        index: The version.
        state: What ``into`` has.
        store: Name of the weights.
    """
    if isinstance(into, nn.Module):
        came, mine = (
            {tuple(key.split(".")): TensorLeaf(leaf.dtype, leaf.shape) for key, leaf in leaves.items()}
            for leaves in (index.leaves, state.leaves)
        )
        ways = (SKIP, "read into its state_dict(), which shares its memory, without this key")
        return make_misfit_error(into, tuple(name.split(".")), came, mine, store=store, ways=ways)
    if name in index.leaves:
        expected = f"{describe_leaf(index.leaves[name])}, which the version has"
        actual = f"nothing of this name in into=; {SKIP}"
    else:
        expected = "nothing, as in the version"
        actual = f"{describe_leaf(state.leaves[name])}, which into= has"
    return SpecMismatchError(store=store, key=name, expected=expected, actual=actual)


def describe_leaf(leaf: IndexedLeaf | StateLeaf) -> str:
    """Returns dtype and shape of a tensor, for errors."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def describe_value(value: Any) -> str:
    """Returns the kind of a value, for errors."""
    return f"a value of type {type(value).__name__}, which is no tensor,"
