"""The process-wide registry of LMDB environments.

A second ``lmdb.open`` of the same folder in one process breaks its locks, also in a child made by ``fork``. So every
part of this room takes environments from here, by inode, counted; and a child closes what it inherited before it
opens again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from tdserve.errors import WrongStateError
from tdserve.store.faults import lmdb_faults

MAX_TABLES = 16
"""Named tables per environment. LMDB searches them one by one when it opens one; we use at most five."""

MAX_READERS = 1024
"""Concurrent read transactions of all processes. LMDB's default of 126 is few for a big actor host; 64 B each."""


DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
"""LMDB's names. Readers note in the second one what they read."""


@dataclass
class Environment:
    """One open LMDB environment of this process, shared by everybody who acquired its folder."""

    folder: Path
    env: lmdb.Environment
    max_bytes: int
    writable: bool
    pid: int
    num_users: int = 1
    tables: dict[str, object] = field(default_factory=dict)


_lock = threading.Lock()
_environments: dict[tuple[int, int], Environment] = {}
_given_back: deque[Environment] = deque()


def acquire(folder: Path, *, writable: bool, max_bytes: int) -> Environment:
    """Opens the environment in ``folder``, or shares the one this process has open.

    Commits are not synced: they survive ``kill -9`` of the process (the pages are the kernel's), not a power loss. A
    later ``env.sync(True)`` makes them survive that too. The map is not written through: on a full disk a commit
    fails with an error instead of killing the process with SIGBUS.

    Args:
        folder: Made if it is missing and ``writable``.
        writable: Readers of another process than the writer's pass False; ``lock.mdb`` must still be writable for them.
        max_bytes: Size of the map, as the writer says. The file grows with use up to it. Readers pass 0: it is as large
            as the writer's.

    Raises:
        WrongStateError: This process has it open for reading only and asks for writing.
        CapacityError, CorruptDataError, InvalidRequestError: The folder cannot be used.
    """
    with _lock, lmdb_faults(folder, max_bytes=max_bytes):
        _close_unused()
        if writable:
            folder.mkdir(parents=True, exist_ok=True)
        shared = _find(folder)
        if shared is not None:
            if writable and not shared.writable:
                raise WrongStateError(
                    state=f"{folder} is open for reading in this process", event="opening it for writing"
                )
            shared.num_users += 1
            return shared
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
            mode=0o666,  # as far as the umask lets: to read values is to write into the lock file
        )
        opened = Environment(folder=folder, env=env, max_bytes=max_bytes, writable=writable, pid=os.getpid())
        _environments[_inode(folder)] = opened
        return opened


def _find(folder: Path) -> Environment | None:
    try:
        inode = _inode(folder)
    except FileNotFoundError:
        return None
    shared = _environments.get(inode)
    if shared is not None and shared.pid != os.getpid():
        shared.env.close()  # inherited by fork: only this process' copy is closed, the parent's stays
        del _environments[inode]
        return None
    return shared


def _inode(folder: Path) -> tuple[int, int]:
    # of the file: it is not given to another one while it is open here, as the folder's is once that was deleted
    found = os.stat(folder / DATA_FILE)
    return found.st_dev, found.st_ino


def release(environment: Environment) -> None:
    """Gives an acquired environment back; the last one to do so closes it. Never waits: finalizers may call it."""
    _given_back.append(environment)
    if _lock.acquire(blocking=False):  # else whoever has it closes it, or the next one
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
