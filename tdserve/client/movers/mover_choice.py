"""Who moves the content of a client's session: chosen once, when it opens."""

from __future__ import annotations

from tdserve.client.movers.channel_mover import ChannelMover
from tdserve.client.movers.mapped_mover import MappedMover
from tdserve.client.session.requests.client_mover import ClientMovers
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient


def make_movers(client: SessionClient, session: Session) -> ClientMovers:
    """Has this process copy what it can read or write itself out of and into the server's files; the rest goes over the
    session's channel."""
    channel, local = ChannelMover(client, session), session.local
    if local is None:
        return ClientMovers(channel, channel, channel)
    mapped = MappedMover(client, session, local)
    entries = channel if local.is_read_only or local.lacks_values else mapped
    return ClientMovers(mapped, channel if local.is_read_only else mapped, entries)
