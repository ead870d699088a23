"""Pads ragged tensors to the longest of a result, with masks that mark the content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.captured import conform, share_spec
from tdserve.structure.stacks.elements import flatten_elements
from tdserve.structure.tensors.pieces import Pieces
from tdserve.structure.tensors.torch_types import to_indexable
from tdserve.structure.trees.changes import replace_entries
from tdserve.structure.trees.nodes import Entry, Node, Path, Ragged, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

MASKS = "masks"
"""Key of the root below which the masks are, as in ``tensordict.pad_sequence``."""

Pad = float | int | bool | Mapping[Any, Any] | None
"""Padding: a number for all keys, or numbers by key and 0 for the others; None leaves tensors ragged."""


class Columns(NamedTuple):
    """Content by path, and its structure: the arguments of ``structure.building.build.build``."""

    spec: Spec
    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]


def pad_ragged(spec: Spec, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any], pad: Pad) -> Columns:
    """Pads every ragged tensor after its elements, and adds masks under ``("masks", *key)``.

    Nested parts whose rows differ in structure (chat histories) stay as they are.

    Args:
        spec: Structure of the content.
        tensors: Its dense leaves.
        values: Its other leaves.
        pad: See ``Pad``.

    Shape:
        Leaf ``[*batch, *sizes]`` with the largest sizes of its elements; mask bool ``[*batch, *sizes that differ]``.

    Raises:
        InvalidRequestError: ``pad`` is not a number, or names a missing key; or there is a key ``"masks"`` already.
    """
    columns = Columns(spec, dict(tensors), dict(values))
    if pad is None:
        return columns
    fills = _find_padding(spec, pad)
    ragged = [(path, leaf, leaf.ragged) for path, leaf in spec.values if leaf.ragged is not None and leaf.ragged.dtype]
    if not ragged:
        return columns
    if MASKS in dict(spec.root.entries):
        raise InvalidRequestError(argument="pad", reason=f"there is a key {MASKS!r} already")
    changed: dict[Path, Entry] = {}
    masks: dict[Path, TensorLeaf] = {}
    for path, leaf, kind in ragged:
        dense, mask = _fill_up(columns.values.pop(path), leaf, kind, fills(path))
        columns.tensors[path] = dense
        columns.tensors.update({(MASKS, *path): mask})
        changed[path] = TensorLeaf(kind.dtype, tuple(dense.shape))
        masks[path] = TensorLeaf("bool", tuple(mask.shape))
    root = _make_dense(replace_entries(spec.root, changed))
    held = _make_masks_node(root, masks)
    # A tensorclass has no field for the masks.
    root = root._replace(entries=(*root.entries, (MASKS, held)), tensorclass=None)
    return columns._replace(spec=share_spec(root))


def pad_built(td: Any, pad: Pad, stored: Spec | None = None) -> Any:
    """Pads a tensordict that is built already; returns it unchanged if there is nothing to pad.

    Args:
        td: The tensordict.
        pad: See ``Pad``.
        stored: Structure of the store, of any number of rows, of whose keys ``td`` may have a part. It decides what is
            ragged, and in which dimensions, whatever sizes these rows happen to have. ``pad`` may name its other
            ragged leaves, too.
    """
    if pad is None:
        return td
    captured = capture(td, allow_pickle=True, is_exact=True)
    if captured.spec.packed:  # rows with a structure of their own are captured exactly only to be sent
        captured = capture(td, allow_pickle=True)
    if stored is not None:
        captured = conform(captured, stored)
        pad = select_padding(pad, captured.spec, stored)
    return build(*pad_ragged(captured.spec, captured.tensors, captured.values, pad))


def select_padding(pad: Pad, spec: Spec, stored: Spec) -> Pad:
    """Returns the padding without that of ragged leaves of the store which the content does not have."""
    if not isinstance(pad, Mapping):
        return pad
    own = dict(spec.values)
    others = {path for path, leaf in stored.values if leaf.ragged is not None and path not in own}
    return {key: value for key, value in pad.items() if ((key,) if isinstance(key, str) else key) not in others}


def _find_padding(spec: Spec, pad: Any) -> Any:
    """Returns the padding at a path."""
    if isinstance(pad, Mapping):
        by_path = {(key,) if isinstance(key, str) else key: _check_number(value) for key, value in pad.items()}
        unknown = [path for path in by_path if not isinstance(path, tuple) or path not in dict(spec.values)]
        if unknown:
            raise InvalidRequestError(argument="pad", reason=f"key {unknown[0]!r} names nothing that is ragged")
        return lambda path: by_path.get(path, 0)
    number = _check_number(pad)
    return lambda path: number


def _check_number(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    raise InvalidRequestError(argument="pad", reason=f"{value!r} is not a number")


def _fit_number(number: Any, dtype: torch.dtype) -> Any:
    """Returns a number that this dtype holds, rounded where it is one of floating point."""
    try:
        found = torch.tensor(number, dtype=dtype).item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        found = None
    if found is None or (found != number and not (dtype.is_floating_point or dtype.is_complex)):
        raise InvalidRequestError(argument="pad", reason=f"{number!r} does not fit {str(dtype).rpartition('.')[2]}")
    return number


def _fill_up(elements: Any, leaf: ValueLeaf, ragged: Ragged, fill: Any) -> tuple[torch.Tensor, torch.Tensor]:
    depth = len(leaf.batch_size)
    pieces = Pieces.from_tensors(elements if depth == 1 else flatten_elements(elements, depth), ragged)
    flat, shapes = pieces.join()
    sizes = tuple(int(shapes[:, dim].max()) if len(shapes) else max(size, 0) for dim, size in enumerate(ragged.shape))
    free = [dim for dim, size in enumerate(ragged.shape) if size == -1]
    present = np.ones((len(shapes), *(sizes[dim] for dim in free)), np.bool_)
    for number, dim in enumerate(free):
        steps = np.arange(sizes[dim]).reshape(-1, *(1,) * (len(free) - 1 - number))
        present &= steps < shapes[:, dim].reshape(-1, *(1,) * len(free))
    mask = torch.from_numpy(present)
    dense = torch.full((len(shapes), *sizes), _fit_number(fill, pieces.dtype), dtype=pieces.dtype)
    if free == [0]:
        to_indexable(dense)[mask] = to_indexable(flat).view(-1, *sizes[1:])
    else:
        for row, piece in zip(dense, pieces, strict=True):
            row[tuple(slice(0, size) for size in piece.shape)] = piece
    return dense.view(*leaf.batch_size, *sizes), mask.view(*leaf.batch_size, *mask.shape[1:])


def _make_dense(node: Node) -> Node:
    """Returns the tree without the lazy stacks that hold ragged tensors."""
    if node.inner is not None:
        return node
    entries = tuple((key, _make_dense(entry) if isinstance(entry, Node) else entry) for key, entry in node.entries)
    return node._replace(entries=entries, stack_dim=None)


def _make_masks_node(root: Node, masks: Mapping[Path, TensorLeaf]) -> Node:
    below: dict[str, dict[Path, TensorLeaf]] = {}
    for path, leaf in masks.items():
        below.setdefault(path[0], {})[path[1:]] = leaf
    entries = tuple(
        (key, leaves[()] if () in leaves else _make_masks_node(root, leaves)) for key, leaves in below.items()
    )
    return Node(root.batch_size, None, root.device, None, entries)
