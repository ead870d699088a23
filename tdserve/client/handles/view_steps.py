"""The steps that a view is made of, and index expressions for views placed into the store below."""

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
"""Calls that choose or name keys. Rows are chosen before or after them alike."""

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
"""Calls that arrange the batch dimensions anew."""

REPEATING_STEPS = frozenset({"broadcast_to", "expand", "expand_as"})
"""Calls after which a row may be there more than once."""

STACKING_STEPS = REPEATING_STEPS | {"unsqueeze"}
"""Calls that make a NonTensorStack of NonTensorData."""

INDEX_STEP = "__getitem__"
"""Rows of what was arranged anew."""

Dim = int | range
"""What is left of a dimension of the store: positions, or one of them, whose dimension is gone."""

Grid = NDArray[np.int64]


class Step(NamedTuple):
    """One call of a tensordict method."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def apply(self, td: Any) -> Any:
        """Performs it on something local that may have fewer keys than the call speaks of."""
        kwargs = {**self.kwargs, "strict": False} if self.name == "select" else self.kwargs
        with set_lazy_legacy(False):  # which gives others than tensordicts, that do not take everything
            return getattr(td, self.name)(*self.args, **kwargs)

    def check(self, td: Any, *, store: str) -> Any:
        """Performs it on a skeleton. Raises what tensordict does, KeyNotFoundError for a KeyError."""
        try:
            with set_lazy_legacy(False):
                return getattr(td, self.name)(*self.args, **self.kwargs)
        except KeyError as error:
            missing = [key for key in self.args if isinstance(key, (str, tuple)) and key not in td.keys(True)]
            named = missing[0] if missing else error.args[0] if error.args else ""
            raise KeyNotFoundError(store=store, key=str(named)) from None


def narrow_dims(dims: Sequence[Dim], index: Sequence[int | slice]) -> tuple[Dim, ...]:
    """What an index leaves of the dimensions that are there still."""
    left = list(index)
    return tuple(dim[left.pop(0)] if isinstance(dim, range) and left else dim for dim in dims)


def compose_index(dims: Sequence[Dim], selection: Selection) -> tuple[Item, ...]:
    """The index of a store that selects what a canonical selection does of what is left of its dimensions."""
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
                found.append(_positions(span)[positions])
        elif isinstance(item, np.ndarray):
            span = next_range()
            found.append(_positions(span)[item])
        else:
            span = next_range()
            found.append(_item(span[item]))
    return (*found, *map(_item, left))


def num_elements(dims: Sequence[Dim]) -> int:
    """How many elements are left of the dimensions."""
    return math.prod(len(dim) for dim in dims if isinstance(dim, range))


def grid_of(dims: Sequence[Dim], steps: Sequence[Step]) -> torch.Tensor:
    """Which element of what is left of the dimensions stands where, after all steps."""
    sizes = [len(dim) for dim in dims if isinstance(dim, range)]
    td: Any = TensorDict({"at": torch.arange(num_elements(dims)).reshape(sizes)}, sizes)
    for step in steps:
        td = step.apply(td) if step.name not in KEY_STEPS else td
    grid: torch.Tensor = td.get("at")
    return grid


def spread(dims: Sequence[Dim], grid: Grid) -> tuple[Item, ...]:
    """The index of a store that selects elements of what is left of its dimensions, in the shape of the grid."""
    sizes = [len(dim) for dim in dims if isinstance(dim, range)]
    parts = list(np.unravel_index(grid, sizes)) if sizes else []
    return tuple(dim if isinstance(dim, int) else _positions(dim)[parts.pop(0)] for dim in dims)


def _positions(span: range) -> Grid:
    return np.arange(span.start, span.stop, span.step, dtype=np.int64)


def _item(part: Dim) -> int | slice:
    if isinstance(part, int):
        return part
    return slice(part.start, part.stop if part.stop >= 0 else None, part.step) if len(part) else slice(0, 0)
