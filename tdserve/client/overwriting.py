"""Writes over a part of what is stored: an index expression, and all leaves or those at one key."""

from __future__ import annotations

from typing import Any

from tdserve.client.calls import SessionClient
from tdserve.client.fitting import fitted
from tdserve.client.writing import write_selection
from tdserve.content import selected_spec
from tdserve.deadline import Deadline
from tdserve.selection import encode
from tdserve.spec.tree import Path, Spec


def overwrite(
    client: SessionClient,
    name: str,
    stored: Spec,
    index: Any,
    value: Any,
    *,
    at: Path,
    generations: bytes = b"",
    deadline: Deadline,
) -> None:
    """Replaces what an index selects, whole or not at all.

    Args:
        stored: Structure of the store, rows included.
        index: As in ``tensordict[index]``.
        value: What goes there; broadcast as an assignment would.
        generations: Of a replay's rows, as ``write_selection`` takes them.
        at: Key of a leaf or nested part; ``()``: the leaves that ``value`` has.

    Raises:
        SelectionError, KeyNotFoundError, SpecMismatchError: Nothing was written.
    """
    selection = encode(index, batch_size=stored.batch_size, store=name)
    chosen = selected_spec(stored, selection, (at,) if at else (), store=name)
    captured, keys = fitted(value, chosen, at=at, store=name, is_whole=bool(at), allow_pickle=client.allow_pickle)
    if not captured.tensors and not captured.values:
        return
    write_selection(
        client,
        name,
        selection,
        captured,
        keys=keys or ((at,) if at else ()),
        stored=stored,
        generations=generations,
        deadline=deadline,
    )
