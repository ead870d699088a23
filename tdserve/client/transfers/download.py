"""Receives content from the server, into a pooled buffer or directly into the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    RemoteProtocolError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.client.content.gpu import find_landing_device
from tdserve.client.content.leaves import Leaves
from tdserve.client.content.received import Received, make_views
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s, compute_transfer_timeout_s
from tdserve.client.session.channels.content_channel import ContentChannel
from tdserve.client.session.requests.pending import Announced, Pending, Reply
from tdserve.client.session.session import Session
from tdserve.messages.content import cut_values
from tdserve.messages.layout import Layout, Message
from tdserve.rules.tags import make_tag
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.transport.appended import SinkBehind
from tdserve.transport.channel import Channel, Work
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import FlatBuffer, LeafBuffers, Sink
from tdserve.transport.stream import MAX_POSTED, recv_messages, unpack
from tdserve.v1 import control_pb2

ANSWER_GRACE_S = 1.0
"""The server ends a wait at its deadline by itself; its answer gets this much longer to arrive."""


class Posted(NamedTuple):
    """Receives that begin before their answer arrives: the server may answer several requests in any order.

    Attributes:
        columns: Views of the layout's flat buffer.
        works: One per message.
        channel: The channel that they use.
    """

    columns: list[torch.Tensor]
    works: list[Work]
    channel: Channel

    def finish(self, layout: Layout, timeout_s: float) -> Received:
        """Waits until all of it is received."""
        self.channel.wait_all(self.works, timeout_s)
        return Received(layout, _show_columns(layout, self.columns))


def post_known_size(
    layout: Layout, session: Session, pending: Pending, tag: int, pool: BufferPool, *, device: Any = None
) -> Posted:
    """Starts to receive the whole layout into a pooled buffer, or onto a GPU, as ``receive_content`` does.

    Args:
        pending: The request, which has named the channel.

    Raises:
        TDServeError: The channel is lost, or was not open in time.
    """
    buffer = _allocate(layout, pool, find_landing_device(session.device, device))
    try:
        return _post(
            layout, session.contents.get(pending.content_channel or session.contents.current), tag, buffer, pool
        )
    except (TransportError, DeadlineExceededError) as error:
        raise abort_transfer(session, pending, error) from error


def _post(layout: Layout, channel: Channel, tag: int, buffer: torch.Tensor, pool: BufferPool) -> Posted:
    end = FlatBuffer(buffer)
    works = [channel.recv(end.find_memory(message), tag) for message in layout.messages]
    columns = make_views(layout, buffer, shares_storage=pool.is_shared)
    return Posted(columns, works, channel)  # made while the server works


def post_announced(
    layout: Layout,
    session: Session,
    pending: Pending,
    accepted: control_pb2.Accepted,
    *,
    tag: int,
    pool: BufferPool,
    device: Any = None,
) -> Announced | None:
    """Starts to receive content that was announced just now, without waiting for anything.

    Returns:
        None if the channel is not open, or lost, if the content is for a GPU, or if there is no room for it: then the
        caller receives it, or gets the error.
    """
    content_channel = session.contents.current
    if accepted.channel != content_channel.number or not content_channel.is_open:
        return None
    of_values = cut_values(accepted.values_nbytes)
    num_messages = len(layout.messages) + len(of_values)
    if num_messages > MAX_POSTED or find_landing_device(session.device, device) is not None:
        return None
    pending.content_channel = content_channel
    with suppress(TDServeError, RuntimeError, MemoryError):
        values = pool.take(accepted.values_nbytes) if of_values else None
        columns, works, channel = _post(
            layout, session.contents.get(content_channel), tag, pool.take(layout.nbytes), pool
        )
        if values is not None:
            works += [channel.recv(FlatBuffer(values).find_memory(message), tag) for message in of_values]
        return Announced(columns, values, works, channel)
    return None


def receive_content(
    layout: Layout,
    session: Session,
    tag: int,
    *,
    pool: BufferPool,
    timeout_s: float,
    inline: bytes | None,
    content_channel: ContentChannel | None = None,
    into: Leaves | None = None,
    values: torch.Tensor | None = None,
    device: Any = None,
) -> Received:
    """Receives the content of a read.

    Args:
        inline: The content itself, if the answer contains it.
        content_channel: The channel that carries it otherwise.
        into: Contiguous CPU tensors; by default views of a pooled buffer.
        values: Receives the block of values that follows the leaves, uint8.
        device: Where the leaves will be moved: they are received there, if the channel ends on that GPU.

    Raises:
        PeerLostError, DeadlineExceededError: ``into`` is undefined; the channel is closed.
    """
    if inline is not None and len(inline) != sum(layout.message_nbytes):
        raise RemoteProtocolError(expected=f"{sum(layout.message_nbytes)} bytes", received=f"{len(inline)}")
    if inline is not None and into is None and len(layout.messages) == 1 and not pool.is_shared:
        # Small content is one message, which is in the flat buffer just as it arrived.
        message = layout.messages[0]
        flat = bytearray(layout.nbytes)
        flat[message.offset : message.offset + message.nbytes] = inline
        return Received(layout, make_views(layout, torch.frombuffer(flat, dtype=torch.uint8)))
    sink: Sink
    if into is None:
        buffer = _allocate(layout, pool, None if inline is not None else find_landing_device(session.device, device))
        columns = make_views(layout, buffer, shares_storage=pool.is_shared)
        sink = FlatBuffer(buffer)
    else:
        trailing = (_make_empty(layout, number) for number in range(layout.num_leaves, len(layout.slots)))
        columns = [*into.tensors, *trailing]
        sink = LeafBuffers(columns, contents=into.contents or (), targets=into.targets)
    if inline is not None:
        unpack(inline, layout.messages, sink)
    else:
        messages: Sequence[Message] = layout.messages
        if values is not None:
            messages, sink = (*messages, *cut_values(len(values))), SinkBehind(sink, FlatBuffer(values))
        channel = session.contents.get(content_channel or session.contents.current, timeout_s)
        recv_messages(channel, tag, messages, sink, pool=pool, timeout_s=timeout_s)
    return Received(layout, _show_columns(layout, columns))


def receive_answer(
    layout: Layout,
    session: Session,
    reply: Reply,
    *,
    pool: BufferPool,
    into: Leaves | None = None,
    values: torch.Tensor | None = None,
    device: Any = None,
) -> Received:
    """Receives the content that an answer announces or contains, as ``receive_content`` does.

    Raises:
        TDServeError: Why it did not arrive; the server's own reason if it has sent one. The channel was replaced.
    """
    announced = reply.pending.announced
    if announced is not None:
        try:
            announced.channel.wait_all(announced.works, compute_transfer_timeout_s(reply.deadline))
        except (TransportError, DeadlineExceededError) as error:
            raise abort_transfer(session, reply.pending, error, reply.deadline) from error
        session.observed_calls.count_content(bytes_out=_compute_nbytes(layout, announced.values))
        return Received(layout, _show_columns(layout, announced.columns))
    inline = reply.answer.done.inline if reply.answer.HasField("done") else None
    content_channel = None if inline is not None else session.find_channel(reply.pending, reply.answer.accepted)
    try:
        received = receive_content(
            layout,
            session,
            make_tag(reply.request),
            pool=pool,
            timeout_s=compute_transfer_timeout_s(reply.deadline),
            inline=inline,
            content_channel=content_channel,
            into=into,
            values=values,
            device=device,
        )
    except (TransportError, DeadlineExceededError) as error:
        raise abort_transfer(session, reply.pending, error, reply.deadline) from error
    session.observed_calls.count_content(bytes_out=_compute_nbytes(layout, values) + len(reply.accepted.values))
    return received


def _compute_nbytes(layout: Layout, values: torch.Tensor | None) -> int:
    return sum(layout.message_nbytes) + (0 if values is None else values.nbytes)


def _allocate(layout: Layout, pool: BufferPool, device: torch.device | None) -> torch.Tensor:
    """Returns uint8 memory for the whole layout."""
    return pool.take(layout.nbytes) if device is None else torch.empty(layout.nbytes, dtype=torch.uint8, device=device)


def _show_columns(layout: Layout, columns: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the columns; those that the service has added are on the CPU, where they are examined."""
    if not columns or columns[-1].device.type == "cpu":
        return columns
    return [*columns[: layout.num_leaves], *(column.cpu() for column in columns[layout.num_leaves :])]


