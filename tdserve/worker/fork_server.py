"""The process that forks data workers: ``python -m tdserve.worker.fork_server FD``, started by the control process.

It has imported all that a worker needs: a worker is ready within milliseconds, where a fresh process would import torch
for seconds, and workers share the imported pages. It has one thread, and one descriptor of its own: FD, a UNIX message
socket on which it answers the requests of control in order. It keeps nothing of a worker but the process id; the end of
a worker shows on that worker's own descriptors. When control ends, this process ends, and its workers with it.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tdserve.base.machine import die_with_parent, use_small_pages
from tdserve.base.worker_arguments import WorkerArguments

MAX_REQUEST_BYTES = 1 << 16

MAX_FDS = 4
"""Descriptors that come with a request: a worker's socket, the one by which it gets others, its life pipe, and the
root's lock."""


class ForkServer:
    """Carries out the requests of control.

    Args:
        connection: The end of control's socket.
        work: Runs a worker: its socket, the one by which it gets others, and its arguments.
    """

    def __init__(self, connection: socket.socket, work: Callable[[int, int, WorkerArguments], object]) -> None:
        self._connection = connection
        self._work = work
        self._workers: set[int] = set()  # not yet reaped, so their process ids are not reused

    def run(self) -> None:
        """Works until the control process is gone."""
        self._connection.send(b"{}")  # requests that came meanwhile are answered now
        while True:
            content, fds, _, _ = socket.recv_fds(self._connection, MAX_REQUEST_BYTES, MAX_FDS)
            if not content:
                return
            try:
                answer = self._answer(json.loads(content), fds)
            finally:
                for fd in fds:  # at once: only the worker may have its end of them
                    os.close(fd)
            self._connection.send(json.dumps(answer).encode())

    def _answer(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, int]:
        number, pid = request["number"], request.get("pid", 0)
        if "fork" in request:
            arguments = WorkerArguments.from_json(request["fork"])
            return {"number": number, **self._fork(arguments, fds, num_fds=request["num_fds"])}
        if "kill" in request and pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        if "reap" in request and pid in self._workers:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:  # its memory is free, but a driver may take long to release a device
                return {"number": number, "ends": 1}
            self._workers.remove(pid)
            return {"number": number, "exit_code": os.waitstatus_to_exitcode(status)}
        return {"number": number}

    def _fork(self, arguments: WorkerArguments, fds: Sequence[int], *, num_fds: int) -> dict[str, int]:
        if len(fds) < num_fds:  # the kernel drops those for which this process has no room
            return {"errno": errno.EMFILE}
        mine = os.getpid()
        try:
            born_fd, held_fd = os.pipe()
            with open(born_fd, "rb", buffering=0) as born:
                try:
                    pid = os.fork()
                    if not pid:
                        self._run_child(arguments, fds, [born_fd, held_fd], parent=mine)
                finally:
                    os.close(held_fd)
                born.read()  # ends when the worker cannot outlive this process any more
        except OSError as fault:
            return {"errno": fault.errno or errno.EAGAIN}
        self._workers.add(pid)
        return {"pid": pid}

    def _run_child(self, arguments: WorkerArguments, fds: Sequence[int], born: Sequence[int], *, parent: int) -> None:
        """Runs a worker, from its beginning to its end."""
        try:
            die_with_parent()
            if os.getppid() != parent:  # it died before the kernel knew
                os._exit(1)
            for fd in born:
                os.close(fd)
            self._connection.close()
            for fd in fds:
                os.set_inheritable(fd, False)
            self._work(fds[0], fds[1], arguments)
        except BaseException:  # noqa: BLE001 (the outermost frame of this process)
            traceback.print_exc()
        finally:
            os._exit(1)


def main(arguments: list[str]) -> None:
    """Runs the process."""
    # Who ends a server may signal all of its processes; this one ends when control does, or when control ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    use_small_pages(False)  # unlike control: the buffers of workers are filled from end to end
    work = _import_worker()
    with suppress(ConnectionError):  # control has ended, perhaps before it read that this process is ready
        ForkServer(socket.socket(fileno=int(arguments[0])), work).run()
    os._exit(0)


def _import_worker() -> Callable[[int, int, WorkerArguments], object]:
    """Imports what a worker needs, with torch: a second of processor time, for which remote clients wait."""
    gc.disable()  # collections find nothing, and take a tenth of that
    from tdserve.worker.data_worker import main as work

    gc.enable()
    gc.collect()
    gc.freeze()  # otherwise a worker's first collection would write to, and so copy, every shared page
    return work


if __name__ == "__main__":
    main(sys.argv[1:])
