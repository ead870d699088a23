"""Tensors of one dtype that differ in shape, in one buffer: the form of a ragged leaf in memory.

In storage and messages an element is its shape (int64, little endian, one number per dimension), then its bytes in C
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError, RemoteProtocolError
from tdserve.structure.tensors.torch_types import to_torch, view_bytes
from tdserve.structure.torch_private import NestedTensor, jagged_parts
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.nodes import Ragged
from tdserve.values.value_bundles import SplitColumn
from tdserve.values.value_codec import NONE
from tdserve.values.value_columns import Buffer, JoinedValues, join, split_rows

Shapes = NDArray[np.int64]

_MAX_ELEMENTS = 2**62


class Pieces(Sequence[torch.Tensor]):
    """A list of tensors; single ones may be replaced by others of the same dtype and number of dimensions.

    Args:
        flat: All elements, ``[total]``, one tensor after the other, contiguous.
        shapes: ``[n, ndim]``; their products add up to ``total``.
    """

    def __init__(self, flat: torch.Tensor, shapes: Shapes) -> None:
        self._flat = flat
        self._shapes = shapes
        self._ends: Shapes = np.cumsum(_count_elements(shapes), dtype=np.int64)
        self._replaced: dict[int, torch.Tensor] = {}

    @staticmethod
    def from_tensors(tensors: Sequence[torch.Tensor], ragged: Ragged) -> Pieces:
        """Copies tensors into one buffer; all have the dtype and the number of dimensions of ``ragged``."""
        if isinstance(tensors, Pieces):
            return tensors
        dtype = to_torch(ragged.dtype)
        ndim = len(ragged.shape)
        if any(tensor.dtype is not dtype or tensor.dim() != ndim for tensor in tensors):
            raise LocalProtocolError(reason=f"tensors that are not of {ragged.dtype} and {ndim} dimensions")
        # As bytes: not every dtype can be joined.
        parts = [_flatten_to_bytes(tensor) for tensor in tensors]
        joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return Pieces(joined.view(dtype), _stack_shapes([tuple(tensor.shape) for tensor in tensors], ndim))

    @staticmethod
    def from_rows(tensor: torch.Tensor) -> Pieces:
        """Returns the rows of a dense tensor."""
        shape = tuple(tensor.shape)
        return Pieces(tensor.cpu().contiguous().view(-1), _stack_shapes([shape[1:]] * shape[0], len(shape) - 1))

    @staticmethod
    def from_blobs(blobs: Sequence[bytes], ragged: Ragged) -> Pieces:
        """Returns the tensors of stored elements.

        Raises:
            RemoteProtocolError: A blob is not an element of this leaf.
        """
        header = 8 * len(ragged.shape)
        itemsize = ITEMSIZE[ragged.dtype]
        split = _split(blobs, ragged)
        content: Any = split.content if header else bytearray(split.content)
        shapes = np.frombuffer(split.heads, "<i8").reshape(len(split), len(ragged.shape)).astype(np.int64)
        if not _is_sane(shapes) or not _fit(shapes, ragged.shape):
            raise _make_piece_error(ragged)
        numels, nbytes = _count_elements(shapes), split.sizes
        if (numels > nbytes).any() or (numels * itemsize != nbytes).any():  # the first, in case the second overflows
            raise _make_piece_error(ragged)
        if ragged.dtype == "bool" and len(content) and max(content) > 1:
            raise _make_piece_error(ragged)
        if not len(content):
            return Pieces(torch.empty(0, dtype=to_torch(ragged.dtype)), shapes)
        return Pieces(torch.frombuffer(content, dtype=torch.uint8).view(to_torch(ragged.dtype)), shapes)

    def to_blobs(self) -> list[bytes]:
        """Returns the stored form of each element."""
        return list(map(b"".join, zip(*self.split().pieces, strict=True)))

    def split(self) -> SplitColumn:
        """Returns the stored form of each element, as its shape and its bytes, which are not copied."""
        shapes = self.shapes
        itemsize = self._flat.element_size()
        width = 8 * shapes.shape[1]
        content = _flatten_to_bytes(self._flat).numpy().data
        ends = (self._ends * itemsize).tolist()
        bodies: list[Buffer] = list(map(content.__getitem__, map(slice, [0, *ends], ends)))
        for number, tensor in self._replaced.items():
            bodies[number] = _flatten_to_bytes(tensor).numpy().data
        return SplitColumn(_count_elements(shapes) * itemsize + width, [split_rows(shapes.astype("<i8")), bodies])

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if self._replaced or step != 1:
                return [self[number] for number in range(start, stop, step)]
            first = int(self._ends[start - 1]) if start else 0
            last = int(self._ends[stop - 1]) if stop > start else first
            return Pieces(self._flat[first:last], self._shapes[start : max(start, stop)])
        number = range(len(self))[index]
        if number in self._replaced:
            return self._replaced[number]
        start = int(self._ends[number - 1]) if number else 0
        return self._flat[start : int(self._ends[number])].view(self._shapes[number].tolist())

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._replaced:
            return (self[number] for number in range(len(self)))
        sizes = np.diff(self._ends, prepend=0).tolist()
        parts = torch.split(self._flat, sizes) if sizes else ()
        return (part.view(shape) for part, shape in zip(parts, self._shapes.tolist(), strict=True))

    def __setitem__(self, index: int, tensor: torch.Tensor) -> None:
        self._replaced[range(len(self))[index]] = tensor

    @property
    def shapes(self) -> Shapes:
        """Shape of each element, ``[n, ndim]``."""
        if self._replaced:
            shapes: Shapes = self._shapes.copy()
            for number, tensor in self._replaced.items():
                shapes[number] = tuple(tensor.shape)
            return shapes
        return self._shapes

    @property
    def nbytes(self) -> int:
        """Approximate size of all elements: replaced ones count with their former size."""
        return self._flat.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of every element."""
        return self._flat.dtype

    def join(self) -> tuple[torch.Tensor, Shapes]:
        """Returns the buffer of all elements, and their shapes."""
        if self._replaced:
            flat = torch.cat([_flatten_to_bytes(tensor) for tensor in self]).view(self.dtype)
            return flat, self.shapes
        return self._flat, self._shapes

    def stack(self) -> torch.Tensor | None:
        """Returns one dense tensor if all elements have one shape; None if not, or if there are none."""
        flat, shapes = self.join()
        if not len(shapes) or (shapes != shapes[0]).any():
            return None
        return flat.view(len(shapes), *shapes[0].tolist())


