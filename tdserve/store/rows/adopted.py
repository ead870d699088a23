"""The record of a store whose tensors lie in a user's folder: the folder, the file of each leaf, whether it may be
written.

The record is ``adopted.json`` in the store's own folder, for every process that opens the store. ``rows`` beside it is
a symlink to the user's folder, for programs that open the store without a server. Deleting the store removes both, and
nothing of the user's.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath

from tdserve.base.errors import CorruptDataError, InvalidRequestError, SpecMismatchError, TDServeError
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX
from tdserve.store.rows.adoptable import FileName, FoundFolder, open_folder, read_folder
from tdserve.store.rows.format import ROWS, Folder
from tdserve.structure.trees.tree import Path, Spec, check_matches

FILE_NAME = "adopted.json"


@dataclass(frozen=True)
class Adopted:
    """The record of an adopted folder.

    Attributes:
        path: Absolute, without symlinks.
        read_only: Whether the store must not be written.
        device, inode: Identity of the folder when the server last checked it: another process may see another folder
            under the same name.
        files: File of each tensor leaf below it; leaves without elements may have none.
    """

    path: str
    read_only: bool
    device: int
    inode: int
    files: tuple[tuple[Path, FileName], ...]

    @classmethod
    def from_folder(cls, found: FoundFolder, *, read_only: bool) -> Adopted:
        """Returns the record of a folder that was read."""
        return cls(found.path, read_only, found.device, found.inode, tuple(sorted(found.files.items())))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Adopted | None:
        """Returns the record in a store's folder; None if the store was not adopted.

        Raises:
            CorruptDataError: Its file is damaged.
        """
        file = FilePath(folder, FILE_NAME)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise CorruptDataError(path=str(file), expected="a usable file", actual=str(fault.strerror)) from fault
        try:
            fields = json.loads(content)
            files = tuple((tuple(map(str, key)), tuple(map(str, names))) for key, names in fields["files"])
            numbers = int(fields["device"]), int(fields["inode"])
            return cls(str(fields["path"]), bool(fields["read_only"]), *numbers, files)
        except (ValueError, TypeError, KeyError, RecursionError) as fault:
            raise CorruptDataError(
                path=str(file), expected="the record of an adopted folder", actual=repr(content[:80])
            ) from fault

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes it into a store's folder, whole or not at all."""
        file = FilePath(folder, FILE_NAME)
        fresh = file.with_name(FILE_NAME + FRESH_SUFFIX)
        with convert_os_errors(file):
            fresh.write_text(json.dumps(asdict(self)), encoding="ascii")
            os.replace(fresh, file)

    def link(self, folder: str | os.PathLike[str]) -> None:
        """Creates a store's folder with links to this one."""
        base = FilePath(folder)
        with convert_os_errors(base):
            base.mkdir(parents=True, exist_ok=True)
            os.symlink(self.path, base / ROWS, target_is_directory=True)
        self.save(base)

    def check(self, spec: Spec, folder: str | os.PathLike[str]) -> None:
        """Checks that the user's folder is unchanged, and records its present identity.

        Args:
            spec: The structure that it had.
            folder: Folder of the store.

        Raises:
            CorruptDataError: It is gone, shorter or of another structure.
        """
        try:
            found = read_folder(self.path, writable=not self.read_only)
            check_matches(spec, found.spec, store="")
        except SpecMismatchError as error:
            expected = f"key {error.key!r} to be {error.expected}" if error.key else error.expected
            raise CorruptDataError(path=self.path, expected=expected, actual=error.actual) from error
        except CorruptDataError:
            raise
        except TDServeError as error:
            expected = "the folder that was adopted"
            raise CorruptDataError(path=self.path, expected=expected, actual=str(error)) from error
        now = Adopted.from_folder(found, read_only=self.read_only)
        if now != self:
            now.save(folder)

    def open(self) -> int:
        """Opens the user's folder. Returns a descriptor.

        Raises:
            CorruptDataError: The name leads to another folder here, or to a symlink.
        """
        try:
            fd = open_folder(self.path)
        except TDServeError as error:
            raise self._make_changed_error(str(error)) from error
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            os.close(fd)
            raise self._make_changed_error("another folder")
        return fd

    def _make_changed_error(self, actual: str) -> CorruptDataError:
        remedy = "if only this process sees that, connect with transport='gloo'"
        expected = "the folder that the server has adopted"
        return CorruptDataError(path=self.path, expected=expected, actual=f"{actual}; {remedy}")

    def plan(self, spec: Spec) -> Folder:
        """Returns the plan of the leaves' files in the opened folder."""
        leaves = dict(spec.tensors)
        top = Folder(".")
        folders: dict[FileName, Folder] = {(): top}
        for path, names in self.files:
            if path in leaves and all(map(_is_file_name, names)):
                folder = _get_folder(folders, names[:-1])
                folder.files.append((names[-1], path, leaves[path]))
        return top


def check_adopted(folder: str | os.PathLike[str], spec: Spec) -> None:
    """Like ``Adopted.check``, for a store's folder. Raises CorruptDataError also if the folder has no record."""
    adopted = Adopted.load(folder)
    if adopted is None:
        raise CorruptDataError(path=os.fspath(folder), expected=FILE_NAME, actual="no such file")
    adopted.check(spec, folder)


def is_within(path: str, folder: str) -> bool:
    """Returns whether an absolute path is a folder or lies below it; both without symlinks."""
    return os.path.commonpath((path, folder)) == folder


def resolve_path(path: str) -> str:
    """Returns the folder of a path, absolute and with symlinks resolved, as a store's record can hold it.

    Raises:
        InvalidRequestError: The path is relative, or cannot name a folder.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise InvalidRequestError(argument="path", reason=f"{path!r} is not absolute")
    try:
        found = os.path.realpath(path)
        found.encode()
    except (OSError, UnicodeEncodeError) as fault:
        raise InvalidRequestError(argument="path", reason=f"{path!r} cannot name a folder: {fault}") from fault
    return found


def _is_file_name(name: str) -> bool:
    return "/" not in name and name not in ("", ".", "..")


def _get_folder(folders: dict[FileName, Folder], names: FileName) -> Folder:
    found = folders.get(names)
    if found is None:
        above = _get_folder(folders, names[:-1])
        found = folders[names] = Folder(names[-1])
        above.folders.append(found)
    return found
