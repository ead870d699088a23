"""Errors for versions that do not fit what is to be filled, with the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from tdserve.base.errors import SpecMismatchError
from tdserve.client.weights.module_misfits import COMPILED, make_misfit_error
from tdserve.dtensor.sharded_index import IndexedLeaf, ShardedIndex
from tdserve.dtensor.state_leaves import StateLeaf, StateLeaves
from tdserve.structure.trees.tree import TensorLeaf

SKIP = "strict=False leaves such leaves out"
WAYS = (SKIP, "read into its state_dict(), which shares its memory, without this key")
"""What to do if only the version has a name, and if only the module has it."""


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
    remedy = _suggest_prefix(index.leaves.keys(), state.leaves.keys())
    prefix, module = _find_module(into, name)
    if module is not None and (not remedy or COMPILED in remedy):
        came, mine = (
            {
                tuple(key.removeprefix(prefix).split(".")): TensorLeaf(leaf.dtype, leaf.shape)
                for key, leaf in leaves.items()
                if key.startswith(prefix)
            }
            for leaves in (index.leaves, state.leaves)
        )
        path = tuple(name.removeprefix(prefix).split("."))
        return make_misfit_error(module, path, came, mine, store=store, ways=WAYS).with_fields(key=name)
    if name in index.leaves:
        expected = f"{describe_leaf(index.leaves[name])}, which the version has"
        actual = f"nothing of this name in into=; {remedy or SKIP}"
    else:
        expected = "nothing, as in the version"
        actual = (
            f"{describe_leaf(state.leaves[name])}, which into= has; {remedy or 'leave it out there, or publish it'}"
        )
    return SpecMismatchError(store=store, key=name, expected=expected, actual=actual)


def _find_module(into: Any, name: str, prefix: str = "") -> tuple[str, nn.Module | None]:
    """Returns the module in a dict, or the module itself, that has a name or could have it, and what comes before."""
    if isinstance(into, nn.Module) and not isinstance(into, TensorDictBase):
        return prefix, into
    for key, item in into.items() if isinstance(into, Mapping) else ():
        if name.startswith(f"{prefix}{key}."):
            found = _find_module(item, name, f"{prefix}{key}.")
            if found[1] is not None:
                return found
    return "", None


def _suggest_prefix(theirs: Collection[str], own: Collection[str]) -> str:
    """Returns what to do if one side has the names of the other below a key; "" if it does not."""
    remedies = (
        (theirs, own, "the version has these names below {0!r}, as {{{0!r}: module}} has: give into={{{0!r}: ...}}"),
        (own, theirs, "into= has the names of the version below {0!r}: give what is there alone"),
    )
    for longer, shorter, remedy in remedies:
        first = next(iter(shorter), "")
        for prefix in (each.removesuffix(first) for each in longer if first and each.endswith(f".{first}")):
            is_below = all(f"{prefix}{each}" in longer for each in shorter)
            if is_below and not any(each in longer for each in shorter):
                return remedy.format(prefix[:-1])
    return ""


def describe_leaf(leaf: IndexedLeaf | StateLeaf) -> str:
    """Returns dtype and shape of a tensor, for errors."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def describe_value(value: Any) -> str:
    """Returns the kind of a value, for errors."""
    return f"a value of type {type(value).__name__}, which is no tensor,"
