"""Tensors whose elements are in a file that is not mapped into memory: the arrays of a PersistentTensorDict.

h5py and zarr are used only through a PersistentTensorDict that the user has opened.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import PersistentTensorDict

from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.structure.tensordict_private import (
    SubTensorDict,
    get_array,
    get_array_dtype,
    get_held_entry,
    is_tensor_array,
    shown_source,
)
from tdserve.structure.torch_private import TO_COPY, make_wrapper_tensor, no_torch_function, pytree

Index = tuple[int | slice, ...]

MAX_BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes in memory at a time while a file is copied."""


class FileTensor(torch.Tensor):
    """A tensor in a file. ``read_piece`` reads only what is needed; any other operation reads all of it.

    Its device is meta, since it is not in the memory of this process. ``cpu()`` reads it.

    Args:
        array: Indexed like a NumPy array, with one as the result: ``h5py.Dataset``, ``zarr.Array``.
        dtype: Dtype of its elements.
    """

    _array: Any

    @staticmethod
    def __new__(cls, array: Any, dtype: torch.dtype) -> FileTensor:
        made: FileTensor = make_wrapper_tensor(cls, tuple(array.shape), dtype=dtype, device=torch.device("meta"))
        made._array = array
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own declares what it does not mean
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        whole_args, whole_kwargs = pytree.tree_map_only(cls, cls.read_all, (args, kwargs or {}))
        if func is TO_COPY and not whole_kwargs.get("dtype"):
            return whole_args[0].to(whole_kwargs.get("device") or "cpu")  # it is a copy already
        return func(*whole_args, **whole_kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's takes what shows elements
        return f"FileTensor({self._array!r})"

    def read_all(self) -> torch.Tensor:
        """Reads all of it into memory."""
        return torch.from_numpy(self.read_piece(0, self.nbytes)).view(self.dtype).view(self.shape)

    def block(self, index: Index) -> torch.Tensor:
        """Reads a block of it into memory; the index is one of ``split_blocks``. Raises as ``read_piece``."""
        with _convert_faults():
            found = torch.from_numpy(np.ascontiguousarray(self._array[index]).reshape(-1).view(np.uint8))
        check_size(self._array)
        shape: tuple[int, ...] = tuple(self.shape[len(index) :])
        if index and isinstance(index[-1], slice):
            shape = (index[-1].stop - index[-1].start, *shape)
        return found.view(self.dtype).view(shape)

    def read_piece(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads bytes ``[start, stop)`` of its elements in C order; both are between elements.

        Raises:
            CorruptDataError: The file has become shorter since it was opened.
            InvalidRequestError: The file cannot be read (any more).
        """
        itemsize = self.element_size()
        piece: NDArray[Any] = np.empty((stop - start) // itemsize, self._array.dtype)
        at = 0
        for index in split_blocks(tuple(self.shape), start // itemsize, stop // itemsize):
            with _convert_faults():
                block = np.asarray(self._array[index])
            piece[at : at + block.size] = block.reshape(-1)
            at += block.size
        check_size(self._array)
        return piece.view(np.uint8)


def check_size(array: Any) -> None:
    """Checks that the file still has all elements of an array that is in one piece in it.

    HDF5 reads zeros for what was cut off while the file was open. Called after reading, so that such zeros are not
    used.

    Raises:
        CorruptDataError: The file is too short.
    """
    array = array.whole if isinstance(array, _Rows) else array
    file: Any = getattr(array, "file", None)
    if getattr(file, "driver", "") != "sec2" or (offset := array.id.get_offset()) is None:
        return
    expected, actual = offset + array.id.get_storage_size(), os.fstat(file.id.get_vfd_handle()).st_size
    if actual < expected:
        raise CorruptDataError(path=file.filename, expected=f"{expected} bytes or more", actual=f"{actual} bytes")


def split_blocks(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Index]:
    """Divides elements ``[first, stop)`` of an array, in C order, into consecutive blocks.

    Args:
        shape: Shape of the array; () has one element.
        first, stop: Numbers of elements, ``0 <= first <= stop <= prod(shape)``.

    Yields:
        Indices of integers, then at most one slice; the dimensions after it are complete. At most two blocks per
        dimension, and one more.
    """
    if first >= stop:
        return
    if not shape:
        yield ()
        return
    row_size = math.prod(shape[1:])
    row, offset = divmod(first, row_size)
    if offset:
        end = min(stop - row * row_size, row_size)
        yield from ((row, *index) for index in split_blocks(shape[1:], offset, end))
        row += 1
    last, rest = divmod(stop, row_size)
    if row < last:
        yield (slice(row, last),)
    if rest and row <= last:
        yield from ((last, *index) for index in split_blocks(shape[1:], 0, rest))


def read_strided_piece(tensor: torch.Tensor, start: int, stop: int) -> NDArray[np.uint8]:
    """Reads a piece as ``FileTensor.read_piece`` does, of a tensor on the CPU with elements in any order."""
    itemsize = tensor.element_size()
    piece = torch.empty((stop - start) // itemsize, dtype=tensor.dtype)
    at = 0
    for index in split_blocks(tuple(tensor.shape), start // itemsize, stop // itemsize):
        block = tensor[index]
        piece[at : at + block.numel()].view(block.shape).copy_(block)
        at += block.numel()
    found: NDArray[np.uint8] = piece.view(torch.uint8).numpy()
    return found


def split_spans(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """Divides all elements of an array, in C order, into blocks of at most 4 MiB, indexed as by ``split_blocks``."""
    row_size = math.prod(shape[1:])
    most = max(MAX_BLOCK_BYTES // itemsize, 1)
    step = max(most // row_size, 1) * row_size if 0 < row_size <= most else most
    num_elements = math.prod(shape)
    for first in range(0, num_elements, step):
        yield from split_blocks(shape, first, min(first + step, num_elements))


def is_in_file(td: Any) -> bool:
    """Returns whether a tensordict's entries are in a file that is not mapped.

    It is a PersistentTensorDict, or rows of one.
    """
    while type(td) is SubTensorDict:
        td = shown_source(td)
    return isinstance(td, PersistentTensorDict)


def read_into_memory(td: Any) -> Any:
    """Reads everything of a tensordict that is in such a file, for callers that cannot read it piece by piece."""
    if not is_in_file(td):
        return td
    with _silence_warnings(), _convert_faults():
        found = td.to_tensordict()
    source = td
    while type(source) is SubTensorDict:
        source = shown_source(source)
    for key in source.keys(True, True):
        check_size(get_array(source, key))
    return found


def iter_file_items(td: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a PersistentTensorDict, or of rows of one, without reading tensors: these are FileTensor.

    Non-tensor values are read.
    """
    rows = None
    source = td
    if type(td) is SubTensorDict:
        rows, source = _run_of(td), shown_source(td)
        if rows is None or type(source) is SubTensorDict:
            yield from read_into_memory(td).items()
            return
    for key in source.keys():  # noqa: SIM118 (a tensordict is iterated over by rows)
        array = get_array(source, key)
        if is_tensor_array(source, array):
            dtype = get_array_dtype(source, key)
            yield key, FileTensor(array if rows is None else _Rows(array, rows), dtype)
        else:
            with _silence_warnings(), _convert_faults():
                entry = get_held_entry(td, key)
            yield key, entry


class _Rows:
    """Rows of an array, indexed like it: by integers and slices that select something."""

    def __init__(self, array: Any, rows: range) -> None:
        self.whole = array
        self._rows = rows
        self.shape = (len(rows), *array.shape[1:])
        self.dtype = array.dtype

    def __getitem__(self, index: Index) -> Any:
        first, *others = index
        rows = self._rows[first]
        chosen = slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
        whole: Index = (chosen, *others)
        return self.whole[whole]


def _run_of(td: SubTensorDict) -> range | None:
    """Returns the rows that a sub-tensordict shows of its source, if they are consecutive and ascending."""
    index = td.idx if isinstance(td.idx, tuple) else (td.idx,)
    if len(index) != 1 or not isinstance(index[0], slice) or not shown_source(td).batch_size:
        return None
    rows = range(shown_source(td).batch_size[0])[index[0]]
    return rows if rows.step > 0 else None


@contextmanager
def _convert_faults() -> Iterator[None]:
    """Raises InvalidRequestError for whatever the file's library raises."""
    try:
        yield
    except Exception as fault:
        raise make_content_error(fault) from fault


def make_content_error(fault: Exception) -> InvalidRequestError:
    """Returns the error of a write whose content raises one; nothing of it is or will be seen."""
    return InvalidRequestError(argument="tensordict", reason=f"its content cannot be read any more: {fault!r}"[:300])


@contextmanager
def _silence_warnings() -> Iterator[None]:
    """Silences tensordict 0.15, which warns of every str in an HDF5 file, since these are stored as bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
