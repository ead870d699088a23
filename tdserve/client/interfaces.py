"""The interface of this machine on which a client waits for others, and what to do where they cannot reach it."""

from __future__ import annotations

from tdserve.addresses import address_towards as route_towards
from tdserve.addresses import interface_address, resolve
from tdserve.config import client_interface
from tdserve.errors import ConnectError


def address_towards(address: str, interface: str = "") -> str:
    """The address of this machine's interface for content.

    Args:
        address: ``host:port`` of the server.
        interface: Address on which its data worker waits, if it says so: of a name with several addresses nobody else
            knows which one reached the server.
    """
    chosen = client_interface()
    if chosen is not None:
        return interface_address(chosen)
    return route_towards(interface or resolve(address)[0])


def unformed(error: ConnectError, address: str, interface: str) -> ConnectError:
    """What a caller is told when the channel for content could not be formed.

    Args:
        error: Of the channel.
        address: ``host:port`` of the server.
        interface: Address on which its data worker waits, "" where it did not say.
    """
    there = interface or "its address"
    remedy = (
        f"content needs gloo, which connects by ports of its own choice: {there} must be reachable from here, and "
        "this address from there, so one published port is not enough. Put both into one network, or the server "
        "into its host's (network_mode: host, --advertise HOST); shared files need no gloo (transport='shm')"
    )
    return ConnectError(address=address, reason=f"{error.fields['reason']}; {remedy}")
