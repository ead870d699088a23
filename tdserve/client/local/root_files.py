"""How a local client reaches the files below the server's root: by their names, or through what the server lends."""

from __future__ import annotations

import os
import socket
from pathlib import Path as FilePath
from typing import Protocol

from tdserve.base.errors import ConnectError, TDServeError
from tdserve.control.lending import borrow
from tdserve.control.local import connect
from tdserve.store.root import STORES
from tdserve.v1 import control_pb2


class StoreFolder:
    """A store's folder, as this process reaches it.

    Args:
        path: Its path, which is good as long as this object lives.
        fd: Descriptor that the path goes through, closed with this object; -1 if there is none.
    """

    def __init__(self, path: FilePath, fd: int = -1) -> None:
        self.path = path
        self._fd = fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class RootFiles(Protocol):
    """The files below a root. Threads: safe.

    Attributes:
        root: Path of the root, as this process sees it; of a lent one, as the server does.
        is_lent: Whether the server lends them, to be read.
    """

    root: FilePath
    is_lent: bool

    def connect(self) -> socket.socket:
        """Connects to the server. Raises ConnectError if that is not possible."""

    def open_folder(self, store: str) -> StoreFolder:
        """Opens the folder of a store.

        Raises:
            TDServeError: Why the server does not lend it.
        """


class SeenFiles:
    """The files of a root that this process sees; attributes and methods as of RootFiles."""

    is_lent = False

    def __init__(self, root: FilePath) -> None:
        self.root = root

    def connect(self) -> socket.socket:
        """Connects over the socket in the root."""
        return connect(self.root)

    def open_folder(self, store: str) -> StoreFolder:
        """Returns it by its name."""
        return StoreFolder(self.root / STORES / store)


class LentFiles:
    """The files of a root that this process does not see, or may not enter. The server lends the folders of stores.

    Their files are opened with the permissions of this process, which may read them. Attributes and methods as of
    RootFiles.

    Args:
        welcome: The server's message, which describes its root.
    """

    is_lent = True

    def __init__(self, welcome: control_pb2.Welcome) -> None:
        self.root = FilePath(welcome.local.root)
        self._nonce = welcome.local.nonce
        self._session, self._key = welcome.session, welcome.local.key

    def connect(self) -> socket.socket:
        """Borrows a connection."""
        try:
            return socket.socket(fileno=self._borrow(""))
        except ConnectError:
            raise
        except TDServeError as error:
            raise ConnectError(address=str(self.root), reason=str(error)) from error

    def open_folder(self, store: str) -> StoreFolder:
        """Borrows it."""
        fd = self._borrow(store)
        return StoreFolder(FilePath(f"/proc/self/fd/{fd}"), fd)

    def _borrow(self, store: str) -> int:
        return borrow(self._nonce, control_pb2.Borrow(session=self._session, key=self._key, store=store))
