"""Row numbers as bytes: a run of consecutive rows, which is what writers nearly always get, takes 24 bytes at any
length."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.errors import InvalidRequestError, RemoteProtocolError

_RUN = -1
"""First number of the form for runs; no row has it."""

_RUN_FORM = struct.Struct("<3q")

_HALVES = -2
"""First number of the form of four bytes per row; no row has it either."""


def encode_rows(rows: NDArray[np.int64]) -> bytes:
    """int64, little endian: ``[-1, first, count]`` for a run, else the numbers themselves."""
    num_rows = len(rows)
    if num_rows > 3 and is_run(rows):
        return _RUN_FORM.pack(_RUN, int(rows[0]), num_rows)
    return rows.astype("<i8", copy=False).tobytes()


def is_run(rows: NDArray[np.int64]) -> bool:
    """Whether the numbers, of which there is at least one, follow one another."""
    # Numbers that only grow, and so little, leave none out.
    length = len(rows) - 1
    return int(rows[-1]) - int(rows[0]) == length and int(np.count_nonzero(rows[1:] > rows[:-1])) == length


def encode_few_bytes(rows: NDArray[np.int64]) -> bytes:
    """As ``encode_rows``, in four bytes each where all numbers fit: for messages that must stay short.

    Behind ``[-2, count]`` the numbers are uint32, padded to a multiple of eight bytes.
    """
    num_rows = len(rows)
    if num_rows < 8 or int(rows.min()) < 0 or int(rows.max()) >> 32:
        return encode_rows(rows)
    halves = np.zeros(num_rows + num_rows % 2, "<u4")
    halves[:num_rows] = rows
    return np.array([_HALVES, num_rows], "<i8").tobytes() + halves.tobytes()


def decode_rows(content: bytes, *, max_rows: int | None = None) -> NDArray[np.int64]:
    """The numbers, in their order.

    Args:
        max_rows: Of what a client says: a few bytes can stand for more rows than memory has room for.

    Raises:
        RemoteProtocolError: The bytes are no row numbers, or more than ``max_rows``.
    """
    if len(content) % 8:
        raise RemoteProtocolError(expected="int64 row numbers", received=f"{len(content)} bytes")
    numbers = np.frombuffer(content, "<i8")
    if len(numbers) == 3 and numbers[0] == _RUN:
        if max_rows is not None and numbers[2] > max_rows:
            raise RemoteProtocolError(expected=f"at most {max_rows} row numbers", received=str(numbers[2]))
        return np.arange(numbers[1], numbers[1] + numbers[2], dtype=np.int64)
    if len(numbers) > 2 and numbers[0] == _HALVES:
        halves = np.frombuffer(content, "<u4", offset=16)
        if not 0 <= numbers[1] <= len(halves):
            raise RemoteProtocolError(expected=f"{numbers[1]} row numbers", received=f"{len(halves)}")
        return halves[: numbers[1]].astype(np.int64)
    return numbers.astype(np.int64, copy=False)


def run_of(content: bytes) -> tuple[int, int] | None:
    """The first number and the count of a run, without its numbers being made; None for what is encoded otherwise."""
    if len(content) != _RUN_FORM.size:
        return None
    form, first, count = _RUN_FORM.unpack(content)
    return (first, count) if form == _RUN and first >= 0 and count > 0 else None


def spread(rows: NDArray[np.int64], num_each: int) -> NDArray[np.int64]:
    """Positions in an array of ``num_each`` elements per row, of all elements of these rows, in order."""
    if num_each == 1:
        return rows
    return (rows[:, None] * num_each + np.arange(num_each)).reshape(-1)


def column_of(argument: str, content: bytes, dtype: str, num_rows: int) -> NDArray[Any]:
    """One number per row, of which a single one may stand for all; a view of the content.

    Raises:
        InvalidRequestError: There are more or fewer.
    """
    itemsize = np.dtype(dtype).itemsize
    if len(content) not in (itemsize, num_rows * itemsize):
        reason = f"{len(content)} bytes are neither one number nor {num_rows} of {itemsize} bytes"
        raise InvalidRequestError(argument=argument, reason=reason)
    return np.broadcast_to(np.frombuffer(content, dtype), num_rows)
