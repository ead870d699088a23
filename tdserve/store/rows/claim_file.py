"""Claim files: in them a writer claims rows by itself, and records which rows it has filled.

The writer is a local client, or a data worker that writes for its clients. A file belongs to one claim. It has a page
of int64 numbers, then a circular journal of records, little-endian. Each number has one writer:

=====  =======  =====================================================================
word   writer   meaning
=====  =======  =====================================================================
0      writer   rows that it has claimed
1      writer   records that it has written
16     server   rows that it may claim
17     server   1: it may claim no more
18     server   records that the server has taken
19     server   claimed rows from which on the writer reports every record to the server
=====  =======  =====================================================================

A record has the id of a client (16 bytes), the number of its request, and the number of rows that it has filled; these
rows follow those of the previous record. To claim, a writer adds to word 0 and then reads word 17; to end the claim,
the server sets word 17 and then reads word 0. With a full fence in between at both ends, at least one of the two sees
the other's change: both agree on which rows are claimed, and neither waits for the other.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import NamedTuple

from tdserve.base.errors import CorruptDataError
from tdserve.base.ids import CLIENT_ID_BYTES
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.mapped import map_shared

FOLDER = "claims"
"""Name of the folder of claim files in a store's."""

MAX_RECORDS = 1024
"""Most records that the server has not taken."""

LOST = -1
"""Result of ``claim``: the server has ended the claim at this moment, and may or may not count the rows."""

_CLAIMED, _WRITTEN = 0, 1
_ALLOWED, _IS_OVER, _TAKEN, _NOTIFY_FROM = 16, 17, 18, 19  # two cache lines behind those of the writer
_RECORD = Struct(f"<{CLIENT_ID_BYTES}s2q")
_HEADER_BYTES = 4096
_FILE_BYTES = _HEADER_BYTES + _RECORD.size * MAX_RECORDS


class ClaimedRows(NamedTuple):
    """A record: rows that were filled.

    Attributes:
        client_id: Id of the client that extended the table.
        request: Number of its request.
        num_rows: Number of rows.
    """

    client_id: bytes
    request: int
    num_rows: int


def has_fences() -> bool:
    """Returns whether stores become visible in order and a lock is a full fence, which claims need: on x86."""
    return os.uname().machine in ("x86_64", "AMD64")


class ClaimFile:
    """A mapped claim file. Build it with :meth:`create` or :meth:`open`. Threads: one at a time.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, content: memoryview) -> None:
        self.path = path
        self._words = content[:_HEADER_BYTES].cast("q")
        self._records = content[_HEADER_BYTES:]
        self._fence = Lock()

    @classmethod
    def create(cls, path: Path, num_allowed: int) -> ClaimFile:
        """Creates the file of a claim of ``num_allowed`` rows.

        Its space is reserved, since a mapped page for which the disk has no room ends the process.

        Raises:
            CapacityError: The disk is full. No file remains.
            CorruptDataError: The file exists already.
        """
        with convert_os_errors(path, asked=_FILE_BYTES):
            path.parent.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                os.posix_fallocate(fd, 0, _FILE_BYTES)
                file = cls._map_file(fd, path)
            except BaseException:
                path.unlink()
                raise
            finally:
                os.close(fd)
        file.take(0, num_allowed)
        return file

    @classmethod
    def open(cls, path: Path) -> ClaimFile:
        """Maps an existing file.

        Raises:
            CorruptDataError, InvalidRequestError: It is missing, truncated, or may not be written.
        """
        with convert_os_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if (nbytes := os.fstat(fd).st_size) != _FILE_BYTES:
                    raise CorruptDataError(path=str(path), expected=f"{_FILE_BYTES} bytes", actual=f"{nbytes} bytes")
                return cls._map_file(fd, path)
            finally:
                os.close(fd)

    @classmethod
    def _map_file(cls, fd: int, path: Path) -> ClaimFile:
        return cls(path, memoryview(map_shared(fd, _FILE_BYTES, writable=True, path=path)).cast("B"))

    # ------------------------------------------------------------ both ends

    @property
    def num_claimed(self) -> int:
        """Number of rows that the writer has claimed."""
        return self._words[_CLAIMED]

    @property
    def num_written(self) -> int:
        """Number of records that the writer has written."""
        return self._words[_WRITTEN]

    @property
    def is_over(self) -> bool:
        """Whether the claim has ended."""
        return bool(self._words[_IS_OVER])

    def fence(self) -> None:
        """Orders memory: earlier stores are visible to all processes before later stores and loads."""
        with self._fence:
            pass

    # ------------------------------------------------------------ the writer's

    def claim(self, num_rows: int) -> int | None:
        """Claims the next rows.

        Returns:
            How many rows were claimed before these. None if that many may not be claimed, or the server has to take
            records first; then nothing was changed. Or ``LOST``.
        """
        if not self.may_claim(num_rows):
            return None
        words = self._words
        first = words[_CLAIMED]
        words[_CLAIMED] = first + num_rows
        self.fence()
        return LOST if words[_IS_OVER] else first

    def may_claim(self, num_rows: int) -> bool:
        """Returns whether this many rows may be claimed now."""
        words = self._words
        has_room = words[_WRITTEN] - words[_TAKEN] < MAX_RECORDS
        return not words[_IS_OVER] and words[_CLAIMED] + num_rows <= words[_ALLOWED] and has_room

    def write(self, filled: ClaimedRows) -> bool:
        """Records that the last claimed rows are filled: they are stored, whatever becomes of this process.

        Returns:
            Whether the server must be notified; otherwise it finds the record when a request needs the table.
        """
        words = self._words
        written = words[_WRITTEN]
        _RECORD.pack_into(self._records, written % MAX_RECORDS * _RECORD.size, *filled)
        words[_WRITTEN] = written + 1
        self.fence()
        return words[_CLAIMED] >= words[_NOTIFY_FROM]

    # ------------------------------------------------------------ the server's

    def take(self, num_records: int, num_allowed: int) -> None:
        """Allows the writer to overwrite ``num_records`` records in all, and to claim ``num_allowed`` rows in all."""
        self._words[_TAKEN], self._words[_ALLOWED] = num_records, num_allowed

    def request_messages(self, num_rows: int) -> None:
        """Asks the writer for a message per record once it has claimed ``num_rows``; read the file after this call."""
        self._words[_NOTIFY_FROM] = num_rows
        self.fence()

    def end(self) -> None:
        """Ends the claim: the writer claims no more rows, but may still fill those that ``num_claimed`` counts from
        here on."""
        self._words[_IS_OVER] = 1
        self.fence()

    def record(self, number: int) -> ClaimedRows:
        """Returns a record that was written and not taken."""
        return ClaimedRows(*_RECORD.unpack_from(self._records, number % MAX_RECORDS * _RECORD.size))

    def unlink(self) -> None:
        """Removes the file, if it exists."""
        with convert_os_errors(self.path):
            self.path.unlink(missing_ok=True)


def remove_others(folder: Path, kept: AbstractSet[str]) -> None:
    """Removes a store's claim files that a crash has left, except those of these names."""
    with convert_os_errors(folder), suppress(FileNotFoundError):
        for name in set(os.listdir(folder)) - kept:
            os.unlink(folder / name)
