"""A version that is sent completely: received into the caller's place, or into a buffer."""

from __future__ import annotations

from typing import Any

from tdserve.base.errors import DeadlineExceededError, TDServeError, TransportError
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.session.calls.timeouts import compute_transfer_timeout_s
from tdserve.client.session.requests.pending import Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.download import abort_transfer
from tdserve.client.transfers.read import receive_with_values
from tdserve.client.weights.relay_taking import receive_over_hop
from tdserve.client.weights.version_part import VersionPart
from tdserve.messages.content import read_layout


def take_whole(
    client: SessionClient,
    session: Session,
    reply: Reply,
    *,
    part: VersionPart,
    destination: Destination | None,
    mismatch: TDServeError | None,
    device: Any = None,
) -> Content | None:
    """Receives what an answer announces or contains, and checks that it is complete.

    A destination that does not fit is detected before a byte is written to it, after the content was received from the
    channel.

    Args:
        part: Structure of what is sent, and of what is wanted of it.
        destination: The caller's place.
        mismatch: Why there is none; raised then.
        device: Where the content will be moved, as in ``receive_content``.

    Returns:
        The content; None if all of it is in its destination.

    Raises:
        HopFailedError: Another client did not pass it on correctly; request it again.
        SpecMismatchError, NotSupportedError: The ``mismatch``. Nothing was written to the destination.
        PeerLostError, DeadlineExceededError: The destination may hold a part of it.
    """
    accepted, spec = reply.accepted, part.wanted
    layout = read_layout(spec, is_packed=True)
    places, mismatch = (None, mismatch) if destination is None else destination.match_places(spec, layout)
    if mismatch is not None and accepted.is_relayed:  # nothing is under way to this client
        session.relays.give_up(accepted.hop)
        raise mismatch
    if accepted.hop:
        try:
            timeout_s = compute_transfer_timeout_s(reply.deadline)
            received = receive_over_hop(
                client,
                session,
                reply.request,
                reply.pending,
                accepted,
                layout=layout,
                spec=spec,
                timeout_s=timeout_s,
                into=places,
            )
            encoded = accepted.values
        except (TransportError, DeadlineExceededError) as error:
            raise abort_transfer(session, reply.pending, error, reply.deadline) from error
    else:
        received, encoded = receive_with_values(
            client, session, reply, layout, into=places, device=device if destination is None else None
        )
    if mismatch is not None:
        raise mismatch
    version = received.version
    built, values = part.decode_values(encoded, allow_pickle=client.allow_pickle)
    if destination is not None and places is not None and not values:
        destination.mark_changed()
        return None
    content = Content(built, received.get_leaves(), values, version or accepted.version, accepted)
    if destination is not None:
        destination.finish(content, was_direct=places is not None)
    return content
