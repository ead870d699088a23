"""Memory that one process fills repeatedly and another reads in place: anonymous files that both map.

The receiver opens such a file through ``/proc`` and needs only a few numbers from the sender. When it has finished, it
marks that in the segment, and the sender refills it: its pages exist, while fresh ones cost more than the copy into
them. The receiver keeps segments mapped for the same reason. The files have no names, so nothing remains when a process
is killed.
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
"""Most simultaneous uses of the content of one segment by receivers."""

MAX_KEPT = 128
MAX_KEPT_NBYTES = 512 * 1024 * 1024
"""Segments that a receiver keeps mapped for the next use; segments in use stay mapped in any case."""

END_TIMEOUT_S = 1.0
"""Time for a process that is being killed to end."""

_ID_AT = NUM_MARKS
_ID_NBYTES = 16

Bytes = NDArray[np.uint8]


class Loan(np.ndarray):
    """A view that torch keeps alive as long as a tensor uses the memory."""


@dataclass(frozen=True)
class SegmentReference:
    """The numbers that a receiver needs.

    Attributes:
        pid: Process id of the sender.
        fd: Descriptor of the file there.
        uid: Id of the segment; the descriptor may belong to another file by now.
        mark: Number of this receiver's mark.
        nbytes: Size of the content.
        capacity_nbytes: Size of the segment.
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
        """Returns whether a receiver uses the content, or will use it."""
        return bool(self._memory[:NUM_MARKS].any())

    def lend(self, nbytes: int) -> Loan:
        """Returns the first bytes of its memory."""
        return self._memory[HEADER_NBYTES : HEADER_NBYTES + nbytes].view(Loan)

    def send(self, nbytes: int) -> SegmentReference | None:
        """Marks the content as used by one more receiver; None if it has too many."""
        free = np.flatnonzero(self._memory[:NUM_MARKS] == 0)
        if not len(free):
            return None
        mark = int(free[0])
        self._memory[mark] = 1
        return SegmentReference(os.getpid(), self._fd, self._uid, mark, nbytes, self.nbytes)


def receive(sent: SegmentReference) -> Loan:
    """Returns the sender's content in place. When its last view is dropped, the sender may refill the segment.

    Raises:
        PeerLostError: The sender has ended.
        CorruptDataError: The descriptor belongs to another file.
    """
    memory = _MAPPED.get(sent)
    loan = memory[HEADER_NBYTES : HEADER_NBYTES + sent.nbytes].view(Loan)
    weakref.finalize(loan, _give_back, memory, sent.mark, os.getpid()).atexit = False
    return loan


class MappedSegments:
    """The most recently used mapped segments of other processes. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[tuple[int, bytes], Bytes] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, sent: SegmentReference) -> Bytes:
        """Returns the whole segment. Raises as ``receive``."""
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
        """Drops segments whose senders have ended: they will not be refilled."""
        ended = {pid for pid in {pid for pid, _ in self._kept} if not os.path.exists(f"/proc/{pid}/fd")}
        for key in [key for key in self._kept if key[0] in ended]:
            del self._kept[key]


_MAPPED = MappedSegments()


def _map(sent: SegmentReference) -> Bytes:
    path = f"/proc/{sent.pid}/fd/{sent.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory: Bytes = np.frombuffer(mmap.mmap(fd, HEADER_NBYTES + sent.capacity_nbytes), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # no such process or file, or a shorter one
        _await_end(sent.pid)
        raise PeerLostError(peer=f"process {sent.pid}", reason=str(error)) from error
    if memory[_ID_AT : _ID_AT + _ID_NBYTES].tobytes() != sent.uid:
        raise CorruptDataError(path=path, expected="a segment", actual="another file")
    return memory


def _await_end(pid: int) -> None:
    """Waits for the end of a process that is being killed: its files are gone while it still counts as alive, and a
    caller that gets the error and then checks the process should find that it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    with os.fdopen(fd) as ended:
        waiting = select.poll()  # select takes no descriptor above 1023
        waiting.register(ended, select.POLLIN)
        waiting.poll(END_TIMEOUT_S * 1e3)


def _give_back(memory: Bytes, mark: int, pid: int) -> None:
    if os.getpid() == pid:  # the parent may still use what a forked child drops
        memory[mark] = 0
