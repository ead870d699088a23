"""Converts elements of packed nodes and leaves to plain values, and back: the stored form of one element.

An element is stored like everything else: as its structure and its leaves. The structure describes only what the
tensors of elements have in common, so that many elements have the same one: each tensor's shape is stored with its
bytes. The structure of a lazy stack whose rows differ is a packed node; its only leaf is the list of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack
from tensordict.nn import TensorDictParams

from tdserve.base.errors import InvalidSpecError, RemoteProtocolError, TDServeError
from tdserve.structure.building.build import build
from tdserve.structure.captures.node_capture import NodeReader
from tdserve.structure.stacks.common_structure import CapturedPart
from tdserve.structure.stacks.elements import Element, Note, flatten_elements, nest_list
from tdserve.structure.tensordict_private import entries_of, new_tensordict
from tdserve.structure.tensors.pieces import Pieces, decode_tensor, encode_tensor
from tdserve.structure.trees import codec
from tdserve.structure.trees.changes import move_to_cpu
from tdserve.structure.trees.nodes import PACKED, Entry, Node, Path, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

_KEY = ""
"""Key of an entry of a leaf, in the tensordict that it is stored in."""

_CONTENT = 2
"""Position of the structure in a packed element."""

_MAX_ROWS = 1 << 20
"""A structure may claim more rows only if there is a byte or a value for each: they are built one by one."""

_NUM_KEPT = 1024
"""Structures of elements that are cached by their bytes."""

_HOSTILE = (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError, OverflowError)
"""Exceptions that invalid content leads to."""


def pack(entry: Any) -> list[Any]:
    """Returns the plain value of an element, or of a tensordict, tensor or non-tensor entry that is one.

    Raises:
        NotSupportedError: It contains something that cannot be sent.
    """
    element = entry if type(entry) is Element else _take_apart(entry, is_exact=False)
    part = element.tree
    if part is None:
        return pack(_take_apart(element.entry, is_exact=True)._replace(note=element.note))
    spec, content = _encode_spec(_find_common(part.root))
    tensor_paths, value_paths = _find_leaf_paths(spec, part.at)
    tensors: list[Any] = []
    for path in tensor_paths:
        tensors += encode_tensor(part.tensors[path])
    values = [_pack_value(part.values[path], leaf) for path, (_, leaf) in zip(value_paths, spec.values, strict=True)]
    if _has_rows(spec):  # which are not in a list of their own: each level counts in how deep values nest
        (values,) = values
    note = None if element.note is None else [element.note.position, codec.to_content(element.note.spec)]
    return [element.is_entry, note, content, tensors, *values]


def unpack(value: Any) -> Any:
    """Returns the entry of a plain value; an ``Element`` if it has a note.

    Its tensors, and tensordicts that had a device, are on the CPU.

    Raises:
        RemoteProtocolError: It was not made by ``pack``.
        NotSupportedError: A tensorclass is not known in this process.
    """
    try:
        found = _read(*value)
        return found if value[1] is None else Element(found, note=_read_note(*value[1]))
    except InvalidSpecError as error:
        raise RemoteProtocolError(expected="the structure of an element", received=str(error)) from None
    except TDServeError:
        raise
    except _HOSTILE as error:
        raise RemoteProtocolError(expected="an entry of a tensordict", received=f"{error!r}"[:200]) from None


def _pack_value(value: Any, leaf: ValueLeaf) -> Any:
    if leaf.is_unbatched or not (leaf.per_row or leaf.ragged):
        return value
    elements = flatten_elements(value, len(leaf.batch_size))
    if leaf.ragged is None:
        return elements if leaf.batch_size else value
    found = _pack_all(elements) if leaf.ragged == PACKED else Pieces.from_tensors(elements, leaf.ragged).to_blobs()
    return found if leaf.batch_size else found[0]


def _pack_all(elements: Sequence[Any]) -> list[Any]:
    """Packs elements; None replaces a structure that equals the one before it."""
    found = [*map(pack, elements)]
    for plain, before in zip(found[:0:-1], found[-2::-1], strict=True):
        if plain[_CONTENT] is before[_CONTENT]:
            plain[_CONTENT] = None
    return found


def _take_apart(entry: Any, *, is_exact: bool) -> Element:
    """Captures an entry of a leaf; one that was read before is captured already."""
    if isinstance(entry, NonTensorStack) and -1 in entry.batch_size:
        return Element.from_rows(entry, [Element(row) for row in entry.tensordicts])._replace(is_entry=True)
    batch_size = _find_batch_around(entry)
    held = entry if batch_size is None else new_tensordict({_KEY: entry}, batch_size=torch.Size(batch_size))
    reader = NodeReader("", False, checks=False, encodes=False, is_exact=is_exact)
    part = CapturedPart(reader.capture_node(held, (), ()), reader.tensors, reader.values)
    return Element.from_part(entry, part) if batch_size is None else Element(entry, part, is_entry=True)


def _find_batch_around(entry: Any) -> tuple[int, ...] | None:
    """Returns the batch size of a tensordict that holds an entry; None for an entry that is one itself."""
    if isinstance(entry, (NonTensorData, NonTensorStack)):
        return tuple(entry.batch_size)
    if not isinstance(entry, torch.Tensor) or isinstance(entry, TensorDictParams):
        return None
    return (entry.size(0),) if entry.is_nested else ()


def _find_common(node: Node) -> Node:
    """Returns what elements have in common.

    Of tensors that is only the batch, of devices only the CPU, and of packed nodes only that they are packed.
    """
    batch_size = node.batch_size
    entries: list[tuple[str, Entry]] = []
    for key, entry in node.entries if node.inner is None else ():
        if type(entry) is TensorLeaf:
            entry = TensorLeaf(entry.dtype, batch_size, entry.kind, entry.requires_grad)
        elif type(entry) is Node:
            entry = _find_common(entry)
        entries.append((key, entry))
    members = tuple(map(move_to_cpu, node.members))
    return node._replace(device=node.device and "cpu", entries=tuple(entries), members=members)


@lru_cache(maxsize=_NUM_KEPT)
def _encode_spec(root: Node) -> tuple[Spec, bytes]:
    spec = Spec(root)
    return spec, codec.to_content(spec)


def _find_leaf_paths(spec: Spec, at: Path) -> tuple[list[Path], list[Path]]:
    """Returns the paths of tensors and values in what was captured at a path."""
    found: tuple[list[Path], list[Path]] = spec.memoize(
        ("paths", at), lambda: tuple([(*at, *path) for path, _ in leaves] for leaves in (spec.tensors, spec.values))
    )
    return found


def _read(is_entry: bool, note: Any, content: bytes, tensors: Sequence[Any], *values: Any) -> Any:
    spec = codec.from_content(content)
    if _has_rows(spec):
        if tensors or len(values) != spec.num_rows:
            raise _make_damage_error("the rows of a stack")
        return _stack(spec.root, _read_all(values), is_entry)
    num_rows = spec.memoize("num rows", lambda: _count_rows(spec.root))
    if num_rows > _MAX_ROWS + sum(map(len, tensors[1::2])) + sum(map(_count_held, values)):
        raise _make_damage_error("no more rows than it holds")
    found = {}
    for (path, leaf), shape, data in zip(spec.tensors, tensors[::2], tensors[1::2], strict=True):
        if tuple(shape[: len(leaf.shape)]) != leaf.shape:
            raise _make_damage_error("tensors of its batch size")
        found[path] = decode_tensor(leaf.dtype, shape, data)
    held = {path: _read_value(value, leaf) for (path, leaf), value in zip(spec.values, values, strict=True)}
    td = build(spec, found, held)
    return entries_of(td)[_KEY] if is_entry else td


def _read_note(position: int, content: bytes) -> Note:
    """Decodes the note of an element; elements with equal notes get the same structure."""
    spec = codec.from_content(content)
    root = spec.root
    is_around = root.stack_dim is not None and 0 <= root.stack_dim < len(root.batch_size)
    is_in = type(position) is int and 0 <= position < math.prod(spec.batch_size)
    if not root.members or not root.batch_size or is_around or not is_in:
        raise _make_damage_error("what an element was written with")
    return Note(spec, position)


def _has_rows(spec: Spec) -> bool:
    """Returns whether it is the structure of a stack whose rows differ."""
    return spec.root.inner is not None and bool(spec.batch_size)


def _stack(root: Node, rows: Sequence[Any], is_entry: bool) -> Any:
    make: Any = NonTensorStack if is_entry else LazyStackedTensorDict
    stack = make(*rows, stack_dim=root.stack_dim, stack_dim_name=root.names and root.names[0])
    return stack.lock_() if root.is_locked else stack


def _read_all(records: Sequence[Any]) -> list[Any]:
    """Reverses ``_pack_all``."""
    found = []
    structure = b""
    for is_entry, note, content, *leaves in records:
        if note is not None:
            raise _make_damage_error("no note inside of an element")
        structure = structure if content is None else content
        found.append(_read(is_entry, note, structure, *leaves))
    return found


def _read_value(value: Any, leaf: ValueLeaf) -> Any:
    if leaf.is_unbatched or not (leaf.per_row or leaf.ragged):
        return value
    if not leaf.batch_size:
        value = [value]
    if type(value) is not list or len(value) != math.prod(leaf.batch_size):
        raise _make_damage_error("a value for each of its rows")
    elements: Any = value
    if leaf.ragged is not None:
        elements = _read_all(value) if leaf.ragged == PACKED else Pieces.from_blobs(value, leaf.ragged)
    if not leaf.batch_size:
        return elements[0]
    return elements if len(leaf.batch_size) == 1 else nest_list(list(elements), leaf.batch_size)


def _count_rows(node: Node) -> int:
    """Returns the largest number of rows of any part of a tree."""
    sizes = [node.batch_size] if node.stack_dim is not None or node.inner is not None else []
    sizes += [entry.batch_size for _, entry in node.entries if isinstance(entry, ValueLeaf)]
    numbers = [math.prod(size or 1 for size in batch_size) for batch_size in sizes]
    return max([*numbers, *(_count_rows(entry) for _, entry in node.entries if isinstance(entry, Node))], default=0)


def _count_held(value: Any) -> int:
    return len(value) if type(value) is list else 1


def _make_damage_error(expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(expected=expected, received="something else")
