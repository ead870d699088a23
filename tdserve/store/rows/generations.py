"""The generation file of a store: a header, and one int64 per row. Control writes the numbers, all processes map them.

There are two exceptions: a local client makes rows odd that it has claimed (:mod:`tdserve.store.rows.claim_file`), and
some numbers of the rules belong to readers and writers.

Layout, little-endian: 8 bytes magic, 32 bytes store uid (hexadecimal digits), int64 num_rows, one byte deleted flag, 7
zeros, int64 objects epoch, int64 number of the structure, int64 former version, zeros up to 128, 496 int64 that belong
to the rules of the store, then the generations. :mod:`tdserve.rules.replay.allocation.ring` defines what the
generations mean, and :mod:`tdserve.rules.replay.allocation.shared_numbers` the numbers before them.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tdserve.base.errors import ClosedError, CorruptDataError, LocalProtocolError
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file
from tdserve.store.disk.mapped import Mapping, map_new, map_shared

FILE_NAME = "generation.memmap"

HEADER_BYTES = 4096
"""One page, so that the numbers are page-aligned and the header is apart from the pages that the writer changes."""

_MAGIC = b"TDSGEN\x00\x01"
_HEADER = struct.Struct("<8s32sq")
_UID_OFFSET = 8
_DELETED_OFFSET = _HEADER.size
_EPOCH_OFFSET = _HEADER.size + 8
_STRUCTURE_OFFSET = _EPOCH_OFFSET + 8
_FORMER_OFFSET = _STRUCTURE_OFFSET + 8
_NUMBERS_OFFSET = 128
_ITEM_BYTES = 8
_FORMER = struct.Struct("<q")


def sum_generations(numbers: npt.NDArray[np.int64]) -> int:
    """Returns the sum of generations modulo 2^64. They only grow, so it changes with each of them."""
    return int(numbers.sum()) % (1 << 64)


class Generations:
    """A mapped generation file. Build it with :meth:`create` or :meth:`open`.

    Attributes:
        path: The file.
        uid: Incarnation of the store that the file belongs to.
        numbers: The numbers of the rules, int64 ``[496]``, writable as the file is.
        former_version: Number that the versions of the store follow: the last one of earlier stores of its name.
    """

    def __init__(self, path: Path, *, uid: str, num_rows: int, mapping: Mapping, writable: bool) -> None:
        self.path = path
        self.uid = uid
        self._header: npt.NDArray[np.uint8] | None = np.ndarray((HEADER_BYTES,), np.uint8, buffer=mapping)
        self._values: npt.NDArray[np.int64] | None = np.ndarray(
            (num_rows,), dtype="<i8", buffer=mapping, offset=HEADER_BYTES
        )
        self._header.flags.writeable = self._values.flags.writeable = writable
        # Each read of a local client looks at these: items of a memoryview take a third of the time.
        self._deleted = self._header[_DELETED_OFFSET : _DELETED_OFFSET + 1].data
        self._structure = self._header[_STRUCTURE_OFFSET : _STRUCTURE_OFFSET + 8].view("<i8").data
        self._epoch = self._header[_EPOCH_OFFSET : _EPOCH_OFFSET + 8].view("<i8").data
        self.former_version = int(self._header[_FORMER_OFFSET : _FORMER_OFFSET + 8].view("<i8")[0])  # never changes
        self.numbers: npt.NDArray[np.int64] = self._header[_NUMBERS_OFFSET:].view("<i8")

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, uid: str, num_rows: int, former_version: int = 0) -> Generations:
        """Creates the file with every generation 0, and reserves its space.

        Args:
            path: A file that does not exist yet, in a folder that does.
            uid: 32 hexadecimal digits (:func:`tdserve.base.ids.make_uid`).
            num_rows: Rows of the store; 1 for a store without batch dimensions.
            former_version: Number that the content versions follow.

        Raises:
            CapacityError: The disk is full. No file remains.
            CorruptDataError: The file exists already.
        """
        file = Path(path)
        if len(uid.encode()) != 32 or num_rows < 0:
            raise LocalProtocolError(reason=f"generation file with uid {uid!r} and {num_rows} rows")
        nbytes = HEADER_BYTES + num_rows * _ITEM_BYTES
        with convert_os_errors(file, asked=nbytes):
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                os.pwrite(fd, _HEADER.pack(_MAGIC, uid.encode(), num_rows), 0)
                os.pwrite(fd, _FORMER.pack(former_version), _FORMER_OFFSET)
                mapping = map_new(fd, nbytes, path=file)
            except BaseException:
                file.unlink()
                raise
            finally:
                os.close(fd)
        return cls(file, uid=uid, num_rows=num_rows, mapping=mapping, writable=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, uid: str, writable: bool = False) -> Generations:
        """Maps an existing file.

        Args:
            path: The file.
            uid: Incarnation of the store that the caller means.
            writable: Only for the control process, and for those that the exceptions name.

        Raises:
            CorruptDataError: The file is missing, truncated, or belongs to another store.
        """
        file = Path(path)
        with convert_os_errors(file):
            fd = os.open(file, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                num_rows = _check_header(fd, file, uid)
                nbytes = HEADER_BYTES + num_rows * _ITEM_BYTES
                mapping = map_shared(fd, nbytes, writable=writable, path=file)
            finally:
                os.close(fd)
        return cls(file, uid=uid, num_rows=num_rows, mapping=mapping, writable=writable)

    @classmethod
    def replace(
        cls,
        path: str | os.PathLike[str],
        *,
        uid: str,
        values: npt.NDArray[np.int64],
        structure: int,
        former_version: int,
    ) -> None:
        """Replaces the file, whatever its state, and syncs it to the disk.

        Args:
            path: The file.
            uid: Incarnation of the store.
            values: Every generation.
            structure: Number of the store's structure.
            former_version: As for ``create``.

        Raises:
            CapacityError: The disk is full. The old file remains.
        """
        file = Path(path)
        fresh = file.with_name(file.name + FRESH_SUFFIX)
        with convert_os_errors(file, asked=values.nbytes):
            fresh.unlink(missing_ok=True)
            made = cls.create(fresh, uid=uid, num_rows=len(values), former_version=former_version)
            made.values[:] = values
            made.move_structure(structure)
            made.close()
            sync_file(fresh)
            os.replace(fresh, file)
        sync_file(file.parent)

    @property
    def values(self) -> npt.NDArray[np.int64]:
        """The numbers, shape ``[num_rows]``: a view of the shared mapping, read-only unless opened writable."""
        if self._values is None:
            raise ClosedError(what=f"generation file {self.path}")
        return self._values

    @property
    def content_version(self) -> int:
        """Number of the last write that was applied to a tensordict store; 0 before the first. They follow those of
        earlier stores of its name."""
        num_writes = int(self.values[-1]) // 2
        return self.former_version + num_writes if num_writes else 0

    @property
    def next_content_version(self) -> int:
        """Number of the next write of a tensordict store."""
        return self.former_version + int(self.values[-1]) // 2 + 1

    @property
    def is_deleted(self) -> bool:
        """Whether the store was deleted; processes that had it mapped before see that too."""
        self._check_open()
        return bool(self._deleted[0])

    def mark_deleted(self) -> None:
        """Shows all processes that map this file that the store is gone. Call it before unlinking anything."""
        self._check_open()[_DELETED_OFFSET] = 1

    @property
    def objects_epoch(self) -> int:
        """How often the store's non-tensor values have moved; determines the folder that they are in now."""
        self._check_open()
        return int(self._epoch[0])

    def move_objects(self, epoch: int) -> None:
        """Shows all processes that map this file where the non-tensor values are now; survives a loss of power."""
        self._epoch[0] = epoch
        sync_file(self.path)

    @property
    def structure(self) -> int:
        """How often the store's structure has changed; -1 while its files are moved. Files that were mapped under
        another number belong to another structure."""
        self._check_open()
        return int(self._structure[0])

    def is_current(self, structure: int) -> bool:
        """Returns whether the store still exists, and has the structure of this number."""
        self._check_open()
        return bool(self._structure[0] == structure and not self._deleted[0])

    def move_structure(self, number: int) -> None:
        """Shows all processes that map this file that the files of the leaves are about to change."""
        self._structure[0] = number

    def begin_copy(self, uid: str) -> None:
        """Makes the file that of a copy, another incarnation, and syncs it; drops the mapping."""
        self._check_open()[_UID_OFFSET : _UID_OFFSET + len(uid)] = np.frombuffer(uid.encode(), np.uint8)
        self.close()
        sync_file(self.path)

    def close(self) -> None:
        """Drops the mapping. Idempotent. Views taken from :attr:`values` stay usable."""
        self._header = self._values = None

    def _check_open(self) -> npt.NDArray[np.uint8]:
        if self._header is None:
            raise ClosedError(what=f"generation file {self.path}")
        return self._header


