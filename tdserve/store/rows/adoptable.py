"""Reads a folder that tensordict's ``memmap`` or ``save`` wrote: its structure, and the file of each leaf.

It reads only ``meta.json`` files, and the sizes of the others: control does this, without torch. It unpickles nothing,
looks up no class, and follows no symlink inside the folder. It refuses, by key, whatever a store cannot keep, so that
nothing is lost silently.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path as FilePath
from typing import Any, NoReturn

from tdserve.base.errors import CorruptDataError, InvalidSpecError, NotSupportedError
from tdserve.store.disk.faults import convert_os_error, convert_os_errors
from tdserve.store.disk.files import reserve_blocks
from tdserve.store.rows.format import NAMES_KEY, encode_key
from tdserve.structure.trees import codec
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.nodes import MAX_DEPTH, DimNames, Entry, Node, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Path, Spec, quote

META_FILE = "meta.json"

MAX_META_BYTES = 192 * 1024 * 1024
"""Non-tensor values are in these files; more than this would not fit into one message to a data worker."""

_SUFFIX = ".memmap"
_INNER_FOLDER = "_tensordict"
_PICKLES = ("other.pickle", "pickle.pkl")
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CLASS = re.compile(r"<class '([^']+)'>")
FileName = tuple[str, ...]
"""Names of a file and of the folders above it, below the folder that is read."""


@dataclass(frozen=True)
class FoundFolder:
    """The content of a folder.

    Attributes:
        path: Path of the folder.
        spec: The structure of the whole folder.
        files: File of each tensor leaf; a leaf without elements may have none.
        values: Every non-tensor leaf, as ``structure.captures.capture`` returns it.
        device, inode: Identity of the folder, whatever its name.
    """

    path: str
    spec: Spec
    files: dict[Path, FileName]
    values: dict[Path, Any]
    device: int
    inode: int


def open_folder(path: str) -> int:
    """Opens a user's folder, and follows no symlink on the way: a user who may write a folder above may have put one
    there since the path was checked.

    Args:
        path: Absolute, without symlinks.

    Returns:
        A descriptor of the folder.

    Raises:
        CorruptDataError: There is no such folder, or a part of the path is a symlink now.
        InvalidRequestError: It may not be read.
    """
    names = [name for name in path.split("/") if name]
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for number, name in enumerate(names, 1):
        above, where = fd, FilePath("/", *names[:number])
        access = os.O_PATH if number < len(names) else os.O_RDONLY  # passing through needs no permission to list
        try:
            if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                remedy = "put the folder back, or delete the store and adopt it where it is now"
                raise _make_damage_error(where, "a folder, as when it was adopted", f"a symlink; {remedy}")
            fd = os.open(name, access | os.O_DIRECTORY | _NO_LINK, dir_fd=above)
        except OSError as fault:
            raise convert_os_error(fault, where) from fault
        finally:
            os.close(above)
    return fd


def has_meta(path: str) -> bool:
    """Returns whether a folder, opened as by :func:`open_folder`, has tensordict's description file.

    Raises:
        CorruptDataError, InvalidRequestError: As in :func:`open_folder`.
    """
    fd = open_folder(path)
    try:
        return _exists(fd, META_FILE)
    finally:
        os.close(fd)


def read_folder(path: str, *, writable: bool, reserves: bool = False) -> FoundFolder:
    """Reads the structure of a folder, and checks that all of its files can be opened.

    10,000 leaves take about 0.3 s, so a server does this off its event loop if it can.

    Args:
        path: Absolute.
        writable: Whether the files are to be written too.
        reserves: Whether to reserve their room: a write to a page that is not there yet kills a process if the disk is
            full.

    Raises:
        CorruptDataError: There is no such folder, or it is incomplete: the error names the leaf whose file is missing
            or shorter than its content.
        NotSupportedError: It contains something that a store cannot keep in place, or a file cannot be written; the
            error has the key and the reason.
        InvalidSpecError: Its structure contradicts itself.
        InvalidRequestError: It may not be read.
        CapacityError: There is no room for a file.
    """
    where = FilePath(path)
    fd = open_folder(path)
    try:
        status = os.fstat(fd)
        reader = _FolderReader(os.O_RDWR if writable else os.O_RDONLY, reserves=reserves)
        root = reader.read_entry(fd, where, (), (), ())
    finally:
        os.close(fd)
    if not isinstance(root, Node):
        raise NotSupportedError(feature=f"adopting the single value in {path}", reason="tensordicts can be stores")
    spec = codec.decode(codec.encode(Spec(root)))  # applies the rules for specs from outside
    return FoundFolder(path, spec, reader.files, reader.values, status.st_dev, status.st_ino)


class _FolderReader:
    """One walk over one folder; ``access`` is the mode in which each file must open, ``reserves`` as in
    ``read_folder``."""

    def __init__(self, access: int, *, reserves: bool) -> None:
        self._access = access
        self._reserves = reserves
        self.files: dict[Path, FileName] = {}
        self.values: dict[Path, Any] = {}

    def read_entry(self, fd: int, where: FilePath, names: FileName, path: Path, above: tuple[int, ...]) -> Entry:
        """Returns the entry in the open folder ``fd``; ``above`` is the batch size of the tensordict around it."""
        if len(path) >= MAX_DEPTH:
            raise InvalidSpecError(reason=f"tensordicts are nested deeper than {MAX_DEPTH} levels in {where}")
        meta = _read_meta(fd, where)
        found = _CLASS.fullmatch(str(meta.get("_type", "")))
        module, _, kind = (found[1] if found else "").rpartition(".")
        own = module.partition(".")[0] == "tensordict"
        for pickled in _PICKLES:
            if _exists(fd, pickled):
                reason = f"{where / pickled} is a pickle, and those are never read; save values of JSON's types"
                raise NotSupportedError(feature=f"adopting a pickled value{_describe_place(path)}", reason=reason)
        if own and kind == "NonTensorData":
            return self._read_value(meta, where, path, above)
        if own and kind == "NonTensorStack":
            return self._read_values(fd, meta, where, path, above)
        if _exists(fd, _INNER_FOLDER):
            return self._read_tensorclass(fd, meta, where, names, path, above, f"{module}.{kind}")
        if "stack_dim" in meta:
            reason = "its rows lie in folders of their own; store it densely, or send it with client.memmap()"
            raise NotSupportedError(feature=f"adopting a {kind or 'lazy stack'}{_describe_place(path)}", reason=reason)
        if kind and not (own and kind == "TensorDict"):
            reason = f"{where / META_FILE} names another class than tensordict's own, and it is no tensorclass"
            raise NotSupportedError(feature=f"adopting a {module}.{kind}{_describe_place(path)}", reason=reason)
        return self._read_node(fd, meta, where, names, path, above)

    def _read_node(
        self, fd: int, meta: dict[str, Any], where: FilePath, names: FileName, path: Path, above: tuple[int, ...]
    ) -> Node:
        batch_size = _read_sizes(meta.get("shape"), where, path)
        if batch_size[: len(above)] != above:
            raise _make_damage_error(
                where / META_FILE, f"a batch size that starts with {list(above)}{_describe_place(path)}", batch_size
            )
        entries: list[tuple[str, Entry]] = []
        for key, described in meta.items():
            if not isinstance(described, dict):  # an entry of the format itself
                continue
            below = (*path, key)
            if "type" in described:
                entries.append((key, self._read_child(fd, where, names, below, batch_size)))
            else:
                entries.append((key, self._read_tensor(fd, described, where, names, below)))
        device = "cpu" if meta.get("device") == "cpu" else None
        return Node(batch_size, _read_dim_names(meta, len(batch_size)), device, None, tuple(entries))

    def _read_child(self, fd: int, where: FilePath, names: FileName, path: Path, batch_size: tuple[int, ...]) -> Entry:
        name = _find_name(fd, path[-1], "")
        if name is None:
            raise _make_damage_error(where / encode_key(path[-1]), f"a folder{_describe_place(path)}", "none")
        with _open_below(fd, name, where / name, path, os.O_RDONLY | os.O_DIRECTORY) as child:
            return self.read_entry(child, where / name, (*names, name), path, batch_size)

    def _read_tensorclass(
        self,
        fd: int,
        meta: dict[str, Any],
        where: FilePath,
        names: FileName,
        path: Path,
        above: tuple[int, ...],
        tensorclass: str,
    ) -> Node:
        inner = where / _INNER_FOLDER
        with _open_below(fd, _INNER_FOLDER, inner, path, os.O_RDONLY | os.O_DIRECTORY) as child:
            content = _read_meta(child, inner)
            if "stack_dim" in content:
                self.read_entry(child, inner, names, path, above)  # raises the reason
            node = self._read_node(child, content, inner, (*names, _INNER_FOLDER), path, above)
        beside = {key: value for key, value in meta.items() if key != "_type"}
        self.values.update(((*path, key), value) for key, value in beside.items())
        fields = tuple((key, ValueLeaf(node.batch_size, False)) for key in beside)
        return node._replace(tensorclass=tensorclass, entries=(*node.entries, *fields))

    def _read_tensor(
        self, fd: int, described: dict[str, Any], where: FilePath, names: FileName, path: Path
    ) -> TensorLeaf:
        dtype = str(described.get("dtype")).removeprefix("torch.")
        if described.get("is_nested"):
            reason = "the elements of a nested tensor have no place by row; send it with client.memmap()"
            raise NotSupportedError(feature=f"adopting a nested tensor{_describe_place(path)}", reason=reason)
        if dtype not in ITEMSIZE:
            raise NotSupportedError(
                feature=f"adopting a tensor of dtype {dtype!r}{_describe_place(path)}", reason="unknown dtype"
            )
        leaf = TensorLeaf(dtype, _read_sizes(described.get("shape"), where, path))
        name = _find_name(fd, path[-1], _SUFFIX)
        if name is None and leaf.nbytes:
            file = where / (encode_key(path[-1]) + _SUFFIX)
            raise _make_damage_error(file, f"a file of {leaf.nbytes} bytes{_describe_place(path)}", "none")
        if name is not None:
            with _open_below(fd, name, where / name, path, self._access) as file_fd:
                check_size(file_fd, where / name, path, leaf)
                if self._reserves:
                    with convert_os_errors(where / name, asked=leaf.nbytes):
                        reserve_blocks(file_fd, leaf.nbytes)
            self.files[path] = (*names, name)
        return leaf

    def _read_value(self, meta: dict[str, Any], where: FilePath, path: Path, above: tuple[int, ...]) -> ValueLeaf:
        if "data" not in meta:
            raise _make_damage_error(where / META_FILE, f"a value{_describe_place(path)}", "none")
        self.values[path] = meta["data"]
        return ValueLeaf(above, False)

    def _read_values(
        self, fd: int, meta: dict[str, Any], where: FilePath, path: Path, above: tuple[int, ...]
    ) -> ValueLeaf:
        data = meta.get("data")
        if data is None:
            data = self._read_single_values(fd, where, path)
        if not isinstance(data, list):
            raise _make_damage_error(where / META_FILE, f"a list of values{_describe_place(path)}", type(data).__name__)
        batch_size = _find_stacked_size(data)
        if batch_size[: len(above)] != above:
            raise _make_damage_error(
                where / META_FILE, f"values for a batch size of {list(above)}{_describe_place(path)}", batch_size
            )
        self.values[path] = data
        return ValueLeaf(batch_size, True)

    def _read_single_values(self, fd: int, where: FilePath, path: Path) -> list[Any]:
        """Returns the values of a stack whose elements have folders of their own, as older versions of tensordict wrote
        it."""
        data: list[Any] = []
        while _exists(fd, str(len(data))):
            name = str(len(data))
            with _open_below(fd, name, where / name, path, os.O_RDONLY | os.O_DIRECTORY) as child:
                self.read_entry(child, where / name, (), path, ())
            data.append(self.values.pop(path))
        return data


def check_size(fd: int, file: FilePath, path: Path, leaf: TensorLeaf) -> None:
    """Raises CorruptDataError unless an open file is regular and has all of a leaf's content; it may be longer."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _make_damage_error(file, f"a regular file{_describe_place(path)}", "something else")
    if status.st_size < leaf.nbytes:
        raise _make_damage_error(file, f"{leaf.nbytes} bytes{_describe_place(path)}", f"{status.st_size} bytes")


