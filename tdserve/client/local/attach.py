"""Whether a session's content moves through the server's own files."""

from __future__ import annotations

import platform
from collections.abc import Callable

from tdserve.base.errors import ConnectError, NotLocalError, PeerLostError
from tdserve.base.machine import why_not_shared
from tdserve.client.local.end import LocalEnd
from tdserve.v1 import control_pb2


def open_local(
    welcome: control_pb2.Welcome,
    *,
    transport: str,
    root: str | None,
    address: str,
    on_message: Callable[[control_pb2.ServerMessage], None],
    on_lost: Callable[[], None],
    machine: str | None = None,
) -> tuple[LocalEnd | None, str]:
    """The client's end of the local socket, where it sees the server's files; else why there is none.

    Args:
        transport: That was asked for: with ``"shm"`` there must be one.
        address: Of the server, for errors.
        root, on_message, on_lost: As of ``LocalEnd.open``.
        machine: Kind of processor; None is that of this machine.

    Raises:
        NotLocalError: Shared memory was asked for, and cannot be had.
        PeerLostError: It was asked for, and the server does not let this client in any more.
    """
    unordered = why_not_shared(platform.machine() if machine is None else machine)
    if unordered or not welcome.HasField("local"):
        error = ConnectError(address=address, reason=unordered or "the server runs on another machine")
    else:
        try:
            return LocalEnd.open(welcome, root=root, on_message=on_message, on_lost=on_lost), ""
        except PeerLostError as failure:
            if transport == "shm":
                raise
            return None, str(failure.fields["reason"])
        except ConnectError as failure:
            error = failure
    reason = str(error.fields["reason"])
    if transport == "shm":
        raise NotLocalError(address=address, reason=reason) from error
    return None, reason
