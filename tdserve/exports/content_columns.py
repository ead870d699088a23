"""A tensordict as columns: what is at each key."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from tdserve.base.errors import KeyNotFoundError, NotSupportedError
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.nodes import TensorLeaf, ValueLeaf

Key = tuple[str, ...]

RAGGED_REASON = (
    "its rows differ in shape; write .jsonl or .pt, leave it out by naming the keys to export (--key, or keys=), or "
    "read it in Python with pad="
)

Columns = dict[Key, Any]
"""By key a tensor, or a list of values, one for each row, which are tensors if rows differ in shape; without rows the
value itself."""


def list_columns(content: Any, keys: Sequence[Key], name: str, *, ragged: Container[Key] = ()) -> Columns:
    """Returns tensors and values by key.

    Args:
        content: A tensordict.
        keys: Only these, with what is below them; all if empty.
        name: Name of the store, for errors.
        ragged: Keys whose rows may differ in shape, though these do not.

    Raises:
        KeyNotFoundError: A key does not exist.
        NotSupportedError: A chosen key has rows that differ in structure.
    """
    captured = capture(content)
    found: Columns = {}
    for key in captured.spec.keys(include_nested=True, leaves_only=False):
        path = (key,) if isinstance(key, str) else tuple(key)
        if keys and not any(path[: len(each)] == each for each in keys):
            continue
        entry = captured.spec.find(path)
        if isinstance(entry, TensorLeaf):
            tensor = captured.tensors[path].detach().cpu().contiguous()
            found[path] = list(tensor) if path in ragged else tensor
        elif isinstance(entry, ValueLeaf) and entry.ragged is None:
            value = captured.values[path]
            has_rows = bool(captured.spec.batch_size)
            found[path] = list(value) if entry.per_row else [value] * captured.spec.batch_size[0] if has_rows else value
        elif isinstance(entry, ValueLeaf) and entry.ragged is not None and entry.ragged.dtype and entry.batch_size:
            found[path] = [piece.detach().cpu() for piece in captured.values[path]]
        elif isinstance(entry, ValueLeaf) or entry.inner is not None:
            reason = "its rows differ in structure; leave it out by naming the keys to export (--key, or keys=)"
            raise NotSupportedError(feature=f"the export of {'/'.join(path)!r} of {name!r}", reason=reason)
    if captured.spec.packed and () in captured.spec.packed:
        raise NotSupportedError(feature=f"the export of {name!r}", reason="its rows differ in structure")
    for each in keys:
        if not any(path[: len(each)] == each for path in found):
            raise KeyNotFoundError(store=name, key="/".join(each))
    return found
