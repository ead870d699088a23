"""Who moves the content of a session: chosen when it opens, and when a local client is attached."""

from __future__ import annotations

from tdserve.server.movers.mover_context import MoverContext
from tdserve.server.movers.permit_mover import PermitMover
from tdserve.server.movers.worker_mover import WorkerMover
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import LocalClient
from tdserve.server.sessions.mover import Movers


def make_channel_movers(context: MoverContext, session: ClientSession) -> Movers:
    """Has the session's worker move everything."""
    worker = WorkerMover(context, session)
    return Movers(worker, worker, worker)


def make_local_movers(context: MoverContext, session: ClientSession, client: LocalClient) -> Movers:
    """Has a local client move, by permits, what it can read or write itself; the worker moves the rest."""
    permits = PermitMover(context, session, client)
    if client.lock_name and not client.lacks_values:
        return Movers(permits, permits, permits)
    worker = WorkerMover(context, session)
    return Movers(permits, permits if client.lock_name else worker, worker)
