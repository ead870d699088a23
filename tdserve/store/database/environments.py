"""The process-wide registry of LMDB environments.

A second ``lmdb.open`` of the same folder in one process breaks its locks and is refused, also in a child made by
``fork``. So every part of this room takes environments from here; they are counted by inode.

A child must release the environments that it inherited before it can open one itself. But LMDB's way of closing frees
all reader slots of the parent in the lock file, which both map: a writer would then reuse pages that the parent still
reads. So in every child, before anything else runs in it, the inherited mappings of lock files become private copies;
closing and finalizing in the child then changes only these.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import lmdb

from tdserve.base.errors import CorruptDataError, TDServeError, WrongStateError
from tdserve.store.database.page_walk import Meta, find_broken_page, read_last_freed, read_metas
from tdserve.store.database.pinned_tree import PinnedTree
from tdserve.store.disk.faults import lmdb_faults
from tdserve.store.disk.mapped import make_private

MAX_TABLES = 16
"""Most named tables per environment. LMDB searches them linearly when it opens one; we use at most five."""

MAX_READERS = 1024
"""Most concurrent read transactions of all processes. LMDB's default of 126 is too small for a big actor host; each
takes 64 B."""

LOCK_FILE_BYTES = 64 * MAX_READERS + 128
"""Size of LMDB's lock file: a cache line for each reader, and two shared ones."""

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
"""LMDB's file names. Readers record what they read in the second one."""

LockFile = tuple[str, int]
"""Path and inode. These identify the mappings of a process; on layered file systems only the path does."""


_MAGIC = 0xBEEFC0DE

_PAGE_SIZES = frozenset(1 << bits for bits in range(9, 17))
"""Sizes of pages that there may be: LMDB takes the machine's."""


@dataclass
class Environment:
    """One open LMDB environment of this process, shared by all users of its folder."""

    folder: Path
    env: lmdb.Environment
    max_bytes: int
    writable: bool
    pid: int
    lock_file: LockFile
    num_users: int = 1
    tables: dict[str, object] = field(default_factory=dict)

    def write_copy(self, target: Path, pinned: lmdb.Transaction | None = None) -> None:
        """Writes all records to a new file, without free pages, and syncs it. Raises OSError, lmdb.Error.

        Args:
            pinned: A transaction that has begun to read the records; None: as they are now.
        """
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self.env.copyfd(fd, compact=True, txn=pinned)
            os.fsync(fd)
        finally:
            os.close(fd)


_lock = threading.Lock()
_environments: dict[tuple[int, int], Environment] = {}
_given_back: deque[Environment] = deque()
_kept: list[lmdb.Environment] = []
"""Inherited environments that could not be separated from the parent's: they must be neither closed nor opened
again."""
_max_checked_nbytes = 0.0
_checked: set[tuple[str, int]] = set()
"""Folders of files whose pages were looked at, and the files' inodes."""

_MAX_LOOKS = 4
"""Looks at a file that another process is writing."""


def check_pages_when_opened(max_nbytes: float = math.inf) -> None:
    """Has this process follow the pages of each environment when it opens it for the first time, from now on.

    For a process that stands in for one that a damaged page may have ended, or that must not end: it refuses the
    environment, and serves the others. It costs about a second for each GiB.

    Args:
        max_nbytes: Files that are larger are not looked at.
    """
    global _max_checked_nbytes  # noqa: PLW0603 (of the process, as the registry is)
    _max_checked_nbytes = max_nbytes


@contextmanager
def hold_page_checks(max_nbytes: float = math.inf) -> Iterator[None]:
    """The same within a block, in all threads of this process."""
    before = _max_checked_nbytes
    check_pages_when_opened(max_nbytes)
    try:
        yield
    finally:
        check_pages_when_opened(before)


