"""Where content may go over ports of its own: gloo and NCCL encrypt nothing, and need ports that others can reach."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from tdserve.base.errors import InvalidRequestError

ONE_PORT = "only the server's own port is reachable (--one-port)"

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class TrustedNetwork:
    """The decision for each client.

    Attributes:
        is_encrypted: Whether the server has TLS.
        has_one_port: Whether clients reach only the server's own port.
        network: Range in which content may go unencrypted; None: nowhere.
        interface: Address of the interface at which it may; "" for none.
    """

    is_encrypted: bool = False
    has_one_port: bool = False
    network: _Network | None = None
    interface: str = ""

    @classmethod
    def make(cls, *, is_encrypted: bool, has_one_port: bool, text: str, interface: str) -> TrustedNetwork:
        """Makes one of the settings of a server.

        Args:
            is_encrypted, has_one_port: As in the attributes.
            text: What ``--trusted-network`` names; "" for nothing.
            interface: Address of the interface of that name, for a text that is no range; "" otherwise.
        """
        return cls(is_encrypted, has_one_port, None if interface or not text else parse_range(text), interface)

    def explain_one_port(self, peer: str, interface: str) -> str:
        """Returns why a client must use the server's own port for everything; "" if it need not.

        Args:
            peer: Address of the client.
            interface: Address at which it reaches the server.
        """
        if self.has_one_port:
            return ONE_PORT
        if not self.is_encrypted or (self.interface and self.interface == interface):
            return ""
        if self.network is not None and all(_is_in(self.network, address) for address in (peer, interface)):
            return ""
        if self.network is None and not self.interface:
            return "the server has TLS, which gloo and NCCL lack; --trusted-network names where they may be used"
        return f"the server has TLS, and {peer} does not come from its --trusted-network"


def parse_range(text: str) -> _Network:
    """Parses a range of addresses, such as ``10.0.0.0/8``.

    Raises:
        InvalidRequestError: The text is not a range.
    """
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as fault:
        raise InvalidRequestError(argument="trusted_network", reason=str(fault)) from fault


def is_range(text: str) -> bool:
    """Returns whether a text is meant as a range of addresses, not as an interface."""
    return "/" in text


def _is_in(network: _Network, address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False
