"""The parts of a structure: leaves and nodes, as plain immutable values. No I/O, no torch.

They are named tuples rather than dataclasses because specs are hashed and compared on every call that carries a
tensordict, and tuples do both in C.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from tdserve.structure.dtypes import ITEMSIZE

Path = tuple[str, ...]
"""A nested key, outermost first; never empty when it names an entry."""

DimNames = tuple[str | None, ...]
"""One name per batch dimension, None where it has none."""

MAX_DEPTH = 40
"""Tensordicts inside one another, the root included. Protobuf's parser stops at 100 nested messages, a level takes two,
and the messages around a spec need some of them too."""

MAX_NBYTES = 2**62
"""Bytes of a leaf or of a whole structure: offsets and sums stay far inside int64."""

MAX_DIMS = 64
"""Dimensions of a leaf; torch's own kernels end there too."""


class TensorKind(str, Enum):
    """As what a tensor comes back."""

    PLAIN = "plain"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    NON_PERSISTENT_BUFFER = "non-persistent buffer"


class TensorLeaf(NamedTuple):
    """A tensor.

    Attributes:
        dtype: Name as in ``dtypes.ITEMSIZE``.
        shape: Complete shape; starts with the batch size of its node.
        kind: As what it comes back.
        requires_grad: Whether it comes back requiring grad, as a leaf of a graph of its own.
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
    """As what a ragged leaf comes back."""

    JAGGED = "jagged"  # a nested tensor of layout torch.jagged
    NESTED = "nested"  # a nested tensor of layout torch.strided
    STACK = "stack"  # an entry of the rows of a lazy stack
    PACKED = "packed"  # whatever it was: each element's content describes itself


class Ragged(NamedTuple):
    """What the elements of a batch hold where they differ in shape.

    Attributes:
        form: As what they come back.
        dtype: Name as in ``dtypes.ITEMSIZE``; "" for ``PACKED``.
        shape: Of one element, -1 where elements may differ; () for ``PACKED``.
        has_lengths: Whether a jagged tensor has lengths beside its offsets.
    """

    form: Form
    dtype: str = ""
    shape: tuple[int, ...] = ()
    has_lengths: bool = False


class ValueLeaf(NamedTuple):
    """An entry whose content is stored value by value, beside the tables of tensors: non-tensor data, ragged tensors.

    Attributes:
        batch_size: Starts with the batch size of its node.
        per_row: False: one value for all rows (NonTensorData). True: one value per row (NonTensorStack).
        ragged: What each value is; None for non-tensor data.
        requires_grad: Of a nested tensor, as of ``TensorLeaf``.
        is_unbatched: Whether the value is an ``UnbatchedTensor``, packed, which all rows share.
    """

    batch_size: tuple[int, ...]
    per_row: bool
    ragged: Ragged | None = None
    requires_grad: bool = False
    is_unbatched: bool = False


class Params(NamedTuple):
    """How a ``TensorDictParams`` is.

    Attributes:
        no_convert: Of its constructor: False, True or "skip".
        locks_content: Whether it was made with ``lock=True``.
        is_content_locked: Whether the tensordict inside is locked; of the outside its node says it.
        is_in_eval: Whether it is not training, as a module.
        is_in_class: Whether the instance of its node's tensorclass is around it, not inside.
    """

    no_convert: bool | str = False
    locks_content: bool = False
    is_content_locked: bool = False
    is_in_eval: bool = False
    is_in_class: bool = False


class Node(NamedTuple):
    """A tensordict or tensorclass.

    A *packed* node is stored like a value: each element of its batch is a tensordict that describes itself, so that
    elements may differ in batch size, keys and kind. Its entries only tell what is known of the elements: nothing below
    it is a leaf of the whole structure.

    Attributes:
        batch_size: Starts with the batch size of its parent. Of a packed node: of its elements.
        names: One per batch dimension; None when no dimension is named. A packed node has none.
        device: As ``str(torch.device)``; None when the tensordict has no device.
        tensorclass: ``"module.QualName"``; None for a plain tensordict.
        entries: Keys and what they hold, in insertion order; keys are unique.
        stack_dim: Of a lazy stack: the batch dimension along which its rows are stacked. -1: none yet, but rows of this
            structure are stacked lazily, along the dimension that numbers them. Of a packed node: the dimension of
            ``shown_batch_size`` along which its elements are put together, dense along the others where they agree;
            -1: along none. None: its elements are stacked along one dimension of ``batch_size`` after the other.
        inner: Of a packed node: batch dimensions of one element, -1 where elements differ. None: it is not packed.
        is_locked: Whether no entry may be added, replaced or removed; what is below a locked node is locked too.
        params: Of the ``TensorDictParams`` around it, if there is one.
        is_typed: Whether its class is a ``TypedTensorDict``, which plain tensordict stores as if it had none.
        members: Of a packed node with a ``stack_dim``: what is stacked along it, each without that dimension (with -1
            as it is, a single one), where elements that agree do not tell it. Elements may have been written since that
            are of no such members. (): not known.
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
"""What a key holds."""

PACKED = Ragged(Form.PACKED)


def entry_of(root: Node, path: Path) -> Entry | None:
    """What lies at a path; the root for the empty path, None where there is nothing."""
    entry: Entry | None = root
    for key in path:
        entry = dict(entry.entries).get(key) if isinstance(entry, Node) else None
    return entry


def num_dims_of(entry: Entry) -> int | None:
    """How many dimensions an entry has by itself; None where only its content knows."""
    if isinstance(entry, Node):
        return len(entry.shown_batch_size)
    if isinstance(entry, TensorLeaf):
        return len(entry.shape)
    if entry.is_unbatched or entry.ragged == PACKED:
        return None
    return len(entry.batch_size) + (0 if entry.ragged is None else len(entry.ragged.shape))


def packed_leaf(node: Node) -> ValueLeaf:
    """How a packed node is stored."""
    return ValueLeaf(node.batch_size, bool(node.batch_size), PACKED)


def packed_stack_dim(stack_dim: int | None, num_dims: int) -> int | None:
    """What a packed node with so many dimensions of its own notes of how it is put together: nothing where elements
    stand for themselves, or are stacked along their only dimension."""
    return None if not num_dims or (num_dims == 1 and stack_dim == 0) else stack_dim


def has_state(node: Node, *, is_locked: bool = True) -> bool:
    """Whether anything in a tree is noted that does not count for content; ``is_locked``: locks too."""
    if node.params is not None or (is_locked and node.is_locked):
        return True
    if any(has_state(member, is_locked=is_locked) for member in node.members):
        return True
    return any(
        has_state(entry, is_locked=is_locked) if isinstance(entry, Node) else is_marked(entry)
        for _, entry in node.entries
    )


def is_marked(leaf: TensorLeaf | ValueLeaf) -> bool:
    """Whether a leaf comes back as more than a plain tensor or value."""
    return leaf.requires_grad or (isinstance(leaf, TensorLeaf) and leaf.kind is not TensorKind.PLAIN)


def has_nothing(known: Entry) -> bool:
    """Whether elements have no turn, no token there: tensordict makes tensors of empty lists, whatever others hold."""
    return isinstance(known, ValueLeaf) and known.ragged is not None and 0 in known.ragged.shape
