"""Memory that one process fills and another reads where it lies, again and again: anonymous files, mapped by both.

The receiver opens such a file through ``/proc`` and needs nothing from the sender but a few numbers. What it does not
need any more it marks so in the segment itself, and the sender fills it anew: its pages are there already, which
fresh ones cost more than the copy into them. The receiver keeps segments mapped for the same reason. Nothing has a
name, so nothing is left behind when a process is killed.
"""

from __future__ import annotations

import mmap
import os
import select
import weakref
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import CorruptDataError, PeerLostError

HEADER_NBYTES = 4096
NUM_MARKS = 256
"""How often the content of one segment can be with receivers at the same time."""

MAX_KEPT = 128
MAX_KEPT_NBYTES = 512 * 1024 * 1024
"""Of segments that a receiver keeps mapped for the next time; what is in use stays mapped in any case."""

END_TIMEOUT_S = 1.0
"""For the rest of a process that is being killed."""

_ID_AT = NUM_MARKS
_ID_NBYTES = 16

Bytes = NDArray[np.uint8]


class Loan(np.ndarray):
    """A view that torch keeps alive for as long as any tensor uses the memory."""


@dataclass(frozen=True)
class Sent:
    """What a receiver must know.

    Attributes:
        pid: Of the sender.
        fd: The file there.
        uid: Of the segment; another file may have its number by now.
        mark: Which mark says that this receiver uses it.
        nbytes: Of the content.
        capacity_nbytes: Of the segment.
    """

    pid: int
    fd: int
    uid: bytes
    mark: int
    nbytes: int
    capacity_nbytes: int


class Segment:
    """The sender's end. Threads: one at a time.

    Args:
        nbytes: Most content that it has room for.
    """

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("tdserve-segment", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        os.ftruncate(self._fd, HEADER_NBYTES + nbytes)
        self._memory: Bytes = np.frombuffer(mmap.mmap(self._fd, HEADER_NBYTES + nbytes), np.uint8)
        self._uid = os.urandom(_ID_NBYTES)
        self._memory[_ID_AT : _ID_AT + _ID_NBYTES] = np.frombuffer(self._uid, np.uint8)
        self.nbytes = nbytes

    @property
    def is_with_others(self) -> bool:
        """Whether a receiver uses the content, or is going to."""
        return bool(self._memory[:NUM_MARKS].any())

    def content(self, nbytes: int) -> Loan:
        """The first bytes of its memory."""
        return self._memory[HEADER_NBYTES : HEADER_NBYTES + nbytes].view(Loan)

    def send(self, nbytes: int) -> Sent | None:
        """Marks the content as used by one more receiver; None where it has too many."""
        free = np.flatnonzero(self._memory[:NUM_MARKS] == 0)
        if not len(free):
            return None
        mark = int(free[0])
        self._memory[mark] = 1
        return Sent(os.getpid(), self._fd, self._uid, mark, nbytes, self.nbytes)


def receive(sent: Sent) -> Loan:
    """The content as the sender has it. When the last view of it is dropped, the sender may fill the segment anew.

    Raises:
        PeerLostError: The sender has ended.
        CorruptDataError: The number is that of another file.
    """
    memory = _MAPPED.get(sent)
    loan = memory[HEADER_NBYTES : HEADER_NBYTES + sent.nbytes].view(Loan)
    weakref.finalize(loan, _give_back, memory, sent.mark, os.getpid()).atexit = False
    return loan


class MappedSegments:
    """Segments of others, mapped: those that were used last. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[tuple[int, bytes], Bytes] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, sent: Sent) -> Bytes:
        """The whole of a segment. Raises as ``receive``."""
        key = sent.pid, sent.uid
        with self._lock:
            memory = self._kept.pop(key, None)
            if memory is None:
                memory = _map(sent)
                self._drop_ended()
            self._kept[key] = memory
            while len(self._kept) > MAX_KEPT or sum(map(len, self._kept.values())) > max(MAX_KEPT_NBYTES, len(memory)):
                del self._kept[next(iter(self._kept))]
        return memory

    def _drop_ended(self) -> None:
        """Whose senders are gone will not be filled again."""
        ended = {pid for pid in {pid for pid, _ in self._kept} if not os.path.exists(f"/proc/{pid}/fd")}
        for key in [key for key in self._kept if key[0] in ended]:
            del self._kept[key]


_MAPPED = MappedSegments()


def _map(sent: Sent) -> Bytes:
    path = f"/proc/{sent.pid}/fd/{sent.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory: Bytes = np.frombuffer(mmap.mmap(fd, HEADER_NBYTES + sent.capacity_nbytes), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # no such process or file; a shorter one
        _await_end(sent.pid)
        raise PeerLostError(peer=f"process {sent.pid}", reason=str(error)) from error
    if memory[_ID_AT : _ID_AT + _ID_NBYTES].tobytes() != sent.uid:
        raise CorruptDataError(path=path, expected="a segment", actual="another file")
    return memory


def _await_end(pid: int) -> None:
    """A process that is being killed has no files any more while it still counts as alive: whoever is told that
    something of it is missing, and looks, is to find that it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    with os.fdopen(fd) as ended:
        select.select([ended], [], [], END_TIMEOUT_S)


def _give_back(memory: Bytes, mark: int, pid: int) -> None:
    if os.getpid() == pid:  # what a forked child drops, its parent may use still
        memory[mark] = 0
