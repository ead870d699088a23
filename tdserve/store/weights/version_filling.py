"""Fills a version's file: through its mapping as long as that takes no page faults, otherwise by writing to the file.

The first store into a page of a mapping is a page fault, and so is the first after the page cache has written that page
to the disk. These faults may take longer than the copy, and far longer while the disk is busy. A write takes none: of
70 publishes of 256 MiB, one each second, the median took 33 ms in place of 52, and the slowest 66 ms in place of 232
(measured). Between touched pages, however, a write takes a tenth longer than stores, or twice as long from leaves of
tens of megabytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from resource import RUSAGE_THREAD, getrusage

import numpy as np
from numpy.typing import NDArray

GROUP_NBYTES = 4 << 20
"""Most bytes that are copied by one call. Large pieces are cut at multiples of it: writes of whole huge pages make
huge pages, which fault once where small ones do 512 times."""

_MAX_PIECES = 32
"""Most pieces that are copied by one call. Hundreds that live together would set off the garbage collector."""

_MAX_FAULTS = 1
"""Page faults of a call that need not come from the file: Python's own memory grows too."""

Piece = NDArray[np.uint8]


def count_faults() -> int:
    """Returns the number of page faults of this thread so far."""
    return getrusage(RUSAGE_THREAD).ru_minflt


def fill(
    fd: int,
    memory: Piece,
    start: int,
    pieces: Iterable[Piece],
    *,
    is_touched: bool,
    count_faults: Callable[[], int] = count_faults,
) -> None:
    """Copies pieces of bytes into a file, one behind the other.

    A group of pieces that took page faults is followed by a write of all others. Before that, however, as many groups
    may take faults as there were groups without, and one more: so the number of touched pages doubles with each version
    of the file, and few faults are wasted.

    Args:
        fd: The file, for writing.
        memory: A writable mapping of the whole file.
        start: Place of the first piece in the file.
        pieces: May be views that are made in their turn.
        is_touched: Whether the pages may have been touched through this mapping; otherwise everything is written.
        count_faults: Returns the page faults of this thread.

    Raises:
        OSError: The disk is full.
    """
    credit = 1 if is_touched else 0
    for at, group in _iter_groups(pieces, start):
        end = at + sum(map(len, group))
        if credit:
            before = count_faults()
            np.concatenate(group, out=memory[at:end])
            credit += 1 if count_faults() - before <= _MAX_FAULTS else -1
        else:
            _write(fd, group, at, end)


def _iter_groups(pieces: Iterable[Piece], at: int) -> Iterator[tuple[int, list[Piece]]]:
    """Yields groups of pieces with their places; pieces that are too long are cut."""
    each = iter(pieces)
    while some := list(islice(each, _MAX_PIECES)):
        nbytes = sum(map(len, some))
        if nbytes <= GROUP_NBYTES:
            yield at, some
        else:
            yield from _cut(some, at)
        at += nbytes


def _cut(pieces: list[Piece], at: int) -> Iterator[tuple[int, list[Piece]]]:
    group: list[Piece] = []
    start = at
    for piece in pieces:
        first = 0
        while first < len(piece):
            group.append(piece[first : first + GROUP_NBYTES - at % GROUP_NBYTES])
            first += len(group[-1])
            at += len(group[-1])
            if at % GROUP_NBYTES == 0:
                yield start, group
                group, start = [], at
    if group:
        yield start, group


def _write(fd: int, group: list[Piece], at: int, end: int) -> None:
    at += os.pwritev(fd, [piece.data for piece in group], at)
    if at < end:  # the kernel may write less than it was given
        rest = np.concatenate(group)[at - end :]
        _write(fd, [rest], at, end)
