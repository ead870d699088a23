"""The kinds of stores: their names, which the catalog and users have, and the numbers that messages have for them."""

from __future__ import annotations

from tdserve.base.errors import WrongStateError
from tdserve.v1 import control_pb2

KIND_NUMBERS: dict[str, control_pb2.StoreKind] = {
    name.removeprefix("STORE_KIND_").lower(): getattr(control_pb2, name)
    for name in control_pb2.StoreKind.keys()[1:]
    if name != "STORE_KIND_QUEUE"  # in the catalog it is a replay
}
"""By name: ``"tensordict"``, ``"replay"``, ``"weights"``, ``"keyed"``, ``"placement"``."""

KIND_NAMES: dict[int, str] = {number: name for name, number in KIND_NUMBERS.items()}
"""By number."""

QUEUE = "queue"
"""What a table is shown as if its rows are taken."""

MEANT_NAMES: dict[int, str] = {**KIND_NAMES, control_pb2.STORE_KIND_QUEUE: QUEUE}
"""The kinds, as they are shown, by the numbers that requests have for the kind that they mean."""

_USER_WORDS = {"placement": "a store that several servers share", QUEUE: "a queue"}
"""What a store of a kind is for its users, where the kind's name is another word."""


def describe_kind(kind: str) -> str:
    """Returns what errors call a store of a kind."""
    return _USER_WORDS.get(kind, f"a {kind} store")


_OPENERS = {
    "tensordict": "client[{!r}] opens it",
    "replay": "client.replay({!r}) opens it",
    QUEUE: "client.queue({!r}) opens it",
    "weights": "client.latest({!r}) pulls them",
    "keyed": "client.kv({!r}) opens it",
    "placement": "client[{!r}] opens it, with a client of all its servers",
}


def make_kind_error(name: str, kind: str, *, wanted: str, is_unshared: bool = False) -> WrongStateError:
    """Returns the error of a call for a store whose name means one of another kind, and how that one is opened.

    Args:
        kind: The kind that it has now, as it is shown.
        wanted: The kind, or kinds, that the call needs.
        is_unshared: Whether the call needs a store that several servers share, and this one has a single server.
    """
    what = describe_kind(kind) + (" of a single server" if is_unshared else "")
    opener = _OPENERS.get(kind, "")
    advice = f" ({opener.format(name)})" if opener else ""
    needed = wanted if wanted.endswith(QUEUE) else f"{wanted} store"
    return WrongStateError(state=f"store {name!r} is {what}{advice}", event=f"a call that needs a {needed}")


def count_kind(shown_kind: str, num_stores: int) -> control_pb2.KindCount:
    """Returns the message about the number of stores of one kind, or of queues."""
    is_queue = shown_kind == QUEUE
    kind = control_pb2.STORE_KIND_REPLAY if is_queue else KIND_NUMBERS[shown_kind]
    return control_pb2.KindCount(kind=kind, num_stores=num_stores, is_queue=is_queue)


def name_counted_kind(count: control_pb2.KindCount) -> str:
    """Returns the kind that ``count_kind`` was given; "unknown" if it is of a later server."""
    return name_kind(count.kind, is_queue=count.is_queue)


def name_kind(number: int, *, is_queue: bool) -> str:
    """Returns the kind of a store as it is shown: a queue is a table whose rows are taken.

    Args:
        number: The kind in a message.
        is_queue: Whether the message is about a queue.

    Returns:
        A name of ``KIND_NAMES``, or ``QUEUE``; "unknown" for a kind of a later server.
    """
    return QUEUE if is_queue else KIND_NAMES.get(number, "unknown")
