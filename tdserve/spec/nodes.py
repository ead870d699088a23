"""The parts of a structure: leaves and nodes, as plain immutable values. No I/O, no torch.

They are named tuples rather than dataclasses because specs are hashed and compared on every call that carries a
tensordict, and tuples do both in C.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tdserve.spec.dtypes import ITEMSIZE

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


class TensorLeaf(NamedTuple):
    """A tensor.

    Attributes:
        dtype: Name as in ``dtypes.ITEMSIZE``.
        shape: Complete shape; starts with the batch size of its node.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, packed."""
        return ITEMSIZE[self.dtype] * math.prod(self.shape)


class ValueLeaf(NamedTuple):
    """A non-tensor entry; its value is content and not part of the structure.

    Attributes:
        batch_size: Starts with the batch size of its node.
        per_row: False: one value for all rows (NonTensorData). True: one value per row (NonTensorStack).
    """

    batch_size: tuple[int, ...]
    per_row: bool


class Node(NamedTuple):
    """A tensordict or tensorclass.

    Attributes:
        batch_size: Starts with the batch size of its parent.
        names: One per batch dimension; None when no dimension is named.
        device: As ``str(torch.device)``; None when the tensordict has no device.
        tensorclass: ``"module.QualName"``; None for a plain tensordict.
        entries: Keys and what they hold, in insertion order; keys are unique.
    """

    batch_size: tuple[int, ...]
    names: DimNames | None
    device: str | None
    tensorclass: str | None
    entries: tuple[tuple[str, Entry], ...]


Entry = Node | TensorLeaf | ValueLeaf
"""What a key holds."""
