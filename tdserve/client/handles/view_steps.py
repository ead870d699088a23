"""The steps that make up a view, and the translation of index expressions on views into those of the store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, set_lazy_legacy

from tdserve.base.errors import KeyNotFoundError
from tdserve.messages.selection.items import Item, is_mask
from tdserve.messages.selection.selection import Selection

KEY_STEPS = frozenset({"select", "exclude", "flatten_keys", "unflatten_keys"})
"""Calls that choose or name keys. They commute with a choice of rows."""

SHAPE_STEPS = frozenset(
    {
        "broadcast_to",
        "expand",
        "expand_as",
        "flatten",
        "moveaxis",
        "movedim",
        "permute",
        "reshape",
        "squeeze",
        "swapaxes",
        "swapdims",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
    }
)
"""Calls that rearrange the batch dimensions."""

REPEATING_STEPS = frozenset({"broadcast_to", "expand", "expand_as"})
"""Calls after which a row may occur more than once."""

STACKING_STEPS = REPEATING_STEPS | {"unsqueeze"}
"""Calls that turn NonTensorData into a NonTensorStack."""

INDEX_STEP = "__getitem__"
"""An index into rows that were rearranged."""

Dim = int | range
"""What remains of a dimension of the store: positions, or a single one, whose dimension is removed."""

Grid = NDArray[np.int64]


class Step(NamedTuple):
    """One call of a tensordict method."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def apply(self, td: Any) -> Any:
        """Performs the call on a local object, which may lack some keys that the call names."""
        kwargs = {**self.kwargs, "strict": False} if self.name == "select" else self.kwargs
        with set_lazy_legacy(False):  # lazy legacy returns objects that do not accept every call
            return getattr(td, self.name)(*self.args, **kwargs)

    def check(self, td: Any, *, store: str) -> Any:
        """Performs the call on a skeleton. Raises what tensordict raises, with KeyNotFoundError for a KeyError."""
        try:
            with set_lazy_legacy(False):
                return getattr(td, self.name)(*self.args, **self.kwargs)
        except KeyError as error:
            missing = [key for key in self.args if isinstance(key, (str, tuple)) and key not in td.keys(True)]
            named = missing[0] if missing else error.args[0] if error.args else ""
            raise KeyNotFoundError(store=store, key=str(named)) from None


def narrow_dims(dims: Sequence[Dim], index: Sequence[int | slice]) -> tuple[Dim, ...]:
    """Applies an index to the remaining dimensions."""
    left = list(index)
    return tuple(dim[left.pop(0)] if isinstance(dim, range) and left else dim for dim in dims)


def compose_index(dims: Sequence[Dim], selection: Selection) -> tuple[Item, ...]:
    """Returns the index of a store that selects what a canonical selection selects of its remaining dimensions."""
    left = list(dims)
    found: list[Item] = []

    def next_range() -> range:
        while isinstance(left[0], int):
            found.append(left.pop(0))  # type: ignore[arg-type]
        first = left.pop(0)
        return first if isinstance(first, range) else range(0)

    for item in selection.items:
        if item is None or item is ... or (is_mask(item) and not item.ndim):
            found.append(item)
        elif is_mask(item):
            for positions in np.nonzero(item):
                span = next_range()
                found.append(_list_positions(span)[positions])
        elif isinstance(item, np.ndarray):
            span = next_range()
            found.append(_list_positions(span)[item])
        else:
            span = next_range()
            found.append(_to_item(span[item]))
    return (*found, *map(_to_item, left))


def count_elements(dims: Sequence[Dim]) -> int:
    """Counts the elements of the remaining dimensions."""
    return math.prod(len(dim) for dim in dims if isinstance(dim, range))


def make_grid(dims: Sequence[Dim], steps: Sequence[Step]) -> torch.Tensor:
    """Returns the number of the element at each position after all steps."""
    sizes = [len(dim) for dim in dims if isinstance(dim, range)]
    td: Any = TensorDict({"at": torch.arange(count_elements(dims)).reshape(sizes)}, sizes)
    for step in steps:
        td = step.apply(td) if step.name not in KEY_STEPS else td
    grid: torch.Tensor = td.get("at")
    return grid


def spread(dims: Sequence[Dim], grid: Grid) -> tuple[Item, ...]:
    """Returns the index of a store that selects these elements; the result has the shape of the grid."""
    sizes = [len(dim) for dim in dims if isinstance(dim, range)]
    parts = list(np.unravel_index(grid, sizes)) if sizes else []
    return tuple(dim if isinstance(dim, int) else _list_positions(dim)[parts.pop(0)] for dim in dims)


def _list_positions(span: range) -> Grid:
    return np.arange(span.start, span.stop, span.step, dtype=np.int64)


def _to_item(part: Dim) -> int | slice:
    if isinstance(part, int):
        return part
    return slice(part.start, part.stop if part.stop >= 0 else None, part.step) if len(part) else slice(0, 0)
