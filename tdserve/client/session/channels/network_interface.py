"""The network interface on which a client waits for others, and the error for one that they cannot reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tdserve.base.addresses import find_interface_address, find_source_address as route_towards, resolve
from tdserve.base.config import read_client_interface
from tdserve.base.errors import ConnectError, InvalidRequestError

BEYOND = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has: the route to them is the route to all machines that are not near."""


def find_content_address(address: str, interface: str = "") -> str:
    """Returns the address of this machine's interface for content.

    Args:
        address: ``host:port`` of the server.
        interface: Address on which its data worker waits, if the server names it: of a host name with several addresses
            only the server knows which one was reached.
    """
    chosen = read_client_interface()
    if chosen is not None:
        return find_interface_address(chosen)
    return route_towards(interface or resolve(address)[0])


def find_offered_address(hosts: Iterable[str], own: str, *, beyond: Sequence[str] = BEYOND) -> str:
    """Returns the address to offer to other clients: loopback would lead those on other machines to themselves.

    If all are on this machine, loopback is used, where no other machine can listen.

    Args:
        hosts: Names of the machines of all members.
        own: Address of this machine towards the server; offered unless it is loopback and a member is elsewhere.
        beyond: Addresses; otherwise the interface on the route to one of them is offered.

    Raises:
        ConnectError: There is no such interface; the error names the setting.
    """
    if read_client_interface() is not None or not _is_loopback(own) or set(hosts) <= {socket.gethostname()}:
        return own
    for far in beyond:
        with suppress(ConnectError):
            return route_towards(far)
    reason = "members on other machines cannot reach it; TDSERVE_INTERFACE names an interface that they reach"
    raise ConnectError(address=own, reason=reason)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def make_channel_error(reason: str, address: str, interface: str) -> ConnectError:
    """Makes the error for a content channel that could not be opened, or not in time.

    Args:
        reason: Why it failed.
        address: ``host:port`` of the server.
        interface: Address on which its data worker waits, "" if the server did not name it.
    """
    there, here = interface or "its address", "this machine"
    with suppress(ConnectError, InvalidRequestError):
        here = find_content_address(address, interface)
    remedy = (
        f"content needs gloo, which connects by ports of its own choice: {there} must be reachable from here, and "
        f"{here} (or another, by TDSERVE_INTERFACE) from there, so one published port is not enough. Put both into one "
        "network, or the server into its host's (network_mode: host, --advertise HOST to be called by its address); "
        "shared files need no gloo (transport='shm')"
    )
    return ConnectError(address=address, reason=f"{reason}; {remedy}")
