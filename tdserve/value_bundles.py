"""Bundles: the serialised values that one row has under several paths, together in one buffer. No torch.

A bundle begins with the bytes of each value (uint32, little endian, in the order of the paths); the values follow. A
database takes one of them in half the time that it needs for four values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from tdserve.errors import RemoteProtocolError
from tdserve.value_columns import Buffer, Sizes, sizes_of

_SIZE_BYTES = 4


class SplitColumn(NamedTuple):
    """The values of one path, row by row.

    Attributes:
        sizes: Bytes of each value, int64 ``[n]``; below 4 GiB.
        pieces: Lists of n elements: those of one row, one after the other, are its value.
    """

    sizes: Sizes
    pieces: Sequence[Sequence[Buffer]]

    @classmethod
    def joined(cls, columns: Sequence[SplitColumn]) -> SplitColumn:
        """Columns of one path, one after the other."""
        pieces = zip(*[column.pieces for column in columns], strict=True)
        return cls(np.concatenate([column.sizes for column in columns]), [list(chain(*each)) for each in pieces])

    def parts(self) -> list[Buffer]:
        """All values one after the other, in parts that are no copies unless they are small."""
        if len(self.pieces) == 1:
            return [b"".join(self.pieces[0])]
        return list(chain.from_iterable(zip(*self.pieces, strict=True)))


def bundle(columns: Sequence[SplitColumn]) -> tuple[Sizes, list[Buffer]]:
    """Bytes of each row's bundle, and all bundles one after the other, in parts that are no copies."""
    table = np.stack([column.sizes for column in columns], axis=1)
    width = _SIZE_BYTES * len(columns)
    packed = table.astype("<u4").tobytes()
    heads = [packed[at : at + width] for at in range(0, len(packed), width)]
    lists = [heads, *(piece for column in columns for piece in column.pieces)]
    return table.sum(axis=1) + width, list(chain.from_iterable(zip(*lists, strict=True)))


class Unbundled:
    """The values in bundles of the same paths.

    Args:
        bundles: Of each row; None where a row has none.
        num_paths: Of each bundle.

    Raises:
        RemoteProtocolError: A buffer is no such bundle.
    """

    def __init__(self, bundles: Sequence[Buffer | None], num_paths: int) -> None:
        self._bundles = bundles
        self._present = present = [each for each in bundles if each is not None]
        width = _SIZE_BYTES * num_paths
        heads = b"".join([each[:width] for each in present])
        if len(heads) != width * len(present):
            raise _no_bundle(present)
        table = np.frombuffer(heads, "<u4").reshape(len(present), num_paths)
        self._ends = width + np.cumsum(table, axis=1, dtype=np.int64)
        self._begins = self._ends - table
        if [*map(len, present)] != self._ends[:, -1].tolist():
            raise _no_bundle(present)

    def column(self, number: int) -> Iterator[Buffer | None]:
        """The values of one path, one by one, which are no copies of memoryviews; None where a row has no bundle."""
        bounds = zip(self._begins[:, number].tolist(), self._ends[:, number].tolist(), strict=True)
        values = (each[begin:end] for each, (begin, end) in zip(self._present, bounds, strict=True))
        return values if len(self._present) == len(self._bundles) else self._with_gaps(values)

    def _with_gaps(self, values: Iterator[Buffer]) -> Iterator[Buffer | None]:
        return (None if each is None else next(values) for each in self._bundles)


def bundles_of(columns: Sequence[Sequence[Buffer]]) -> list[bytes]:
    """Each row's bundle, of the values of every path."""
    split = [SplitColumn(sizes_of(values), (values,)) for values in columns]
    _, parts = bundle(split)
    step = len(columns) + 1
    return [b"".join(parts[at : at + step]) for at in range(0, len(parts), step)]


def _no_bundle(bundles: Sequence[Buffer]) -> RemoteProtocolError:
    return RemoteProtocolError(expected="bundles of values", received=f"{sum(map(len, bundles))} bytes that are none")
