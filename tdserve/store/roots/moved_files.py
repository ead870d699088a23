"""The files of a store that moves to another server, read and written in blocks."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from tdserve.base.errors import InvalidRequestError
from tdserve.base.failpoints import reach
from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES
from tdserve.store.database.environments import LOCK_FILE
from tdserve.store.disk.faults import convert_os_error, convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file, write_at
from tdserve.store.roots.record_file import FILE_NAME as RECORD_FILE
from tdserve.store.rows.claim_file import FOLDER as CLAIMS_FOLDER
from tdserve.store.rows.restructuring import PREFIX as ALTERING_PREFIX
from tdserve.store.values import value_copy

DIGEST_BYTES = 16

MAX_PATH_BYTES = 4096

STAGING_FOLDER = "staging"
"""Name of the folder of content that waits to be copied in."""

_STAY = (CLAIMS_FOLDER, STAGING_FOLDER, value_copy.NAME, f"{value_copy.NAME}{FRESH_SUFFIX}", RECORD_FILE)
"""What lies in a store's folder and concerns this server's processes, or its disk, alone. The checksums of rows and
versions are not among them: without them what is damaged here would be whole there."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
"""Errors of the system for a path that names no file beside the others."""

Digest = bytes


@dataclass(frozen=True)
class Block:
    """A part of a file.

    Attributes:
        path: Path of the file, below the store's folder.
        offset: Offset of its first byte.
        nbytes: Its size.
        digest: Digest of the content that is known elsewhere; empty for none.
        content: To be written.
    """

    path: bytes
    offset: int
    nbytes: int
    digest: Digest = b""
    content: bytes = b""


def compute_digest(content: bytes) -> Digest:
    """Returns what identifies the content of a block."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


@lru_cache
def compute_zero_digest(nbytes: int) -> Digest:
    """Returns the digest of a block of zeros."""
    return compute_digest(bytes(nbytes))


def list_files(folder: Path) -> dict[bytes, int]:
    """Returns the sizes of the files that move, by their paths below the store's folder.

    A file that vanishes meanwhile may be missing.
    """
    found = {}
    with convert_os_errors(folder):
        for path in _walk(folder):
            try:
                found[os.fsencode(path.relative_to(folder))] = path.stat().st_size
            except FileNotFoundError:
                continue
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if not (name in _STAY or name.startswith(ALTERING_PREFIX))]
            names = [name for name in names if name not in _STAY]
        yield from (Path(parent, name) for name in names if name != LOCK_FILE and not name.endswith(FRESH_SUFFIX))


def read_blocks(folder: Path, wanted: Iterable[Block], *, max_bytes: int) -> list[tuple[Digest, bytes | None]]:
    """Reads blocks of files, which others may be changing.

    Args:
        folder: Folder of the store.
        wanted: The blocks. The content of one that still has the digest is not returned.
        max_bytes: Content from which on no more blocks are read.

    Returns:
        The digest and the content of each of the first blocks; what a file lacks is zero.
    """
    # Before any is read: the kernel reads ahead into what follows, even if nothing was ever written there.
    with _convert_faults(folder):
        paths = [(block, _find(folder, block)) for block in wanted]
        located = [(block, path, _is_hole(path, block)) for block, path in paths]
    found: list[tuple[Digest, bytes | None]] = []
    num_bytes = 0
    for block, path, is_hole in located:
        if is_hole:
            content, digest = bytes(block.nbytes), compute_zero_digest(block.nbytes)
        else:
            with _convert_faults(path):
                content = _read(path, block)
            digest = compute_digest(content)
        found.append((digest, None if digest == block.digest else content))
        num_bytes += 0 if digest == block.digest else len(content)
        if num_bytes >= max_bytes:
            break
    return found


def _read(path: Path, block: Block) -> bytes:
    try:
        fd = os.open(path, _READ_FLAGS)
    except FileNotFoundError:  # of a version that was retired just now
        return bytes(block.nbytes)
    try:
        return os.pread(fd, block.nbytes, block.offset).ljust(block.nbytes, b"\0")
    finally:
        os.close(fd)


def _is_hole(path: Path, block: Block) -> bool:
    """Returns whether nothing was ever written into a block, as far as the file system shows: rows of a large table
    that never came need not be read."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except FileNotFoundError:  # of a version that was retired
        return True
    try:
        return os.lseek(fd, block.offset, os.SEEK_DATA) >= block.offset + block.nbytes
    except OSError as fault:
        return fault.errno == errno.ENXIO  # no data from there on; others, such as EINVAL, do not know
    finally:
        os.close(fd)


