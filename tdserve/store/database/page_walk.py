"""Follows a tree of an LMDB file from page to page, and finds where it is broken, without LMDB.

LMDB trusts its pages: at one that is damaged it ends the process by an assertion, or reads memory that it does not
have. Here every number is compared with its limits before it is followed. The pages are those of LMDB 0.9, as
``mdb.c`` describes them (``MDB_page``, ``MDB_node``, ``MDB_db``, ``MDB_meta``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from tdserve.store.disk.faults import convert_os_errors

_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
"""Flags of pages. Others are set in memory only."""

_IN_OVERFLOW, _IS_TABLE = 1, 2
"""Flags of nodes of leaves: the value is in pages of its own; it is a table's record."""

_BY_NUMBER, _KINDS = 8, 0x7E
"""Flags of tables: the keys are numbers; all that say how records are compared."""

_PAGE_HEADER_BYTES, _NODE_HEADER_BYTES, _NUMBER_BYTES = 16, 8, 8
_NO_PAGE = 2**64 - 1
_NUM_FIRST_PAGES = 2

_META = struct.Struct("<16xI20x48s48sQQ")
"""A meta page: see ``Meta``."""

META_BYTES = _META.size
"""Bytes of such a page that are used."""

_TABLE_RECORD = np.dtype(
    [
        ("page_nbytes", "<u4"),
        ("flags", "<u2"),
        ("depth", "<u2"),
        ("num_branches", "<u8"),
        ("num_leaves", "<u8"),
        ("num_overflow", "<u8"),
        ("num_entries", "<u8"),
        ("root", "<u8"),
    ]
)

_MAX_DEPTH, _MAX_PAGES = 32, 1 << 40
"""More levels and pages than any file has."""

_CHUNK_PAGES = 1 << 14
"""Pages that are looked at together: their nodes are arrays of some MiB."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class Meta(NamedTuple):
    """Content of one of the first two pages: which tree of records a transaction has made.

    Attributes:
        magic: A number that all such pages have.
        free_pages: The record of the list of free pages, a table.
        tables: Record of the table of tables.
        last_page: The last page that is, or was, in use.
        transaction: The number of the transaction.
    """

    magic: int
    free_pages: bytes
    tables: bytes
    last_page: int
    transaction: int

    @classmethod
    def read(cls, file: IO[bytes], at: int) -> Meta:
        """Reads the page that begins at an offset."""
        file.seek(at)
        return cls(*_META.unpack(file.read(_META.size).ljust(_META.size, b"\0")))

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page, by the first one."""
        return int(_read_table(self.free_pages)["page_nbytes"])


def read_metas(file: IO[bytes], page_nbytes: int) -> list[Meta]:
    """Returns what the first two pages tell; the file is unbuffered."""
    return [Meta.read(file, page * page_nbytes) for page in range(_NUM_FIRST_PAGES)]


class _BrokenPageError(Exception):
    """What is wrong with a page; it does not leave this file."""


class _Nodes(NamedTuple):
    """The nodes of some pages, in order.

    Attributes:
        at: Offsets in the file.
        key_nbytes: Lengths of their keys, which follow a header.
        flags: As in the header.
        value_nbytes: Lengths of their values, which follow the keys unless they are in pages of their own.
        children: What a branch leads to.
    """

    at: _Ints
    key_nbytes: _Ints
    flags: _Ints
    value_nbytes: _Ints
    children: _Ints


def find_broken_page(path: Path, meta: Meta, page_nbytes: int) -> str:
    """Returns where a tree of a data file is broken, or "". Keys and values are not looked at.

    No transaction may end meanwhile that may reuse pages of the tree: a reader of it keeps them.

    Args:
        path: The data file.
        meta: The tree.
        page_nbytes: Bytes of a page.

    Raises:
        TDServeError: The file cannot be read; see ``convert_os_errors``.
    """
    try:
        _Walk(path, meta, page_nbytes).follow()
    except _BrokenPageError as broken:
        return str(broken)
    return ""


