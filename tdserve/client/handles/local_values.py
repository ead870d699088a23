"""Values for local calls and for writes: handles and views among them are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict, is_tensor_collection

from tdserve.base.deadline import Deadline
from tdserve.client.handles.key_paths import check_path
from tdserve.client.handles.view_calls import ViewCalls
from tdserve.structure.captures.array_dicts import select_entries
from tdserve.structure.trees.tree import Path


def read_remote(value: Any, deadline: Deadline | None = None) -> Any:
    """Reads a handle or view into a local tensordict; returns any other value, also one that contains some, as it is.

    Args:
        deadline: Deadline of the call that reads; None: the default timeout of its client begins now.
    """
    if isinstance(value, ViewCalls):
        return value._read_all(value._store.make_deadline(None) if deadline is None else deadline)
    return value


def to_local(value: Any, deadline: Deadline | None = None) -> Any:
    """Replaces handles and views among arguments by local tensordicts; arguments as in ``read_remote``."""
    if type(value) in (list, tuple):
        return type(value)(to_local(item, deadline) for item in value)
    if type(value) is dict:
        return {key: to_local(item, deadline) for key, item in value.items()}
    return read_remote(value, deadline)


def keep_keys(values: Any, keys: Sequence[str | Path] | None, deadline: Deadline) -> Any:
    """Returns the values to write at ``keys_to_update``, as far as they exist."""
    values = to_local(values, deadline)
    if keys is None:
        return values
    if isinstance(values, dict):
        return select_entries(values, [check_path(key) for key in keys])
    if not is_tensor_collection(values):
        values = TensorDict(values)
    return values.select(*keys, strict=False)
