"""Overwrites a part of a store: an index expression, of all leaves or of those at one key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotSupportedError
from tdserve.client.handles.coerce import FittedValue, Manner, coerce_value
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.write import NO_EXPECTATION, ExpectedRows, write_selection
from tdserve.messages.content import select_spec
from tdserve.messages.selection.items import split_index
from tdserve.messages.selection.selection import Selection, encode
from tdserve.structure.captures import unbatched
from tdserve.structure.captures.captured import Captured
from tdserve.structure.trees.nodes import count_dims
from tdserve.structure.trees.tree import Path, Spec, quote
from tdserve.v1 import control_pb2


def overwrite(
    client: SessionClient,
    name: str,
    stored: Spec,
    index: Any,
    value: Any,
    *,
    at: Path,
    manner: Manner = Manner.ROWS,
    is_exact: bool = True,
    expected: ExpectedRows = NO_EXPECTATION,
    shared: Callable[[Path], Any] | None = None,
    kind: control_pb2.StoreKind = control_pb2.STORE_KIND_TENSORDICT,
    deadline: Deadline,
) -> None:
    """Replaces what an index selects, whole or not at all.

    Args:
        stored: Structure of the store, rows included.
        index: As in ``tensordict[index]``.
        value: The new content. A FittedValue is written as it is.
        manner: What is broadcast.
        is_exact: As for ``coerce_value``.
        expected: As in ``write_selection``.
        shared: Reads what all rows share at a key. It is called when only some rows are written; None: nothing is
            shared.
        kind: As in ``write_selection``.
        at: Key of a leaf or nested part; ``()``: all leaves that ``value`` has.

    Raises:
        SelectionError, KeyNotFoundError, SpecMismatchError: Nothing was written.
        NotSupportedError: Only a part of something that is stored in one piece is selected, or the rows would get
            another UnbatchedTensor than the rest, which share one. Nothing was written.
    """
    if stored.root.inner is not None and not stored.root.batch_size:
        index = _find_whole(index, stored, store=name)
    else:
        check_whole_rows(index, stored, at, store=name)
    selection = encode(index, batch_size=stored.batch_size, store=name)
    chosen = select_spec(stored, selection, (at,) if at else (), store=name)
    if isinstance(value, FittedValue):
        value.check_fits(chosen, store=name)
        captured, keys = value
    else:
        captured, keys = coerce_value(
            value,
            chosen,
            at=at,
            store=name,
            manner=manner,
            is_whole=bool(at),
            allow_pickle=client.allow_pickle,
            is_exact=is_exact,
        )
    if not captured.tensors and not captured.values:
        return
    if shared is not None:
        _check_shared(captured, selection, shared, stored, store=name)
    write_selection(
        client,
        name,
        selection,
        captured,
        keys=keys or ((at,) if at else ()),
        stored=stored,
        expected=expected,
        kind=kind,
        deadline=deadline,
    )


def _check_shared(
    captured: Captured, selection: Selection, shared: Callable[[Path], Any], stored: Spec, *, store: str
) -> None:
    """Raises where some rows would get another UnbatchedTensor than the rest: they could not be read together."""
    num_written = math.prod(selection.compute_batch_size(stored.batch_size))
    if num_written in (0, math.prod(stored.batch_size)):
        return
    for path, leaf in captured.spec.values:
        if leaf.is_unbatched and unbatched.to_value(shared(path)) != captured.values[path]:
            feature = f"another UnbatchedTensor at key {quote(path)} for a part of the rows of store {store!r}"
            raise NotSupportedError(feature=feature, reason="all rows have one: write it with store.set(key, tensor)")


def check_whole_rows(index: Any, stored: Spec, at: Path, *, store: str) -> None:
    """Raises where the index of a write extends beyond the batch dimensions of a store or view.

    Raises:
        NotSupportedError: The index does. Nothing was written.
    """
    num_dims = len(stored.batch_size)
    if not num_dims or not (at or stored.root.inner):
        return
    _, below = split_index(index, num_dims, count_dims(stored.find(at, store=store)))
    if below is not None:
        what = f"key {quote(at)}" if at else "one that is kept in one piece"
        reason = "rows are written whole: change what is read of store[row], and write it to store[row]"
        raise NotSupportedError(feature=f"writing a part of a row of store {store!r}, {what},", reason=reason)


def _find_whole(index: Any, stored: Spec, *, store: str) -> Any:
    """Returns the index of a whole store that is kept in one piece because its stacked parts differ in structure."""
    items = index if isinstance(index, tuple) else (index,)
    num_dims = len(stored.root.shown_batch_size)
    is_whole = all(item is ... or (isinstance(item, slice) and item == slice(None)) for item in items)
    if is_whole and len(items) - (... in items) <= num_dims:
        return ...
    reason = (
        "what is stacked in it differs in structure, so that it is kept in one piece: change what to_tensordict() "
        "returns, and write all of it with store[...] = td; stacked along dimension 0 it has rows to write"
    )
    raise NotSupportedError(feature=f"writing a part of store {store!r}", reason=reason)
