"""The columns of a read, received or copied locally: one tensor per slot of its layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch

from tdserve.base.errors import RemoteProtocolError, TransferAbortedError
from tdserve.messages.content import ReadStatus
from tdserve.messages.layout import Layout, Slot
from tdserve.structure.tensors.independent_views import make_independent_views, view_memory
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Path


class Received:
    """The columns of one read, by slot of its layout.

    Attributes:
        columns: One tensor per slot: leaves, then trailing columns.
    """

    def __init__(self, layout: Layout, columns: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self.columns = columns

    def get_leaves(self) -> dict[Path, torch.Tensor]:
        """Returns the leaves of the spec by path."""
        return dict(zip(self._layout.leaf_paths, self.columns, strict=False))  # added columns come after them

    def get_trailing(self, name: str) -> torch.Tensor:
        """Returns a column that the service has added."""
        return self.columns[self._layout.trailing_numbers[name]]

    @cached_property
    def _status(self) -> list[int]:
        status: list[int] = self.columns[-1].tolist()
        return status

    @property
    def is_void(self) -> bool:
        """Whether the read was refused; a Failure on the session gives the reason."""
        return self._status[0] == ReadStatus.FAILED

    @property
    def num_torn(self) -> int:
        """Rows that were overwritten while they were copied."""
        return self._status[2]

    @property
    def version(self) -> int:
        """Content version of a tensordict store at the time of the read.

        Raises:
            TransferAbortedError: Rows changed while they were copied; the read must be repeated.
        """
        outcome, version = self._status[:2]
        if outcome == ReadStatus.TORN:
            raise TransferAbortedError(transfer=0, reason="the rows were written while they were read")
        if self.is_void:
            raise RemoteProtocolError(expected="content, or a failure", received="void content")
        if outcome != ReadStatus.WHOLE:
            raise RemoteProtocolError(expected="the status of a read", received=str(outcome))
        return version


class _Run(NamedTuple):
    """Slots of one dtype and shape at equal distances.

    Attributes:
        size, strides: Size and strides of a tensor that has all of them along its first dimension, or of the single
            one.
        offset: Offset of the first. Strides and offset are in bytes.
    """

    dtype: torch.dtype
    num_slots: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def make_views(layout: Layout, buffer: torch.Tensor, *, shares_storage: bool = False) -> list[torch.Tensor]:
    """Returns every slot as a tensor over the flat buffer, whose memory lives as long as any of them.

    Args:
        shares_storage: True: all have one storage, which another process takes as a whole. False: slots have storages
            of their own, or share one with neighbours of their dtype and shape, so that ``torch.save`` accepts them;
            on a GPU they share one in any case.
    """
    is_one = shares_storage or not buffer.is_cpu
    return make_independent_views(partial(_compute_views_of_one if is_one else _compute_views, layout, buffer))


def _compute_views(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    memory = buffer.numpy()
    found: list[torch.Tensor] = []
    for dtype, num_slots, size, strides, offset in _find_runs(layout):
        run = view_memory(memory, dtype, size, offset, strides)
        if num_slots > 1:
            found += run.unbind(0)
        else:
            found.append(run)
    return found


def _compute_views_of_one(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    typed: dict[torch.dtype, torch.Tensor] = {}
    found: list[torch.Tensor] = []
    for dtype, num_slots, size, strides, offset in _find_runs(layout):
        base = typed.get(dtype)
        if base is None:
            base = typed[dtype] = buffer.view(dtype)
        itemsize = dtype.itemsize
        run = torch.as_strided(base, size, [stride // itemsize for stride in strides], offset // itemsize)
        if num_slots > 1:
            found += run.unbind(0)
        else:
            found.append(run)
    return found


def _find_runs(layout: Layout) -> list[_Run]:
    """Groups the slots so that few calls make all views; cached with the layout."""
    runs: list[_Run] | None = layout.memo.get(_Run)
    if runs is None:
        runs = []  # kept once it is whole: other threads read it
        before: list[Slot] = []
        for slot in layout.slots:
            if before and not _is_continued_by(before, slot):
                runs.append(_run(before))
                before = []
            before.append(slot)
        if before:
            runs.append(_run(before))
        layout.memo[_Run] = runs
    return runs


def _is_continued_by(run: list[Slot], slot: Slot) -> bool:
    last, step = run[-1], slot.offset - run[-1].offset
    is_alike = (slot.dtype, slot.shape) == (last.dtype, last.shape) and slot.nbytes > 0
    return is_alike and step % ITEMSIZE[slot.dtype] == 0 and step == (last.offset - run[-2].offset if run[1:] else step)


def _run(slots: list[Slot]) -> _Run:
    first, num_slots = slots[0], len(slots)
    size, strides = first.shape, _compute_strides(first.shape, ITEMSIZE[first.dtype])
    if num_slots > 1:
        size, strides = (num_slots, *size), (slots[1].offset - first.offset, *strides)
    return _Run(to_torch(first.dtype), num_slots, size, strides, first.offset)


def _compute_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)