def acquire(folder: Path, *, writable: bool, max_bytes: int, is_checked_later: bool = False) -> Environment:
    """Opens the environment in ``folder``, or shares the one that this process has open.

    Commits are not synced: they survive ``kill -9`` of the process (the pages are the kernel's), but not a loss of
    power. A later ``env.sync(True)`` makes them survive that too. The map is not written through: on a full disk a
    commit fails with an error instead of killing the process with SIGBUS.

    Args:
        folder: Created if it is missing and ``writable``, but not the one above it: that of a deleted store would come
            again.
        writable: Processes that only read pass False; ``lock.mdb`` must still be writable for them.
        max_bytes: Size of the map, for a writer. The file grows with use up to it. Readers pass 0 and get the writer's.
        is_checked_later: Whether the caller looks at the pages himself, if this process does.

    Raises:
        WrongStateError: This process has it open for reading only and asks for writing.
        CapacityError, CorruptDataError, InvalidRequestError: The folder cannot be used.
        CorruptDataError: A page is damaged, in a process that checks them: see ``check_pages_when_opened``.
    """
    with _lock, lmdb_faults(folder, max_bytes=max_bytes):
        _close_unused()
        if writable:
            folder.mkdir(exist_ok=True)
        shared = _find(folder)
        if shared is not None:
            if writable and not shared.writable:
                raise WrongStateError(
                    state=f"{folder} is open for reading in this process", event="opening it for writing"
                )
            if not is_checked_later:
                _check_pages(shared.env, folder)
            shared.num_users += 1
            return shared
        _prepare(folder / DATA_FILE, writable=writable)
        if writable:
            _reserve_lock_file(folder / LOCK_FILE)
        env = lmdb.open(
            os.fspath(folder),
            map_size=max_bytes,
            max_dbs=MAX_TABLES,
            max_readers=MAX_READERS,
            readonly=not writable,
            create=writable,
            sync=False,
            metasync=False,
            readahead=False,
            mode=0o666,  # as far as the umask allows: readers write into the lock file
        )
        try:
            if not is_checked_later:
                _check_pages(env, folder)
        except BaseException:
            env.close()
            raise
        opened = Environment(
            folder=folder,
            env=env,
            max_bytes=max_bytes,
            writable=writable,
            pid=os.getpid(),
            lock_file=(os.path.realpath(folder / LOCK_FILE), os.stat(folder / LOCK_FILE).st_ino),
        )
        _environments[_get_inode(folder)] = opened
        return opened


def _check_pages(env: lmdb.Environment, folder: Path) -> None:
    found = os.stat(folder / DATA_FILE)
    key = os.fspath(folder), found.st_ino
    if found.st_size <= _max_checked_nbytes and key not in _checked:
        with PinnedTree(env, folder / DATA_FILE) as tree:
            tree.check_pages()
        _checked.add(key)


class _FirstPages(NamedTuple):
    """What the first two pages of a data file tell.

    Attributes:
        older, newer: By their transactions, which follow each other.
        page_nbytes: Bytes of a page.
        is_misleading: Whether their lists of free pages contradict these numbers, of which one has changed.
        nbytes: What the file has.
    """

    older: Meta
    newer: Meta
    page_nbytes: int
    is_misleading: bool
    nbytes: int

    @property
    def needed_nbytes(self) -> int:
        """What the file needs for all pages that are, or were, in use."""
        return max(self.newer.last_page + 1, 2) * self.page_nbytes

    def describe_order(self) -> str:
        """Returns why it is unknown which records are the last; "" if it is known."""
        lower, higher = self.older.transaction, self.newer.transaction
        if higher - lower <= 1 and not self.is_misleading:
            return ""
        pages = ", which their lists of free pages contradict" if self.is_misleading else ""
        return f"transactions {lower} and {higher} as the last two{pages}: it is unknown which of them is damaged"


def _read_first_pages(path: Path) -> _FirstPages | None:
    """Returns the content of both pages; None if LMDB did not write them."""
    with open(path, "rb", buffering=0) as file:
        for _ in range(_MAX_LOOKS):
            first = Meta.read(file, 0)
            if first.magic != _MAGIC or first.page_nbytes not in _PAGE_SIZES:
                return None
            metas = read_metas(file, first.page_nbytes)
            is_misleading = _is_misleading(file, metas, first.page_nbytes)
            if metas == read_metas(file, first.page_nbytes):
                break
        else:  # another process is writing it, and so knows its last transaction
            metas, is_misleading = [metas[0], metas[0]], False
        nbytes = os.fstat(file.fileno()).st_size  # afterwards: it only grows
    older, newer = sorted(metas, key=lambda meta: meta.transaction)
    return _FirstPages(older, newer, first.page_nbytes, is_misleading, nbytes)


def read_last_transaction(path: Path) -> int | None:
    """Returns the number of the last transaction of a data file; None if LMDB did not write it."""
    found = _read_first_pages(path)
    return None if found is None else found.newer.transaction


def _is_misleading(file: IO[bytes], metas: list[Meta], page_nbytes: int) -> bool:
    """Returns whether the lists of free pages contradict the numbers of the transactions.

    What a transaction frees is listed under its number, and stays listed in the next one.
    """
    older, newer = sorted(metas, key=lambda meta: meta.transaction)
    freed = [read_last_freed(file, each, page_nbytes) for each in (older, newer)]
    return freed[0] > older.transaction or freed[1] > newer.transaction or 0 < freed[1] < freed[0]


