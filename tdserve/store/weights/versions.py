"""Version files: one file per published version of a weights store, in safetensors' layout, mapped and recycled.

A file is ``new-<name>.safetensors.part`` while it is written, ``new-<name>.safetensors`` once sealed, and
``<n>.safetensors`` when control has given it a number. It is ``<n>.retired`` when the version is not needed any more,
then ``.part`` again under the next version's name. Filling touched pages is four to ten
times faster than filling fresh ones, so a retired file keeps its inode *and* its mapping in this process.

A reader holds a shared lock until :meth:`VersionFile.close`, a writer an exclusive one until
:meth:`VersionFile.seal`. A retired file that a reader still locks is unlinked instead of rewritten.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt
import torch

from tdserve.base.errors import CapacityError, CorruptDataError, WrongStateError
from tdserve.base.failpoints import reach
from tdserve.store.disk.faults import convert_os_errors, free_bytes
from tdserve.store.weights import version_mappings
from tdserve.store.weights.version_format import (
    DATA_ALIGNMENT_BYTES,
    LENGTH,
    check_header_nbytes,
    compute_data_start,
    list_leaf_places,
    make_layout,
)
from tdserve.store.weights.version_locks import lock_exclusively, lock_shared, unlock
from tdserve.store.weights.version_mappings import VersionMapping
from tdserve.store.weights.version_names import (
    PART,
    discard,
    make_part_name,
    make_retired_name,
    make_values_name,
    retire,
)
from tdserve.structure.trees.tree import Path, Spec

__all__ = ["VersionFile", "discard", "list_leaf_places", "retire"]


class VersionFile:
    """A mapped version file. Build it with :meth:`create` or :meth:`open`.

    Attributes:
        path: Its name once sealed, which ends in ``.safetensors``.
        spec: Its structure.
        metadata: The publisher's metadata of this version.
        was_recycled: Whether its pages belonged to an earlier version (so filling it is fast).
    """

    def __init__(
        self, path: FilePath, spec: Spec, *, metadata: dict[str, str], mapping: VersionMapping, was_recycled: bool
    ) -> None:
        self.path = path
        self.spec = spec
        self.metadata = metadata
        self.was_recycled = was_recycled
        self._mapping = mapping
        self._reader_fd = -1

    @property
    def leaves(self) -> dict[Path, torch.Tensor]:
        """Every tensor leaf in canonical order, as views of the mapping. All users share them: they must not be
        changed."""
        return self._mapping.get_leaves(self.spec)

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        """The bytes of all leaves, concatenated in the order of :func:`list_leaf_places`."""
        return self._mapping.get_content()

    def iter_leaf_contents(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the bytes of every leaf in canonical order, each cut out in its turn."""
        content, offsets = self.content, make_layout(self.spec).offsets
        for path, leaf in self.spec.tensors:
            yield content[offsets[path] : offsets[path] + leaf.nbytes]

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        spec: Spec,
        *,
        metadata: dict[str, str] | None = None,
        recycles: str | os.PathLike[str] | None = None,
    ) -> VersionFile:
        """Creates the file of a new version under ``<path>.part``, to be filled (:meth:`fill`, or :attr:`content` in
        place) and then sealed.

        Args:
            path: Its name once sealed. An unfinished file of that name is replaced.
            spec: Structure of the version.
            metadata: Strings that any reader of safetensors sees.
            recycles: Path of a retired version, or None. It is gone afterwards in any case: its file is reused if it
                has the right size and no reader, otherwise unlinked.

        Raises:
            CapacityError: The disk is full. No new file remains.
            CorruptDataError, InvalidRequestError: The folder cannot be used.
        """
        final = FilePath(path)
        header = make_layout(spec).encode_header(dict(metadata or {}))
        version_mappings.drop_unlinked()
        mapping = None
        with convert_os_errors(final, asked=spec.nbytes):
            if recycles is not None:
                mapping = _recycle(make_retired_name(FilePath(recycles)), make_part_name(final), spec, header)
            was_recycled = mapping is not None
            if mapping is None:
                mapping = _create_fresh(make_part_name(final), spec, header)
        return cls(final, spec, metadata=dict(metadata or {}), mapping=mapping, was_recycled=was_recycled)

    @classmethod
    def open(cls, path: str | os.PathLike[str], spec: Spec) -> VersionFile:
        """Opens a sealed version for reading, under a shared lock until :meth:`close`.

        Raises:
            CorruptDataError: The file is missing, truncated, or of another structure.
            WrongStateError: The version was retired at this moment.
            CapacityError: The process has too many files or mappings open.
        """
        final = FilePath(path)
        version_mappings.drop_unlinked()
        with convert_os_errors(final):
            fd = os.open(final, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _lock_for_reading(fd, final)
                metadata = _check(fd, final, spec)
                mapping = version_mappings.acquire(fd, writable=False, path=final)
                opened = cls(final, spec, metadata=metadata, mapping=mapping, was_recycled=True)
            except BaseException:
                os.close(fd)
                raise
        opened._reader_fd = fd
        return opened

    @classmethod
    def map(cls, path: str | os.PathLike[str], spec: Spec) -> VersionFile:
        """Opens a sealed version as views for a user, under a shared lock as long as any of its tensors lives.

        The mapping is private: the user's writes into the tensors stay in this process.

        Raises:
            CorruptDataError, WrongStateError, CapacityError: As in :meth:`open`.
        """
        final = FilePath(path)
        with convert_os_errors(final):
            fd = os.open(final, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _lock_for_reading(fd, final)
                metadata = _check(fd, final, spec)
                mapping = VersionMapping.map_private(fd, path=final)
                opened = cls(final, spec, metadata=metadata, mapping=mapping, was_recycled=True)
            except BaseException:
                os.close(fd)
                raise
        mapping.call_when_dropped(os.close, fd)
        return opened

    def fill(self, pieces: Iterable[npt.NDArray[np.uint8]]) -> None:
        """Writes the bytes of all leaves, in the order of :func:`list_leaf_places`.

        Raises:
            CapacityError: The disk is full, on a file system that reserves no space.
        """
        with convert_os_errors(self.path, asked=self.spec.nbytes):
            self._mapping.fill(pieces, is_touched=self.was_recycled)

    def seal(self) -> None:
        """Gives the filled file the name of a whole one, in one step. Control then makes the version visible."""
        with convert_os_errors(self.path):
            reach("version.filled")
            os.replace(make_part_name(self.path), self.path)
            unlock(self._mapping.fd)

    def write_values(self, content: bytes) -> None:
        """Stores the version's non-tensor values, opaque bytes, beside it. Call it before :meth:`seal`."""
        target = make_values_name(self.path)
        fresh = target.with_name(target.name + PART)
        with convert_os_errors(target, asked=len(content)):
            fresh.write_bytes(content)
            os.replace(fresh, target)

    def read_values(self) -> bytes | None:
        """Returns the bytes of :meth:`write_values`, or None if there were none."""
        with convert_os_errors(make_values_name(self.path)), contextlib.suppress(FileNotFoundError):
            return make_values_name(self.path).read_bytes()
        return None

    def close(self) -> None:
        """Ends a reader's lock. Idempotent, and without effect on a file created here. Leaves stay mapped."""
        if self._reader_fd >= 0:
            os.close(self._reader_fd)
            self._reader_fd = -1

    def __enter__(self) -> VersionFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create_fresh(part: FilePath, spec: Spec, header: bytes) -> VersionMapping:
    start = compute_data_start(header)
    nbytes = start + spec.nbytes
    free = free_bytes(part.parent)
    if nbytes > free:
        raise CapacityError(what=f"{part}", asked=nbytes, free=free)
    part.unlink(missing_ok=True)
    # No other process may open it, and lock it for reading, before it is locked.
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        reach("version.made")
        _write_header(fd, header, start)
        mapping = version_mappings.acquire(fd, writable=True, path=part)
        lock_exclusively(mapping.fd)
        # With the permissions of the folder, from the server's umask: a client that creates this file may have another
        # umask and user.
        os.fchmod(fd, os.stat(part.parent).st_mode & 0o666)
        return mapping
    except BaseException:
        part.unlink()
        raise
    finally:
        os.close(fd)


def _recycle(retired: FilePath, part: FilePath, spec: Spec, header: bytes) -> VersionMapping | None:
    """Returns the mapping of the retired file under its new name; None if it cannot be reused, and then it is gone."""
    try:
        fd = os.open(retired, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError:  # the user is not in the server's group
        retired.unlink(missing_ok=True)
        return None
    try:
        start = LENGTH.size + LENGTH.unpack(os.pread(fd, LENGTH.size, 0).ljust(LENGTH.size, b"\0"))[0]
        fits = start % DATA_ALIGNMENT_BYTES == 0 and LENGTH.size + len(header) <= start
        if fits and os.fstat(fd).st_size == start + spec.nbytes:
            mapping = version_mappings.acquire(fd, writable=True, path=retired)
            if _take_retired(mapping, retired, part):
                _write_header(fd, header, start)
                return mapping
        retired.unlink(missing_ok=True)
        return None
    finally:
        os.close(fd)


def _take_retired(mapping: VersionMapping, retired: FilePath, part: FilePath) -> bool:
    """Locks and renames a retired file; returns False if a reader still uses it, or another writer has it: one that was
    stopped before a restart may be given the same."""
    try:
        lock_exclusively(mapping.fd)
    except BlockingIOError:
        return False
    try:
        os.replace(retired, part)
    except FileNotFoundError:
        unlock(mapping.fd)  # it has become a version
        return False
    return True


def _write_header(fd: int, header: bytes, start: int) -> None:
    padded = LENGTH.pack(start - LENGTH.size) + header.ljust(start - LENGTH.size)
    os.pwrite(fd, padded, 0)


def _lock_for_reading(fd: int, path: FilePath) -> None:
    try:
        lock_shared(fd)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return
    except (BlockingIOError, FileNotFoundError):
        pass  # recycled between our open and our lock: reported below
    raise WrongStateError(state=f"version {path} is retired", event="reading it")


def _check(fd: int, path: FilePath, spec: Spec) -> dict[str, str]:
    """Returns the metadata of a file whose header and size fit the spec."""
    nbytes = os.fstat(fd).st_size
    header_nbytes = LENGTH.unpack(os.pread(fd, LENGTH.size, 0).ljust(LENGTH.size, b"\0"))[0]
    check_header_nbytes(header_nbytes, nbytes, path=str(path))
    metadata = make_layout(spec).parse(os.pread(fd, header_nbytes, LENGTH.size), path=str(path))
    expected = LENGTH.size + header_nbytes + spec.nbytes
    if nbytes != expected:
        raise CorruptDataError(path=str(path), expected=f"{expected} bytes", actual=f"{nbytes} bytes")
    return metadata