class Jagged(NamedTuple):
    """The parts of a jagged nested tensor.

    Its own attributes and methods use torch's dispatcher, which is ten times slower.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor | None
    ragged_dim: int

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> Jagged | None:
        """Returns the parts; None for any other tensor."""
        if type(tensor) is not NestedTensor:
            return None
        return Jagged(*jagged_parts(tensor))


def split_jagged(tensor: torch.Tensor) -> Pieces | list[torch.Tensor]:
    """Returns the components of a nested tensor; without a copy if they are contiguous."""
    found = Jagged.from_tensor(tensor)
    if found is None:
        return list(tensor.detach().unbind())
    offsets = found.offsets.cpu().numpy()
    if found.ragged_dim != 1 or found.lengths is not None or offsets[0]:
        return list(tensor.detach().unbind())
    values = found.values.detach().cpu().contiguous()
    lengths = np.diff(offsets).astype(np.int64, copy=False)
    shapes = np.empty((len(lengths), values.dim()), np.int64)
    shapes[:, 0] = lengths
    shapes[:, 1:] = tuple(values.shape[1:])
    total = int(lengths.sum())
    return Pieces((values if total == len(values) else values[:total]).view(-1), shapes)


def build_jagged(pieces: Sequence[torch.Tensor], ragged: Ragged) -> torch.Tensor:
    """Builds the jagged nested tensor of these components, in the form of ``ragged``."""
    at = ragged.shape.index(-1)
    whole = Pieces.from_tensors(pieces, ragged)
    flat, shapes = whole.join()
    lengths = np.ascontiguousarray(shapes[:, at])
    sums = np.zeros(len(shapes) + 1, np.int64)
    np.cumsum(lengths, out=sums[1:])
    offsets = torch.from_numpy(sums)
    if at == 0 or not len(shapes):
        rest = list(ragged.shape)
        rest[at] = int(sums[-1])
        values = flat if len(rest) == 1 else flat.view(rest)
        if not at and not ragged.has_lengths:
            return NestedTensor(values, offsets)
    else:
        values = torch.cat(list(whole), dim=at)
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets=offsets,
        lengths=torch.from_numpy(lengths) if ragged.has_lengths else None,
        jagged_dim=at + 1,
    )


def make_nested(components: list[torch.Tensor], dtype: str) -> torch.Tensor:
    """Builds the strided nested tensor of these components."""
    return torch.nested.nested_tensor(components, dtype=to_torch(dtype))


def encode_tensor(tensor: torch.Tensor) -> tuple[list[int], bytes]:
    """Returns the shape of a dense tensor, and its bytes in C order."""
    return list(tensor.shape), _flatten_to_bytes(tensor).numpy().tobytes()


def decode_tensor(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    """Reverses ``encode_tensor``.

    Raises:
        RemoteProtocolError: The bytes are not booleans. A wrong shape raises torch's own errors.
    """
    kind = to_torch(dtype)
    if not data:
        return torch.empty(0, dtype=kind).view(shape)
    if dtype == "bool" and max(data) > 1:
        raise RemoteProtocolError(expected="booleans that are 0 or 1", received="something else")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)


def _split(blobs: Sequence[bytes], ragged: Ragged) -> JoinedValues:
    """Joins the elements, with their shapes as heads."""
    header = 8 * len(ragged.shape)
    if isinstance(blobs, JoinedValues):
        if blobs.heads and len(blobs.heads) == header * len(blobs):
            return blobs
        each: list[Any] = list(blobs) if blobs.heads else blobs.get_views()
    else:
        each = list(blobs)
    if NONE in each:
        each = [make_zero_blob(ragged) if blob == NONE else blob for blob in each]
    split = join([memoryview(blob) for blob in each], head_nbytes=header)
    if len(split.heads) != header * len(split):
        raise _make_piece_error(ragged)
    return split


def _count_elements(shapes: Shapes) -> Shapes:
    """Returns the number of elements of each tensor."""
    return shapes.reshape(-1) if shapes.shape[1] == 1 else shapes.prod(axis=1)


def _is_sane(shapes: Shapes) -> bool:
    """Returns whether no size is negative, and every number of elements fits into an int64."""
    ndim = shapes.shape[1]
    if not shapes.size or int(shapes.min()) < 0:
        return not shapes.size
    if max(int(shapes.max()), 1) ** ndim <= _MAX_ELEMENTS:
        return True
    return not (np.maximum(shapes, 1).astype(np.float64).prod(axis=1) > _MAX_ELEMENTS).any()


def _fit(shapes: Shapes, expected: tuple[int, ...]) -> bool:
    return all(size < 0 or bool((shapes[:, dim] == size).all()) for dim, size in enumerate(expected))


def _flatten_to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():  # one of NumPy may have strides of 0
        return torch.empty(0, dtype=torch.uint8)
    return view_bytes(tensor.detach().cpu().resolve_neg().resolve_conj().contiguous())


def _stack_shapes(shapes: Sequence[tuple[int, ...]], ndim: int) -> Shapes:
    return np.array(shapes, np.int64).reshape(len(shapes), ndim)


def make_zero_blob(ragged: Ragged) -> bytes:
    """Returns the stored form of an element that was never written: empty where its size is free, zeros elsewhere."""
    shape = tuple(max(size, 0) for size in ragged.shape)
    nbytes = ITEMSIZE[ragged.dtype] * int(np.prod(shape, dtype=np.int64))
    return np.array(shape, "<i8").tobytes() + bytes(nbytes)


def _make_piece_error(ragged: Ragged) -> RemoteProtocolError:
    expected = f"a {ragged.dtype} tensor of shape {list(ragged.shape)} with its shape in front"
    return RemoteProtocolError(expected=expected, received="something else")
