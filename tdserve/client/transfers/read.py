"""Reads: send a request, receive the content that the answer announces, and build it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    TDServeError,
    TransportError,
)
from tdserve.client.content.leaves import Leaves
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.content.received import Received
from tdserve.client.content.value_blocks import decode_values
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s, compute_sending_timeout_s
from tdserve.client.session.requests.pending import Pending, Reply
from tdserve.client.session.session import Session
from tdserve.client.transfers.download import Posted, abort_transfer, receive_answer
from tdserve.data.values import ReadBlock
from tdserve.messages.layout import Layout
from tdserve.structure.trees.tree import Path, Spec
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2


class Receiver(Protocol):
    """What a client that receives content decides about it.

    Attributes:
        pool: Memory for it.
        allow_pickle: Whether pickled values are unpickled.
    """

    @property
    def pool(self) -> BufferPool: ...

    @property
    def allow_pickle(self) -> bool: ...


class ReceiverSettings(NamedTuple):
    """The same for the mover of a session, which must not keep the client alive; attributes as in ``Receiver``."""

    pool: BufferPool
    allow_pickle: bool


def finish_read(
    receiver: Receiver,
    session: Session,
    reply: Reply,
    *,
    spec: Spec,
    layout: Layout,
    destination: Destination | None = None,
    keeps_fault: bool = False,
    device: Any = None,
    allow_pickle: bool | None = None,
) -> Content:
    """Receives what an answer announces or contains, and checks that it is complete.

    A destination that does not fit is detected before a byte is written to it, after the content was received from the
    channel.

    Args:
        keeps_fault: Whether the content carries the error of values that cannot be decoded, instead of raising it here.
        device: Where the content will be moved, as in ``receive_content``.
        allow_pickle: Whether pickled values are unpickled; None: as set for the client.
    """
    accepted = reply.accepted
    places, mismatch = (None, None) if destination is None else destination.match_places(spec, layout)
    received, encoded = receive_with_values(
        receiver, session, reply, layout, into=places, device=device if destination is None else None
    )
    if mismatch is not None:
        raise mismatch
    version = received.version
    spec, values, fault = try_decode_values(receiver, spec, encoded, keeps_fault=keeps_fault, allow_pickle=allow_pickle)
    content = Content(spec, received.get_leaves(), values, version or accepted.version, accepted, received, fault)
    if destination is not None:
        destination.finish(content, was_direct=places is not None)
    return content


def receive_with_values(
    receiver: Receiver,
    session: Session,
    reply: Reply,
    layout: Layout,
    *,
    into: Leaves | None = None,
    device: Any = None,
) -> tuple[Received, bytes]:
    """Receives what an answer announces or contains; returns it, and the encoded values. Arguments and errors as in
    ``receive_answer``."""
    announced = reply.pending.announced
    block = _allocate_values(receiver, reply.accepted) if announced is None else announced.values
    received = receive_answer(layout, session, reply, pool=receiver.pool, into=into, values=block, device=device)
    return received, reply.accepted.values if block is None else block.numpy().tobytes()


def try_decode_values(
    receiver: Receiver,
    spec: Spec,
    encoded: bytes | ReadBlock,
    *,
    keeps_fault: bool,
    allow_pickle: bool | None = None,
) -> tuple[Spec, dict[Path, Any], TDServeError | None]:
    """Decodes values; with ``keeps_fault`` returns an error instead of raising it, and no values with it."""
    trusts = receiver.allow_pickle if allow_pickle is None else allow_pickle
    try:
        return *decode_values(spec, encoded, allow_pickle=trusts), None
    except TDServeError as error:
        if not keeps_fault:
            raise
        return spec, {}, error


def _allocate_values(receiver: Receiver, accepted: control_pb2.Accepted) -> torch.Tensor | None:
    """Returns memory for the block of values that follows the leaves; None if there is none."""
    return receiver.pool.take(accepted.values_nbytes) if accepted.values_nbytes else None


def finish_known_size(
    session: Session, pending: Pending, posted: Posted, *, spec: Spec, layout: Layout, deadline: Deadline
) -> Content | None:
    """Waits for content whose receives began with the request; None if the server has nothing to grant now."""
    try:
        received = posted.finish(layout, compute_sending_timeout_s(deadline, layout.nbytes))
    except (TransportError, DeadlineExceededError) as error:
        raise abort_transfer(session, pending, error, deadline) from error
    if received.is_void:
        pending.wait(compute_answer_timeout_s(deadline), "a read that found nothing to grant")
        return None
    session.observed_calls.count_content(bytes_out=sum(layout.message_nbytes))
    return Content(spec, received.get_leaves(), {}, received.version, received=received)
