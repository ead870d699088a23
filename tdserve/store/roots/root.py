"""The root folder: its owner, its layout, and the proof of being on its machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from tdserve.base.errors import (
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    NotSupportedError,
    RootInUseError,
)
from tdserve.base.ids import check_store_name, make_uid
from tdserve.store.database.environments import DATA_FILE as CATALOG_FILE, find_damage
from tdserve.store.disk.checked_json import decode_checked, encode_checked
from tdserve.store.disk.faults import convert_os_errors, free_bytes
from tdserve.store.disk.files import SET_ASIDE, replace_file, sync_file
from tdserve.store.roots.run_record import RunRecord

FORMAT_VERSION = 6
"""Version of the whole folder layout. Any other version is refused."""

ORPHANS_TIMEOUT_S = 30.0
"""Time for the data workers of a killed server to end: it takes milliseconds, but on an overloaded machine more than
ten seconds, and longer if one hangs in the kernel."""

ENDING_TIMEOUT_S = 2.0
"""Time for a server to end whose launcher was killed just now; until then it looks like any other."""

RESTORING_FOLDER = ".restoring"
"""Folder in the place of a new root, in which a restore makes it; a server refuses a root that has it."""

_FORMAT_FILE = "tdserve.json"
_LOCK_FILE = "tdserve.lock"
_NONCE_FILE = "nonce"
_NONCE_BYTES = 16
_HOLDER_BYTES = 512
"""Size of the lock file. It never changes, so a start on a full disk has room for its text."""
_MAX_SHOWN_NAME = 60
STORES = "stores"
"""Folder of the stores' folders."""

_OPEN_MODE, _CLOSED_MODE = 0o777, 0o700

_SUBFOLDERS = ("arriving", "catalog", "requests", "sessions", STORES)