def _read_meta(fd: int, where: FilePath) -> dict[str, Any]:
    file = where / META_FILE
    with convert_os_errors(file):
        meta_fd = os.open(META_FILE, os.O_RDONLY | _NO_LINK, dir_fd=fd)
    with os.fdopen(meta_fd, "rb") as opened, convert_os_errors(file):
        content = opened.read(MAX_META_BYTES + 1)
    if len(content) > MAX_META_BYTES:
        raise NotSupportedError(feature=f"adopting {where}", reason=f"meta.json is larger than {MAX_META_BYTES} bytes")
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError) as fault:
        raise _make_damage_error(file, "what tensordict writes there", repr(content[:80])) from fault
    if not isinstance(meta, dict):
        raise _make_damage_error(file, "what tensordict writes there", repr(content[:80]))
    return meta


@contextmanager
def _open_below(folder_fd: int, name: str, file: FilePath, path: Path, access: int) -> Iterator[int]:
    """Opens a file or folder inside the folder that is read; refuses a symlink by the key that it belongs to."""
    if stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
        reason = f"{file} is a symlink; put what it leads to in its place"
        raise NotSupportedError(feature=f"adopting a symlink{_describe_place(path)}", reason=reason)
    try:
        fd = os.open(name, access | _NO_LINK, dir_fd=folder_fd)
    except OSError as fault:
        if access & os.O_RDWR and not access & os.O_DIRECTORY:
            reason = f"the server may not write {file} ({fault.strerror}); adopt it with read_only=True (--read-only)"
            raise NotSupportedError(feature=f"adopting {quote(path)} for writing", reason=reason) from fault
        raise convert_os_error(fault, file) from fault
    try:
        yield fd
    finally:
        os.close(fd)


