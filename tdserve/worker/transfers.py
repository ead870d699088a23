"""One transfer of a lane: sending or receiving its content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tdserve.base.errors import RemoteProtocolError, TooLargeError
from tdserve.messages.content import (
    MAX_INLINE_VALUES_BYTES,
    MIN_SENT_VALUES_BYTES,
    check_inline,
    cut_values,
    write_messages,
)
from tdserve.messages.layout import Layout, Message
from tdserve.store.exchange.spools import SpoolWriter
from tdserve.transport.appended import BytesEnd, SinkBehind
from tdserve.transport.channel import PerMessage
from tdserve.transport.sources_sinks import Sink, Source
from tdserve.transport.stream import pack, recv_messages, send_messages, start_send, unpack
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.lane import Lane

MAX_UNAWAITED_BYTES = 512 * 1024
"""Content up to this size is sent without waiting for the client to take it."""


def send_read(
    lane: Lane,
    order: worker_pb2.Order,
    layout: Layout,
    source: Source,
    *,
    values: bytes,
    inline: bool,
    sends_values: bool = False,
    fills_last_after_sends: bool = True,
) -> worker_pb2.Worked:
    """Sends a read's content to the client over the lane's channel, or to control if it is inline.

    Args:
        values: A serialised ValueBlock.
        fills_last_after_sends: As in ``send_messages``.
        sends_values: Whether the client accepts large values over the channel.

    Raises:
        TooLargeError: It does not, and they are too many for a message.
    """
    are_sent = sends_values and len(values) >= MIN_SENT_VALUES_BYTES
    if not are_sent and len(values) > MAX_INLINE_VALUES_BYTES:
        what = "values for a client that takes them in messages alone, in bytes"
        raise TooLargeError(what=what, asked=len(values), free=MAX_INLINE_VALUES_BYTES)
    if inline and not are_sent:
        return worker_pb2.Worked(inline=pack(layout.messages, source), values=values)
    if are_sent:
        lane.report_prepared(order, b"", values_nbytes=len(values))
    elif not order.is_accepted:
        lane.report_prepared(order, values)
    _send(lane, order, layout.messages, source, fills_last_after_sends=fills_last_after_sends)
    nbytes_moved = sum(layout.message_nbytes)
    if are_sent:  # behind all of the layout, whose last message describes what was sent before it
        _send(lane, order, cut_values(len(values)), BytesEnd(values))
        nbytes_moved += len(values)
    return worker_pb2.Worked(nbytes_moved=nbytes_moved)


def is_sent_at_once(messages: Sequence[Message]) -> bool:
    """Returns whether content is sent without waiting for the client to take it."""
    return len(messages) == 1 and messages[0].nbytes <= MAX_UNAWAITED_BYTES


def _send(
    lane: Lane,
    order: worker_pb2.Order,
    messages: Sequence[Message],
    source: Source,
    *,
    fills_last_after_sends: bool = False,
) -> None:
    context = lane.context
    if is_sent_at_once(messages):
        lane.keep(start_send(lane.channel, order.tag, messages, source, context.pool), messages[0].nbytes)
        return
    timeout_s = PerMessage(context.transfer_timeout_s)
    send_messages(
        lane.channel,
        order.tag,
        messages,
        source,
        pool=context.pool,
        timeout_s=timeout_s,
        fills_last_after_sends=fills_last_after_sends,
    )


def receive_write(
    lane: Lane,
    order: worker_pb2.Order,
    content: control_pb2.Content,
    layout: Layout,
    sink: Sink,
    *,
    values: Sink | None = None,
) -> worker_pb2.Worked:
    """Takes a write's content from the message or the channel.

    Args:
        values: Takes its values if they come over the channel.

    Raises:
        RemoteProtocolError: The announced sizes are not those of the content; nothing was received.
        CapacityError: There is no room for the values. The channel is in the middle of the content.
    """
    context = lane.context
    if content.HasField("inline"):
        check_inline(content, layout)
        unpack(content.inline, layout.messages, sink)
        return worker_pb2.Worked()
    messages = write_messages(layout, content.values_nbytes, content.message_nbytes)
    timeout_s = PerMessage(context.transfer_timeout_s)
    if values is not None:
        sink = SinkBehind(sink, values)
    elif content.values_nbytes:
        raise RemoteProtocolError(expected="values in the message", received=f"{content.values_nbytes} bytes behind it")
    recv_messages(lane.channel, order.tag, messages, sink, pool=context.pool, timeout_s=timeout_s)
    return worker_pb2.Worked(nbytes_moved=sum(content.message_nbytes))


@contextmanager
def spool_values(content: control_pb2.Content, path: str) -> Iterator[Sink | None]:
    """A block in which a spool file takes the values of a write; None if they do not come over the channel.

    Raises:
        CapacityError, InvalidRequestError: The file cannot be created.
    """
    if not content.values_nbytes:
        yield None
        return
    with SpoolWriter(path) as writer:
        yield _SpoolEnd(writer)


class _SpoolEnd:
    """A sink that writes a block of values to a file."""

    def __init__(self, writer: SpoolWriter) -> None:
        self._writer = writer

    def find_memory(self, message: Message) -> None:
        return

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        self._writer.write(message.offset, staging.numpy().data)
