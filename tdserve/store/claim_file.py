"""Claim files: in them a local client claims rows by itself, and records which rows it has filled.

A file belongs to one claim. It has a page of numbers, then a circular journal of records. All are int64, little-endian.
Each number has one writer:

=====  =======  =====================================================================
word   writer   meaning
=====  =======  =====================================================================
0      client   rows that it has claimed
1      client   records that it has written
16     server   rows that it may claim
17     server   1: it may claim no more
18     server   records that the server has taken
19     server   claimed rows from which on the client reports every record to the server
=====  =======  =====================================================================

A record is the number of a request and of the rows that it has filled; these rows follow those of the previous record.
To claim, a client adds to word 0 and then reads word 17; to end the claim, the server sets word 17 and then reads word
0. With a full fence in between at both ends, at least one of the two sees the other's change: both agree on which rows
are claimed, and neither waits for the other.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from threading import Lock

from tdserve.base.errors import CorruptDataError
from tdserve.store.faults import convert_os_errors
from tdserve.store.mapped import map_shared

FOLDER = "claims"
"""Name of the folder of claim files in a store's."""

MAX_RECORDS = 1024
"""Most records that the server has not taken."""

LOST = -1
"""Result of ``claim``: the server has ended the claim at this moment, and may or may not count the rows."""

_CLAIMED, _WRITTEN = 0, 1
_ALLOWED, _IS_OVER, _TAKEN, _BELL_AT = 16, 17, 18, 19  # two cache lines behind those of the client
_NUM_WORDS = 512
_FILE_BYTES = 8 * (_NUM_WORDS + 2 * MAX_RECORDS)


def has_fences() -> bool:
    """Returns whether stores become visible in order and a lock is a full fence, which claims need: on x86."""
    return os.uname().machine in ("x86_64", "AMD64")


class ClaimFile:
    """A mapped claim file. Build it with :meth:`create` or :meth:`open`. Threads: one at a time.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, words: memoryview) -> None:
        self.path = path
        self._words = words[:_NUM_WORDS]
        self._records = words[_NUM_WORDS:]
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
        return cls(path, memoryview(map_shared(fd, _FILE_BYTES, writable=True, path=path)).cast("B").cast("q"))

    # ------------------------------------------------------------ both ends

    @property
    def num_claimed(self) -> int:
        """Number of rows that the client has claimed."""
        return self._words[_CLAIMED]

    @property
    def num_written(self) -> int:
        """Number of records that the client has written."""
        return self._words[_WRITTEN]

    @property
    def is_over(self) -> bool:
        """Whether the claim has ended."""
        return bool(self._words[_IS_OVER])

    def fence(self) -> None:
        """Orders memory: earlier stores are visible to all processes before later stores and loads."""
        with self._fence:
            pass

    # ------------------------------------------------------------ the client's

    def claim(self, num_rows: int) -> int | None:
        """Claims the next rows.

        Returns:
            How many rows were claimed before these. None if so many may not be claimed, or the server has to take
            records first; then nothing was changed. Or ``LOST``.
        """
        words = self._words
        first = words[_CLAIMED]
        has_room = words[_WRITTEN] - words[_TAKEN] < MAX_RECORDS
        if words[_IS_OVER] or first + num_rows > words[_ALLOWED] or not has_room:
            return None
        words[_CLAIMED] = first + num_rows
        self.fence()
        return LOST if words[_IS_OVER] else first

    def write(self, request: int, num_rows: int) -> bool:
        """Records that the last claimed rows are filled: they are stored, whatever becomes of this process.

        Returns:
            Whether the server wants a message; otherwise it finds the record when a request needs the table.
        """
        words = self._words
        written = words[_WRITTEN]
        at = written % MAX_RECORDS * 2
        self._records[at], self._records[at + 1] = request, num_rows
        words[_WRITTEN] = written + 1
        self.fence()
        return words[_CLAIMED] >= words[_BELL_AT]

    # ------------------------------------------------------------ the server's

    def take(self, num_records: int, num_allowed: int) -> None:
        """Allows the client to overwrite ``num_records`` records in all, and to claim ``num_allowed`` rows in all."""
        self._words[_TAKEN], self._words[_ALLOWED] = num_records, num_allowed

    def request_messages(self, num_rows: int) -> None:
        """Asks the client for a message per record once it has claimed ``num_rows``; read the file after this call."""
        self._words[_BELL_AT] = num_rows
        self.fence()

    def end(self) -> None:
        """Ends the claim: the client claims no more rows, but may still fill those that ``num_claimed`` counts from
        here on."""
        self._words[_IS_OVER] = 1
        self.fence()

    def record(self, number: int) -> tuple[int, int]:
        """Returns a record that was written and not taken: its request, and the number of rows that it has filled."""
        at = number % MAX_RECORDS * 2
        return self._records[at], self._records[at + 1]

    def unlink(self) -> None:
        """Removes the file, if it exists."""
        with convert_os_errors(self.path):
            self.path.unlink(missing_ok=True)


def remove_others(folder: Path, kept: AbstractSet[str]) -> None:
    """Removes a store's claim files that a crash has left, except those of these names."""
    with convert_os_errors(folder), suppress(FileNotFoundError):
        for name in set(os.listdir(folder)) - kept:
            os.unlink(folder / name)