def _find_name(fd: int, key: str, suffix: str) -> str | None:
    """Returns the name of the file or folder of a key: as tensordict spells it since 0.7, or as before; None if it
    is missing."""
    name = encode_key(key) + suffix
    if _exists(fd, name):
        return name
    plain = key + suffix
    return plain if "/" not in key and key not in ("", ".", "..") and _exists(fd, plain) else None


def _exists(fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except (OSError, ValueError):  # a name that no file can have
        return False
    return True


def _read_sizes(described: Any, where: FilePath, path: Path) -> tuple[int, ...]:
    is_shape = isinstance(described, list) and all(type(size) is int and size >= 0 for size in described)
    return tuple(described) if is_shape else _refuse_shape(described, where, path)


def _refuse_shape(described: Any, where: FilePath, path: Path) -> NoReturn:
    raise _make_damage_error(where / META_FILE, f"a shape{_describe_place(path)}", repr(described)[:80])


def _read_dim_names(meta: dict[str, Any], num_dims: int) -> DimNames | None:
    names = meta.get(NAMES_KEY)
    if not isinstance(names, list) or len(names) != num_dims or all(name is None for name in names):
        return None
    return tuple(None if name is None else str(name) for name in names)


def _find_stacked_size(data: list[Any]) -> tuple[int, ...]:
    """Returns the batch size of stacked values as tensordict reads them: nested lists of equal length are
    dimensions."""
    batch_size = [len(data)]
    while data and all(isinstance(item, list) for item in data) and len({len(item) for item in data}) == 1:
        batch_size.append(len(data[0]))
        data = list(chain.from_iterable(data))
    return tuple(batch_size)


def _describe_place(path: Path) -> str:
    return f" at key {quote(path)}" if path else ""


def _make_damage_error(file: FilePath, expected: str, actual: object) -> CorruptDataError:
    shown = list(actual) if isinstance(actual, tuple) else actual
    return CorruptDataError(path=str(file), expected=expected, actual=str(shown))