def count_used_pages(path: Path, meta: Meta, page_nbytes: int) -> int:
    """Returns how many pages the records of a tree take; 0 if a page that leads to them is broken. Arguments and errors
    as in ``find_broken_page``."""
    try:
        return _Walk(path, meta, page_nbytes).count_used_pages()
    except _BrokenPageError:
        return 0


def read_last_freed(file: IO[bytes], meta: Meta, page_nbytes: int) -> int:
    """Returns the last transaction that a list of free pages names: the one that has made it, unless that freed none.

    Args:
        file: The data file, unbuffered.
        meta: Names the list.
        page_nbytes: Bytes of a page.

    Returns:
        The number; 0 if there is none, or if a page is damaged.
    """
    table = _read_table(meta.free_pages)
    page = int(table["root"])
    for _ in range(min(int(table["depth"]), _MAX_DEPTH)):
        if not 0 < page < _MAX_PAGES:
            break
        file.seek(page * page_nbytes)
        content = file.read(page_nbytes)
        if len(content) < page_nbytes:
            break
        flags, lower = struct.unpack_from("<HH", content, 10)
        if not _PAGE_HEADER_BYTES < lower <= page_nbytes:
            break
        (at,) = struct.unpack_from("<H", content, lower - 2)
        if at > page_nbytes - _NODE_HEADER_BYTES - _NUMBER_BYTES:
            break
        low, high, upper, key_nbytes = struct.unpack_from("<4H", content, at)
        if flags == _LEAF:
            key = content[at + _NODE_HEADER_BYTES :][:_NUMBER_BYTES]
            return int.from_bytes(key, "little") if key_nbytes == _NUMBER_BYTES else 0
        page = low | high << 16 | upper << 32
    return 0


def _read_table(record: bytes) -> np.void:
    found: np.void = np.frombuffer(record, _TABLE_RECORD)[0]
    return found


