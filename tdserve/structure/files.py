"""Tensors whose elements lie in a file that is not mapped into memory: the arrays of a PersistentTensorDict.

h5py and zarr are only ever reached through a PersistentTensorDict that the user has opened.
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

from tdserve.base.errors import CorruptDataError
from tdserve.structure.tensordict_private import (
    SubTensorDict,
    array_dtype,
    array_of,
    held_entry,
    is_tensor_array,
    shown_source,
)
from tdserve.structure.torch_private import TO_COPY, make_wrapper_tensor, no_torch_function, pytree

Index = tuple[int | slice, ...]

MAX_BLOCK_BYTES = 4 * 1024 * 1024
"""In memory at a time, where a file is copied."""


class FileTensor(torch.Tensor):
    """A tensor in a file. ``read_piece`` reads as little as it must; whatever else is done with it reads all of it.

    It says of itself that it is on the meta device: it is not in the memory of this process. ``cpu()`` brings it there.

    Args:
        array: What is indexed as a NumPy array is, and gives one: ``h5py.Dataset``, ``zarr.Array``.
        dtype: Of its elements.
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
        whole_args, whole_kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        if func is TO_COPY and not whole_kwargs.get("dtype"):
            return whole_args[0].to(whole_kwargs.get("device") or "cpu")  # it is a copy already
        return func(*whole_args, **whole_kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's takes what shows elements
        return f"FileTensor({self._array!r})"

    def whole(self) -> torch.Tensor:
        """All of it, in memory."""
        return torch.from_numpy(self.read_piece(0, self.nbytes)).view(self.dtype).view(self.shape)

    def block(self, index: Index) -> torch.Tensor:
        """A block of it, in memory; the index is one of ``blocks``. Raises as ``read_piece``."""
        found = torch.from_numpy(np.ascontiguousarray(self._array[index]).reshape(-1).view(np.uint8))
        check_size(self._array)
        shape: tuple[int, ...] = tuple(self.shape[len(index) :])
        if index and isinstance(index[-1], slice):
            shape = (index[-1].stop - index[-1].start, *shape)
        return found.view(self.dtype).view(shape)

    def read_piece(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes ``[start, stop)`` of its elements in C order; both lie between elements.

        Raises:
            CorruptDataError: The file has become shorter since it was opened.
            Exception: Whatever the file's library raises, when it cannot be read (any more).
        """
        itemsize = self.element_size()
        piece: NDArray[Any] = np.empty((stop - start) // itemsize, self._array.dtype)
        at = 0
        for index in blocks(tuple(self.shape), start // itemsize, stop // itemsize):
            block = np.asarray(self._array[index])
            piece[at : at + block.size] = block.reshape(-1)
            at += block.size
        check_size(self._array)
        return piece.view(np.uint8)


def check_size(array: Any) -> None:
    """Looks whether the file still has all elements of an array that lies in it in one piece: of what was cut off while
    it is open HDF5 reads zeros. Asked after reading, so that nothing is handed on that was not there.

    Raises:
        CorruptDataError: It has not.
    """
    array = array.whole if isinstance(array, _Rows) else array
    file: Any = getattr(array, "file", None)
    if getattr(file, "driver", "") != "sec2" or (offset := array.id.get_offset()) is None:
        return
    expected, actual = offset + array.id.get_storage_size(), os.fstat(file.id.get_vfd_handle()).st_size
    if actual < expected:
        raise CorruptDataError(path=file.filename, expected=f"{expected} bytes or more", actual=f"{actual} bytes")


def blocks(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Index]:
    """Elements ``[first, stop)`` of an array in C order, as indices of blocks that follow one another.

    Args:
        shape: Of the array; () has one element.
        first, stop: Numbers of elements, ``0 <= first <= stop <= prod(shape)``.

    Yields:
        Integers, then at most one slice; the dimensions behind it are taken whole. At most two blocks per dimension,
        and one.
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
        yield from ((row, *index) for index in blocks(shape[1:], offset, end))
        row += 1
    last, rest = divmod(stop, row_size)
    if row < last:
        yield (slice(row, last),)
    if rest and row <= last:
        yield from ((last, *index) for index in blocks(shape[1:], 0, rest))


def strided_piece(tensor: torch.Tensor, start: int, stop: int) -> NDArray[np.uint8]:
    """As ``FileTensor.read_piece``, of a tensor on the CPU whose elements lie in any order."""
    itemsize = tensor.element_size()
    piece = torch.empty((stop - start) // itemsize, dtype=tensor.dtype)
    at = 0
    for index in blocks(tuple(tensor.shape), start // itemsize, stop // itemsize):
        block = tensor[index]
        piece[at : at + block.numel()].view(block.shape).copy_(block)
        at += block.numel()
    found: NDArray[np.uint8] = piece.view(torch.uint8).numpy()
    return found


def spans(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """All elements of an array in C order, as indices of blocks of at most 4 MiB, as ``blocks`` gives them."""
    row_size = math.prod(shape[1:])
    most = max(MAX_BLOCK_BYTES // itemsize, 1)
    step = max(most // row_size, 1) * row_size if 0 < row_size <= most else most
    num_elements = math.prod(shape)
    for first in range(0, num_elements, step):
        yield from blocks(shape, first, min(first + step, num_elements))


def is_in_file(td: Any) -> bool:
    """Whether the entries of a tensordict lie in a file that is not mapped: a PersistentTensorDict, or rows of one."""
    while type(td) is SubTensorDict:
        td = shown_source(td)
    return isinstance(td, PersistentTensorDict)


def in_memory(td: Any) -> Any:
    """A tensordict with everything that lies in such a file read: for what cannot be read piece by piece."""
    if not is_in_file(td):
        return td
    with _quiet():
        found = td.to_tensordict()
    source = td
    while type(source) is SubTensorDict:
        source = shown_source(source)
    for key in source.keys(True, True):
        check_size(array_of(source, key))
    return found


def file_items(td: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a PersistentTensorDict, or of rows of one, without a look at their content: tensors as FileTensor.

    Non-tensor values are the exception; they are read.
    """
    rows = None
    source = td
    if type(td) is SubTensorDict:
        rows, source = _run_of(td), shown_source(td)
        if rows is None or type(source) is SubTensorDict:
            yield from in_memory(td).items()
            return
    for key in source.keys():  # noqa: SIM118 (a tensordict is iterated over by rows)
        array = array_of(source, key)
        if is_tensor_array(source, array):
            dtype = array_dtype(source, key)
            yield key, FileTensor(array if rows is None else _Rows(array, rows), dtype)
        else:
            with _quiet():
                entry = held_entry(td, key)
            yield key, entry


class _Rows:
    """Rows of an array, indexed as it is: by integers and slices that select something."""

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
    """The rows that a sub-tensordict shows of its source, if they follow one another in ascending order."""
    index = td.idx if isinstance(td.idx, tuple) else (td.idx,)
    if len(index) != 1 or not isinstance(index[0], slice) or not shown_source(td).batch_size:
        return None
    rows = range(shown_source(td).batch_size[0])[index[0]]
    return rows if rows.step > 0 else None


@contextmanager
def _quiet() -> Iterator[None]:
    """tensordict 0.15 warns of every str that it reads from an HDF5 file as bytes; that is what it is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
