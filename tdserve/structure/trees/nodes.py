"""The parts of a structure: leaves and nodes, as plain immutable values. No I/O, no torch.

They are named tuples rather than dataclasses because specs are hashed and compared on every call that carries a
tensordict, and tuples do both in C.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from tdserve.structure.trees.dtypes import ITEMSIZE

Path = tuple[str, ...]
"""A nested key, outermost first; never empty when it names an entry."""

DimNames = tuple[str | None, ...]
"""One name per batch dimension, None where it has none."""

MAX_DEPTH = 40
"""Levels of nested tensordicts, including the root. Protobuf's parser stops at 100 nested messages; a level takes two,
and the messages around a spec need some too."""

MAX_NBYTES = 2**62
"""Bytes of a leaf or of a whole structure: offsets and sums stay far inside int64."""

MAX_DIMS = 64
"""Most dimensions of a leaf, and items of an index; torch's own kernels and NumPy end there too."""


class TensorKind(str, Enum):
    """The kind of tensor that is restored."""

    PLAIN = "plain"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    NON_PERSISTENT_BUFFER = "non-persistent buffer"


class TensorLeaf(NamedTuple):
    """A tensor.

    Attributes:
        dtype: Name as in ``dtypes.ITEMSIZE``.
        shape: Complete shape; starts with the batch size of its node.
        kind: The kind of tensor that is restored.
        requires_grad: Whether it is restored as a leaf of a graph of its own that requires grad.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: TensorKind = TensorKind.PLAIN
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, packed."""
        return ITEMSIZE[self.dtype] * math.prod(self.shape)


class Form(str, Enum):
    """The form in which a ragged leaf is restored."""

    JAGGED = "jagged"  # a nested tensor of layout torch.jagged
    NESTED = "nested"  # a nested tensor of layout torch.strided
    STACK = "stack"  # an entry of the rows of a lazy stack
    PACKED = "packed"  # anything: each element carries its own structure


class Ragged(NamedTuple):
    """The elements of a batch that differ in shape.

    Attributes:
        form: The form in which they are restored.
        dtype: Name as in ``dtypes.ITEMSIZE``; "" for ``PACKED``.
        shape: Shape of one element, with -1 where elements may differ; () for ``PACKED``.
        has_lengths: Whether a jagged tensor has lengths besides its offsets.
    """

    form: Form
    dtype: str = ""
    shape: tuple[int, ...] = ()
    has_lengths: bool = False


class ValueLeaf(NamedTuple):
    """An entry that is stored value by value, separately from the tables of tensors: non-tensor data, ragged tensors.

    Attributes:
        batch_size: Starts with the batch size of its node.
        per_row: False: one value for all rows (NonTensorData). True: one value per row (NonTensorStack).
        ragged: Form of the elements; None for non-tensor data.
        requires_grad: Whether a nested tensor requires a gradient, as in ``TensorLeaf``.
        is_unbatched: Whether the value is an ``UnbatchedTensor``, packed, which all rows share.
    """

    batch_size: tuple[int, ...]
    per_row: bool
    ragged: Ragged | None = None
    requires_grad: bool = False
    is_unbatched: bool = False


class Params(NamedTuple):
    """The state of a ``TensorDictParams``.

    Attributes:
        no_convert: Argument of its constructor: False, True or "skip".
        locks_content: Whether it was made with ``lock=True``.
        is_content_locked: Whether the tensordict inside is locked; the node records the lock of the outside.
        is_in_eval: Whether it is in eval mode, as a module.
        is_in_class: Whether the instance of its node's tensorclass is around it, not inside.
    """

    no_convert: bool | str = False
    locks_content: bool = False
    is_content_locked: bool = False
    is_in_eval: bool = False
    is_in_class: bool = False