def is_header(content: bytes) -> bool:
    """Returns whether a file that begins in this way is one of generations, damaged or not."""
    return content.startswith(_MAGIC)


def is_of(path: str | os.PathLike[str], *, uid: str) -> bool:
    """Returns whether the generation file of this incarnation is there, damaged or not."""
    try:
        with open(path, "rb") as file:
            return uid.encode() in file.read(_HEADER.size)
    except OSError:
        return False


def read_structure(path: Path) -> int:
    """Returns ``Generations.structure`` of a file that may be another store's. Raises CorruptDataError."""
    with convert_os_errors(path), path.open("rb") as file:
        file.seek(_STRUCTURE_OFFSET)
        return int.from_bytes(file.read(_ITEM_BYTES), "little", signed=True)


def read_generations(path: Path, num_rows: int, structure: int) -> npt.NDArray[np.int64] | None:
    """Returns the generations of a file whose header may be damaged; None unless its size and its structure are these.

    Args:
        num_rows: Number of its generations.
        structure: Number of the store's structure.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != HEADER_BYTES + num_rows * _ITEM_BYTES or read_structure(path) != structure:
        return None
    return np.frombuffer(content, "<i8", offset=HEADER_BYTES).astype(np.int64)


def is_marked_deleted(path: str | os.PathLike[str]) -> bool:
    """Returns whether the store of a generation file is being deleted; its other files may be gone already."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEADER.size + 1)[_DELETED_OFFSET:] == b"\x01"
    except OSError:
        return False


def _check_header(fd: int, path: Path, uid: str) -> int:
    """Returns the number of rows."""
    nbytes = os.fstat(fd).st_size
    header = os.pread(fd, _HEADER.size, 0)
    if nbytes < HEADER_BYTES or len(header) < _HEADER.size:
        raise CorruptDataError(path=str(path), expected=f"at least {HEADER_BYTES} bytes", actual=f"{nbytes} bytes")
    magic, found_uid, num_rows = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise CorruptDataError(path=str(path), expected=f"magic {_MAGIC!r}", actual=f"{magic!r}")
    if found_uid != uid.encode():
        raise CorruptDataError(path=str(path), expected=f"store {uid}", actual=f"store {found_uid.decode('latin-1')}")
    if num_rows < 0 or nbytes != HEADER_BYTES + num_rows * _ITEM_BYTES:
        expected = f"{HEADER_BYTES + num_rows * _ITEM_BYTES} bytes for {num_rows} rows"
        raise CorruptDataError(path=str(path), expected=expected, actual=f"{nbytes} bytes")
    return int(num_rows)
