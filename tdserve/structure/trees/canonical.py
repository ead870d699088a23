"""The protobuf form of a tree of nodes, and its fingerprint, which both ends compute."""

from __future__ import annotations

import hashlib

from tdserve.structure.trees.dtypes import WIRE
from tdserve.structure.trees.nodes import Entry, Form, Node, Params, Ragged, TensorKind, TensorLeaf, ValueLeaf
from tdserve.v1 import spec_pb2

FORMS: dict[Form, int] = {
    Form.JAGGED: spec_pb2.RAGGED_FORM_JAGGED,
    Form.NESTED: spec_pb2.RAGGED_FORM_NESTED,
    Form.STACK: spec_pb2.RAGGED_FORM_STACK,
    Form.PACKED: spec_pb2.RAGGED_FORM_PACKED,
}
"""Number of the protobuf enum ``RaggedForm``."""


TENSOR_KINDS: dict[TensorKind, int] = {
    TensorKind.PLAIN: spec_pb2.TENSOR_KIND_PLAIN,
    TensorKind.PARAMETER: spec_pb2.TENSOR_KIND_PARAMETER,
    TensorKind.BUFFER: spec_pb2.TENSOR_KIND_BUFFER,
    TensorKind.NON_PERSISTENT_BUFFER: spec_pb2.TENSOR_KIND_NON_PERSISTENT_BUFFER,
}
"""Number of the protobuf enum ``TensorKind``."""

CONVERTS: dict[bool | str, int] = {
    False: spec_pb2.Params.CONVERT_ALL,
    True: spec_pb2.Params.CONVERT_BUFFERS,
    "skip": spec_pb2.Params.CONVERT_NONE,
}
"""Number of the protobuf enum ``Params.Convert`` by ``no_convert``."""


def write_node(node: Node, message: spec_pb2.Node, *, is_sorted: bool) -> None:
    """Writes ``node`` and everything below it into ``message``, which must be empty.

    Args:
        node: The tree.
        message: The message.
        is_sorted: True sorts entries by key (the order of the fingerprint), False keeps their order (as in messages).
    """
    message.batch_size.extend(node.batch_size)
    if node.names is not None:
        message.has_names = True
        for name in node.names:
            message.names.add(name=name)
    if node.device is not None:
        message.device = node.device
    if node.tensorclass is not None:
        message.tensorclass = node.tensorclass
    if node.stack_dim is not None:
        message.stack_dim = node.stack_dim
    if node.inner is not None:
        message.is_packed = True
        message.inner.extend(node.inner)
    if node.is_locked:
        message.is_locked = True
    if node.params is not None:
        _write_params(node.params, message.params)
    if node.is_typed:
        message.is_typed = True
    for member in node.members:
        write_node(member, message.members.add(), is_sorted=is_sorted)
    # Code points sort like their UTF-8 bytes, so this is the order that the protocol book requires.
    for key, entry in sorted(node.entries, key=_get_key) if is_sorted else node.entries:
        _write_entry(entry, message.entries.add(key=key), is_sorted=is_sorted)


def _write_entry(entry: Entry, message: spec_pb2.Entry, *, is_sorted: bool) -> None:
    if isinstance(entry, TensorLeaf):
        leaf = message.tensor
        leaf.dtype = WIRE[entry.dtype]  # type: ignore[assignment]  # the stub asks for the enum's wrapper, an int is one
        leaf.shape.extend(entry.shape)
        leaf.kind = TENSOR_KINDS[entry.kind]  # type: ignore[assignment]  # as above
        leaf.requires_grad = entry.requires_grad
    elif isinstance(entry, ValueLeaf):
        value = message.value
        value.SetInParent()  # otherwise an empty message in a oneof would not be sent
        value.batch_size.extend(entry.batch_size)
        value.per_row = entry.per_row
        value.requires_grad = entry.requires_grad
        value.is_unbatched = entry.is_unbatched
        if entry.ragged is not None:
            _write_ragged(entry.ragged, value.ragged)
    else:
        message.node.SetInParent()
        write_node(entry, message.node, is_sorted=is_sorted)


def _write_ragged(ragged: Ragged, message: spec_pb2.Ragged) -> None:
    message.form = FORMS[ragged.form]  # type: ignore[assignment]  # as above
    message.dtype = WIRE.get(ragged.dtype, spec_pb2.DTYPE_UNSPECIFIED)  # type: ignore[assignment]
    message.shape.extend(ragged.shape)
    message.has_lengths = ragged.has_lengths


def _write_params(params: Params, message: spec_pb2.Params) -> None:
    message.SetInParent()
    message.convert = CONVERTS[params.no_convert]  # type: ignore[assignment]  # as above
    message.locks_content = params.locks_content
    message.is_content_locked = params.is_content_locked
    message.is_in_eval = params.is_in_eval
    message.is_in_class = params.is_in_class


def compute_fingerprint(root: Node) -> bytes:
    """Returns the SHA-256 (32 bytes) of a tree, equal for every order of its entries."""
    message = spec_pb2.Spec()
    message.root.SetInParent()
    write_node(root, message.root, is_sorted=True)
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def _get_key(item: tuple[str, object]) -> str:
    return item[0]
