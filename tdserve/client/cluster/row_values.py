"""Divides a value that is written to rows of several servers: what each server writes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, is_tensor_collection

from tdserve.base.errors import SpecMismatchError
from tdserve.client.content.ragged_values import describe_value, split_entries, split_tensors
from tdserve.client.content.row_choice import Where, choose_rows
from tdserve.structure.array_tensors import read_array
from tdserve.structure.nodes import Form, Ragged
from tdserve.structure.tree import Entry, Node, Path, TensorLeaf, ValueLeaf, describe, show

Choose = Callable[[Where], Any]
"""Returns the value of some of the rows."""


def split_value(value: Any, entry: Entry, path: Path, *, store: str) -> Choose:
    """Returns what gives the values of some rows, of values for each row or of one for all.

    What a value means does not depend on how many rows a server has: this decides it for all rows, as ``coerce_value``
    would.

    Args:
        value: As of ``leaf[index] = value``, or of ``td[index] = value`` for a nested part.
        entry: What is written, with a first dimension of all rows.
        path: Its key, for errors.
        store: Name of the store, for errors.

    Raises:
        SpecMismatchError: The value does not fit so many rows. Servers raise what else does not fit.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "USO":  # strings and other values, one per row
        value = value.tolist()
    if isinstance(entry, Node):
        return _split_for_node(value, entry, path, store)
    if isinstance(entry, TensorLeaf):
        return _split_for_tensor(value, entry, path, store)
    if entry.ragged is not None:
        return _split_for_ragged(value, entry, entry.ragged, path, store)
    return _split_for_value(value, entry, path, store)


def _split_for_node(value: Any, node: Node, path: Path, store: str) -> Choose:
    if is_tensor_collection(value):
        size, wanted = tuple(value.batch_size), node.batch_size
        if node.inner is not None:
            is_whole = len(size) == len(node.inner)
        else:
            is_whole = len(size) < len(wanted) and size == wanted[len(wanted) - len(size) :]
        if not is_whole and size[:1] != wanted[:1]:
            raise _make_mismatch(path, f"batch size {list(wanted)}", f"{list(size)}", store)
        return _keep(value) if is_whole else lambda where: choose_rows(value, where)
    if isinstance(value, dict):
        return _split_entries_of(value, node, path, store)
    if isinstance(value, (torch.Tensor, np.ndarray)) and len(value.shape):  # of every leaf
        leaves = {key: value for key, child in node.entries if not isinstance(child, ValueLeaf)}
        return _split_entries_of(leaves, node, path, store)
    return _keep(value)


def _split_entries_of(values: dict[Any, Any], node: Node, path: Path, store: str) -> Choose:
    parts = {}
    for key, value in values.items():
        below = (key,) if isinstance(key, str) else key
        entry = _find_entry(node, below)
        parts[key] = _keep(value) if entry is None else split_value(value, entry, (*path, *below), store=store)
    return lambda where: {key: choose(where) for key, choose in parts.items()}


def _find_entry(node: Node, below: Path) -> Entry | None:
    found: Entry | None = node
    for key in below:
        found = dict(found.entries).get(key) if isinstance(found, Node) else None
    return found


def _split_for_tensor(value: Any, leaf: TensorLeaf, path: Path, store: str) -> Choose:
    if is_tensor_collection(value):
        return _keep(value)
    try:
        is_array = isinstance(value, np.ndarray)
        tensor = (read_array(value, dtype=leaf.dtype) if is_array else torch.as_tensor(value)).detach()
    except (TypeError, ValueError, RuntimeError):
        return _keep(value)
    if tensor.is_nested or tensor.layout is not torch.strided:
        return _keep(value)
    while tensor.ndim > len(leaf.shape) and tensor.shape[0] == 1:  # as torch does
        tensor = tensor[0]
    try:
        torch.broadcast_to(tensor, leaf.shape)
    except RuntimeError:
        raise _make_mismatch(path, describe(leaf), describe_value(tensor), store) from None
    if tensor.ndim < len(leaf.shape) or tensor.shape[0] != leaf.shape[0]:
        return _keep(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return lambda where: tensor[where]
    listed = tensor.tolist()  # numbers of Python, which take the dtype of the leaf
    return lambda where: choose_rows(listed, where)


def _split_for_ragged(value: Any, leaf: ValueLeaf, ragged: Ragged, path: Path, store: str) -> Choose:
    if ragged.form is Form.PACKED:
        found = split_entries(value, leaf.batch_size)
    else:
        found = split_tensors(value, leaf.batch_size, ragged)
    if found is None:
        raise _make_mismatch(path, describe(leaf), describe_value(value), store)
    return lambda where: choose_rows(list(found), where)


def _split_for_value(value: Any, leaf: ValueLeaf, path: Path, store: str) -> Choose:
    """Divides a stack of values, or a list of as many values as there are rows; anything else is one for all."""
    num_rows = leaf.batch_size[0]
    if isinstance(value, NonTensorStack):
        if tuple(value.batch_size[:1]) != (num_rows,):
            raise _make_mismatch(path, describe(leaf), f"values of batch size {list(value.batch_size)}", store)
        return lambda where: choose_rows(value, where)
    if not isinstance(value, list):
        return _keep(value)
    if len(value) == num_rows:
        return lambda where: choose_rows(value, where)
    single: Any = NonTensorData(data=value)  # though a server may have as many rows
    return _keep(single)


def _keep(value: Any) -> Choose:
    return lambda _: value


def _make_mismatch(path: Path, expected: str, actual: str, store: str) -> SpecMismatchError:
    return SpecMismatchError(store=store, key=show(path) if path else "", expected=expected, actual=actual)
