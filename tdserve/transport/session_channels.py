"""Opens the channel of a session; there is one entry for each transport whose content moves over a channel.

A new transport is a class that implements :class:`tdserve.transport.channel.Channel`, a function here with its entry in
``OPENERS``, an entry in :data:`tdserve.rules.channel_transports.CHANNEL_TRANSPORTS`, whose order is the preference of
"auto", and its name in ``TransportName`` of :mod:`tdserve.base.config`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tdserve.base.errors import ConnectError, InvalidRequestError
from tdserve.transport.byte_streams import ByteStream
from tdserve.transport.channel import Channel
from tdserve.transport.gloo import WORKER_RANK, GlooChannel
from tdserve.transport.nccl import open_wire
from tdserve.transport.ordered import OrderedChannel
from tdserve.transport.proving import ChannelCredential
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S, Branch, KVStore
from tdserve.transport.stream_channel import StreamChannel


@dataclass(frozen=True)
class ChannelEnd:
    """What one end of a session needs to open a channel.

    Attributes:
        kv_store: Rendezvous; kept alive by the channel.
        rank: ``WORKER_RANK`` (which decides the order of messages) or ``CLIENT_RANK``.
        host: Address of the interface for what goes by gloo.
        credential: Secret and purpose that both ends prove over gloo; NCCL asks for a number of its own, which comes
            the same way.
        peer: Name of the other end, for errors.
        open_stream: Opens the byte stream between the ends, for a transport that has no connection of its own; raises
            TDServeError if there is none.
        device: This end's GPU, which is not the other end's; "" if the transport needs none.
        timeout_s: Seconds for each pair of processes to connect.
    """

    kv_store: KVStore
    rank: int
    host: str
    credential: ChannelCredential
    peer: str
    device: str = ""
    timeout_s: float = CONNECT_TIMEOUT_S
    open_stream: Callable[[], ByteStream] | None = None


def open_channel(transport: str, end: ChannelEnd) -> Channel:
    """Opens one end of a session's channel; blocks until the other end has opened its own.

    Raises:
        ConnectError: It did not form. Nothing was sent.
        InvalidRequestError: No transport of this name has channels.
    """
    opener = OPENERS.get(transport)
    if opener is None:
        raise InvalidRequestError(
            argument="transport", reason=f"it must be one of {', '.join(OPENERS)}, got {transport!r}"
        )
    return opener(end)


def _open_gloo(end: ChannelEnd) -> GlooChannel:
    return GlooChannel(
        end.kv_store, end.rank, host=end.host, credential=end.credential, peer=end.peer, timeout_s=end.timeout_s
    )


def _open_nccl(end: ChannelEnd) -> OrderedChannel:
    """Opens an NCCL channel: large messages move from GPU to GPU, small ones and the order of large ones over gloo."""
    with ExitStack() as unfinished:
        small = _open_gloo(end)
        unfinished.callback(small.close)
        mail = _open_gloo(
            replace(end, kv_store=Branch(end.kv_store, "order"), credential=end.credential.narrow("order"))
        )
        unfinished.callback(mail.close)
        branch = Branch(end.kv_store, "nccl")
        wire = open_wire(branch, end.rank, device=end.device, peer=end.peer, timeout_s=end.timeout_s)
        unfinished.pop_all()
    return OrderedChannel(small, mail, wire, is_leader=end.rank == WORKER_RANK, transport="nccl", peer=end.peer)


def _open_grpc(end: ChannelEnd) -> StreamChannel:
    """Opens a channel over the client's connection to the control process, which relays it to the data worker."""
    if end.open_stream is None:
        raise ConnectError(address=end.peer, reason="this end has no connection to the control process")
    return StreamChannel(end.open_stream(), transport="grpc", peer=end.peer, timeout_s=end.timeout_s)


OPENERS: dict[str, Callable[[ChannelEnd], Channel]] = {"gloo": _open_gloo, "nccl": _open_nccl, "grpc": _open_grpc}
