"""Adapts a capture to another structure where no value can change: dtypes that hold all values, and keys to leave out.

What has to be done is found once for two structures and kept, so that content that fits already costs a look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tdserve.structure.captures.captured import Captured, share_spec
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.changes import replace_entries
from tdserve.structure.trees.dtypes import has_all_values
from tdserve.structure.trees.nodes import Entry, Path, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

NO_KEYS: frozenset[str] = frozenset()


class _Adaptation(NamedTuple):
    like: Spec
    ignores: frozenset[str]
    spec: Spec
    dtypes: Mapping[Path, torch.dtype]
    left_out: frozenset[Path]


def adapt(captured: Captured, like: Spec, ignores: frozenset[str] = NO_KEYS) -> Captured:
    """Returns a capture with the dtypes of another structure, as far as these hold all of its values.

    What does not fit stays as it is; ``check_matches`` reports it.

    Args:
        captured: Content to be sent.
        like: The structure that it is for, of any number of rows.
        ignores: Keys of the root; tensors at those that ``like`` does not have are left out.
    """
    if captured.is_in_files:  # such tensors are read when they are sent
        return captured
    spec = captured.spec
    plan: _Adaptation | None = spec.memo.get("adaptation")
    if plan is None or plan.like is not like or plan.ignores is not ignores:
        plan = spec.memo["adaptation"] = _plan(spec, like, ignores)
    if plan.spec is spec:
        return captured
    tensors = {
        path: tensor.to(plan.dtypes[path]) if path in plan.dtypes else tensor
        for path, tensor in captured.tensors.items()
        if path not in plan.left_out
    }
    return Captured(plan.spec, tensors, captured.values, {})


def _plan(spec: Spec, like: Spec, ignores: frozenset[str]) -> _Adaptation:
    root = spec.root
    wanted: dict[Path, TensorLeaf | ValueLeaf] = dict((*like.tensors, *like.values))
    keys = {key for key, _ in like.root.entries}
    left_out = frozenset(
        (key,) for key, entry in root.entries if key in ignores - keys and isinstance(entry, TensorLeaf)
    )
    changed: dict[Path, Entry] = {}
    for path, leaf in spec.tensors:
        dtype = _get_dtype(wanted.get(path))
        if dtype is not None and dtype != leaf.dtype and has_all_values(dtype, leaf.dtype):
            changed[path] = leaf._replace(dtype=dtype)
    if changed:
        root = replace_entries(root, changed)
    if left_out:  # rows that a table has shown with these keys: as a plain tensordict, whatever its rows are
        entries = tuple(entry for entry in root.entries if (entry[0],) not in left_out)
        root = root._replace(entries=entries, tensorclass=root.tensorclass or like.root.tensorclass)
    dtypes = {path: to_torch(leaf.dtype) for path, leaf in changed.items() if isinstance(leaf, TensorLeaf)}
    return _Adaptation(like, ignores, share_spec(root) if changed or left_out else spec, dtypes, left_out)


def _get_dtype(entry: TensorLeaf | ValueLeaf | None) -> str | None:
    if isinstance(entry, ValueLeaf):
        return entry.ragged.dtype or None if entry.ragged is not None else None
    return None if entry is None else entry.dtype
