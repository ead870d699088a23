"""One transfer of a session: content out, content in."""

from __future__ import annotations

from tdserve.errors import RemoteProtocolError
from tdserve.layout import Layout
from tdserve.transport.ends import Sink, Source
from tdserve.transport.stream import PerMessage, pack, recv_messages, send_messages, start_send, unpack
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.session import WorkerSession

MAX_POSTED_BYTES = 512 * 1024
"""Content up to this size is sent without waiting until the client has taken it."""


def answer(
    session: WorkerSession, order: worker_pb2.Order, layout: Layout, source: Source, *, values: bytes, inline: bool
) -> worker_pb2.Worked:
    """Gives a read's content to the client over the session's channel, or to control when it is inline."""
    if inline:
        return worker_pb2.Worked(inline=pack(layout.messages, source), values=values)
    shared = session.surroundings
    if len(layout.messages) == 1 and layout.nbytes <= MAX_POSTED_BYTES:
        session.keep(start_send(session.channel, order.tag, layout.messages, source, shared.pool))
        return worker_pb2.Worked(nbytes_moved=sum(layout.message_nbytes))
    timeout_s = PerMessage(shared.transfer_timeout_s)
    send_messages(session.channel, order.tag, layout.messages, source, pool=shared.pool, timeout_s=timeout_s)
    return worker_pb2.Worked(nbytes_moved=sum(layout.message_nbytes))


def take(
    session: WorkerSession, order: worker_pb2.Order, content: control_pb2.Content, layout: Layout, sink: Sink
) -> worker_pb2.Worked:
    """Takes a write's content from where it comes.

    Raises:
        RemoteProtocolError: The client's sizes are not those of the layout; nothing was received.
    """
    shared = session.surroundings
    if content.HasField("inline"):
        check_inline(content, layout)
        unpack(content.inline, layout.messages, sink)
        return worker_pb2.Worked()
    if tuple(content.message_nbytes) != layout.message_nbytes:
        received = f"{len(content.message_nbytes)} messages of {sum(content.message_nbytes)} bytes"
        raise RemoteProtocolError(expected=f"messages of {sum(layout.message_nbytes)} bytes", received=received)
    timeout_s = PerMessage(shared.transfer_timeout_s)
    recv_messages(session.channel, order.tag, layout.messages, sink, pool=shared.pool, timeout_s=timeout_s)
    return worker_pb2.Worked(nbytes_moved=sum(layout.message_nbytes))


def check_inline(content: control_pb2.Content, layout: Layout) -> None:
    """Raises RemoteProtocolError unless inline content has the layout's length."""
    if len(content.inline) != sum(layout.message_nbytes):
        raise RemoteProtocolError(
            expected=f"{sum(layout.message_nbytes)} bytes of content", received=f"{len(content.inline)}"
        )
