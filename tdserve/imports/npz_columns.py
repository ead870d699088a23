"""NumPy's files: of archives (``np.savez``, ``np.savez_compressed``) each array is read as a stream, a piece at a time;
a single array (``np.save``) is mapped."""

from __future__ import annotations

import math
import zipfile
from contextlib import ExitStack
from functools import partial
from pathlib import PurePath
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tdserve.imports.import_source import (
    CHOOSE_OTHERS,
    ColumnSource,
    ImportOptions,
    SourceColumn,
    make_open_error,
    make_path_error,
    split_key,
)

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_SUFFIX = ".npy"

_Header = tuple[tuple[int, ...], bool, "np.dtype[Any]"]
"""Shape, whether it lies column by column, and dtype."""


def open_npz(path: str, options: ImportOptions) -> ColumnSource:
    """Opens an archive; a slash in a name makes a nested key.

    Raises:
        InvalidRequestError: It is no such archive, or has arrays that cannot be imported.
    """
    try:
        archive = zipfile.ZipFile(path)
    except OSError as fault:
        raise make_open_error(path, fault) from None
    except zipfile.BadZipFile:
        raise make_path_error(path, _describe_other(path)) from None
    opened = ExitStack()  # also the arrays of which rows were read, which keep the file open
    opened.callback(archive.close)
    try:
        names = [name for name in archive.namelist() if name.endswith(_SUFFIX)]
        keys = {name: split_key(name.removesuffix(_SUFFIX)) for name in names}
        wanted = [name for name in names if not options.keys or any(keys[name][: len(k)] == k for k in options.keys)]
        columns = [_make_column(archive, path, name, opened) for name in wanted or names]
    except BaseException:
        opened.close()
        raise
    return ColumnSource(path, columns, options, opened.close)


def open_npy(path: str, options: ImportOptions) -> ColumnSource:
    """Opens a file of one array, whose key is the name of the file without its ending.

    Raises:
        InvalidRequestError: It is no such file, or its array cannot be imported.
    """
    try:
        with open(path, "rb") as file:
            shape, is_transposed, dtype = _read_header(file)
            offset = file.tell()
        _check_dtype(path, "it", dtype)
        array: NDArray[Any] = np.memmap(path, dtype, "r", offset, shape, "F" if is_transposed else "C")
    except OSError as fault:
        raise make_open_error(path, fault) from None
    except (ValueError, KeyError, EOFError) as fault:
        raise make_path_error(path, f"it is no array of np.save, or ends early: {fault}") from None

    def read(start: int, stop: int) -> NDArray[Any]:
        return np.array(array[start:stop])

    key = (PurePath(path).stem,)
    return ColumnSource(path, [SourceColumn(key, array.shape, array.nbytes, read, lambda: np.array(array))], options)


def _describe_other(path: str) -> str:
    """Returns what a file is that is no archive."""
    with open(path, "rb") as file:
        is_array = file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
    if is_array:
        return "it is one array (.npy), not an archive of np.savez: give its name that ending, or import it as npy"
    return "it is no archive of np.savez"


def _make_column(archive: zipfile.ZipFile, path: str, name: str, opened: ExitStack) -> SourceColumn:
    array = _StreamedArray(archive, path, name, opened)
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    return SourceColumn(
        split_key(name.removesuffix(_SUFFIX)), array.shape, nbytes, array.read, partial(array.read, 0, -1)
    )


def _read_header(stream: IO[bytes]) -> _Header:
    read_header = _HEADERS[npy.read_magic(stream)]
    return read_header(stream)


def _check_dtype(path: str, name: str, dtype: np.dtype[Any], remedy: str = "") -> None:
    if dtype.hasobject or dtype.names:
        what = "structured values" if dtype.names else "Python objects, which would be unpickled"
        raise make_path_error(path, f"{name} is an array of {what}{remedy}")


class _StreamedArray:
    """An array of an archive, whose rows are read in their order.

    Args:
        archive: The open archive.
        path: Its path, for errors.
        name: Name of the array in it.
        opened: Closes what is opened here.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    def __init__(self, archive: zipfile.ZipFile, path: str, name: str, opened: ExitStack) -> None:
        self._archive = archive
        self._opened = opened
        self._path = path
        self._name = name
        self._whole: NDArray[Any] | None = None
        self._stream: IO[bytes] | None = None
        with archive.open(name) as stream:
            self.shape, self._is_transposed, self.dtype = self._read_header(stream)
        _check_dtype(path, name, self.dtype, f"; {CHOOSE_OTHERS}")

    def _read_header(self, stream: IO[bytes]) -> _Header:
        try:
            return _read_header(stream)
        except (ValueError, KeyError, EOFError) as fault:
            raise make_path_error(self._path, f"{self._name} is not an array: {fault}") from None

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Reads rows ``[start, stop)``, which follow the last ones; ``stop`` -1 reads everything.

        Raises:
            EOFError: The archive is shorter than it should be.
        """
        if stop < 0 or self._is_transposed:  # column by column there is no row to read
            if self._whole is None:
                with self._archive.open(self._name) as stream:
                    self._whole = npy.read_array(stream, allow_pickle=False)
            return self._whole if stop < 0 else np.ascontiguousarray(self._whole[start:stop])
        if self._stream is None:
            self._stream = self._opened.enter_context(self._archive.open(self._name))
            self._read_header(self._stream)
        shape = (stop - start, *self.shape[1:])
        content = bytearray(math.prod(shape) * self.dtype.itemsize)
        view, at = memoryview(content), 0
        while at < len(content):
            piece = self._stream.read(len(content) - at)
            if not piece:
                raise EOFError(f"{self._name} ends {len(content) - at} bytes early")
            view[at : at + len(piece)] = piece
            at += len(piece)
        return np.frombuffer(content, self.dtype).reshape(shape)
