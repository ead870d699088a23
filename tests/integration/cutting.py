"""A proxy in front of a server. From a moment that the test chooses it loses an answer, or all requests after one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread


class Cutting:
    """Hands bytes on between clients and a server, both ways; a context manager.

    Args:
        address: Address of the server.

    Attributes:
        address: Where clients connect.
        was_cut: Set when an answer was lost.
        was_muted: Set when requests began to be lost.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.was_cut, self.was_muted = Event(), Event()
        self._is_mute = False
        self._may_connect = Event()
        self._may_connect.set()
        self._is_due: Callable[[], bool] = lambda: False
        self._is_mute_due: Callable[[], bool] = lambda: False
        self._sockets = [self._listening]
        self._threads: list[Thread] = []
        self._start(self._accept)

    def cut_when(self, is_due: Callable[[], bool]) -> None:
        """Once this is true, drops the server's next bytes and all connections; new ones wait for ``mend``."""
        self._is_due = is_due

    def mute_when(self, is_due: Callable[[], bool]) -> None:
        """Once this is true, passes the server's next bytes on, and then no bytes of clients any more. To clients the
        server seems to stand still just after its answer. Lasts until ``mend``."""
        self._is_mute_due = is_due

    def mend(self) -> None:
        """Lets clients through again, by new connections if bytes of the old ones were lost."""
        self._may_connect.set()
        if self._is_mute:
            self._is_mute, self._is_mute_due = False, lambda: False
            for each in self._sockets[1:]:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Cutting:
        return self

    def __exit__(self, *_: object) -> None:
        self.mend()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20.0)
        for each in self._sockets:
            each.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._sockets.append(client)
                self._may_connect.wait()
                server = socket.create_connection(self._server)
                self._sockets.append(server)
                self._start(self._pump, client, server, False)
                self._start(self._pump, server, client, True)

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                if is_answer and not self.was_cut.is_set() and self._is_due():
                    self._may_connect.clear()
                    self.was_cut.set()
                    break
                if is_answer and not self._is_mute and self._is_mute_due():
                    self._is_mute = True
                    self.was_muted.set()
                if is_answer or not self._is_mute:
                    target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
