"""Admission control for clients: limits their number by the file descriptors that the server's processes have.

A process without a free descriptor cannot open a file. A data worker does not survive it: gloo ends the process when it
cannot accept a connection (measured).
"""

from __future__ import annotations

from collections.abc import Iterable

from tdserve.base.errors import ServerBusyError
from tdserve.base.machine import count_descriptors, get_descriptor_limit
from tdserve.rules.channel_transports import BASE_TRANSPORT, CHANNEL_TRANSPORTS
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession

CONTROL_DESCRIPTORS = 2
"""Descriptors that another client takes at the control process: a socket and a lock if it is local, a socket to its
data worker if it uses but one port. Its gRPC connection is open already."""

KEPT_SHARE = 8
MIN_KEPT = 32
"""A process keeps one in ``KEPT_SHARE`` of its descriptors, and at least ``MIN_KEPT``, for files of its own."""


def count_kept_descriptors(limit: int) -> int:
    """Returns how many descriptors a process keeps for its own files."""
    return max(limit // KEPT_SHARE, MIN_KEPT)


def check_room(worker: DataWorker, sessions: Iterable[ClientSession], channel_transport: str) -> None:
    """Checks that another client leaves enough descriptors to its data worker and to this process.

    Raises:
        ServerBusyError: It does not.
    """
    limit = get_descriptor_limit()
    chosen = CHANNEL_TRANSPORTS[channel_transport]
    asked_of_worker = chosen.num_descriptors + chosen.has_mail * CHANNEL_TRANSPORTS[BASE_TRANSPORT].num_descriptors
    promised = sum(session.num_promised_descriptors for session in sessions if session.worker is worker)
    for whose, pid, taken, asked in (
        (f"data worker {worker.number}", worker.pid, promised, asked_of_worker),
        ("the control process", None, 0, CONTROL_DESCRIPTORS),
    ):
        free = limit - count_kept_descriptors(limit) - count_descriptors(pid) - taken
        if free < asked:
            what = f"another client, in descriptors of {whose}"
            raise ServerBusyError(what=what, asked=asked, free=max(free, 0), limit=limit)
