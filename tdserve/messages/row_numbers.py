"""Row numbers as bytes: a run of consecutive rows, which writers nearly always get, takes 24 bytes at any length."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError, RemoteProtocolError

Rows = NDArray[np.int64]
"""Row numbers."""

NO_ROWS: Rows = np.empty(0, np.int64)

_RUN = -1
"""First number of the form for runs; no row has it."""

RUN_FORM = struct.Struct("<3q")
"""The form of a run: a negative number, its first row, and how many."""

_HALVES = -2
"""First number of the form of four bytes per row; no row has it."""

PIECE_ROWS = 1 << 14
"""Rows of a very large request that are handled at a time, while others are served in between: the slowest work, on
trees of priorities, takes a few milliseconds for these."""

RUN_PIECE_ROWS = 8 * PIECE_ROWS
"""The same for consecutive rows and little work per row."""

TREE_PIECE_ROWS = PIECE_ROWS // 8
"""The same for rows all over a tree of ten million priorities: each needs memory accesses on every level."""

_BITS = -3
"""First number of the form of one bit per row."""

_REPEATS = -4
"""First number of the run-length form of generations; no generation is negative."""

_RUNS = -5
"""First number of the form of several runs."""

_MAX_NUMBER = 2**62

_MIN_RUNS_ROWS = 1024
"""With fewer rows than this, runs are not looked for: the numbers are sent one by one."""

_ROWS_OF_RUN = 64
"""Least average length of runs for the form of several runs."""


def encode_rows(rows: NDArray[np.int64]) -> bytes:
    """Encodes rows as int64, little endian: ``[-1, first, count]`` for a run, ``[-5, first, count, first, count, ...]``
    for a few long ones, as from a writer that wraps around the end of a table; otherwise the numbers themselves."""
    num_rows = len(rows)
    if num_rows > 3 and is_run(rows):
        return RUN_FORM.pack(_RUN, int(rows[0]), num_rows)
    if num_rows >= _MIN_RUNS_ROWS:
        heads = np.append(0, np.flatnonzero(rows[1:] != rows[:-1] + 1) + 1)
        if len(heads) * _ROWS_OF_RUN <= num_rows:
            runs = np.stack((rows[heads], np.diff(heads, append=num_rows)), axis=1).reshape(-1)
            return np.append(_RUNS, runs).astype("<i8", copy=False).tobytes()
    return rows.astype("<i8", copy=False).tobytes()


def encode_many(rows: NDArray[np.int64]) -> bytes:
    """Encodes rows as ``encode_rows`` does, but very many sorted rows as one bit each if that is shorter."""
    content = encode_rows(rows)
    if len(rows) <= PIECE_ROWS or (int(rows[-1]) >> 3) + 17 >= len(content) or not (rows[1:] > rows[:-1]).all():
        return content
    mask = np.zeros(int(rows[-1]) + 1, np.bool_)
    mask[rows] = True
    return encode_bits(np.packbits(mask))


def has_runs(content: bytes) -> bool:
    """Returns whether the encoding may stand for far more rows than it has bytes."""
    return len(content) >= RUN_FORM.size and int.from_bytes(content[:8], "little", signed=True) == _RUNS


def _expand_runs(runs: NDArray[np.int64], max_rows: int | None) -> NDArray[np.int64]:
    firsts, counts = runs[0::2], runs[1::2]
    num_rows = float(counts.astype(np.float64).sum())
    if len(firsts) != len(counts) or (counts < 0).any() or (max_rows is not None and num_rows > max_rows):
        raise RemoteProtocolError(expected=f"at most {max_rows} row numbers", received=f"{len(firsts)} runs")
    return np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def is_run(rows: NDArray[np.int64]) -> bool:
    """Returns whether the numbers, of which there is at least one, are consecutive."""
    # Ascending numbers leave none out if their range is as long as their count.
    length = len(rows) - 1
    return int(rows[-1]) - int(rows[0]) == length and int(np.count_nonzero(rows[1:] > rows[:-1])) == length


def sort_unique(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the rows sorted, each once. Sorted rows, such as most rows that were written together, are
    returned unchanged; others are sorted, in a tenth of the time of np.unique."""
    if np.count_nonzero(rows[1:] > rows[:-1]) == len(rows) - 1:
        return rows
    rows = np.sort(rows)
    is_first = np.ones(len(rows), np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    return rows[is_first]


def encode_few_bytes(rows: NDArray[np.int64]) -> bytes:
    """Like ``encode_rows``, in four bytes each if all numbers fit: for messages that must stay short.

    After ``[-2, count]`` the numbers are uint32, padded to a multiple of eight bytes.
    """
    num_rows = len(rows)
    if num_rows < 8 or int(rows.min()) < 0 or int(rows.max()) >> 32:
        return encode_rows(rows)
    halves = np.zeros(num_rows + num_rows % 2, "<u4")
    halves[:num_rows] = rows
    return np.array([_HALVES, num_rows], "<i8").tobytes() + halves.tobytes()


def encode_bits(bits: NDArray[np.uint8]) -> bytes:
    """Encodes one bit per row, most significant first: ``[-3, bytes]`` and the bits, padded to eight bytes."""
    return np.array([_BITS, len(bits)], "<i8").tobytes() + bits.tobytes() + bytes(-len(bits) % 8)


def decode_bits(content: bytes) -> NDArray[np.uint8] | None:
    """Returns the bits that ``encode_bits`` encoded; None for any other form."""
    if len(content) < 16 or len(content) % 8:
        return None
    form, size = np.frombuffer(content, "<i8", 2).tolist()
    return np.frombuffer(content, np.uint8, size, 16) if form == _BITS and 0 <= size <= len(content) - 16 else None


def encode_repeats(numbers: NDArray[np.int64]) -> bytes:
    """Encodes numbers, none negative, as int64, little endian. If most neighbours are equal, as with the generations of
    very many rows, they are run-length encoded: ``[-4]``, each number that differs from the previous one, and the
    counts."""
    if len(numbers):
        heads = np.append(0, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1)
        if len(heads) * 16 < len(numbers):
            counts = np.diff(heads, append=len(numbers))
            return np.concatenate(([_REPEATS], numbers[heads], counts)).astype("<i8", copy=False).tobytes()
    return numbers.astype("<i8", copy=False).tobytes()


def decode_repeats(content: bytes, num_rows: int) -> NDArray[np.int64]:
    """Returns the numbers that ``encode_repeats`` encoded.

    Args:
        num_rows: Number of numbers that there must be.

    Raises:
        RemoteProtocolError: There are more or fewer.
    """
    if len(content) % 8:
        raise RemoteProtocolError(expected=f"{num_rows} numbers", received=f"{len(content)} bytes")
    numbers = np.frombuffer(content, "<i8").astype(np.int64, copy=False)
    if len(numbers) and numbers[0] == _REPEATS:
        values, counts = np.split(numbers[1:], 2) if len(numbers) % 2 else (numbers[:0], numbers[:0])
        is_right = int(counts.sum()) == num_rows and not (counts < 0).any()
        numbers = np.repeat(values, counts) if is_right else numbers[:0]
    if len(numbers) != num_rows:
        raise RemoteProtocolError(expected=f"{num_rows} numbers", received=f"{len(content)} bytes")
    return numbers


def decode_rows(content: bytes, *, max_rows: int | None = None) -> NDArray[np.int64]:
    """Returns the numbers, in order.

    Args:
        max_rows: Limit for input from a client, of the numbers and, in the form of bits, of their range: a few bytes
            can stand for more rows than memory has room for.

    Raises:
        RemoteProtocolError: The bytes are not row numbers, or more than ``max_rows``.
    """
    if len(content) % 8:
        raise RemoteProtocolError(expected="int64 row numbers", received=f"{len(content)} bytes")
    numbers = np.frombuffer(content, "<i8")
    if len(numbers) == 3 and numbers[0] == _RUN:
        first, count = int(numbers[1]), int(numbers[2])
        if not 0 <= count <= (_MAX_NUMBER if max_rows is None else max_rows) or first + count > _MAX_NUMBER:
            expected = "row numbers" if max_rows is None else f"at most {max_rows} row numbers"
            raise RemoteProtocolError(expected=expected, received=f"{count} from {first} on")
        return np.arange(first, first + count, dtype=np.int64)
    if len(numbers) > 2 and numbers[0] == _RUNS:
        return _expand_runs(numbers[1:].astype(np.int64, copy=False), max_rows)
    if (bits := decode_bits(content)) is not None:
        if max_rows is not None and 8 * len(bits) > max_rows + 64:  # each stands for 64 times its size
            raise RemoteProtocolError(expected=f"bits of {max_rows} rows", received=f"{8 * len(bits)}")
        return np.flatnonzero(np.unpackbits(bits)).astype(np.int64, copy=False)
    if len(numbers) > 2 and numbers[0] == _HALVES:
        halves = np.frombuffer(content, "<u4", offset=16)
        if not 0 <= numbers[1] <= len(halves):
            raise RemoteProtocolError(expected=f"{numbers[1]} row numbers", received=f"{len(halves)}")
        return halves[: numbers[1]].astype(np.int64)
    return numbers.astype(np.int64, copy=False)


def find_run(content: bytes) -> tuple[int, int] | None:
    """Returns first number and count of a run, without expanding it; None for any other form."""
    if len(content) != RUN_FORM.size:
        return None
    form, first, count = RUN_FORM.unpack(content)
    return (first, count) if form == _RUN and first >= 0 and count > 0 else None


def compute_max_rows(content: bytes) -> int:
    """Returns an upper bound of the number of rows, without expanding them."""
    numbers = np.frombuffer(content[: len(content) // 8 * 8], "<i8")
    form = int(numbers[0]) if len(numbers) else 0
    if form == _RUN and len(numbers) == RUN_FORM.size // 8:
        return int(numbers[2])
    if form == _RUNS:
        return int(numbers[2::2].sum())
    return len(numbers) * {_HALVES: 2, _BITS: 64}.get(form, 1)


def spread(rows: NDArray[np.int64], num_each: int) -> NDArray[np.int64]:
    """Returns the positions of all elements of these rows, in order, in an array of ``num_each`` elements per row."""
    if num_each == 1:
        return rows
    return (rows[:, None] * num_each + np.arange(num_each)).reshape(-1)


def decode_column(argument: str, content: bytes, dtype: str, num_rows: int) -> NDArray[Any]:
    """Returns one number per row as a view of the content; a single number stands for all rows.

    Raises:
        InvalidRequestError: There are more or fewer.
    """
    itemsize = np.dtype(dtype).itemsize
    if len(content) not in (itemsize, num_rows * itemsize):
        reason = f"{len(content)} bytes are neither one number nor {num_rows} of {itemsize} bytes"
        raise InvalidRequestError(argument=argument, reason=reason)
    return np.broadcast_to(np.frombuffer(content, dtype), num_rows)
