"""The kinds of stores: their names, which the catalog and users have, and the numbers that messages have for them."""

from __future__ import annotations

from tdserve.v1 import control_pb2

KIND_NUMBERS: dict[str, control_pb2.StoreKind] = {
    name.removeprefix("STORE_KIND_").lower(): getattr(control_pb2, name) for name in control_pb2.StoreKind.keys()[1:]
}
"""By name: ``"tensordict"``, ``"replay"``, ``"weights"``, ``"keyed"``, ``"placement"``."""

KIND_NAMES: dict[int, str] = {number: name for name, number in KIND_NUMBERS.items()}
"""By number."""

QUEUE = "queue"
"""What a table is shown as if its rows are taken."""


_USER_WORDS = {"placement": "a store that several servers share"}
"""What a store of a kind is for its users, where the kind's name says something else."""


def describe_kind(kind: str) -> str:
    """Returns what errors call a store of a kind."""
    return _USER_WORDS.get(kind, f"a {kind} store")


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
