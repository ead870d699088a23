"""Gloo groups that are being formed, whose waits can be ended from this process.

gloo's constructor waits up to five times its timeout for a connection that does not come (measured), and nothing of
its own wakes it. A thread that returns from it to Python while the interpreter ends is ended in the middle of C++, and
the process with it (SIGABRT or SIGSEGV). A connection from any process wakes it, and so does one of its own that is
given up.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from tdserve.transport.strangers import abandon_connecting, decode_port

_CONNECT_TIMEOUT_S = 0.2
"""For a connection to a port of this process."""

_forming: dict[object, tuple[int, Callable[[], None]]] = {}  # no lock, which a fork could find taken


@contextmanager
def note_forming(end: Callable[[], None]) -> Iterator[None]:
    """Notes during the block that a group is being formed.

    Args:
        end: Ends the waits of its constructor, from any thread.
    """
    key = object()
    _forming[key] = os.getpid(), end
    try:
        yield
    finally:
        _forming.pop(key, None)


_ending: set[int] = set()
"""Ids of this process once it ends: a fork is another process."""


def is_ending() -> bool:
    """Returns whether this process has ended the forming of all groups, since it ends."""
    return os.getpid() in _ending


def end_forming() -> None:
    """Ends the waits of all groups that are being formed in this process, which ends; their forming then fails."""
    _ending.add(os.getpid())
    for pid, end in list(_forming.values()):
        if pid == os.getpid():
            end()


def end_connecting(host: str, address: bytes | None, others: Sequence[bytes], rank: int, world_size: int) -> None:
    """Ends what a rank of this process waits for: connections to it come, and go again; those to others are given up.

    Args:
        host: Where it listens.
        address: What it has sent through the rendezvous: its port, and at the end a number for each rank, by which a
            connection names the pair that it is for. None: it has sent nothing, and waits for no connection.
        others: What other ranks have sent, and it has received.
        rank, world_size: Its rank, and the number of ranks.
    """
    port, num_bytes = decode_port(address or b""), 8 * world_size
    if address is None or port is None or len(address) < num_bytes:
        return
    abandon_connecting({each for each in map(decode_port, others) if each is not None})
    numbers = struct.unpack(f"<{world_size}q", address[-num_bytes:])
    for other, number in enumerate(numbers):
        if other != rank:
            with suppress(OSError), socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as connection:
                connection.sendall(struct.pack("<q", number))
