"""Places that keep named contents: a folder, or what a URL of fsspec names.

In a folder a content is there whole or not at all. So it is at a URL whose file system writes it at once, as object
stores do; elsewhere a process that is killed while it writes may leave a part, whose size shows that.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tdserve.base.errors import CapacityError, CorruptDataError, InvalidRequestError
from tdserve.base.failpoints import reach
from tdserve.store.disk.faults import NO_ROOM, convert_os_errors
from tdserve.store.disk.files import write_at
from tdserve.store.roots.root import is_root

_LOCAL_SCHEMES = ("file", "local")
"""Schemes of URLs whose paths are of this machine's files."""


class Archive(Protocol):
    """Keeps contents by names such as ``blocks/ab/abcd``. Threads: safe.

    Attributes:
        place: Path of its folder, or its URL.
    """

    place: str

    def write(self, name: str, content: bytes) -> None:
        """Keeps a content, in the place of an earlier one; after an error no part of it. Raises CapacityError,
        InvalidRequestError."""

    def read(self, name: str) -> bytes:
        """Returns a content. Raises CorruptDataError if there is none."""

    def list_sizes(self, folder: str) -> dict[str, int | None]:
        """Returns the sizes in bytes of all contents below a folder, by their names, in order; None: the file system
        does not tell. Raises InvalidRequestError if the folder cannot be read."""

    def list_folders(self) -> list[str]:
        """Returns the names of the folders in the place, also if it is not there. Raises InvalidRequestError if it
        cannot be read."""

    def remove(self, name: str) -> None:
        """Removes a content, if it is there."""

    def exists(self) -> bool:
        """Returns whether the place is there, be it empty. Raises InvalidRequestError if that cannot be found out."""


def open_archive(place: str | os.PathLike[str]) -> Archive:
    """Opens a place, which may not exist yet.

    Args:
        place: Path of a folder, or a URL of fsspec (``s3://bucket/run``), whose package has to be installed.

    Raises:
        InvalidRequestError: The URL names no file system that this process has.
    """
    text = os.fspath(place)
    if not text.strip():
        raise InvalidRequestError(argument="place", reason="it is empty")
    scheme, is_url, path = text.rpartition("://")
    # fsspec would write its files readable to all users, as far as the umask lets it.
    return _UrlArchive(text) if is_url and scheme not in _LOCAL_SCHEMES else _FolderArchive(Path(path))


def check_outside_roots(place: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> None:
    """Raises InvalidRequestError if a place is in the root of a server that this machine sees, or is one itself: the
    next start of that server removes checkpoints there as leftovers.

    Args:
        place: As in ``open_archive``.
        root: One that need not exist yet.
    """
    scheme, is_url, path = os.fspath(place).rpartition("://")
    if is_url and scheme not in _LOCAL_SCHEMES:
        return
    folder = Path(path).resolve()
    new = None if root is None else Path(root).resolve()
    for each in (folder, *folder.parents):
        if each == new or is_root(each):
            reason = (
                f"{place} is in {each}, the root of a server, which removes it when it starts; name a folder outside"
            )
            raise InvalidRequestError(argument="place", reason=reason)


class _FolderArchive:
    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder

    def write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        try:
            with convert_os_errors(self._folder, asked=len(content)):
                self._write(path, content)
        except (CorruptDataError, InvalidRequestError) as error:
            reason = f"{self._folder} cannot be written: {error.__cause__ or error}"
            raise InvalidRequestError(argument="place", reason=reason) from error

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
        try:
            try:
                write_at(fd, content, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            reach("archive.written")
            os.replace(unfinished, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise

    def read(self, name: str) -> bytes:
        path = self._folder / name
        try:
            with convert_os_errors(path):
                return path.read_bytes()
        except FileNotFoundError:
            raise CorruptDataError(path=str(path), expected="a file", actual="none") from None

    def list_sizes(self, folder: str) -> dict[str, int | None]:
        with convert_os_errors(self._folder):
            return dict(sorted(_iter_sizes(self._folder / folder, folder)))

    def list_folders(self) -> list[str]:
        with convert_os_errors(self._folder):
            try:
                with os.scandir(self._folder) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir())
            except FileNotFoundError:
                return []

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def exists(self) -> bool:
        with convert_os_errors(self._folder):
            return self._folder.is_dir()


def _iter_sizes(path: Path, name: str) -> Iterator[tuple[str, int]]:
    """Yields names and sizes of the files below a folder, which need not be there and may change meanwhile."""
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        below = f"{name}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _iter_sizes(path / entry.name, below)
        elif entry.is_file():
            with suppress(FileNotFoundError):  # it was removed just now
                yield below, entry.stat().st_size


class _UrlArchive:
    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # half a second, for those alone who name a URL

        try:
            found: tuple[Any, str] = url_to_fs(url)
        except (ValueError, ImportError) as fault:
            raise InvalidRequestError(argument="place", reason=f"{url!r} cannot be used: {fault}") from fault
        self.place = url
        self._fs, self._folder = found

    def write(self, name: str, content: bytes) -> None:
        path = f"{self._folder}/{name}"
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._pipe(path, content)
        except OSError as fault:
            if fault.errno in NO_ROOM:
                what = f"{path} ({fault.strerror or fault})"
                raise CapacityError(what=what, asked=len(content)) from fault
            raise InvalidRequestError(argument="place", reason=f"{path} cannot be written: {fault}") from fault

    def _pipe(self, path: str, content: bytes) -> None:
        try:
            self._fs.pipe_file(path, content)
        except BaseException:  # an interrupt too
            # Few file systems can move a file at once: most would copy it. What is there in full stays: other
            # checkpoints may need it.
            with suppress(Exception):
                self._fs.invalidate_cache(path)
                if self._fs.size(path) != len(content):
                    self._fs.rm_file(path)
            raise

    def read(self, name: str) -> bytes:
        path = f"{self._folder}/{name}"
        try:
            found: bytes = self._fs.cat_file(path)
        except OSError as fault:
            raise CorruptDataError(path=path, expected="a file", actual=str(fault)) from fault
        return found

    def list_sizes(self, folder: str) -> dict[str, int | None]:
        below = f"{self._folder}/{folder}"
        self._fs.invalidate_cache()  # many keep listings, in which later changes by others are missing
        try:
            found = self._fs.find(below, detail=True)
        except FileNotFoundError:
            return {}
        except OSError as fault:
            raise InvalidRequestError(argument="place", reason=f"{below} cannot be read: {fault}") from fault
        return {f"{folder}{path[path.index(below) + len(below) :]}": found[path].get("size") for path in sorted(found)}

    def list_folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._folder, detail=True)
        except FileNotFoundError:
            return []
        except OSError as fault:
            raise InvalidRequestError(argument="place", reason=f"{self._folder} cannot be read: {fault}") from fault
        names = (each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")
        return sorted(names)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._folder}/{name}")

    def exists(self) -> bool:
        try:
            return bool(self._fs.exists(self._folder))
        except OSError as fault:
            raise InvalidRequestError(argument="place", reason=f"{self._folder} cannot be read: {fault}") from fault
