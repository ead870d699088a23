"""Bundles: the serialised values of one row under several paths, together in one buffer. No torch.

A bundle begins with the length of each value (uint32, little endian, in the order of the paths); the values follow. A
database stores one bundle in half the time of four values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import getitem, itemgetter
from typing import Any, NamedTuple

import numpy as np

from tdserve.base.errors import RemoteProtocolError
from tdserve.values.value_columns import Buffer, JoinedValues, Sizes, measure_sizes, split_rows

_SIZE_BYTES = 4

_FEW_BYTES = 2048
"""Pieces of up to about this size are copied together faster than they are passed on one by one."""


class SplitColumn(NamedTuple):
    """The values of one path, row by row.

    Attributes:
        sizes: Length of each value, int64 ``[n]``; below 4 GiB.
        pieces: Lists of n elements: the elements of one row, concatenated, are its value. A single list of values that
            are never bundled may be cut anywhere.
    """

    sizes: Sizes
    pieces: Sequence[Sequence[Buffer]]

    @classmethod
    def from_values(cls, values: Sequence[Buffer]) -> SplitColumn:
        """Returns a column of these values."""
        return cls(measure_sizes(values), [values])

    @classmethod
    def join(cls, columns: Sequence[SplitColumn]) -> SplitColumn:
        """Returns the concatenation of columns of one path."""
        if len(columns) == 1:
            return columns[0]
        pieces = zip(*[column.pieces for column in columns], strict=True)
        return cls(np.concatenate([column.sizes for column in columns]), [list(chain(*each)) for each in pieces])

    @property
    def nbytes(self) -> int:
        """Size of all values."""
        return int(self.sizes.sum())

    def get_parts(self) -> list[Buffer]:
        """Returns all values, concatenated, in parts that are no copies unless they are small."""
        if len(self.pieces) == 1 and self.nbytes <= _FEW_BYTES * len(self.pieces[0]):
            return [b"".join(self.pieces[0])]
        return list(chain.from_iterable(zip(*self.pieces, strict=True)))


def bundle(columns: Sequence[SplitColumn]) -> tuple[Sizes, list[Buffer]]:
    """Returns the length of each row's bundle, and all bundles, concatenated, in parts that are no copies."""
    table = np.stack([column.sizes for column in columns], axis=1)
    pieces = [split_rows(table.astype("<u4")), *chain.from_iterable(column.pieces for column in columns)]
    return table.sum(axis=1) + _SIZE_BYTES * len(columns), list(chain.from_iterable(zip(*pieces, strict=True)))


class Unbundled:
    """The values in bundles of the same paths.

    Args:
        bundles: Bundle of each row; None if a row has none.
        num_paths: Number of paths of each bundle.

    Raises:
        RemoteProtocolError: A buffer is not such a bundle.
    """

    def __init__(self, bundles: Sequence[Buffer | None], num_paths: int) -> None:
        present: Any = [each for each in bundles if each is not None] if None in bundles else bundles
        self._bundles = bundles
        self._present: Sequence[Buffer] = present
        width = _SIZE_BYTES * num_paths
        heads = b"".join(map(itemgetter(slice(width)), present))
        if len(heads) != width * len(present):
            raise _make_bundle_error(present)
        self._sizes = np.frombuffer(heads, "<u4").reshape(len(present), num_paths).astype(np.int64)
        self._ends = width + np.cumsum(self._sizes, axis=1)
        self._begins = self._ends - self._sizes
        if (measure_sizes(present) != self._ends[:, -1]).any():
            raise _make_bundle_error(present)

    @property
    def has_gaps(self) -> bool:
        """Whether any row has no bundle."""
        return len(self._present) < len(self._bundles)

    def iter_column(self, number: int) -> Iterator[Buffer | None]:
        """Yields the values of one path, which for memoryviews are no copies; None if a row has no bundle."""
        values = iter(self._cut(self._begins[:, number], self._ends[:, number]))
        return (None if each is None else next(values) for each in self._bundles) if self.has_gaps else values

    def join_columns(self, heads_nbytes: Mapping[int, int | None]) -> dict[int, JoinedValues]:
        """Returns copies of the values of several paths, for the rows that have a bundle; neighbouring paths share a
        buffer.

        Args:
            heads_nbytes: By number of the path. A path whose values are large gets a buffer of its own; the number is
                how many bytes at the front of each value are returned apart, or None.
        """
        runs: list[list[int]] = []  # neighbouring paths, of which the last one may be large
        for number in sorted(heads_nbytes):
            if runs and runs[-1][-1] == number - 1 and heads_nbytes[number - 1] is None:
                runs[-1].append(number)
            else:
                runs.append([number])
        found: dict[int, JoinedValues] = {}
        for run in runs:
            found |= self._copy_run(run, heads_nbytes[run[-1]])
        return found

    def _copy_run(self, run: Sequence[int], head_nbytes: int | None) -> dict[int, JoinedValues]:
        """Copies the values of a run; ``head_nbytes`` is that of its last path."""
        first, last = run[0], run[-1]
        begins, ends = self._begins[:, first], self._ends[:, last]
        if head_nbytes is not None:
            head_nbytes = head_nbytes if int(self._sizes[:, last].min(initial=head_nbytes)) >= head_nbytes else 0
            ends = self._begins[:, last] + head_nbytes
        content = b"".join(self._cut(begins, ends))
        lengths = ends - begins
        moved = np.cumsum(lengths) - lengths - begins  # from where a value lies in its bundle to where in the content
        found = {
            number: JoinedValues(content, self._sizes[:, number], begins=self._begins[:, number] + moved)
            for number in (run if head_nbytes is None else run[:-1])
        }
        if head_nbytes is not None:
            heads = np.frombuffer(content, np.uint8)[(self._begins[:, last] + moved)[:, None] + np.arange(head_nbytes)]
            bodies = bytearray().join(self._cut(ends, self._ends[:, last]))
            found[last] = JoinedValues(bodies, self._sizes[:, last] - head_nbytes, heads=heads.tobytes())
        return found

    def _cut(self, begins: Sizes, ends: Sizes) -> list[Buffer]:
        """Returns a part of each bundle."""
        parts = map(slice, begins.tolist(), ends.tolist())
        return list(map(getitem, self._present, parts))  # type: ignore[arg-type]  # overloaded by kind of index


def encode_bundles(columns: Sequence[Sequence[Buffer]]) -> list[bytes]:
    """Returns each row's bundle of the values of every path."""
    heads = split_rows(np.stack([measure_sizes(values) for values in columns], axis=1).astype("<u4"))
    return list(map(b"".join, zip(heads, *columns, strict=True)))


def _make_bundle_error(bundles: Sequence[Buffer]) -> RemoteProtocolError:
    return RemoteProtocolError(
        expected="bundles of values", received=f"{sum(map(len, bundles))} bytes that are not bundles"
    )
