"""Content on its way from the server: received into a pooled buffer, or straight into the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from tdserve.client.gpu import landing
from tdserve.client.leaves import Leaves
from tdserve.client.session import Session
from tdserve.content import ReadStatus, values_messages
from tdserve.errors import RemoteProtocolError, TransferAbortedError
from tdserve.layout import Layout, Message, Slot
from tdserve.spec.dtypes import ITEMSIZE
from tdserve.spec.torch_types import to_torch
from tdserve.spec.tree import Path
from tdserve.spec.untracked import untracked
from tdserve.transport.behind import SinkBehind
from tdserve.transport.channel import Channel, Work
from tdserve.transport.ends import FlatEnd, LeafEnd, Sink
from tdserve.transport.pool import BufferPool
from tdserve.transport.stream import recv_messages, unpack


class Received:
    """The columns of one read, by slot of its layout.

    Attributes:
        columns: One tensor per slot: leaves, then trailing columns.
    """

    def __init__(self, layout: Layout, columns: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self.columns = columns

    def leaves(self) -> dict[Path, torch.Tensor]:
        """The leaves of the spec by path."""
        return dict(zip(self._layout.leaf_paths, self.columns, strict=False))  # behind them is what was added

    def trailing(self, name: str) -> torch.Tensor:
        """A column that the service has added."""
        slots = self._layout.slots
        number = next(i for i in range(self._layout.num_leaves, len(slots)) if slots[i].path == (name,))
        return self.columns[number]

    @cached_property
    def _status(self) -> list[int]:
        status: list[int] = self.columns[-1].tolist()
        return status

    @property
    def is_void(self) -> bool:
        """Whether the read was refused; a Failure on the session says why."""
        return self._status[0] == ReadStatus.FAILED

    @property
    def num_missing(self) -> int:
        """Rows that were overwritten while they were copied."""
        return self._status[2]

    @property
    def version(self) -> int:
        """Content version that a tensordict store had when it was read.

        Raises:
            TransferAbortedError: Rows moved while they were copied; to be read again.
        """
        outcome, version = self._status[:2]
        if outcome == ReadStatus.TORN:
            raise TransferAbortedError(transfer=0, reason="the rows were written while they were read")
        if self.is_void:
            raise RemoteProtocolError(expected="content, or a failure", received="void content")
        if outcome != ReadStatus.WHOLE:
            raise RemoteProtocolError(expected="the status of a read", received=str(outcome))
        return version


class Posted(NamedTuple):
    """Receives that began before their request was sent: whatever order the server answers in, nobody waits for
    another.

    Attributes:
        columns: Views of the layout's flat buffer.
        works: One per message.
        channel: Theirs.
    """

    columns: list[torch.Tensor]
    works: list[Work]
    channel: Channel

    def finish(self, layout: Layout, timeout_s: float) -> Received:
        """Waits until all of it is here."""
        self.channel.wait_all(self.works, timeout_s)
        return Received(layout, _shown(layout, self.columns))


def post(layout: Layout, session: Session, tag: int, pool: BufferPool, *, device: Any = None) -> Posted:
    """Begins to receive the whole layout into a pooled buffer, or onto a GPU, as ``receive`` does."""
    buffer = _buffer(layout, pool, landing(session.device, device))
    channel = session.channel
    end = FlatEnd(buffer)
    works = [channel.recv(end.direct(message), tag) for message in layout.messages]
    return Posted(views(layout, buffer), works, channel)  # made while the server works


def receive(
    layout: Layout,
    session: Session,
    tag: int,
    *,
    pool: BufferPool,
    timeout_s: float,
    inline: bytes | None,
    into: Leaves | None = None,
    values: torch.Tensor | None = None,
    device: Any = None,
) -> Received:
    """Takes the content of a read.

    Args:
        inline: The content itself, when it came in the answer.
        into: Contiguous CPU tensors; by default views of a pooled buffer.
        values: Takes the block of values that follows behind the leaves, uint8.
        device: Where the leaves will be moved: they are received there, where the channel ends on that GPU.

    Raises:
        PeerLostError, DeadlineExceededError: ``into`` is undefined; the session is closed.
    """
    if inline is not None and len(inline) != sum(layout.message_nbytes):
        raise RemoteProtocolError(expected=f"{sum(layout.message_nbytes)} bytes", received=f"{len(inline)}")
    if inline is not None and into is None and len(layout.messages) == 1 and not pool.is_shared:
        # Small content as one message, which lies in the flat buffer just as it came.
        message = layout.messages[0]
        flat = bytearray(layout.nbytes)
        flat[message.offset : message.offset + message.nbytes] = inline
        return Received(layout, views(layout, torch.frombuffer(flat, dtype=torch.uint8)))
    sink: Sink
    if into is None:
        buffer = _buffer(layout, pool, None if inline is not None else landing(session.device, device))
        columns = views(layout, buffer)
        sink = FlatEnd(buffer)
    else:
        trailing = (_empty(layout, number) for number in range(layout.num_leaves, len(layout.slots)))
        columns = [*into.tensors, *trailing]
        sink = LeafEnd(columns, contents=into.contents or (), targets=into.targets)
    if inline is not None:
        unpack(inline, layout.messages, sink)
    else:
        messages: Sequence[Message] = layout.messages
        if values is not None:
            messages, sink = (*messages, *values_messages(len(values))), SinkBehind(sink, FlatEnd(values))
        recv_messages(session.channel, tag, messages, sink, pool=pool, timeout_s=timeout_s)
    return Received(layout, _shown(layout, columns))


def _buffer(layout: Layout, pool: BufferPool, device: torch.device | None) -> torch.Tensor:
    """Memory for the whole layout, uint8."""
    return pool.take(layout.nbytes) if device is None else torch.empty(layout.nbytes, dtype=torch.uint8, device=device)


def _shown(layout: Layout, columns: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The columns, those that the service has added on the CPU, where they are looked at."""
    if not columns or columns[-1].device.type == "cpu":
        return columns
    return [*columns[: layout.num_leaves], *(column.cpu() for column in columns[layout.num_leaves :])]


