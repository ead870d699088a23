"""A way to a server that loses an answer: it cuts the connection at the moment that a test chooses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread


class Cutting:
    """Hands bytes on between clients and a server, both ways; a context manager.

    Args:
        address: Of the server.

    Attributes:
        address: Where clients connect.
        was_cut: Set when an answer was lost.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.was_cut = Event()
        self._may_connect = Event()
        self._may_connect.set()
        self._is_due: Callable[[], bool] = lambda: False
        self._sockets = [self._listening]
        self._threads: list[Thread] = []
        self._start(self._accept)

    def cut_when(self, is_due: Callable[[], bool]) -> None:
        """Drops the first bytes of the server after this is true, and all connections; new ones wait for ``mend``."""
        self._is_due = is_due

    def mend(self) -> None:
        """Lets clients through again."""
        self._may_connect.set()

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
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
