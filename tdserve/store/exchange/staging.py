"""Staging files: they hold bytes that have arrived completely until these are copied to their place. They outlive their
worker."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.mapped import map_shared

_SUFFIX = ".staging"

_MIN_NBYTES = 1 << 20
_MAX_STEP_NBYTES = 64 << 20
"""A file grows at least to the first, then by doubling, and in steps of the second beyond it: few reservations, little
waste."""


class Staging:
    """A staging file, mapped and reused from write to write.

    Attributes:
        path: The file; a successor needs it to find the bytes.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str = "0") -> None:
        """Names the file ``<folder>/<name>.staging``; creates the folder if it is missing, but not the one above it:
        that of a deleted store would come again. Nothing is reserved yet.

        Args:
            folder: A folder on the disk whose space the writes may take.
            name: One per concurrent write: the file holds one write at a time.
        """
        if not name or "/" in name:
            raise InvalidRequestError(argument="staging name", reason=f"{name!r} is not a file name")
        self.path = Path(folder) / (name + _SUFFIX)
        self._buffer: torch.Tensor | None = None
        with convert_os_errors(self.path):
            self.path.parent.mkdir(exist_ok=True)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], nbytes: int, *, name: str = "0") -> Staging:
        """Returns a staging file with room for ``nbytes``; an existing one keeps its content."""
        staging = cls(folder, name=name)
        staging.reserve(nbytes)
        return staging

    @property
    def nbytes(self) -> int:
        """Bytes reserved and mapped."""
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Returns the first ``nbytes`` as a uint8 tensor over the shared mapping; the file grows if needed and never
        shrinks.

        Tensors of earlier calls stay valid and show the same bytes.

        Raises:
            CapacityError: The disk is full. The file is unchanged.
        """
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._grow(nbytes)
        if self._buffer is None:
            raise CorruptDataError(path=str(self.path), expected="a mapped file", actual="none")
        return self._buffer[:nbytes]

    def remove(self) -> None:
        """Unlinks the file; tensors taken from it stay usable. Idempotent."""
        self._buffer = None
        with convert_os_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _grow(self, nbytes: int) -> None:
        step = min(max(_MIN_NBYTES, 1 << max(nbytes - 1, 0).bit_length()), _MAX_STEP_NBYTES)
        wanted = -(-max(nbytes, 1) // step) * step
        with convert_os_errors(self.path, asked=wanted):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                found = os.fstat(fd).st_size
                try:
                    os.posix_fallocate(fd, 0, max(wanted, found))
                except OSError:
                    os.ftruncate(fd, found)  # return what was reserved before the disk was full
                    raise
                mapping = map_shared(fd, max(wanted, found), writable=True, path=self.path)
                with torch.inference_mode(False):  # it is kept, and written in any mode
                    self._buffer = torch.frombuffer(mapping, dtype=torch.uint8)
            finally:
                os.close(fd)
