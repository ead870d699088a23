"""What each request needs: a role, and the names of the stores that it is about. One table for the whole protocol.

A request without an entry is refused, so a new kind of request is closed until it is entered here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple


class Role(IntEnum):
    """What the holder of a token may do; each role may do what those below it may."""

    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """Its name in files, messages and logs."""
        return self.name.lower()


ROLES: Mapping[str, Role] = {role.label: role for role in Role}
"""The roles by their names in files."""


class Need(NamedTuple):
    """What one request needs.

    Attributes:
        role: The lowest role that may make it.
        stores: Names of the stores, or of the group, that it is about; the token's patterns must include all of them.
        call: Its name for errors and logs: a question over a session is named as the call that asks the same.
        is_server_wide: Whether it is about all stores.
    """

    role: Role
    stores: tuple[str, ...] = ()
    call: str = ""
    is_server_wide: bool = False


@dataclass(frozen=True)
class _Rule:
    """An entry of the table.

    Attributes:
        role: The role.
        name: Field of the request with the name of its store; "" for a request about no store.
        oneof: Its oneof whose field decides, if ``steps`` has entries.
        steps: Entries of the fields of ``oneof``; a name in one is a field of that message.
        flags: Fields of which each makes it a request that needs ``WRITE``.
        is_server_wide: As in ``Need``.
    """

    role: Role
    name: str = ""
    oneof: str = ""
    steps: Mapping[str, _Rule] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    is_server_wide: bool = False


_READ, _WRITE, _ADMIN = _Rule(Role.READ), _Rule(Role.WRITE), _Rule(Role.ADMIN)
_READ_STORE, _WRITE_STORE = _Rule(Role.READ, "store"), _Rule(Role.WRITE, "store")

_QUESTIONS = {
    "describe_store": _Rule(Role.READ, "name"),
    "list_stores": _READ,  # the answer leaves out names that the token does not include
    "list_keys": _Rule(Role.READ, "name"),
}

_MOVE_STEPS = {
    **dict.fromkeys(("list_files", "read", "seal", "unseal", "release"), _ADMIN),
    **dict.fromkeys(("receive", "write", "complete", "list_complete", "sync", "give_up", "place"), _ADMIN),
    "show": _READ,  # any client that finds a released store completes its move, and changes nothing else
}

REQUESTS: Mapping[str, _Rule] = {
    # The session itself. What these messages refer to was granted by another request of the same session.
    **dict.fromkeys(("hello", "rendezvous", "attach", "cancel", "part", "channel_lost", "client_report"), _READ),
    **dict.fromkeys(("written", "taken", "relay_report"), _READ),
    "catalog": _Rule(Role.READ, oneof="body", steps=_QUESTIONS),
    "read": _Rule(Role.READ, "store", flags=("is_for_writing",)),
    # Rows on lease are taken away from others, and those that were drawn for ranks are kept from writers.
    "sample": _Rule(Role.READ, "store", flags=("is_lease", "share")),
    "latest": _READ_STORE,
    "get": _READ_STORE,
    "list": _READ_STORE,
    "write": _WRITE_STORE,
    "extend": _WRITE_STORE,
    "publish": _WRITE_STORE,
    "change": _WRITE_STORE,
    "alter": _WRITE_STORE,
    "put": _WRITE_STORE,
    "remove": _WRITE_STORE,
    "end_filling": _WRITE_STORE,
    "create_store": _Rule(Role.WRITE, "name"),
    "claimed": _WRITE,
    # Members of a group send each other tensors, and can make its collectives fail.
    **dict.fromkeys(("join_group", "group_notice"), _Rule(Role.WRITE, "name")),
    "delete_store": _Rule(Role.ADMIN, "name"),
    "adopt": _Rule(Role.ADMIN, "name"),  # it reads any folder below --adoptable
    "checkpoint": _Rule(Role.ADMIN, "store", is_server_wide=True),
    "move": _Rule(Role.ADMIN, "store", oneof="step", steps=_MOVE_STEPS),
}
"""By field of ``ClientMessage.body``."""

CALLS: Mapping[str, _Rule] = {
    "session": _READ,
    **_QUESTIONS,
    **dict.fromkeys(("get_stats", "observe"), _READ),  # figures of the whole server are for admins of all stores
}
"""By method of the service that is not a request of a session, in snake case."""


def find_need(kind: str, asked: Any) -> Need:
    """Returns what a request needs.

    Args:
        kind: Its key in ``REQUESTS``, or in ``CALLS``. An unknown one needs ``ADMIN``.
        asked: The message of that kind.
    """
    rule = REQUESTS.get(kind) or CALLS.get(kind, _ADMIN)
    stores: tuple[str, ...] = (getattr(asked, rule.name),) if rule.name else ()
    role, call = rule.role, kind
    if rule.oneof:
        step = asked.WhichOneof(rule.oneof) or ""
        chosen = rule.steps.get(step, _ADMIN)
        role, call = chosen.role, step if kind == "catalog" else kind
        if chosen.name:
            stores += (getattr(getattr(asked, step), chosen.name),)
    if rule.flags and any(field.name in rule.flags for field, _ in asked.ListFields()):
        role = max(role, Role.WRITE)
    if kind == "create_store":
        stores += _list_policies(asked)
    elif kind == "write" and asked.HasField("new_store"):
        stores += (asked.new_store.name, *_list_policies(asked.new_store))
    return Need(role, stores, call, rule.is_server_wide)


def _list_policies(wanted: Any) -> tuple[str, ...]:
    """Returns the weights whose newest version a table would follow."""
    try:
        policy = json.loads(wanted.settings).get("policy", "") if wanted.settings else ""
    except (ValueError, AttributeError):  # the creation of the store refuses such settings
        return ()
    return (policy,) if isinstance(policy, str) and policy else ()
