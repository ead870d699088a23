"""The order in which a dataset epoch visits the rows of a store, and each reader's share of it. Nothing is stored.

An order is a function of (seed, epoch, number of rows) only: it is the same in every process and on every machine. So
readers that do not know of one another divide an epoch among them, and a reader that was interrupted continues where it
was.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.messages.row_numbers import Rows

MAX_SORTED_ROWS = 1 << 16
"""Up to this number of rows an order is sorted once, in half a megabyte; beyond it each part is computed on demand."""

NUM_ROUNDS = 6
"""Rounds of the cipher; four already give a permutation that no statistical test distinguishes from a random one.
Even."""

_Words = NDArray[np.uint64]


class EpochOrder(Protocol):
    """A permutation of the rows."""

    def list_rows(self, start: int, stop: int) -> Rows | slice:
        """Returns the rows at places ``start`` to ``stop`` of the order."""


@dataclass(frozen=True)
class NumberOrder:
    """The rows in the order of their numbers."""

    def list_rows(self, start: int, stop: int) -> slice:
        """See :class:`EpochOrder`."""
        return slice(start, stop)


class SortedOrder:
    """A few rows in random order, sorted by a random number each: every order has the same probability."""

    def __init__(self, num_rows: int, *, seed: int, epoch: int) -> None:
        (key,) = _derive_keys(1, seed, epoch, num_rows)
        self._order: Rows = np.argsort(_mix_words(np.arange(num_rows, dtype=np.uint64), key), kind="stable")

    def list_rows(self, start: int, stop: int) -> Rows:
        """See :class:`EpochOrder`."""
        return self._order[start:stop]


class EncipheredOrder:
    """Many rows in random order, without memory: the row at a place is the place, enciphered.

    A Feistel network enciphers numbers of k bits, where 2**k is at least the number of rows and less than twice that. A
    result that is too large is enciphered again, until it is a row. 100 million rows cost as much as a thousand.
    """

    def __init__(self, num_rows: int, *, seed: int, epoch: int) -> None:
        num_bits = max((num_rows - 1).bit_length(), 2)
        self._num_rows = num_rows
        self._bits = num_bits // 2, num_bits - num_bits // 2
        self._keys = _derive_keys(NUM_ROUNDS, seed, epoch, num_rows)

    def list_rows(self, start: int, stop: int) -> Rows:
        """See :class:`EpochOrder`."""
        found = self._encipher(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(found >= self._num_rows)
        while len(outside):
            again = self._encipher(found[outside])
            found[outside] = again
            outside = outside[again >= self._num_rows]
        return found.astype(np.int64)

    def _encipher(self, words: _Words) -> _Words:
        high, low = self._bits
        for key in self._keys:
            left, right = words >> np.uint64(low), words & np.uint64((1 << low) - 1)
            words = (right << np.uint64(high)) | (left ^ (_mix_words(right, key) & np.uint64((1 << high) - 1)))
            high, low = low, high
        return words


def compute_share(num_rows: int, *, rank: int, world_size: int) -> range:
    """Returns the places of an order that one of several readers visits; all readers together visit each place once.

    If they do not divide evenly, some readers have one place more than others.

    Raises:
        InvalidRequestError: There is no such reader.
    """
    world_size = check_integer("world_size", world_size, 1)
    rank = check_integer("rank", rank, 0)
    if rank >= world_size:
        raise InvalidRequestError(argument="rank", reason=f"{rank} is not below world_size, which is {world_size}")
    return range(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)


def _derive_keys(num_keys: int, *parts: int) -> list[np.uint64]:
    """Returns random words that are a function of some integers, however large."""
    text = ",".join(map(str, parts)).encode()
    digest = hashlib.blake2b(text, digest_size=8 * num_keys).digest()
    return [np.uint64(word) for word in np.frombuffer(digest, "<u8")]


def _mix_words(words: _Words, key: np.uint64) -> _Words:
    """Maps each word to a random one: the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        mixed: _Words = words * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed
