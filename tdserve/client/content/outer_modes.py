"""Calls outside of the modes of torch that the caller is in.

Under ``torch.device(...)`` or a default device, torch makes every tensor there that names no device. Inside of a
transform of ``torch.func`` even plain tensors become tensors of the transform, which have no memory. A call of tdserve
works on memory of its own, so it begins with leaving both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

from tdserve.structure.torch_private import clear_transforms, find_transform_level, num_function_modes

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

SPECIAL_CALLS = (
    "__getitem__",
    "__getitems__",
    "__setitem__",
    "__delitem__",
    "__contains__",
    "__len__",
    "__next__",
    "__enter__",
    "__exit__",
)
"""Calls by which Python itself uses an object."""


@contextmanager
def leave_modes() -> Iterator[None]:
    """Leaves the modes for the time of a call.

    Custom modes stay active. Device modes do not move tensors that are explicitly on the CPU.
    """
    with clear_transforms(), torch.device("cpu"):
        yield


def leave_modes_in_calls(owner: _Class) -> _Class:
    """Makes the calls of a class leave the modes that their caller is in: what it defines without an underscore, and
    ``SPECIAL_CALLS``. Properties and static methods stay as they are."""
    made: dict[FunctionType, Callable[..., Any]] = {}  # a second name of a call stays one
    for name, found in list(vars(owner).items()):
        if isinstance(found, FunctionType) and (name in SPECIAL_CALLS or not name.startswith("_")):
            made[found] = made.get(found) or leave_modes_first(found)
            setattr(owner, name, made[found])
    return owner


def leave_modes_first(method: _Method) -> _Method:
    """Makes a method leave the modes that its caller is in."""

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if find_transform_level() is None and not num_function_modes():  # 0.06 us: each call asks
            return method(self, *args, **kwargs)
        with leave_modes():
            return method(self, *args, **kwargs)

    return cast("_Method", call)
