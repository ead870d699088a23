"""How a local client reaches the files below the server's root: by their names, or through what the server lends."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Protocol

from tdserve.base.errors import ConnectError, TDServeError, TransferAbortedError
from tdserve.control.lending import borrow
from tdserve.control.local import connect
from tdserve.store.disk.held_folder import HeldFolder
from tdserve.store.roots.root import STORES
from tdserve.store.weights.version_marks import is_of_another
from tdserve.v1 import control_pb2

MAX_KEPT_FOLDERS = 32
"""Most folders that are kept for the next version of a store: to borrow one takes half a millisecond, and to look whose
one is a tenth of that."""


@dataclass
class FileAccess:
    """How a client reaches the files of its server, in all of its sessions.

    Attributes:
        root: Path of the server's root folder in this process, if it differs from the server's.
        why_not_lent: Why the server does not lend something that this client has to read; then it borrows nothing more.
    """

    root: str | None = None
    why_not_lent: str = ""


class StoreFolder:
    """A store's folder, as this process reaches it.

    Args:
        path: Its path, which is good as long as this object lives.
        fd: Descriptor that the path goes through, closed with this object; -1 if there is none.
        held: What the path goes through instead, kept alive.

    Attributes:
        path: As given.
        is_kept: Whether it was opened for an earlier call: the store may have got another folder since.
    """

    def __init__(self, path: FilePath, fd: int = -1, *, held: HeldFolder | None = None) -> None:
        self.path = path
        self.is_kept = False
        self._fd = fd
        self._held = held

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _KeptFolders:
    """Folders that were opened for earlier calls, by store and incarnation."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, StoreFolder]] = {}

    def open(self, store: str, uid: str, open_anew: Callable[[], StoreFolder]) -> StoreFolder:
        """Returns the folder of this incarnation, which is opened if it is not kept; "" for the one of now, which is
        not kept."""
        kept_uid, kept = self._kept.pop(store, ("", None))
        if kept is None or not uid or kept_uid != uid:
            opened = open_anew()
        else:
            opened, kept.is_kept = kept, True
        if uid:
            self._kept[store] = uid, opened
            if len(self._kept) > MAX_KEPT_FOLDERS:
                self._kept.pop(next(iter(self._kept)), None)
        return opened

    def forget(self, store: str) -> None:
        """Has the folder of a store opened again for the next call."""
        self._kept.pop(store, None)


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

    def open_folder(self, store: str, *, uid: str = "") -> StoreFolder:
        """Opens the folder of a store.

        Args:
            store: Name of the store.
            uid: Its incarnation, if the folder may be one that was opened for an earlier call.

        Raises:
            CorruptDataError: It is not there.
            TransferAbortedError: The folder of this name is of another incarnation.
            TDServeError: Why the server does not lend it.
        """

    def forget(self, store: str) -> None:
        """Opens the folder of a store again for the next call."""


class SeenFiles:
    """The files of a root that this process sees; attributes and methods as in RootFiles."""

    is_lent = False

    def __init__(self, root: FilePath) -> None:
        self.root = root
        self._kept = _KeptFolders()

    def connect(self) -> socket.socket:
        """Connects over the socket in the root."""
        return connect(self.root)

    def open_folder(self, store: str, *, uid: str = "") -> StoreFolder:
        """Returns it by its name; that of an incarnation by a descriptor, so that all its files are of that one."""
        folder = self.root / STORES / store
        return self._kept.open(store, uid, lambda: _hold(folder, uid)) if uid else StoreFolder(folder)

    def forget(self, store: str) -> None:
        """Looks the name of the store's folder up again for the next call."""
        self._kept.forget(store)


class LentFiles:
    """The files of a root that this process may not enter. The server lends the folders of stores.

    Their files are opened with the permissions of this process, which may read them. Attributes and methods as in
    RootFiles.

    Args:
        welcome: The server's message, which describes its root.
    """

    is_lent = True

    def __init__(self, welcome: control_pb2.Welcome) -> None:
        self.root = FilePath(welcome.local.root)
        self._nonce = welcome.local.nonce
        self._session, self._key = welcome.session, welcome.local.key
        self._kept = _KeptFolders()

    def connect(self) -> socket.socket:
        """Borrows a connection."""
        try:
            return socket.socket(fileno=self._borrow(""))
        except ConnectError:
            raise
        except TDServeError as error:
            raise ConnectError(address=str(self.root), reason=str(error)) from error

    def open_folder(self, store: str, *, uid: str = "") -> StoreFolder:
        """Borrows it, or returns the one that was borrowed for this incarnation."""

        def lend() -> StoreFolder:
            fd = self._borrow(store)
            return _check_incarnation(StoreFolder(FilePath(f"/proc/self/fd/{fd}"), fd), store, uid)

        return self._kept.open(store, uid, lend)

    def forget(self, store: str) -> None:
        """Borrows the store's folder again for the next call."""
        self._kept.forget(store)

    def _borrow(self, store: str) -> int:
        return borrow(self._nonce, control_pb2.Borrow(session=self._session, key=self._key, store=store))


def _hold(folder: FilePath, uid: str) -> StoreFolder:
    held = HeldFolder(folder)
    return _check_incarnation(StoreFolder(held.path, held=held), folder.name, uid)


def _check_incarnation(opened: StoreFolder, store: str, uid: str) -> StoreFolder:
    """Returns a folder. Raises TransferAbortedError if the versions in it are of another incarnation."""
    if uid and is_of_another(opened.path / "versions", uid=uid):
        raise make_deleted_error(store)
    return opened


def find_files(welcome: control_pb2.Welcome, access: FileAccess) -> RootFiles:
    """Returns the files below the server's root, of which the server lends those that this process does not see.

    Raises:
        ConnectError: It does not see them, and the server does not lend, or the user has named the folder.
    """
    folder = FilePath(access.root or welcome.local.root)
    try:
        _check_same(folder, welcome.local)
    except ConnectError as error:
        if access.root or not welcome.local.is_lending:
            raise
        if access.why_not_lent:
            raise ConnectError(address=str(folder), reason=access.why_not_lent) from error
        return LentFiles(welcome)
    return SeenFiles(folder)


def _check_same(folder: FilePath, offered: control_pb2.LocalRoot) -> None:
    """Raises ConnectError unless the folder is the server's: the same file, on the same mounted file system."""
    path = folder / "nonce"
    try:
        found = os.stat(path)
        nonce = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        reason = f"this process does not see the server's root folder there: {error.strerror}"
        raise ConnectError(address=str(folder), reason=reason) from error
    if nonce != offered.nonce or (found.st_dev, found.st_ino) != (offered.device, offered.inode):
        raise ConnectError(address=str(folder), reason="the folder there is not the server's root, but another one")


def make_deleted_error(name: str) -> TransferAbortedError:
    """Returns the error of a call whose store is not there any more, although the server has named it."""
    return TransferAbortedError(transfer=0, reason=f"store {name!r} was deleted meanwhile")