def find_damage(path: Path, *, follows_pages: bool = True) -> str:
    """Returns why a data file of LMDB that no process has open must not be opened, or "".

    LMDB does not notice that the numbers of the last two transactions do not follow each other: it takes the records of
    the higher one. Nor a damaged page, nor a file that was cut: either may end the process.

    Args:
        path: The data file.
        follows_pages: Whether all pages of the newest tree are looked at, not the first two only.

    Raises:
        TDServeError: The file cannot be read; see ``convert_os_errors``.
    """
    found = _read_first_pages(path)
    if found is None:
        return f"{path.stat().st_size} bytes that LMDB did not write"
    reason = found.describe_order()
    return find_broken_page(path, found.newer, found.page_nbytes) if follows_pages and not reason else reason


def _prepare(path: Path, *, writable: bool) -> None:
    """Refuses a file whose older records LMDB would take for the last ones. For a writer, fills one that was cut with
    zeros, which LMDB finds damaged when it reads by key, while a missing page ends the process.

    A file may lack its last pages and be whole: LMDB does not write those that one transaction has taken and freed.

    Raises:
        CorruptDataError: It is unknown which records are the last.
    """
    if not path.exists() or (found := _read_first_pages(path)) is None:
        return  # LMDB raises that itself
    if reason := found.describe_order():
        raise CorruptDataError(path=str(path), expected="a whole file", actual=f"{reason}; see `tdserve check`")
    if writable and found.nbytes < found.needed_nbytes:
        with suppress(OSError), open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, found.needed_nbytes)  # never makes it shorter, as a truncation might


def _reserve_lock_file(path: Path) -> None:
    """Reserves the lock file. LMDB maps it with holes, and a page for which the disk has no room would end the process.

    Do not call this for an environment that is open here: closing a file ends all locks of this process on it.
    """
    if path.exists() and path.stat().st_blocks * 512 >= LOCK_FILE_BYTES:
        return
    is_new = not path.exists()  # otherwise its used pages exist, and a full disk must not block readers
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if is_new:
            _close_to_readers(fd)
        os.posix_fallocate(fd, 0, LOCK_FILE_BYTES)
    except OSError:
        if is_new:
            path.unlink()
            raise
    finally:
        os.close(fd)


def _close_to_readers(fd: int) -> None:
    """Makes the lock file unreadable to users who cannot write it; a read lock on all of it would block new readers."""
    mode = os.fstat(fd).st_mode & 0o777
    os.fchmod(fd, mode & ~0o044 | (mode & 0o022) << 1)


def _find(folder: Path) -> Environment | None:
    try:
        inode = _get_inode(folder)
    except FileNotFoundError:
        return None
    shared = _environments.get(inode)
    if shared is not None and shared.env in _kept:
        raise WrongStateError(
            state=f"{folder} is open in the process that this one was forked from", event="opening it"
        )
    if shared is not None and shared.pid != os.getpid():
        shared.env.close()  # inherited by fork, and private: see _separate_from_parent
        del _environments[inode]
        return None
    return shared


def _get_inode(folder: Path) -> tuple[int, int]:
    # of the file: it is not reused while it is open here, unlike the folder's, once that is deleted
    found = os.stat(folder / DATA_FILE)
    return found.st_dev, found.st_ino


def release(environment: Environment) -> None:
    """Returns an acquired environment; the last user closes it. Never waits, so finalizers may call it."""
    _given_back.append(environment)
    if _lock.acquire(blocking=False):  # otherwise the holder of the lock closes it, or the next one
        try:
            _close_unused()
        finally:
            _lock.release()


def _close_unused() -> None:
    while _given_back:
        environment = _given_back.popleft()
        environment.num_users -= 1
        if environment.num_users > 0 or environment.pid != os.getpid():  # what a child inherited is closed by acquire
            continue
        for inode, shared in list(_environments.items()):
            if shared is environment:
                del _environments[inode]
        environment.env.close()


def _separate_from_parent() -> None:
    """Separates inherited environments in a fork, so that this process cannot affect its parent's."""
    global _lock  # noqa: PLW0603 (another thread of the parent may have had it, which does not exist here)
    _lock = threading.Lock()
    inherited = list(_environments.values())
    try:
        make_private([environment.lock_file for environment in inherited])
    except TDServeError:  # such as without /proc
        for environment in inherited:
            _kept.append(environment.env)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(environment.env))  # not even the end of the process closes it


os.register_at_fork(after_in_child=_separate_from_parent)