class Root:
    """An acquired root folder. Build it with :meth:`acquire`, once per server process.

    The exclusive ``flock`` belongs to the open file: it ends with :meth:`release` or with this process, however that
    ends, unless another process still has the file open. Processes that write below the root are given :attr:`lock_fd`,
    so that no other server starts before the last of them has ended; start any other process by ``spawn`` or ``exec``.

    Attributes:
        path: The folder, absolute.
        server_id: 32 hexadecimal digits, the same over all runs of this root.
        run: Whether the last server here has ended in order.
        nonce: New with every :meth:`acquire`; a client that can read it in :attr:`nonce_path` sees the same files.
    """

    def __init__(self, path: Path, *, lock_fd: int, server_id: str, nonce: str, holder: dict[str, str | int]) -> None:
        self.path = path
        self.server_id = server_id
        self.nonce = nonce
        self.run = RunRecord(path)
        self._lock_fd = lock_fd
        self._holder = holder

    @classmethod
    def acquire(cls, path: str | os.PathLike[str], *, is_closed: bool = False) -> Root:
        """Creates the folders if needed and takes the root for this process. Its address is not known yet: see
        :meth:`set_address`.

        Args:
            path: The root; created with its parents if it is missing.
            is_closed: Whether other users may enter none of its folders, whatever the umask.

        Raises:
            RootInUseError: Another server has it; the error names its process, host and address. Nothing was changed.
            NotSupportedError: The folder has the format of another tdserve. Nothing was changed.
            CorruptDataError: Its ``tdserve.json`` is damaged, or lost. Nothing was changed.
            CapacityError, InvalidRequestError: The folder cannot be created or written, is a place of checkpoints, or
                has what a restore has left that did not end.
        """
        root = Path(os.path.abspath(path))
        with convert_os_errors(root):
            _refuse_checkpoints(root)
            _refuse_unfinished_restore(root)
            mode = _CLOSED_MODE if is_closed else _OPEN_MODE
            _make_folder(root, mode)
            lock_fd = _open_lock(root)
        try:
            with convert_os_errors(root):
                _lock_or_refuse(lock_fd, root)
                server_id = _read_or_create_server_id(root)
                for name in _SUBFOLDERS:
                    (root / name).mkdir(mode, exist_ok=True)
                    if is_closed:
                        (root / name).chmod(mode)
                nonce = secrets.token_hex(_NONCE_BYTES)
                replace_file(root / _NONCE_FILE, nonce.encode())
                holder: dict[str, str | int] = {"pid": os.getpid(), "host": socket.gethostname()}
                acquired = cls(root, lock_fd=lock_fd, server_id=server_id, nonce=nonce, holder=holder)
                acquired.set_address("")
        except BaseException:
            os.close(lock_fd)
            raise
        return acquired

    @classmethod
    def acquire_for_check(cls, path: str | os.PathLike[str]) -> Root:
        """Takes an existing root, so that no server starts meanwhile; changes nothing of it.

        Raises:
            RootInUseError: A server has it.
            NotSupportedError: It has the format of another tdserve.
            CorruptDataError: It has no format that can be read.
            InvalidRequestError: There is no root, or it cannot be opened.
        """
        root = Path(os.path.abspath(path))
        if not any((root / name).exists() for name in (_FORMAT_FILE, _LOCK_FILE, "catalog")):
            raise InvalidRequestError(
                argument="root", reason=f"{root} is no root of a server: it has no {_FORMAT_FILE}"
            )
        with convert_os_errors(root):
            lock_fd = _open_lock(root)
        try:
            _lock_or_refuse(lock_fd, root)
            version, server_id = _read_format(root / _FORMAT_FILE)
            if version is not None:
                _check_version(root / _FORMAT_FILE, version)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(root, lock_fd=lock_fd, server_id=server_id, nonce="", holder={})

    def check_format(self) -> None:
        """Raises CorruptDataError if the file of the format is missing or damaged."""
        _read_server_id(self.path / _FORMAT_FILE)

    def repair_format(self) -> None:
        """Writes the file of the format again, with the id of the server if it can still be read."""
        _write_format(self.path / _FORMAT_FILE, self.server_id or make_uid())

    def is_in_place(self) -> bool:
        """Returns whether the folder is still at its path, and none has taken its place."""
        return self._is_mine() is True

    def is_replaced(self) -> bool:
        """Returns whether another root has taken the place of this one, which was deleted or moved away."""
        return self._is_mine() is False

    def check_in_place(self) -> None:
        """Raises CorruptDataError if the folder is not at its path any more, where files would be another root's."""
        if not self.is_in_place():
            actual = "another root" if self.is_replaced() else "none: it was deleted or moved away"
            raise CorruptDataError(path=str(self.path), expected="the root that this server holds", actual=actual)

    def _is_mine(self) -> bool | None:
        """Returns whether the root at the path is this one; None if there is none."""
        try:
            here, mine = os.stat(self.path / _LOCK_FILE, follow_symlinks=False), os.fstat(self._get_fd())
        except OSError:
            return None
        return os.path.samestat(here, mine)

    def set_address(self, address: str) -> None:
        """Writes the address of this server into the lock file, for the message of a server that is refused."""
        text = json.dumps({**self._holder, "address": address}).encode()
        with convert_os_errors(self.path, asked=len(text)):
            os.pwrite(self._get_fd(), text.ljust(_HOLDER_BYTES), 0)

    def set_aside(self, name: str) -> str:
        """Moves a folder that belongs to no store away from a store's name; returns its new place."""
        folder = self.store_folder(name)
        target = folder.with_name(f"{SET_ASIDE}{name[:_MAX_SHOWN_NAME]}-{make_uid()}")
        with convert_os_errors(folder):
            folder.rename(target)
        return str(target)

    def release(self) -> None:
        """Releases the root. The folders stay. Idempotent."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):  # the holder's name is only for messages; closing is what counts
                os.pwrite(self._lock_fd, b" " * _HOLDER_BYTES, 0)
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def lock_fd(self) -> int:
        """Descriptor of the lock, for ``pass_fds``: the root is taken as long as any process has it open."""
        return self._get_fd()

    @property
    def is_held(self) -> bool:
        """Whether this object still owns the root."""
        return self._lock_fd >= 0

    @property
    def catalog_folder(self) -> Path:
        """Folder of :class:`~tdserve.store.database.catalog_db.CatalogDB`."""
        return self.path / "catalog"

    def find_catalog(self) -> Path:
        """Returns ``catalog_folder`` if it has the catalog of the stores here.

        Raises:
            CorruptDataError: There are stores and no catalog, see ``check_empty``, or a damaged one. Nothing was
                changed.
        """
        path = self.catalog_folder / CATALOG_FILE
        nbytes = path.stat().st_size if path.exists() else None
        if not nbytes:
            self.check_empty("no such file" if nbytes is None else "an empty file")
        elif damage := find_damage(path):
            actual = f"{damage}; `tdserve check {self.path} --repair` puts back what it can"
            raise CorruptDataError(path=str(path), expected="a catalog", actual=actual)
        return self.catalog_folder

    def list_store_folders(self) -> list[Path]:
        """Returns the folders in that of the stores, also those of deleted ones and those that were set aside; a file
        there is a user's."""
        stores = self.path / "stores"
        with convert_os_errors(stores):
            return sorted(path for path in stores.iterdir() if path.is_dir()) if stores.is_dir() else []

    def check_empty(self, actual: str) -> None:
        """Raises CorruptDataError if there are stores here; for a catalog without any, which ``actual`` describes.

        To continue would serve an empty server, and give these folders to new stores of the same names. One without
        any file has nothing to lose.
        """
        folders = [folder for folder in self.list_store_folders() if not folder.name.startswith(".")]
        names = sorted(folder.name for folder in folders if any(path.is_file() for path in folder.rglob("*")))
        if names:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            remedy = (
                f"put back a copy of it, or run `tdserve check {self.path} --repair`, which makes one of the rest, or "
                f"move {self.path / 'stores'} away to begin with an empty server"
            )
            path, expected = str(self.catalog_folder / CATALOG_FILE), f"the catalog of the stores {shown}"
            raise CorruptDataError(path=path, expected=expected, actual=f"{actual}; {remedy}")

    @property
    def synced_folder(self) -> Path:
        """Folder of what the last sync has written, apart from files in the stores' folders."""
        return self.path / "synced"

    @property
    def sessions_folder(self) -> Path:
        """Folder of the lock files of local sessions."""
        return self.path / "sessions"

    @property
    def requests_folder(self) -> Path:
        """Folder of content that requests under way have sent ahead, or that is still to be applied after a crash."""
        return self.path / "requests"

    def empty_requests(self) -> None:
        """Removes leftovers of the requests of an earlier server."""
        for path in self.requests_folder.iterdir():
            path.unlink(missing_ok=True)

    @property
    def nonce_path(self) -> Path:
        """File whose content is :attr:`nonce`."""
        return self.path / _NONCE_FILE

    def store_folder(self, name: str) -> Path:
        """Returns the folder of the store ``name``; it is not created here.

        Raises:
            InvalidRequestError: The name is invalid.
        """
        return self.path / "stores" / check_store_name(name)

    def arriving_folder(self, move: str) -> Path:
        """Returns the folder of the files of a store that comes from another server, until it is visible.

        Raises:
            InvalidRequestError: It is no id of a move.
        """
        return self.path / "arriving" / check_store_name(move)

    def list_arriving(self) -> list[Path]:
        """Returns the folders of all stores that come from other servers."""
        return list((self.path / "arriving").iterdir())

    def checkpoint_folder(self, checkpoint: str) -> Path:
        """Returns the folder of what is kept for a checkpoint; it is not created here.

        Raises:
            InvalidRequestError: It is no id of a checkpoint.
        """
        return self.path / "checkpoints" / check_store_name(checkpoint)

    def empty_checkpoints(self) -> None:
        """Removes what was kept for checkpoints of an earlier server."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    def take_arrived(self, name: str, move: str) -> None:
        """Moves the files of a store that has come to where it has them. It is safe to repeat."""
        arrived, folder = self.arriving_folder(move), self.store_folder(name)
        if arrived.exists():
            with convert_os_errors(folder):
                arrived.rename(folder)

    def move_to_trash(self, name: str, uid: str) -> None:
        """Moves a store's folder away, so that the name is free at once and a crash leaves no incomplete store.

        Raises:
            CapacityError, CorruptDataError, InvalidRequestError: It stays where it is, for example since there is no
                room for another name.
        """
        folder = self.store_folder(name)
        with convert_os_errors(folder):
            if folder.exists():
                folder.rename(self._move_into_trash(uid))

    def remove_in_place(self, name: str) -> bool:
        """Removes a store's folder where it is; returns whether nothing is left of it. For one that cannot be moved."""
        folder = self.store_folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    def empty_trash(self, uid: str = "") -> None:
        """Removes this store's folder that :meth:`move_to_trash` has moved; by default those of all stores."""
        all_trash = self._move_into_trash("")
        for trash in [self._move_into_trash(uid)] if uid else all_trash.parent.glob(f"{all_trash.name}*"):
            shutil.rmtree(trash, ignore_errors=True)

    def free_bytes(self) -> int:
        """Returns the bytes that may still be written below the root."""
        with convert_os_errors(self.path):
            return free_bytes(self.path)

    def size_bytes(self) -> int:
        """Returns the size of the root's file system."""
        with convert_os_errors(self.path):
            found = os.statvfs(self.path)
            return found.f_blocks * found.f_frsize

    def _move_into_trash(self, uid: str) -> Path:
        """Returns a folder for deleted stores; no store's name begins with a dot."""
        return self.path / "stores" / f".deleted-{uid}"

    def _get_fd(self) -> int:
        if self._lock_fd < 0:
            raise ClosedError(what=f"root {self.path}")
        return self._lock_fd


