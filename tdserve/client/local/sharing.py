"""Long copies that several threads share.

One core does not saturate a memory bus: two threads gather 14 MB of rows a fifth faster on a virtual machine of two
cores (measured). The caller and its helpers take one piece after the other. A helper that gets no core takes none; one
that loses its core delays the others by at most one piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread

import torch

MIN_SHARED_BYTES = 4 * 1024 * 1024
"""Waking a thread takes some 50 microseconds, as long as copying a megabyte."""

MAX_THREADS = 4
"""The caller and its helpers: with this many cores a memory bus is nearly saturated."""

Piece = Callable[[], object]


def count_threads() -> int:
    """Returns how many threads may share a copy: no more than torch may use (``torch.set_num_threads``).

    That is one in workers of a DataLoader, and as set by OMP_NUM_THREADS.
    """
    return min(MAX_THREADS, torch.get_num_threads(), len(os.sched_getaffinity(0)))


def share(pieces: Sequence[Piece], threads: int) -> None:
    """Makes copies, in any order and several at once; returns when all are done. Threads: safe.

    Args:
        pieces: Each makes a part.
        threads: How many take part, including the caller: see ``count_threads``.

    Raises:
        Exception: An exception of one of them; the others are made nevertheless.
    """
    job = _Job(pieces)
    helpers = _get_helpers(os.getpid())
    for _ in range(min(threads, len(pieces)) - 1):
        helpers.put(job)
    job.run()


class _Job:
    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._numbers = count()
        self._lock = Lock()
        self._num_helping = 0
        self._is_over = False
        self._idle = Lock()
        self._idle.acquire()  # released by the last helper, once the caller has no more to do
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes copies in the caller's thread."""
        try:
            self._work()
        finally:  # also when interrupted: nothing may write to memory that the caller frees
            with self._lock:
                self._is_over = True
                must_wait = self._num_helping > 0
            if must_wait:
                self._idle.acquire()
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """Makes copies in a helper's thread, if some are left."""
        with self._lock:
            if self._is_over:
                return
            self._num_helping += 1
        self._work()
        with self._lock:
            self._num_helping -= 1
            if self._is_over and not self._num_helping:
                self._idle.release()

    def _work(self) -> None:
        for number in self._numbers:  # shared by the threads: no number is taken twice
            if number >= len(self._pieces):
                return
            try:
                self._pieces[number]()
            except Exception as error:  # noqa: BLE001 (the caller raises it)
                self._error = error


@lru_cache(maxsize=1)
def _get_helpers(pid: int) -> SimpleQueue[_Job]:
    """Returns the queue of this process's helpers; a forked child has threads of its own."""
    jobs: SimpleQueue[_Job] = SimpleQueue()
    for number in range(MAX_THREADS - 1):
        Thread(target=_run_helper, args=(jobs,), name=f"tdserve-copies-{pid}-{number}", daemon=True).start()
    return jobs


def _run_helper(jobs: SimpleQueue[_Job]) -> None:
    while True:
        job = jobs.get()
        job.help()
        del job  # its copies may be large
