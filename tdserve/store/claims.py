"""Claim files: where a local client takes rows by itself, and says which it has filled.

A file belongs to one claim: a page of numbers, then a journal of records, which goes round. All are int64,
little-endian. A number has one writer:

=====  =======  ====================================================================
word   writer   meaning
=====  =======  ====================================================================
0      client   rows that it has claimed
1      client   records that it has written
16     server   rows that it may claim
17     server   1: it may claim no more
18     server   records that the server has taken
19     server   rows claimed from which on the client tells the server of every record
=====  =======  ====================================================================

A record is the number of a request and how many rows it has filled; the rows follow those of the record before. To
claim, a client adds to word 0, and then looks at word 17; to end it, the server sets word 17, and then looks at word 0.
With a full fence in between at both ends, at least one of the two sees what the other did: both agree on which rows are
claimed, and neither waits for the other.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from threading import Lock

from tdserve.base.errors import CorruptDataError
from tdserve.store.faults import os_faults
from tdserve.store.mapped import map_shared

FOLDER = "claims"
"""In a store's folder."""

MAX_RECORDS = 1024
"""That the server has not taken."""

LOST = -1
"""Of ``claim``: the server has ended the claim in this very moment, and may or may not count on the rows."""

_CLAIMED, _WRITTEN = 0, 1
_ALLOWED, _IS_OVER, _TAKEN, _BELL_AT = 16, 17, 18, 19  # two cache lines behind those of the client
_NUM_WORDS = 512
_FILE_BYTES = 8 * (_NUM_WORDS + 2 * MAX_RECORDS)


def has_fences() -> bool:
    """Whether stores become visible in their order, and a lock is a full fence, as all this needs: on x86."""
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
        """Makes the file of a claim of so many rows.

        Its space is reserved: a mapped page for which the disk has no room ends the process.

        Raises:
            CapacityError: The disk is full. No file stays behind.
            CorruptDataError: There is a file already.
        """
        with os_faults(path, asked=_FILE_BYTES):
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
            CorruptDataError, InvalidRequestError: It is missing, cut short, or may not be written.
        """
        with os_faults(path):
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
        """Rows that the client has claimed."""
        return self._words[_CLAIMED]

    @property
    def num_written(self) -> int:
        """Records that it has written."""
        return self._words[_WRITTEN]

    @property
    def is_over(self) -> bool:
        """Whether no more may be claimed."""
        return bool(self._words[_IS_OVER])

    def fence(self) -> None:
        """What was stored before is seen by everybody before what is stored or read from here on."""
        with self._fence:
            pass

    # ------------------------------------------------------------ the client's

    def claim(self, num_rows: int) -> int | None:
        """Takes the next rows.

        Returns:
            How many were claimed before these; None where so many may not be claimed, or the server has records to take
            first: nothing was changed; or ``LOST``.
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
        """The rows that were claimed last are filled: they are the server's, whatever becomes of this process.

        Returns:
            Whether the server wants to be told; else it finds it when somebody asks for the table.
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
        """So many records may be written over, and so many rows be claimed in all."""
        self._words[_TAKEN], self._words[_ALLOWED] = num_records, num_allowed

    def ring_at(self, num_rows: int) -> None:
        """The client tells of every record once it has claimed so many rows; look at the file after this."""
        self._words[_BELL_AT] = num_rows
        self.fence()

    def end(self) -> None:
        """The client may claim no more; what ``num_claimed`` says from here on, it may fill still."""
        self._words[_IS_OVER] = 1
        self.fence()

    def record(self, number: int) -> tuple[int, int]:
        """A record that was written and not taken: the request, and how many rows it has filled."""
        at = number % MAX_RECORDS * 2
        return self._records[at], self._records[at + 1]

    def unlink(self) -> None:
        """Removes the file; harmless when it is gone."""
        with os_faults(self.path):
            self.path.unlink(missing_ok=True)


def remove_others(folder: Path, kept: AbstractSet[str]) -> None:
    """Removes the claim files of a store that a crash has left, but for those of these names."""
    with os_faults(folder), suppress(FileNotFoundError):
        for name in set(os.listdir(folder)) - kept:
            os.unlink(folder / name)
