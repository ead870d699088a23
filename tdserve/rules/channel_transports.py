"""The transports whose content moves over a channel between a client and its data worker, and the choice among them.

``tdserve.transport.session_channels`` has the other half of this table: it opens the channel of each. Nothing else
decides by the name of a transport, except that mail always goes by ``BASE_TRANSPORT``, or there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from tdserve.base.errors import ConnectError, NcclUnavailableError, NotSupportedError, TDServeError

BASE_TRANSPORT = "gloo"
"""The transport for content where there is no better one, and for all small messages."""

ONE_PORT_TRANSPORT = "grpc"
"""The transport that any two ends can use, since it needs nothing but the client's connection to the control
process."""

LOCAL_TRANSPORT: Final = "shm"
"""The transport that needs no channel: the client maps the server's files."""


class SessionEnds(NamedTuple):
    """The two ends of a session, as far as the choice depends on them.

    Attributes:
        client_gpu, worker_gpu: Unique ids of the GPUs of both ends; "" if there is none.
        why_no_gpu: Why the worker has none.
        is_one_machine: Whether both ends run on one kernel.
        why_one_port: Why only the port of the control process may be used; "" if others may.
    """

    client_gpu: str = ""
    worker_gpu: str = ""
    why_no_gpu: str = ""
    is_one_machine: bool = False
    why_one_port: str = ""


WhyNot = Callable[[SessionEnds, bool], str]
"""Returns why two ends do not use a transport, given whether the client asks for it by name; "" if they do."""


@dataclass(frozen=True)
class ChannelTransport:
    """The properties of one of them that decisions depend on.

    Attributes:
        num_descriptors: Descriptors that its channel takes at a worker. A session with mail also has a channel of
            ``BASE_TRANSPORT`` there.
        is_reopened: Whether a lost channel is replaced by another.
        needs_device: Whether each end has a GPU of its own.
        why_not: Why two ends do not use it.
        has_mail: Whether small requests go by mail; otherwise they take the gRPC stream.
        moves_at_once: Whether any thread of a worker may send and receive on its channel at once, without waiting for
            the client. True of one transport only, under whose name workers' counts of this go.
        error: Raised in a client that asks for it by name and cannot have it; None: NotSupportedError.
    """

    num_descriptors: int
    is_reopened: bool
    needs_device: bool
    why_not: WhyNot
    has_mail: bool = True
    moves_at_once: bool = False
    error: type[ConnectError] | None = None


class ChannelChoice(NamedTuple):
    """The transport of a session's channel.

    Attributes:
        transport: Its name.
        why_not: Why it is not the one that the client asks for, none for the GPU that the client has named, or the one
            that needs but one port.
    """

    transport: str
    why_not: str = ""


def _explain_no_nccl(ends: SessionEnds, is_asked_for: bool) -> str:
    if ends.why_one_port:
        return ends.why_one_port
    if not ends.client_gpu:
        return "the client has no GPU that NCCL can use"
    if not ends.worker_gpu:
        reason = ends.why_no_gpu or "none was named (tdserve serve --device cuda:N)"
        return f"the server's data worker has no GPU: {reason}"
    if ends.client_gpu == ends.worker_gpu:
        reason = f"both ends use one GPU, {ends.client_gpu}, which NCCL refuses"
        return f"{reason}; content is staged in pinned memory instead"
    if ends.is_one_machine and not is_asked_for:
        return "both ends are on one machine, whose memory is nearer; content is staged in pinned memory"
    return ""


CHANNEL_TRANSPORTS: dict[str, ChannelTransport] = {
    # Two of them are for gloo; NCCL's need was not measured.
    "nccl": ChannelTransport(
        num_descriptors=7, is_reopened=False, needs_device=True, why_not=_explain_no_nccl, error=NcclUnavailableError
    ),
    BASE_TRANSPORT: ChannelTransport(
        num_descriptors=1,
        is_reopened=True,
        needs_device=False,
        why_not=lambda ends, is_asked_for: ends.why_one_port,
        moves_at_once=True,
    ),
    ONE_PORT_TRANSPORT: ChannelTransport(
        num_descriptors=1,
        is_reopened=True,
        needs_device=False,
        why_not=lambda ends, is_asked_for: "",
        has_mail=False,
    ),
}
"""Channel transports by name. ``"auto"`` takes the first one that suits both ends: better ones come first."""

(AT_ONCE_TRANSPORT,) = (name for name, transport in CHANNEL_TRANSPORTS.items() if transport.moves_at_once)
"""A worker's counts of what it has moved at once name no transport: it is this one."""


def is_local_allowed(asked: str) -> bool:
    """Returns whether a client that asks for this transport maps the server's files if it can."""
    return asked in ("auto", LOCAL_TRANSPORT)


def check_available(transport: str) -> None:
    """Raises NotSupportedError for a transport that this end does not have, although the other may."""
    available = ("auto", LOCAL_TRANSPORT, *CHANNEL_TRANSPORTS)
    if transport not in available:
        raise NotSupportedError(feature=f"transport {transport!r}", reason=f"choose one of {', '.join(available)}")


def choose_channel(asked: str, ends: SessionEnds) -> ChannelChoice:
    """Chooses the transport of a session's channel; it is not the one asked for if that does not suit both ends.

    Args:
        asked: The client's transport.
        ends: What is known of both ends.
    """
    reasons: list[str] = []
    for name, transport in CHANNEL_TRANSPORTS.items():
        is_asked_for = asked == name
        is_candidate = is_asked_for or asked == "auto"
        why_not = transport.why_not(ends, is_asked_for) if is_candidate else f"{asked!r} was asked for"
        if not why_not:
            return ChannelChoice(name, "; ".join(reasons))
        is_missed = is_asked_for or (is_candidate and name == BASE_TRANSPORT)
        if why_not not in reasons and (is_missed or (transport.needs_device and ends.client_gpu)):
            reasons.append(why_not)
    # Also a client that maps files, or asks for what does not suit, needs a channel.
    why_not_base = CHANNEL_TRANSPORTS[BASE_TRANSPORT].why_not(ends, False)
    if why_not_base and why_not_base not in reasons:
        reasons.append(why_not_base)
    return ChannelChoice(ONE_PORT_TRANSPORT if why_not_base else BASE_TRANSPORT, "; ".join(reasons))


def check_granted(asked: str, granted: ChannelChoice, ends: SessionEnds, *, address: str) -> ChannelChoice:
    """Checks what the server has chosen, before the client opens a channel.

    Both ends compare their GPUs; all else about them is known to the server alone.

    Args:
        asked: The client's transport.
        granted: The server's choice.
        ends: The GPUs of both ends.
        address: Address of the server, for errors.

    Returns:
        The transport of the session's channel.

    Raises:
        TDServeError: The client asked for a channel transport by name and cannot have it: the transport's own error.
    """
    transport = CHANNEL_TRANSPORTS.get(granted.transport)
    why_not = f"the server chose {granted.transport!r}" if transport is None else ""
    if transport is not None and transport.needs_device:
        why_not = transport.why_not(ends, True)
    if asked in CHANNEL_TRANSPORTS and (why_not or granted.transport != asked):
        raise _make_transport_error(asked, address, why_not or granted.why_not or "the server gives no reason")
    return ChannelChoice(BASE_TRANSPORT, why_not) if why_not else granted


def _make_transport_error(name: str, address: str, reason: str) -> TDServeError:
    error = CHANNEL_TRANSPORTS[name].error
    if error is None:
        reason = f"it cannot be had from the server at {address}: {reason}"
        return NotSupportedError(feature=f"transport {name!r}", reason=reason)
    return error(address=address, reason=reason)
