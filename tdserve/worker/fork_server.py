"""The process that forks data workers: ``python -m tdserve.worker.fork_server FD``, started by the control process.

It has imported all that a worker needs, so that one is ready within milliseconds where a fresh process would import
torch for seconds; and workers share what it has imported. It has one thread, and one descriptor of its own: FD, a UNIX
socket of messages, on which it answers one request of control after the other. Nothing of a worker stays here but its
process id: a worker's end shows on that worker's own descriptors. When control goes, this process goes, and its workers
with it.
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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tdserve.base.machine import die_with_parent, use_small_pages
from tdserve.worker.main import main as work

MAX_REQUEST_BYTES = 1 << 16

MAX_FDS = 3
"""That come with a request: of a worker its socket, its sign of life, and the root's lock."""


class ForkServer:
    """Carries out requests.

    Args:
        connection: The end of control's socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._workers: set[int] = set()  # not yet reaped, so that their process ids are nobody else's

    def run(self) -> None:
        """Works until the control process is gone."""
        self._connection.send(b"{}")  # what was asked meanwhile is answered now
        while True:
            content, fds, _, _ = socket.recv_fds(self._connection, MAX_REQUEST_BYTES, MAX_FDS)
            if not content:
                return
            try:
                answer = self._answer(json.loads(content), fds)
            finally:
                for fd in fds:  # at once: the worker's end of them is to be the only one
                    os.close(fd)
            self._connection.send(json.dumps(answer).encode())

    def _answer(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, int]:
        number, pid = request["number"], request.get("pid", 0)
        if "fork" in request:
            return {"number": number, **self._fork(request["fork"], fds, num_fds=request["num_fds"])}
        if "kill" in request and pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        if "reap" in request and pid in self._workers:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:  # it has let go of its memory, and a driver may take long to let go of a device
                return {"number": number, "ends": 1}
            self._workers.remove(pid)
            return {"number": number, "exit_code": os.waitstatus_to_exitcode(status)}
        return {"number": number}

    def _fork(self, arguments: list[str], fds: Sequence[int], *, num_fds: int) -> dict[str, int]:
        if len(fds) < num_fds:  # the kernel leaves out those for which this process has no room
            return {"errno": errno.EMFILE}
        mine = os.getpid()
        try:
            born_fd, held_fd = os.pipe()
            with open(born_fd, "rb", buffering=0) as born:
                try:
                    pid = os.fork()
                    if not pid:
                        self._live(arguments, fds, [born_fd, held_fd], parent=mine)
                finally:
                    os.close(held_fd)
                born.read()  # ends when the worker cannot outlive this process any more: nobody knows of it before
        except OSError as fault:
            return {"errno": fault.errno or errno.EAGAIN}
        self._workers.add(pid)
        return {"pid": pid}

    def _live(self, arguments: list[str], fds: Sequence[int], born: Sequence[int], *, parent: int) -> None:
        """A worker from its beginning to its end."""
        try:
            die_with_parent()
            if os.getppid() != parent:  # it died before the kernel was told
                os._exit(1)
            for fd in born:
                os.close(fd)
            self._connection.close()
            for fd in fds:
                os.set_inheritable(fd, False)
            work([str(fds[0]), *arguments])
        except BaseException:  # noqa: BLE001 (the outermost frame of this process)
            traceback.print_exc()
        finally:
            os._exit(1)


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    # Ctrl-C reaches the whole foreground group; this process ends when control does, or has it end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    use_small_pages(False)  # as control does: workers have buffers, which are filled from end to end
    gc.collect()
    gc.freeze()  # else a worker's first collection would write to, and so copy, every page that it shares
    with suppress(BrokenPipeError):  # control went while it was told something
        ForkServer(socket.socket(fileno=int(arguments[0]))).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