def set_files(folder: Path, sizes: dict[bytes, int]) -> None:
    """Makes a folder have just these files; kept bytes stay, and new ones are zero.

    Raises:
        CapacityError: There is no room for them.
        InvalidRequestError: A path leads out of the folder, or names no file beside the others.
    """
    paths = {_find(folder, Block(path, 0, 0)): nbytes for path, nbytes in sizes.items()}
    with _convert_faults(folder, asked=sum(sizes.values())):
        folder.mkdir(parents=True, exist_ok=True)
        for path in set(_walk(folder)) - paths.keys():
            path.unlink()
        for path, nbytes in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                if os.fstat(fd).st_size != nbytes:
                    os.ftruncate(fd, nbytes)
                    if nbytes:  # a sparse mapping on a full disk would end the process that writes it
                        os.posix_fallocate(fd, 0, nbytes)
            finally:
                os.close(fd)


def write_blocks(folder: Path, blocks: Sequence[Block]) -> None:
    """Writes blocks into files that ``set_files`` has made. Errors as in ``set_files``."""
    for block in blocks:
        path = _find(folder, block)
        with _convert_faults(path, asked=len(block.content)):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if block.offset + len(block.content) > os.fstat(fd).st_size:
                    raise InvalidRequestError(argument="block", reason=f"{path.name} ends before {block.offset}")
                write_at(fd, block.content, block.offset)
                reach("move.written")
            finally:
                os.close(fd)


def copy_blocks(folder: Path, target: Path, numbers: Mapping[bytes, Sequence[int]]) -> None:
    """Copies blocks of files into files of the same names, which have holes for all others.

    Args:
        folder: Folder of a store at rest.
        target: Created if it is missing.
        numbers: Numbers of the blocks of each file; block ``n`` begins at ``n * MAX_BLOCK_BYTES``.

    Raises:
        CapacityError: There is no room for them.
    """
    for path, chosen in numbers.items():
        source, copied = _find(folder, Block(path, 0, 0)), _find(target, Block(path, 0, 0))
        with convert_os_errors(copied, asked=len(chosen) * MAX_BLOCK_BYTES):
            try:
                fd = os.open(source, _READ_FLAGS)
            except FileNotFoundError:  # of a version that was retired just now; what is read of the copy is zero
                continue
            try:
                copied.parent.mkdir(parents=True, exist_ok=True)
                with open(copied, "wb", buffering=0) as written:
                    for number in chosen:
                        content = os.pread(fd, MAX_BLOCK_BYTES, number * MAX_BLOCK_BYTES)
                        write_at(written.fileno(), content, number * MAX_BLOCK_BYTES)
            finally:
                os.close(fd)


def sync_files(folder: Path) -> None:
    """Syncs all files and folders to the disk."""
    for parent, _, names in os.walk(folder):
        for path in (*(Path(parent, name) for name in names), Path(parent)):
            sync_file(path)
    sync_file(folder.parent)


def remove(folder: Path) -> None:
    """Removes what has come of a store."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _convert_faults(path: Path, *, asked: int = 0) -> Iterator[None]:
    """Like ``convert_os_errors``, but a path that names no file is a fault of the request that names it."""
    try:
        yield
    except OSError as fault:
        if fault.errno in _WRONG_PATH:
            reason = f"{str(fault.filename or path)[-80:]!r}: {fault.strerror}"
            raise InvalidRequestError(argument="path", reason=reason) from fault
        raise convert_os_error(fault, path, asked=asked) from fault


def _find(folder: Path, block: Block) -> Path:
    """Returns the path of a block's file. Raises InvalidRequestError if it is not below the folder."""
    parts = block.path.split(b"/")
    is_valid = 0 < len(block.path) <= MAX_PATH_BYTES and not any(part in (b"", b".", b"..") for part in parts)
    if not is_valid or b"\0" in block.path or not 0 <= block.nbytes <= MAX_BLOCK_BYTES:
        raise InvalidRequestError(argument="path", reason=f"{block.path[:80]!r} is no file of a store")
    return folder / os.fsdecode(block.path)
