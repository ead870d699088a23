"""Strangers at gloo's ports, as the kernel shows them, and a way to close a port to them."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

MAX_NAMED = 5
"""Most hosts that a message names."""

NUMBER_BYTES = 8
"""Length of the first bytes of a connection: the number of its pair. A proof follows."""

_ESTABLISHED, _SYN_SENT = "01", "02"

_BYTES_RECEIVED_AT = 128
_TCP_INFO_BYTES = 136
"""Length of struct tcp_info in linux/tcp.h, up to tcpi_bytes_received."""

_SO_ATTACH_FILTER = 26
_REFUSE_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A packet filter of one instruction, "return 0": no packet passes."""


def describe_connections(address: bytes | None) -> str:
    """Returns the hosts that are connected to the port of a rank, the most connections first.

    Args:
        address: The address that the rank has sent through the rendezvous; None: it has sent nothing.
    """
    port = decode_port(address or b"")
    if port is None:
        return "its address is not known"
    return f"connected to port {port} are {_describe_hosts(_count_hosts(port))}"


@dataclass
class Sockets:
    """TCP sockets of this process.

    Attributes:
        strangers: For each host, its number of connections over which no more than a number has come.
        listening: Descriptors of the sockets that accepted them.
    """

    listening: list[int] = field(default_factory=list)
    strangers: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_this_process(cls) -> Sockets:
        """Reads all descriptors of this process."""
        found, hosts = cls(), []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), _open_socket(int(name)) as each:
                if each is None:
                    continue
                port = each.getsockname()[1]
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.listening.append(int(name))
                elif _count_received(each) <= NUMBER_BYTES:
                    hosts.append((port, each.getpeername()[0]))
        ports = {_read_port(fd): fd for fd in found.listening}
        found.strangers.update(host for port, host in hosts if port in ports)
        found.listening = [ports[port] for port in {port for port, _ in hosts} & ports.keys()]
        return found

    @property
    def num_strangers(self) -> int:
        """Number of connections of all hosts."""
        return self.strangers.total()

    def describe_strangers(self) -> str:
        """Returns their hosts, the most connections first."""
        return _describe_hosts(self.strangers)


def refuse_connections(listening: int) -> None:
    """Makes the kernel drop requests for connections to a listening socket; existing connections continue.

    Does nothing if the system has no such filters.
    """
    program = struct.pack("HP", 1, ctypes.addressof(_REFUSE_ALL))
    with suppress(OSError), _open_socket(listening) as each:
        if each is not None:
            each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@contextmanager
def _open_socket(fd: int) -> Iterator[socket.socket | None]:
    """Opens a TCP socket that another part of this process owns; None if the descriptor is something else."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        yield None
        return
    with socket.socket(fileno=os.dup(fd)) as found:
        yield found if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM else None


def _count_received(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:  # an old kernel has less
        return NUMBER_BYTES + 1
    return int(struct.unpack_from("<Q", info, _BYTES_RECEIVED_AT)[0])


def _read_port(listening: int) -> int:
    with suppress(OSError), _open_socket(listening) as each:
        if each is not None:
            return int(each.getsockname()[1])
    return 0


def _describe_hosts(hosts: Counter[str]) -> str:
    named = [f"{host} ({num})" for host, num in hosts.most_common(MAX_NAMED)]
    more = f" and {len(hosts) - MAX_NAMED} other hosts" if len(hosts) > MAX_NAMED else ""
    return f"{', '.join(named) or 'none any more'}{more}"


def abandon_connecting(ports: Collection[int]) -> None:
    """Gives up the connections that this process opens to these ports, on any host, and that have got no answer yet."""
    inodes = {
        int(fields[9])
        for fields, _ in _read_connections()
        if fields[3] == _SYN_SENT and int(fields[2].rpartition(":")[2], 16) in ports
    }
    for name in os.listdir("/proc/self/fd") if inodes else ():
        with suppress(OSError):
            if os.fstat(int(name)).st_ino in inodes:
                with _open_socket(int(name)) as each:
                    if each is not None:
                        each.shutdown(socket.SHUT_RDWR)


def _read_connections() -> Iterator[tuple[list[str], socket.AddressFamily]]:
    """Yields the fields of each TCP connection of this network namespace, as the kernel lists them, and its family."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            lines = Path("/proc/self/net", name).read_text().splitlines()[1:]
            yield from ((line.split(), family) for line in lines)


def decode_port(address: bytes) -> int | None:
    """Returns the port from gloo's description of a rank: the length of its host's name, the name, and a sockaddr after
    its own length."""
    try:
        (name_nbytes,) = struct.unpack_from("<Q", address)
        (family,) = struct.unpack_from("<H", address, name_nbytes + 16)
        (port,) = struct.unpack_from(">H", address, name_nbytes + 18)
    except (struct.error, OverflowError):
        return None
    return int(port) if family in (socket.AF_INET, socket.AF_INET6) else None


def _count_hosts(port: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, local, remote, state, *_), family in _read_connections():
        if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
            found[_decode_host(remote.rpartition(":")[0], family)] += 1
    return found


def _decode_host(words: str, family: socket.AddressFamily) -> str:
    """Returns an address from the kernel's notation: words of four bytes, each in the byte order of the machine."""
    packed = b"".join(int(words[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(words), 8))
    return socket.inet_ntop(family, packed)
