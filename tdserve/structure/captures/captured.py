"""The result of a capture, and its conversion to the form that another structure needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tdserve.structure.stacks.elements import convert_to_dense, convert_to_ragged, to_declared
from tdserve.structure.tensors.file_tensors import FileTensor
from tdserve.structure.trees.changes import replace_entries
from tdserve.structure.trees.nodes import Entry, Node, Path, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

_NUM_KEPT_SPECS = 512
"""Specs shared by captures of equal structures, so that fingerprints, layouts and recipes are made once."""


class EncodedValues(list[Any]):
    """Values that were encoded to check whether they can be sent, and the result; neither is changed."""

    def __init__(self, values: list[Any], blobs: list[bytes]) -> None:
        super().__init__(values)
        self.blobs = blobs

    @property
    def nbytes(self) -> int:
        """Encoded size of all of them."""
        return sum(map(len, self.blobs))


class Captured(NamedTuple):
    """The content of a tensordict.

    Attributes:
        spec: The structure; the same object for equal structures, as long as it is cached.
        tensors: Every tensor leaf by path: plain, detached, sharing memory with the tensordict.
        values: Every non-tensor leaf by path; the (nested) list of values if the leaf has one per row.
        memo: Results that other code derives from the tensors, for as long as this capture exists.
        is_kept: Whether the next capture of the same tensors finds it.
    """

    spec: Spec
    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    memo: dict[str, Any]
    is_kept: bool = False

    @property
    def is_in_files(self) -> bool:
        """Whether tensors are read from a file when they are written, which may fail halfway."""
        return FileTensor in map(type, self.tensors.values())


def conform(captured: Captured, expected: Spec) -> Captured:
    """Converts a capture to the form of a structure: dense rows to ragged leaves, or the reverse.

    Leaves that do not fit stay as they are; ``check_matches`` reports them.
    """
    wanted: dict[Path, TensorLeaf | ValueLeaf] = dict((*expected.tensors, *expected.values))
    tensors, values = dict(captured.tensors), dict(captured.values)
    changed: dict[Path, Entry] = {}
    for path, leaf in captured.spec.tensors:
        entry = wanted.get(path)
        if isinstance(entry, ValueLeaf) and entry.ragged is not None and entry.ragged.dtype:
            found = convert_to_ragged(tensors[path], entry, leaf)
            if found is not None:
                changed[path], values[path] = found
                del tensors[path]
    for path, value_leaf in captured.spec.values:
        entry = wanted.get(path)
        ragged = value_leaf.ragged
        if entry is None or ragged is None or not ragged.dtype:
            continue
        if isinstance(entry, TensorLeaf):
            dense = convert_to_dense(values[path], value_leaf, entry)
            if dense is not None:
                changed[path] = TensorLeaf(ragged.dtype, tuple(dense.shape))
                tensors[path] = dense
                del values[path]
        elif entry.ragged is not None and entry.ragged != ragged:
            changed[path] = to_declared(values[path], value_leaf, entry.ragged)
    if not changed:
        return captured
    return Captured(share_spec(replace_entries(captured.spec.root, changed)), tensors, values, {})


@lru_cache(maxsize=_NUM_KEPT_SPECS)
def share_spec(root: Node) -> Spec:
    """Returns the spec of a tree; the same object for equal trees, as long as it is cached."""
    return Spec(root)