def _open_lock(root: Path) -> int:
    return os.open(root / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _lock_or_refuse(lock_fd: int, root: Path) -> None:
    begun_s = time.monotonic()
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as fault:
            content = os.pread(lock_fd, 4096, 0)
            timeout_s = ORPHANS_TIMEOUT_S if _is_gone(content) else ENDING_TIMEOUT_S
            if time.monotonic() - begun_s > timeout_s:
                raise RootInUseError(root=str(root), holder=_describe_holder(content)) from fault
        time.sleep(0.02)


def _is_gone(content: bytes) -> bool:
    """Returns whether the holder was killed, and only processes that it started still keep the lock."""
    try:
        holder = json.loads(content)
        if holder["host"] != socket.gethostname():
            return False
        state = Path(f"/proc/{int(holder['pid'])}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between the open and the read
        return True
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return False
    return state in (b"Z", b"X")


def _describe_holder(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} at {holder['address'] or 'an address not known yet'}"
    except (ValueError, TypeError, KeyError):
        return "a process that has not written its name yet"


def is_root(folder: Path) -> bool:
    """Returns whether a server has its files in this folder, as far as this process can see."""
    return os.path.exists(folder / _FORMAT_FILE)


def move_staged_root(root: Path) -> None:
    """Makes the root that ``RESTORING_FOLDER`` has the root of its parent, the file of the format last: a crash in
    between leaves a folder that no server takes for a root."""
    staged = root / RESTORING_FOLDER
    with convert_os_errors(root):
        for path in sorted(staged.iterdir(), key=lambda path: path.name == _FORMAT_FILE):
            path.rename(root / path.name)
        sync_file(root)
        staged.rmdir()


def _refuse_checkpoints(root: Path) -> None:
    """Raises InvalidRequestError for a place of checkpoints: a server that starts empties that folder of its root."""
    if not is_root(root) and not (root / "catalog").exists() and any((root / "checkpoints").glob("*")):
        reason = (
            f"{root} is a place of checkpoints; name another folder, and bring them there by tdserve restore --root"
        )
        raise InvalidRequestError(argument="root", reason=reason)


def _refuse_unfinished_restore(root: Path) -> None:
    if (root / RESTORING_FOLDER).exists():
        reason = (
            f"a restore into {root} is under way, or was interrupted; repeat tdserve restore PLACE --root {root}, or "
            f"empty that folder if this is refused too"
        )
        raise InvalidRequestError(argument="root", reason=reason)


def _make_folder(root: Path, mode: int) -> None:
    try:
        root.mkdir(mode, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as fault:
        reason = f"{root} cannot be made: {str(fault.strerror).lower()}; is something else there, or above it?"
        raise InvalidRequestError(argument="root", reason=reason) from fault


def _read_or_create_server_id(root: Path) -> str:
    """Returns the server id of a root; writes a new one if the root is new."""
    path = root / _FORMAT_FILE
    # a root without this file may have any format: opening it as new would hide its stores
    if path.exists() or (root / "catalog").exists():
        return _read_server_id(path)
    server_id = make_uid()
    _write_format(path, server_id)
    return server_id


def _read_server_id(path: Path) -> str:
    """Returns the server id in the file of the format; raises CorruptDataError if that is missing or damaged."""
    if not path.exists():
        actual = "none; put it back from a backup, or run tdserve check --repair"
        raise CorruptDataError(path=str(path), expected="a file, since there is a catalog", actual=actual)
    version, server_id = _read_format(path)
    if version is None:
        actual = repr(path.read_bytes()[:80])
        raise CorruptDataError(path=str(path), expected="format_version and server_id", actual=actual)
    _check_version(path, version)
    decode_checked(path.read_bytes(), str(path))
    return server_id


def _read_format(path: Path) -> tuple[Any, str]:
    """Returns version and server id, as far as they can be read: None and ""."""
    try:
        found = json.loads(path.read_bytes())
        return found["format_version"], str(found["server_id"])
    except (OSError, ValueError, TypeError, KeyError):
        return None, ""


def _check_version(path: Path, version: Any) -> None:
    """Raises NotSupportedError if a root has the format of another tdserve, and CorruptDataError if it has none."""
    if type(version) is not int:
        raise CorruptDataError(path=str(path), expected=f"format_version {FORMAT_VERSION}", actual=repr(version))
    if version != FORMAT_VERSION:
        age = "a newer" if version > FORMAT_VERSION else "an older"
        reason = f"it was written by {age} tdserve; this one reads and writes format_version {FORMAT_VERSION}"
        raise NotSupportedError(feature=f"the format_version {version} of {path.parent}", reason=reason)


def _write_format(path: Path, server_id: str) -> None:
    replace_file(path, encode_checked({"format_version": FORMAT_VERSION, "server_id": server_id}))