def _make_empty(layout: Layout, number: int) -> torch.Tensor:
    slot = layout.slots[number]
    return torch.empty(slot.shape, dtype=to_torch(slot.dtype))


def abort_transfer(
    session: Session, pending: Pending, error: TDServeError, deadline: Deadline = Deadline.never
) -> TDServeError:
    """Ends a broken transfer, and returns its true reason: a Failure of the server, for which it waits up to a second,
    but no longer than the call may take, else the transport's error.

    The channel is replaced: content of this transfer may still be under way, and is not received any more. A
    TransferAbortedError shows that the call may be retried.
    """
    if pending.content_channel is not None:
        session.replace_channel(pending.content_channel, error)
    cause, content_channel = error, pending.content_channel
    if not pending.has_failed and not isinstance(error, DeadlineExceededError):
        # Content on a lost channel may have been the answer. All transfers under way there wait during the same second.
        lost_for_s = 0.0 if content_channel is None else content_channel.lost_for_s
        grace_s = max(ANSWER_GRACE_S - lost_for_s, 0.0)
        if deadline.timeout_s and (left_s := compute_answer_timeout_s(deadline)) is not None:
            grace_s = min(grace_s, max(left_s, 0.0))
        try:
            pending.wait(grace_s, "the transfer", is_owed=content_channel is None)
        except TDServeError as failure:
            cause = failure if pending.has_failed else error
    if isinstance(cause, TransportError) and not session.is_lost:
        return TransferAbortedError(transfer=0, reason=str(cause))
    return cause
