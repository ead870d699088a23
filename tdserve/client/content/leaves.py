"""The tensors of a capture in the order in which they are sent, and their bytes; cached with the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.messages.content import write_layout
from tdserve.messages.layout import LARGE_LEAF_BYTES, Layout, Message
from tdserve.structure.captures.capture import Captured
from tdserve.structure.tensors.file_tensors import FileTensor, read_strided_piece
from tdserve.structure.tensors.tensor_view import MIN_LEAVES
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.structure.trees.tree import Path
from tdserve.transport.sources_sinks import LeafBuffers, Source

_OF_NUMPY = frozenset((torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32, torch.float64))


@dataclass(frozen=True, eq=False)
class Leaves:
    """All leaves of a layout.

    Attributes:
        tensors: As captured.
        contents: Their memory as bytes; None when some are not contiguous, or not on the CPU.
    """

    tensors: list[torch.Tensor]
    contents: Sequence[NDArray[np.uint8]] | None

    @cached_property
    def targets(self) -> list[memoryview]:
        """Their memory, to copy to; empty if ``contents`` is None, or viewed when it is needed."""
        return [content.data for content in self.contents] if isinstance(self.contents, list) else []


class _Views(Sequence[NDArray[np.uint8]]):
    """The bytes of tensors, viewed when they are needed.

    NumPy makes another tensor for each view. Of tensors that are new with each write, thousands would live together
    and set off the garbage collector.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NDArray[np.uint8]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint8] | Sequence[NDArray[np.uint8]]:
        return _Views(self._tensors[index]) if isinstance(index, slice) else _view_array(self._tensors[index])

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return map(_view_array, self._tensors)


def make_leaves(captured: Captured, layout: Layout) -> Leaves:
    """Returns the leaves of a capture in the order of its layout, which is the same for a read and a write."""
    kept = "packed leaves" if layout.is_packed else "leaves"
    leaves: Leaves | None = captured.memo.get(kept)
    if leaves is None:
        tensors = [captured.tensors[slot.path] for slot in layout.slots[: layout.num_leaves]]
        is_plain = all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)
        contents: Sequence[NDArray[np.uint8]] | None = _Views(tensors) if is_plain else None
        if contents is not None and (captured.is_kept or len(tensors) < MIN_LEAVES):
            contents = list(contents)
        leaves = captured.memo[kept] = Leaves(tensors, contents)
    return leaves


def _view_array(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Returns the bytes of a tensor, as ``view_bytes``; half the time if NumPy has the dtype."""
    if tensor.dtype not in _OF_NUMPY or not tensor.numel():
        return view_bytes(tensor).numpy()
    found: NDArray[np.uint8] = tensor.numpy().reshape(-1).view(np.uint8)
    return found


def make_source(captured: Captured, layout: Layout) -> Source:
    """Returns the leaves of a capture as a source.

    A large leaf that cannot be sent from its own memory is read piece by piece
    while it is sent."""
    leaves = make_leaves(captured, layout)
    if leaves.contents is not None:
        return LeafBuffers(leaves.tensors, contents=leaves.contents)
    reads = [_read_of(tensor) for tensor in leaves.tensors]
    if not any(reads):
        return LeafBuffers([tensor.cpu().contiguous() for tensor in leaves.tensors])
    return ReadEnd(
        [read or _view_array(tensor.cpu().contiguous()) for read, tensor in zip(reads, leaves.tensors, strict=True)]
    )


def _read_of(tensor: torch.Tensor) -> Read | None:
    """Returns what reads pieces of a leaf; None if it can be read whole."""
    if isinstance(tensor, FileTensor):
        return tensor.read_piece
    is_large = tensor.nbytes >= LARGE_LEAF_BYTES and tensor.is_cpu
    return partial(read_strided_piece, tensor) if is_large and not tensor.is_contiguous() else None


def copy_contents(captured: Captured) -> dict[Path, NDArray[np.uint8]]:
    """Returns the bytes of every leaf of a capture; copies those that are not contiguous, or not on the CPU."""
    paths = write_layout(captured.spec).leaf_paths
    return dict(zip(paths, iter_contents(captured, paths), strict=True))


def iter_contents(captured: Captured, paths: Iterable[Path]) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of leaves, as ``copy_contents`` does, each in its turn."""
    layout = write_layout(captured.spec)
    leaves = make_leaves(captured, layout)
    contents = leaves.contents
    if contents is None:
        return (view_bytes(captured.tensors[path].cpu().contiguous()).numpy() for path in paths)
    return map(contents.__getitem__, map(layout.leaf_numbers.__getitem__, paths))


Read = Callable[[int, int], NDArray[np.uint8]]
"""Bytes ``[start, stop)`` of a leaf, in C order."""


class ReadEnd:
    """Source with one leaf per slot. Only the messages under way are in memory.

    Args:
        leaves: The bytes of each leaf, in C order; or what reads them.
    """

    def __init__(self, leaves: Sequence[NDArray[np.uint8] | Read]) -> None:
        self._leaves = leaves

    def find_memory(self, message: Message) -> torch.Tensor | None:
        part = message.parts[0]
        leaf = self._leaves[part.slot]
        if len(message.parts) > 1 or callable(leaf):
            return None
        return torch.from_numpy(leaf[part.start : part.stop])

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        """Raises InvalidRequestError or CorruptDataError where a leaf cannot be read."""
        target = staging.numpy()
        for slot, start, stop, offset in message.parts:
            leaf = self._leaves[slot]
            target[offset : offset + stop - start] = leaf(start, stop) if callable(leaf) else leaf[start:stop]
        for start, stop in message.gaps:
            target[start:stop] = 0
