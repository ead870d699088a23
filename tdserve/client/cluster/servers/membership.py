"""The servers of a cluster by number, from one of three sources: a list, DNS, or Ray."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from urllib.parse import parse_qs, urlsplit

from tdserve.base.addresses import join_address, parse_address, resolve
from tdserve.base.errors import ConnectError, InvalidRequestError
from tdserve.rules.placement import MAX_SERVERS


class Membership(ABC):
    """Where the servers of a cluster are. Their number is fixed; the address of one may change when it restarts.

    Attributes:
        text: As given to ``tdserve.connect``.
        num_servers: All of them, alive or not.
        token: Token of all servers, once one was found, if the source of their list keeps it.
    """

    text: str
    num_servers: int
    token: str | None = None

    @abstractmethod
    def find(self, server: int) -> str:
        """Returns the address of a server now.

        Raises:
            ConnectError: It has none at the moment.
        """


class StaticMembership(Membership):
    """A list of addresses, whose order numbers the servers: every client must have the same."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._addresses = [_check(each.strip()) for each in text.split(",") if each.strip()]
        self.num_servers = len(self._addresses)
        if len(set(self._addresses)) < self.num_servers:
            raise InvalidRequestError(argument="address", reason=f"{text!r} names a server twice")

    def find(self, server: int) -> str:
        """See :class:`Membership`."""
        return self._addresses[server]


class DnsMembership(Membership):
    """The pods of a StatefulSet behind a headless service: ``dns://tdserve.default.svc:7707``.

    Server 2 is the pod ``tdserve-2.tdserve.default.svc``. A name whose pods have no names of their own stands for its
    addresses, sorted: their numbers hold as long as all of them stay.

    Args:
        text: With ``?servers=3`` the number is known, whichever pods there are now; without, those that have a name
            when the client connects are counted.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        parts = urlsplit(text)
        host, port = parse_address("address", parts.netloc)
        if port is None:
            raise InvalidRequestError(argument="address", reason=f"{text!r} has no port, as in dns://{host}:7707")
        asked = parse_qs(parts.query, keep_blank_values=True)
        if asked.keys() - {"servers", "pods"}:
            raise InvalidRequestError(argument="address", reason=f"{text!r}: only ?servers= and ?pods= are known")
        self._port, self._host = port, host
        pods = asked.get("pods", [host.partition(".")[0]])[0]
        self._addresses: list[str] = []
        if "servers" in asked:
            self.num_servers = _parse_number(text, asked["servers"][0])
        else:
            self.num_servers = 0
            while self.num_servers < MAX_SERVERS and _is_resolvable(f"{pods}-{self.num_servers}.{host}"):
                self.num_servers += 1
            if not self.num_servers:
                self._addresses = _list_addresses(host)
                self.num_servers = len(self._addresses)
        self._names = [f"{pods}-{server}.{host}" for server in range(self.num_servers)]

    def find(self, server: int) -> str:
        """See :class:`Membership`. A name needs no look-up here: connections resolve it again by themselves."""
        return join_address((self._addresses or self._names)[server], self._port)


_SCHEMES = {
    "dns": "tdserve.client.cluster.servers.membership:DnsMembership",
    "ray": "tdserve.ray.ray_membership:RayMembership",
}
"""The class of each scheme, by the module in which it is: what it needs is imported when it is used."""


def is_of_cluster(address: object) -> bool:
    """Returns whether an address names several servers."""
    return isinstance(address, str) and ("," in address or "://" in address)


def read_membership(address: str) -> Membership:
    """Reads the address of a cluster.

    Raises:
        InvalidRequestError: The address is invalid.
        ConnectError: The source of the list does not answer, or has no servers.
    """
    scheme, separator, _ = address.partition("://")
    if not separator:
        return StaticMembership(address)
    if scheme not in _SCHEMES:
        known = ", ".join(f"{each}://" for each in _SCHEMES)
        raise InvalidRequestError(argument="address", reason=f"{address!r} is neither HOST:PORT,HOST:PORT nor {known}")
    module, _, name = _SCHEMES[scheme].partition(":")
    found: Membership = getattr(importlib.import_module(module), name)(address)
    return found


def _check(address: str) -> str:
    if parse_address("address", address)[1] is None:
        raise InvalidRequestError(argument="address", reason=f"{address!r} has no port; give HOST:PORT,HOST:PORT")
    return address


def _parse_number(text: str, number: str) -> int:
    if not number.isdecimal() or not 1 <= int(number) <= MAX_SERVERS:
        raise InvalidRequestError(
            argument="address", reason=f"{text!r}: servers is not a number from 1 to {MAX_SERVERS}"
        )
    return int(number)


def _is_resolvable(host: str) -> bool:
    try:
        return bool(resolve(host))
    except ConnectError:
        return False


def _list_addresses(host: str) -> list[str]:
    """Returns the addresses of one family: a server may have one of each."""
    found = resolve(host)
    return [each for each in found if ":" not in each] or found