class Node(NamedTuple):
    """A tensordict or tensorclass.

    A *packed* node is stored like a value: each element of its batch is a tensordict that carries its own structure, so
    that elements may differ in batch size, keys and kind. Its entries only summarise the elements: nothing below it is
    a leaf of the whole structure.

    Attributes:
        batch_size: Starts with the batch size of its parent. Of a packed node: of its elements.
        names: One per dimension of ``batch_size``; None if no dimension is named.
        device: As ``str(torch.device)``; None if the tensordict has no device.
        tensorclass: ``"module.QualName"``; None for a plain tensordict.
        entries: Keys and their entries, in insertion order; keys are unique.
        stack_dim: For a lazy stack: the batch dimension along which its rows are stacked. -1: no dimension yet, but
            rows of this structure are stacked lazily, along the dimension that numbers them. For a packed node: the
            dimension of ``shown_batch_size`` along which its elements are stacked; along the others they are joined
            densely if they have one structure; -1: stacked along none. None: stacked along one dimension of
            ``batch_size`` after the other.
        inner: For a packed node: batch dimensions of one element, -1 where elements differ. None: it is not packed.
        is_locked: Whether no entry may be added, replaced or removed; nodes below a locked node are locked too.
        params: Params of the ``TensorDictParams`` around it, if there is one.
        is_typed: Whether its class is a ``TypedTensorDict``, which plain tensordict stores without its class.
        members: For a packed node with a ``stack_dim``: the tensordicts stacked along it, each without that dimension
            (with -1 a single one, unchanged), unless elements of one structure show them. Elements that were written
            later may belong to no such members. (): not known.
    """

    batch_size: tuple[int, ...]
    names: DimNames | None
    device: str | None
    tensorclass: str | None
    entries: tuple[tuple[str, Entry], ...]
    stack_dim: int | None = None
    inner: tuple[int, ...] | None = None
    is_locked: bool = False
    params: Params | None = None
    is_typed: bool = False
    members: tuple[Node, ...] = ()

    @property
    def shown_batch_size(self) -> tuple[int, ...]:
        """Batch size of the tensordict, -1 where elements differ."""
        return self.batch_size + (self.inner or ())


Entry = Node | TensorLeaf | ValueLeaf
"""The entry at a key."""

PACKED = Ragged(Form.PACKED)


def find_entry(root: Node, path: Path) -> Entry | None:
    """Returns the entry at a path; the root for the empty path, None if there is none."""
    entry: Entry | None = root
    for key in path:
        entry = dict(entry.entries).get(key) if isinstance(entry, Node) else None
    return entry


def count_dims(entry: Entry) -> int | None:
    """Returns the number of dimensions of an entry by itself; None if only its content shows it."""
    if isinstance(entry, Node):
        return len(entry.shown_batch_size)
    if isinstance(entry, TensorLeaf):
        return len(entry.shape)
    if entry.is_unbatched or entry.ragged == PACKED:
        return None
    return len(entry.batch_size) + (0 if entry.ragged is None else len(entry.ragged.shape))


def make_packed_leaf(node: Node) -> ValueLeaf:
    """Returns the stored form of a packed node."""
    return ValueLeaf(node.batch_size, bool(node.batch_size), PACKED)


def find_packed_stack_dim(stack_dim: int | None, num_dims: int) -> int | None:
    """Returns the ``stack_dim`` that a packed node with this many dimensions of its own records.

    Returns None if elements are single, or are stacked along their only dimension.
    """
    return None if not num_dims or (num_dims == 1 and stack_dim == 0) else stack_dim


def has_state(node: Node, *, is_locked: bool = True) -> bool:
    """Returns whether a tree records anything besides content; ``is_locked``: locks count too."""
    if node.params is not None or (is_locked and node.is_locked):
        return True
    if any(has_state(member, is_locked=is_locked) for member in node.members):
        return True
    return any(
        has_state(entry, is_locked=is_locked) if isinstance(entry, Node) else is_marked(entry)
        for _, entry in node.entries
    )


def is_marked(leaf: TensorLeaf | ValueLeaf) -> bool:
    """Returns whether a leaf is restored as more than a plain tensor or value."""
    return leaf.requires_grad or (isinstance(leaf, TensorLeaf) and leaf.kind is not TensorKind.PLAIN)


def has_nothing(known: Entry) -> bool:
    """Returns whether elements are empty lists there.

    Tensordict turns these into tensors, whatever other elements have.
    """
    return isinstance(known, ValueLeaf) and known.ragged is not None and 0 in known.ragged.shape
