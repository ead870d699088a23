"""Names of the dimensions of a selection's result, by tensordict's own rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from tdserve.messages.selection.items import Item
from tdserve.messages.selection.selection import Selection
from tdserve.messages.selection.torch_selection import to_torch_item


def select_names(
    names: Sequence[str | None] | None, batch_size: Sequence[int], selection: Selection
) -> tuple[str | None, ...] | None:
    """Returns the names of the dimensions of a selection's result, by tensordict's own rules; ``None`` if there are no
    names.

    Args:
        names: One per batch dimension, or ``None``.
        batch_size: Batch size of the tensordict.
        selection: A selection that fits the batch size.
    """
    if names is None or all(name is None for name in names):
        return None
    canonical = selection.canonicalise(batch_size)
    # A negative step names its dimension as a positive one does, and tensordict accepts only the latter.
    index = tuple(to_torch_item(_reverse_step(item)) for item in canonical.items)
    given: Any = list(names)  # tensordict's annotation omits that a dimension may be unnamed
    empty = TensorDict({}, batch_size=list(batch_size), names=given)
    found = tuple((empty[index] if index else empty).names)
    return None if all(name is None for name in found) else found


def _reverse_step(item: Item) -> Item:
    if isinstance(item, slice) and item.step is not None and item.step < 0:
        return slice(None, None, -item.step)
    return item
