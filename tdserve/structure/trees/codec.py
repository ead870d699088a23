"""Converts specs to protobuf and back. A peer or a disk wrote the input, so every field of it is checked."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from functools import lru_cache

from google.protobuf.message import DecodeError

from tdserve.base.errors import InvalidSpecError
from tdserve.structure.trees.canonical import CONVERTS, FORMS, TENSOR_KINDS, write_node
from tdserve.structure.trees.dtypes import DIFFERENTIABLE, ITEMSIZE, NAMES
from tdserve.structure.trees.nodes import (
    MAX_DEPTH,
    MAX_DIMS,
    MAX_NBYTES,
    DimNames,
    Entry,
    Form,
    Node,
    Params,
    Path,
    Ragged,
    TensorKind,
    TensorLeaf,
    ValueLeaf,
)
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import spec_pb2

_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(:\d{1,4})?")

_FORM_NAMES: dict[int, Form] = {number: form for form, number in FORMS.items()}

_TENSOR_KINDS: dict[int, TensorKind] = {number: kind for kind, number in TENSOR_KINDS.items()}

_CONVERTS: dict[int, bool | str] = {number: no_convert for no_convert, number in CONVERTS.items()}

MAX_SPEC_BYTES = 1 << 26
"""Largest message: that of a hundred thousand leaves takes a tenth. It is kept in memory and in the catalog."""

MANY_BYTES = 1 << 20

MAX_ENTRIES = 500_000
"""Most entries and members of all nodes: as Python objects each takes about a kilobyte, ten times as much as sent."""

_NUM_KEPT = 1024
"""Decoded specs of elements and notes that are cached: most elements have the same one."""

_MAX_CLASS_NAME = 1000
"""Characters of "module.QualName"; a limit, so that a peer cannot make this process keep megabytes."""


def compute_order(spec: Spec) -> bytes:
    """Returns what distinguishes a structure from others with its fingerprint, whose keys are in another order."""

    def make() -> bytes:
        return hashlib.sha256(encode(spec).SerializeToString(deterministic=True)).digest()

    order: bytes = spec.memoize(compute_order, make)
    return order


def encode(spec: Spec) -> spec_pb2.Spec:
    """Encodes a spec; entries keep their own order.

    Raises:
        InvalidSpecError: A key is not valid unicode, which protobuf cannot encode. Nothing was changed.
    """
    message = spec_pb2.Spec()
    message.root.SetInParent()
    try:
        write_node(spec.root, message.root, is_sorted=False)
    except UnicodeEncodeError as error:
        raise InvalidSpecError(reason=f"a key is not valid unicode: {error.object[:80]!r}") from None
    return message


def decode(message: spec_pb2.Spec) -> Spec:
    """Decodes a spec, equal to the encoded one (including names, devices, tensorclasses and the order of entries).

    Raises:
        InvalidSpecError: The message is contradictory or absurd; the error names the key. Nothing was changed.
    """
    if not message.HasField("root"):
        raise InvalidSpecError(reason="the root is missing")
    nbytes = message.ByteSize()
    if nbytes > MAX_SPEC_BYTES:
        raise InvalidSpecError(reason=f"its description takes {nbytes} bytes, more than {MAX_SPEC_BYTES}")
    if nbytes > MANY_BYTES:  # a shorter one has no more
        _check_num_entries(message.root)
    root = _decode_node(message.root, (), ())
    spec = Spec(root)
    if spec.nbytes > MAX_NBYTES:
        raise InvalidSpecError(reason=f"all leaves together have {spec.nbytes} bytes, more than {MAX_NBYTES}")
    return spec


def _check_num_entries(root: spec_pb2.Node) -> None:
    todo, num_entries = [root], 0
    while todo:
        node = todo.pop()
        num_entries += len(node.entries) + len(node.members)
        if num_entries > MAX_ENTRIES:
            raise InvalidSpecError(reason=f"it has more than {MAX_ENTRIES} entries")
        todo += [entry.node for entry in node.entries if entry.HasField("node")]
        todo += node.members


def to_content(spec: Spec) -> bytes:
    """Returns the serialised message of a spec; cached.

    Raises:
        InvalidSpecError: As raised by ``encode``.
    """
    content: bytes = spec.memoize("content", lambda: encode(spec).SerializeToString(deterministic=True))
    return content


@lru_cache(maxsize=_NUM_KEPT)
def from_content(content: bytes) -> Spec:
    """Returns the spec of a serialised message; the same object for equal messages, as long as it is cached.

    Raises:
        InvalidSpecError: As raised by ``decode``; or the content is no such message.
    """
    try:
        return decode(spec_pb2.Spec.FromString(content))
    except DecodeError:
        raise InvalidSpecError(reason="its description is not a message") from None


def _decode_node(message: spec_pb2.Node, path: Path, parent: tuple[int, ...]) -> Node:
    if len(path) >= MAX_DEPTH:
        raise InvalidSpecError(reason=f"tensordicts are nested deeper than {MAX_DEPTH} levels at {_show(path)}")
    batch_size = _decode_shape(message.batch_size, path, parent, itemsize=1)
    entries: dict[str, Entry] = {}
    for entry in message.entries:
        key = entry.key
        if key in entries:
            raise InvalidSpecError(reason=f"key {_show((*path, key))} appears twice")
        entries[key] = _decode_entry(entry, (*path, key), batch_size)
    node = Node(
        batch_size=batch_size,
        names=_decode_names(message, path, len(batch_size)),
        device=_decode_device(message, path),
        tensorclass=_decode_tensorclass(message, path),
        entries=tuple(entries.items()),
        stack_dim=_decode_stack_dim(message, path, len(batch_size)),
        inner=_decode_inner(message, path),
        is_locked=bool(message.is_locked),
        params=_decode_params(message.params, path) if message.HasField("params") else None,
        is_typed=bool(message.is_typed),
    )
    return node._replace(members=_decode_members(message, path, node)) if message.members else node


def _decode_members(message: spec_pb2.Node, path: Path, node: Node) -> tuple[Node, ...]:
    """Decodes the members of a packed node."""
    at = node.stack_dim
    around = node.batch_size
    if node.inner is None or at is None:
        raise InvalidSpecError(reason=f"{_show(path)} has members, but is not marked as a packed stack")
    is_around = 0 <= at < len(around)
    wanted = around[at] if is_around else 1 if at < 0 else len(message.members)
    if wanted != len(message.members):
        raise InvalidSpecError(reason=f"{_show(path)} has {len(message.members)} members, not {wanted}")
    if is_around:
        around = around[:at] + around[at + 1 :]
    members = tuple(
        _decode_node(member, (*path, f"[{number}]"), around) for number, member in enumerate(message.members)
    )
    num_dims = len(node.shown_batch_size) - (at >= 0)
    if any(len(member.shown_batch_size) != num_dims for member in members):
        raise InvalidSpecError(reason=f"{_show(path)} has members of other than {num_dims} batch dimensions")
    return members


def _decode_entry(message: spec_pb2.Entry, path: Path, batch_size: tuple[int, ...]) -> Entry:
    kind = message.WhichOneof("kind")
    if kind == "tensor":
        dtype = NAMES.get(message.tensor.dtype)
        if dtype is None:
            raise InvalidSpecError(reason=f"key {_show(path)} has the unknown dtype number {message.tensor.dtype}")
        shape = _decode_shape(message.tensor.shape, path, batch_size, itemsize=ITEMSIZE[dtype])
        how = _TENSOR_KINDS.get(message.tensor.kind)
        if how is None:
            raise InvalidSpecError(reason=f"key {_show(path)} is of the unknown kind number {message.tensor.kind}")
        requires_grad = bool(message.tensor.requires_grad)
        if requires_grad and not dtype.startswith(DIFFERENTIABLE):
            raise InvalidSpecError(reason=f"key {_show(path)} of dtype {dtype} cannot require grad")
        return TensorLeaf(dtype, shape, how, requires_grad)
    if kind == "value":
        value = message.value
        ragged = _decode_ragged(value.ragged, path) if value.HasField("ragged") else None
        own = _decode_shape(value.batch_size, path, batch_size, itemsize=1)
        is_unbatched = bool(value.is_unbatched)
        if is_unbatched and (ragged is not None or value.per_row):
            raise InvalidSpecError(reason=f"key {_show(path)} has one value for all rows, but is marked as one per row")
        return ValueLeaf(own, bool(value.per_row), ragged, bool(value.requires_grad), is_unbatched)
    if kind == "node":
        return _decode_node(message.node, path, batch_size)
    raise InvalidSpecError(reason=f"key {_show(path)} has content that this version does not know")


def _decode_shape(sizes: object, path: Path, parent: tuple[int, ...], *, itemsize: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = tuple(sizes)  # type: ignore[arg-type]  # a repeated field
    if len(shape) > MAX_DIMS:
        raise InvalidSpecError(reason=f"{_show(path)} has {len(shape)} dimensions, at most {MAX_DIMS} are possible")
    if any(size < 0 for size in shape):
        raise InvalidSpecError(reason=f"{_show(path)} has a negative size: {shape}")
    if shape[: len(parent)] != parent:
        raise InvalidSpecError(reason=f"{_show(path)} has shape {shape}, which does not start with batch size {parent}")
    # Zeros count as one: strides and batched shapes must not overflow either.
    if itemsize * math.prod(size or 1 for size in shape) > MAX_NBYTES:
        raise InvalidSpecError(reason=f"{_show(path)} of shape {shape} has more than {MAX_NBYTES} bytes")
    return shape


def _decode_names(message: spec_pb2.Node, path: Path, num_dims: int) -> DimNames | None:
    if not message.has_names:
        if message.names:
            raise InvalidSpecError(reason=f"{_show(path)} has names, but is marked as having none")
        return None
    names = tuple(item.name if item.HasField("name") else None for item in message.names)
    if len(names) != num_dims:
        raise InvalidSpecError(reason=f"{_show(path)} has {len(names)} names for {num_dims} batch dimensions")
    named = [name for name in names if name is not None]
    if len(set(named)) != len(named):
        raise InvalidSpecError(reason=f"{_show(path)} has the same name for two dimensions: {names}")
    return names


def _decode_params(message: spec_pb2.Params, path: Path) -> Params:
    no_convert = _CONVERTS.get(message.convert)
    if no_convert is None:
        raise InvalidSpecError(reason=f"{_show(path)} converts in the unknown way number {message.convert}")
    return Params(
        no_convert,
        bool(message.locks_content),
        bool(message.is_content_locked),
        bool(message.is_in_eval),
        bool(message.is_in_class),
    )


def _decode_stack_dim(message: spec_pb2.Node, path: Path, num_dims: int) -> int | None:
    if not message.HasField("stack_dim"):
        return None
    num_shown = num_dims + len(message.inner)
    is_single = message.is_packed and not num_dims  # such an element is a packed node of its own
    if is_single or not -1 <= message.stack_dim < num_shown:
        reason = f"{_show(path)} is stacked along dimension {message.stack_dim}, of {num_shown}"
        raise InvalidSpecError(reason=reason)
    return message.stack_dim


def _decode_inner(message: spec_pb2.Node, path: Path) -> tuple[int, ...] | None:
    if message.is_packed:
        return _decode_wild_shape(message.inner, path)
    if message.inner:
        raise InvalidSpecError(reason=f"{_show(path)} has dimensions of elements, but is not marked as packed")
    return None


def _decode_ragged(message: spec_pb2.Ragged, path: Path) -> Ragged:
    form = _FORM_NAMES.get(message.form)
    dtype = NAMES.get(message.dtype, "")
    if form is None or bool(dtype) is (form is Form.PACKED):
        raise InvalidSpecError(
            reason=f"{_show(path)} has the ragged form {message.form} of dtype number {message.dtype}"
        )
    shape = _decode_wild_shape(message.shape, path)
    is_odd = shape or message.has_lengths if form is Form.PACKED else form is Form.JAGGED and shape.count(-1) != 1
    if is_odd:
        raise InvalidSpecError(reason=f"{_show(path)} is {form.value} and has elements of shape {shape}")
    return Ragged(form, dtype, shape, bool(message.has_lengths))


def _decode_wild_shape(sizes: Iterable[int], path: Path) -> tuple[int, ...]:
    """Returns a shape in which -1 stands for any size."""
    shape = tuple(sizes)
    if any(size < -1 for size in shape):
        raise InvalidSpecError(reason=f"{_show(path)} has a negative size: {shape}")
    _decode_shape([abs(size) for size in shape], path, (), itemsize=16)
    return shape


def _decode_device(message: spec_pb2.Node, path: Path) -> str | None:
    if not message.HasField("device"):
        return None
    if not _DEVICE.fullmatch(message.device):
        raise InvalidSpecError(reason=f"{_show(path)} has the device {message.device[:80]!r}, which names none")
    return message.device


def _decode_tensorclass(message: spec_pb2.Node, path: Path) -> str | None:
    if not message.HasField("tensorclass"):
        return None
    if "." not in message.tensorclass or len(message.tensorclass) > _MAX_CLASS_NAME:
        raise InvalidSpecError(
            reason=f"{_show(path)} has the tensorclass {message.tensorclass[:80]!r}, not a class name"
        )
    return message.tensorclass


def _show(path: Path) -> str:
    text = repr(path) if path else "the root"
    return text if len(text) <= 200 else f"{text[:200]}..."