class _Run(NamedTuple):
    """Slots of one dtype and shape at equal distances.

    Attributes:
        size, stride: Of a tensor that has all of them along its first dimension, or of the one that there is.
        offset: Of the first, in elements.
    """

    dtype: str
    num_slots: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def views(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Every slot as a tensor over the flat buffer; the buffer's memory lives as long as any of them."""
    return untracked(partial(_views, layout, buffer))


def _views(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    typed: dict[str, torch.Tensor] = {}
    found: list[torch.Tensor] = []
    for dtype, num_slots, size, stride, offset in _runs(layout):
        base = typed.get(dtype)
        if base is None:
            base = typed[dtype] = buffer.view(to_torch(dtype))
        run = torch.as_strided(base, size, stride, offset)
        if num_slots > 1:
            found += run.unbind(0)
        else:
            found.append(run)
    return found


def _runs(layout: Layout) -> list[_Run]:
    """How to make views of all slots with few calls; kept with the layout."""
    runs: list[_Run] | None = layout.memo.get(_Run)
    if runs is None:
        runs = layout.memo[_Run] = []
        before: list[Slot] = []
        for slot in layout.slots:
            if before and not _continues(before, slot):
                runs.append(_run(before))
                before = []
            before.append(slot)
        if before:
            runs.append(_run(before))
    return runs


def _continues(run: list[Slot], slot: Slot) -> bool:
    last, step = run[-1], slot.offset - run[-1].offset
    is_alike = (slot.dtype, slot.shape) == (last.dtype, last.shape) and slot.nbytes > 0
    return is_alike and step % ITEMSIZE[slot.dtype] == 0 and step == (last.offset - run[-2].offset if run[1:] else step)


def _run(slots: list[Slot]) -> _Run:
    first, num_slots = slots[0], len(slots)
    itemsize = ITEMSIZE[first.dtype]
    size, stride = first.shape, _strides(first.shape)
    if num_slots > 1:
        size, stride = (num_slots, *size), ((slots[1].offset - first.offset) // itemsize, *stride)
    return _Run(first.dtype, num_slots, size, stride, first.offset // itemsize)


def _empty(layout: Layout, number: int) -> torch.Tensor:
    slot = layout.slots[number]
    return torch.empty(slot.shape, dtype=to_torch(slot.dtype))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)