class _Walk:
    """One walk over a file. Arguments and errors as in ``find_broken_page``; raises _BrokenPageError."""

    def __init__(self, path: Path, meta: Meta, page_nbytes: int) -> None:
        with convert_os_errors(path):
            self._num_in_file = os.stat(path).st_size // page_nbytes
            if self._num_in_file < _NUM_FIRST_PAGES:
                raise _BrokenPageError("it has no pages")
            self._content = np.memmap(path, np.uint8, "r", shape=(self._num_in_file * page_nbytes,))
        self._halves = self._content.view("<u2")
        self._meta = meta
        self._page_nbytes = page_nbytes
        self._num_pages = min(meta.last_page, _MAX_PAGES) + 1
        # For each page, how many uses begin there less those that end before it.
        self._uses = np.zeros(min(self._num_pages, self._num_in_file) + 1, np.int32)

    def follow(self) -> None:
        """Follows all tables, and the list of free pages."""
        for nodes in self._follow_table(_read_table(self._meta.free_pages), "the table of free pages", kind=_BY_NUMBER):
            self._add_free_pages(nodes)
        for name, table in self._iter_tables():
            for _ in self._follow_table(table, f"the table {name!r}"):
                pass
        is_used_twice = np.cumsum(self._uses[:-1]) > 1
        if np.any(is_used_twice):
            raise _BrokenPageError(f"page {int(np.argmax(is_used_twice))} is used twice, or used and free")

    def count_used_pages(self) -> int:
        """Returns how many pages the tables say that they have."""
        tables = [_read_table(self._meta.tables), *(table for _, table in self._iter_tables())]
        return sum(int(table[key]) for table in tables for key in ("num_branches", "num_leaves", "num_overflow"))

    def _iter_tables(self) -> Iterator[tuple[str, np.void]]:
        """Yields the names and records of all tables but the first two."""
        for nodes in self._follow_table(_read_table(self._meta.tables), "the table of tables"):
            for at, key_nbytes, flags, nbytes in zip(*(each.tolist() for each in nodes[:4]), strict=True):
                if not flags & _IS_TABLE:  # a record beside the tables, which LMDB allows
                    continue
                key_at = at + _NODE_HEADER_BYTES
                name = bytes(self._content[key_at : key_at + key_nbytes]).decode("utf-8", "replace")
                if nbytes != _TABLE_RECORD.itemsize or flags & _IN_OVERFLOW:
                    raise _BrokenPageError(f"the record of table {name!r} has the wrong size or place")
                yield name, _read_table(bytes(self._content[key_at + key_nbytes :][:nbytes]))

    def _follow_table(self, table: np.void, name: str, *, kind: int = 0) -> Iterator[_Nodes]:
        """Yields the nodes of a table's leaves.

        Args:
            kind: Flags of the table; all of ours have keys in the order of their bytes.
        """
        if int(table["flags"]) & _KINDS != kind:
            raise _BrokenPageError(f"the record of {name} has another order of keys")
        root, depth = int(table["root"]), int(table["depth"])
        found = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        num_entries = 0
        pages = np.array([] if root == _NO_PAGE else [min(root, self._num_pages)], np.int64)
        for level in range(depth):
            page_kind = _LEAF if level == depth - 1 else _BRANCH
            found[page_kind] += len(pages)
            children = []
            if len(pages) > self._num_pages:
                raise _BrokenPageError(f"{name} has more pages than there are")
            for first in range(0, len(pages), _CHUNK_PAGES):
                chunk = pages[first : first + _CHUNK_PAGES]
                self._use(chunk, name)
                nodes = self._read_nodes(chunk, page_kind, name)
                if page_kind == _BRANCH:
                    children.append(nodes.children)
                    continue
                num_entries += len(nodes.at)
                found[_OVERFLOW] += self._follow_overflow(nodes, name)
                yield nodes
            pages = np.concatenate(children) if children else pages[:0]
        counts = (found[_BRANCH], found[_LEAF], found[_OVERFLOW], num_entries)
        listed = tuple(int(table[key]) for key in ("num_branches", "num_leaves", "num_overflow", "num_entries"))
        if counts != listed:
            raise _BrokenPageError(
                f"{name} has {counts[:3]} pages (branches, leaves, values) and {counts[3]} records, "
                f"and its record says {listed[:3]} and {listed[3]}"
            )

    def _read_nodes(self, pages: _Ints, kind: int, name: str) -> _Nodes:
        nbytes = self._page_nbytes
        first = pages * (nbytes // 2)  # in halves, numbers of two bytes each
        flags, lower, upper = (self._halves[first + half].astype(np.int64) for half in (5, 6, 7))
        self._check(flags == kind, pages, f"of {name} is of another kind")
        is_sound = (lower >= _PAGE_HEADER_BYTES) & (lower % 2 == 0) & (lower <= upper) & (upper <= nbytes)
        num_nodes = (lower - _PAGE_HEADER_BYTES) // 2
        self._check(is_sound & (num_nodes >= (2 if kind == _BRANCH else 1)), pages, f"of {name} has no sound limits")
        ends = np.cumsum(num_nodes)
        numbers = np.arange(ends[-1]) - np.repeat(ends - num_nodes, num_nodes)
        of_page = np.repeat(np.arange(len(pages)), num_nodes)
        in_page = self._halves[first[of_page] + _PAGE_HEADER_BYTES // 2 + numbers].astype(np.int64)
        can_be = (in_page >= upper[of_page]) & (in_page <= nbytes - _NODE_HEADER_BYTES) & (in_page % 2 == 0)
        self._check(can_be, pages[of_page], f"of {name} has a record elsewhere")
        at = pages[of_page] * nbytes + in_page
        low, high, node_flags, key_nbytes = (self._halves[at // 2 + half].astype(np.int64) for half in range(4))
        if kind == _BRANCH:
            nodes = _Nodes(at, key_nbytes, node_flags * 0, low * 0, low | high << 16 | node_flags << 32)
            value_nbytes = nodes.value_nbytes
        else:
            nodes = _Nodes(at, key_nbytes, node_flags, low | high << 16, low * 0)
            value_nbytes = np.where(node_flags & _IN_OVERFLOW, _NUMBER_BYTES, nodes.value_nbytes)
            self._check(node_flags <= _IS_TABLE, pages[of_page], f"of {name} has a record of no known kind")
        sizes = _NODE_HEADER_BYTES + key_nbytes + value_nbytes
        self._check(in_page + sizes <= nbytes, pages[of_page], f"of {name} has a record that is too long")
        filled = np.add.reduceat(sizes + sizes % 2, ends - num_nodes)
        self._check(filled == nbytes - upper, pages, f"of {name} has records that are not side by side")
        return nodes

    def _follow_overflow(self, nodes: _Nodes, name: str) -> int:
        """Checks the pages of values that have pages of their own; returns their number."""
        is_there = nodes.flags & _IN_OVERFLOW != 0
        if not np.any(is_there):
            return 0
        at = (nodes.at + _NODE_HEADER_BYTES + nodes.key_nbytes)[is_there]
        pages = self._read_numbers(at)
        self._check_range(pages, pages * 0 + 1, name)
        first = pages * (self._page_nbytes // 2)
        flags, low, high = (self._halves[first + half].astype(np.int64) for half in (5, 6, 7))
        num_pages = low | high << 16
        self._check(flags == _OVERFLOW, pages, f"of {name} is of another kind")
        needed = -(-(_PAGE_HEADER_BYTES + nodes.value_nbytes[is_there]) // self._page_nbytes)
        self._check(num_pages >= needed, pages, f"of {name} is too short for its value")
        self._use(pages, name, num_pages)
        return int(num_pages.sum())

    def _add_free_pages(self, nodes: _Nodes) -> None:
        for at, key_nbytes, flags, nbytes in zip(*(each.tolist() for each in nodes[:4]), strict=True):
            value_at = at + _NODE_HEADER_BYTES + key_nbytes
            if flags & _IN_OVERFLOW:
                value_at = self._read_number(value_at) * self._page_nbytes + _PAGE_HEADER_BYTES
            numbers = self._read_numbers(np.arange(value_at, value_at + nbytes - _NUMBER_BYTES + 1, _NUMBER_BYTES))
            num_free = int(numbers[0]) if len(numbers) else -1
            if not 0 <= num_free < len(numbers):
                raise _BrokenPageError("the list of free pages is damaged")
            free = numbers[1 : num_free + 1]
            if np.any((free < _NUM_FIRST_PAGES) | (free >= self._num_pages)):
                raise _BrokenPageError("the list of free pages names one that does not exist")
            in_file = free[free < len(self._uses) - 1]  # LMDB leaves those at the end unwritten
            np.add.at(self._uses, in_file, 1)
            np.add.at(self._uses, in_file + 1, -1)

    def _use(self, pages: _Ints, name: str, num_pages: _Ints | None = None) -> None:
        """Notes that pages, or this many from each of them, are used, after a look at their numbers."""
        lengths = np.ones_like(pages) if num_pages is None else num_pages
        self._check_range(pages, lengths, name)
        own = self._read_numbers(pages * self._page_nbytes)
        self._check(own == pages, pages, f"of {name} has the number of another")
        np.add.at(self._uses, pages, 1)
        np.add.at(self._uses, pages + lengths, -1)

    def _check_range(self, pages: _Ints, lengths: _Ints, name: str) -> None:
        can_be = (pages >= _NUM_FIRST_PAGES) & (pages < self._num_pages) & (pages + lengths <= self._num_pages)
        self._check(can_be, pages, f"of {name} does not exist")
        self._check(pages + lengths <= self._num_in_file, pages, f"of {name} was cut off: the file ends before it")

    @staticmethod
    def _check(is_sound: np.ndarray[Any, np.dtype[np.bool_]], pages: _Ints, wrong: str) -> None:
        if not np.all(is_sound):
            raise _BrokenPageError(f"page {int(pages[np.argmin(is_sound)])} {wrong}")

    def _read_number(self, at: int) -> int:
        return int.from_bytes(bytes(self._content[at : at + _NUMBER_BYTES]), "little")

    def _read_numbers(self, at: _Ints) -> _Ints:
        """Returns the numbers at these places; what is too large for one becomes -1."""
        found = self._content[at[:, None] + np.arange(_NUMBER_BYTES)]
        numbers = np.ascontiguousarray(found).view("<u8")[:, 0]
        return np.where(numbers < 2**62, numbers, 0).astype(np.int64) - (numbers >= 2**62)
