"""Addresses as people write them, and what they mean on this machine: names, interfaces, routes."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import re
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from tdserve.base.errors import ConnectError, InvalidRequestError

RESOLVE_INTERVAL_S = 0.5
"""Pause between two attempts to resolve a name: a container's name resolves once the container is up."""

PROBE_TIMEOUT_S = 0.2
"""Timeout of a connection that is opened only to explain why others fail: the user has waited long enough."""

_SIOCGIFADDR = 0x8915
_IFNAME_BYTES = 15

_ADDRESS = re.compile(
    r"((?P<host>[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}))|\[(?P<six>[^\[\]\s]+)\])(:(?P<port>\d{1,5}))?"
    r"|(?P<bare>[0-9A-Fa-f]*:[^\[\]\s]*:[^\[\]\s]*)"
)


def join_address(host: str, port: int) -> str:
    """Returns ``host:port``, with an IPv6 address in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(argument: str, text: str) -> tuple[str, int | None]:
    """Parses ``host``, ``host:port``, ``[::1]:port`` or a bare IPv6 address.

    Args:
        argument: The option or variable, for the error message.
        text: Its value.

    Returns:
        The host without brackets, and the port, or None if there is none.

    Raises:
        InvalidRequestError: It has none of these forms.
    """
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found is not None and found["port"] else None
    if found is None or port == 0 or (port or 0) > 65535:
        raise InvalidRequestError(argument=argument, reason=f"{text!r} is neither HOST nor HOST:PORT (1 to 65535)")
    host: str = found["host"] or found["six"] or found["bare"]
    if not found["host"]:
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError as fault:
            raise InvalidRequestError(argument=argument, reason=f"{text!r} is not an IPv6 address") from fault
    return host, port


def resolve(
    address: str,
    *,
    timeout_s: float = 0.0,
    given_up: Event | None = None,
    on_unknown: Callable[[str], None] = lambda _reason: None,
) -> list[str]:
    """Resolves the host of ``host:port`` to its sorted addresses, and retries a name that does not resolve yet.

    Args:
        address: As a user gives it.
        timeout_s: For all attempts. A single one may take some seconds.
        given_up: Ends the attempts when it is set.
        on_unknown: Called with the reason each time that the name does not resolve.

    Raises:
        ConnectError: The name did not resolve in time.
        InvalidRequestError: It is not an address.
    """
    host, _ = parse_address("address", address)
    deadline_s = time.monotonic() + timeout_s
    given_up = given_up or Event()
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return sorted({str(target[0]) for _, _, _, _, target in found})
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a valid host name"
            reason = f"the name {host!r} does not resolve: {why}"
            on_unknown(reason)
            if time.monotonic() + RESOLVE_INTERVAL_S > deadline_s or given_up.wait(RESOLVE_INTERVAL_S):
                raise ConnectError(address=address, reason=reason) from error


def explain_unreachable(address: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """Tries to connect to ``host:port`` and returns why that fails, or "" if it does not."""
    try:
        host, port = parse_address("address", address)
        socket.create_connection((host.strip("[]"), port or 0), timeout=timeout_s).close()
    except TimeoutError:
        return "the host does not answer (another network, or a firewall?)"
    except OSError as error:
        return str(error.strerror or error).lower()
    return ""


def find_source_address(host: str) -> str:
    """Returns the address of the interface by which this machine reaches a numeric address.

    Raises:
        ConnectError: There is no route, or it is not an address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConnectError(address=host, reason=f"no route: {error.strerror or error}") from error


def check_listenable(host: str, port: int) -> None:
    """Raises unless a server may listen there now; grpc would not give the reason.

    Raises:
        InvalidRequestError: The port is in use or privileged, or the host is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, target in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # as grpc does: a lingering connection is not another server
                probe.bind(target)
    except OSError as error:
        why = str(error.strerror).lower()
        reason = f"{join_address(host, port)} cannot be listened on: {why}{advise_on_port(error, '--port')}"
        raise InvalidRequestError(argument="address", reason=reason) from error


def advise_on_port(fault: Exception, option: str) -> str:
    """Returns what to do about a port that cannot be listened on, to be appended to a reason; "" if nothing is known.

    Args:
        option: The option of ``tdserve serve`` that has the port.
    """
    is_taken = getattr(fault, "errno", None) == errno.EADDRINUSE
    return f"; is another server there? {option} 0 takes a free one" if is_taken else ""


def find_interface_name(interface: str) -> str | None:
    """Returns the name of an interface, given by name or IPv4 address; None if no interface here has that address."""
    try:
        address = str(ipaddress.ip_address(interface.strip("[]")))
    except ValueError:
        return interface
    for _, name in socket.if_nameindex():
        with suppress(InvalidRequestError):  # it has no such address
            if find_interface_address(name) == address:
                return name
    return None


def find_interface_address(interface: str) -> str:
    """Returns the address of an interface, given by name or address: ``eth0`` or ``10.0.0.7``.

    Raises:
        InvalidRequestError: There is no such interface here, or it has no IPv4 address.
    """
    try:
        return str(ipaddress.ip_address(interface.strip("[]")))
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = struct.pack("256s", interface.encode()[:_IFNAME_BYTES])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            reason = f"{interface!r} is neither an address nor an interface with one; here are {known}"
            raise InvalidRequestError(argument="interface", reason=reason) from error


def find_peer_host(peer: str) -> str:
    """Returns the address in the name of a gRPC peer (``ipv4:10.0.0.2:1234``); that of this machine for another
    kind."""
    family, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]").removeprefix("::ffff:")
    return host if family in ("ipv4", "ipv6") else "127.0.0.1"


def find_local_address(peer: str) -> str:
    """Returns the address of the interface through which this machine reaches a gRPC peer."""
    try:
        return find_source_address(find_peer_host(peer))
    except ConnectError:
        return "127.0.0.1"
