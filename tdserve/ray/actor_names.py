"""Names of the actors that run servers, from which clients learn how many there are."""

from __future__ import annotations

import re

from tdserve.base.errors import InvalidRequestError

NAMESPACE = "tdserve"
"""Ray's namespace of all these actors, whichever job started them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_ACTOR_NAME = re.compile(rf"({_NAME.pattern})/([0-9]+)/([0-9]+)")


def check_name(name: object) -> str:
    """Returns the name of some servers if it may stand in an address.

    Raises:
        InvalidRequestError: It may not.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        reason = f"{name!r} is not a name of letters, digits, '_', '.' and '-'"
        raise InvalidRequestError(argument="name", reason=reason)
    return name


def make_actor_name(name: str, server: int, num_servers: int) -> str:
    """Returns the name of the actor of a server."""
    return f"{name}/{server}/{num_servers}"


def parse_actor_name(text: str) -> tuple[str, int, int] | None:
    """Reads such a name; None for one of another form."""
    found = _ACTOR_NAME.fullmatch(text)
    return (found[1], int(found[2]), int(found[3])) if found else None
