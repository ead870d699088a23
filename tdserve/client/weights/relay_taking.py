"""Receives a version of weights into the caller's tensors: from the server, to pass it on, or from another client."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tdserve.base.errors import DeadlineExceededError, TDServeError
from tdserve.client.content.leaves import Leaves
from tdserve.client.content.received import Received, make_views
from tdserve.client.relays.kept_version import KeptVersion, compute_checksums
from tdserve.client.relays.relay import SessionRelays
from tdserve.client.relays.relay_hop import receive
from tdserve.client.session.requests.pending import Pending
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.download import ANSWER_GRACE_S
from tdserve.messages.layout import Layout
from tdserve.rules.tags import make_tag
from tdserve.structure.trees.tree import Spec
from tdserve.transport.channel import Channel
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import FlatBuffer, copy_bytes
from tdserve.transport.stream import recv_messages
from tdserve.v1 import control_pb2

VERIFY_S = 5.0
"""Time for the server to get the checksums: it makes or receives them soon after the first pull."""


class HopFailedError(Exception):
    """A version did not arrive over a hop, or is damaged: it must be requested from the server again.

    Attributes:
        failed: The report to send with that request.
    """

    def __init__(self, hop: int, *, was_connected: bool) -> None:
        super().__init__(f"hop {hop}")
        self.failed = control_pb2.FailedHop(hop=hop, was_connected=was_connected)


@dataclass(frozen=True)
class Receiving:
    """What is received, and where it goes.

    Attributes:
        layout, spec: Layout and structure of what is sent.
        pool: Pool of the buffers.
        timeout_s: For all of it.
        into: The caller's tensors; None: new ones.
    """

    layout: Layout
    spec: Spec
    pool: BufferPool
    timeout_s: float
    into: Leaves | None

    def copy(self, buffer: torch.Tensor) -> Received:
        """Copies content for the caller, whose changes do not affect what is passed on."""
        if self.into is None:
            copy = self.pool.take(self.layout.nbytes)
            copy_bytes(copy, buffer)
            return Received(self.layout, make_views(self.layout, copy))
        for slot, target in zip(self.layout.slots, self.into.contents or (), strict=False):
            np.copyto(target, buffer.numpy()[slot.offset : slot.offset + slot.nbytes])
        rest = make_views(self.layout, buffer)[self.layout.num_leaves :]
        return Received(self.layout, [*self.into.tensors, *rest])


def receive_over_hop(
    client: SessionClient,
    session: Session,
    request: int,
    pending: Pending,
    accepted: control_pb2.Accepted,
    *,
    layout: Layout,
    spec: Spec,
    timeout_s: float,
    into: Leaves | None,
) -> Received:
    """Receives a version whose arrival must be reported to control: ``Accepted.hop`` is set.

    Raises:
        HopFailedError: As raised by ``take_relayed``.
        PeerLostError, DeadlineExceededError: As raised by ``receive_kept``.
    """
    receiving = Receiving(layout, spec, client.pool, timeout_s, into)
    if accepted.is_relayed:

        def verify(asked: control_pb2.TakenRequest) -> None:
            number = client.requests.take_number()
            asked.timeout_s = VERIFY_S
            try:
                session.send(number, taken=asked).wait(VERIFY_S + ANSWER_GRACE_S, "a look at a version")
            finally:
                session.end_request(number)

        return take_relayed(session.relays, accepted, verify, receiving)
    channel = session.contents.get(session.find_channel(pending, accepted), timeout_s)
    return receive_kept(session.relays, accepted.hop, channel, make_tag(request), receiving)


def receive_kept(relays: SessionRelays, hop: int, channel: Channel, tag: int, receiving: Receiving) -> Received:
    """Receives a version from the server's worker, and keeps it to pass it on.

    Args:
        hop: Its number at control.
        channel, tag: As in ``download.receive_content``.

    Raises:
        PeerLostError, DeadlineExceededError: The channel is closed, nothing is kept; ``into`` is unchanged.
    """
    layout, pool = receiving.layout, receiving.pool
    kept = relays.keep(hop, layout, pool)
    try:
        sink = FlatBuffer(kept.buffer)
        timeout_s = receiving.timeout_s
        recv_messages(channel, tag, layout.messages, sink, pool=pool, timeout_s=timeout_s, on_arrived=kept.add_arrived)
    except BaseException:
        relays.forget(hop)
        raise
    return receiving.copy(kept.buffer)


def take_relayed(
    relays: SessionRelays,
    accepted: control_pb2.Accepted,
    verify: Callable[[control_pb2.TakenRequest], None],
    receiving: Receiving,
) -> Received:
    """Receives a version from another client; the caller sees it once the server has confirmed the checksums.

    Args:
        accepted: The server's message about it.
        verify: Has the server compare the checksums; raises the server's error.
        receiving: Its timeout is for all of it, however many messages arrive in between.

    Raises:
        HopFailedError: It did not arrive, or is damaged. Nothing is kept; ``into`` is unchanged.
    """
    number, layout, pool = accepted.hop, receiving.layout, receiving.pool
    end = time.monotonic() + receiving.timeout_s
    kept: KeptVersion | None = None

    def on_arrived(count: int) -> None:
        if time.monotonic() > end:
            raise DeadlineExceededError(what="a version from another client", timeout_s=receiving.timeout_s)
        if kept is not None:
            kept.add_arrived(count)

    was_connected = is_right = False
    hop = None
    try:
        hop = relays.open_hop(number, accepted.hop_secret)
        channel = hop.connect()
        was_connected = True
        kept = relays.keep(number, layout, pool) if accepted.keeps else None
        buffer = pool.take(layout.nbytes) if kept is None else kept.buffer
        receive(channel, layout, buffer, on_arrived=on_arrived)
        relays.close_hop(hop)
        verify(control_pb2.TakenRequest(hop=number, checksums=compute_checksums(layout, buffer, receiving.spec)))
        is_right = True
    except TDServeError as error:
        raise HopFailedError(number, was_connected=was_connected) from error
    finally:
        if hop is not None:
            relays.close_hop(hop)
        if not is_right:
            relays.forget(number)
            relays.give_up(number)
    if kept is None and receiving.into is None:
        return Received(layout, make_views(layout, buffer))
    return receiving.copy(buffer)
