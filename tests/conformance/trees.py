# mypy: ignore-errors
# tensordict's classes take more than their annotations say.
"""Random trees of every kind of tensordict, held in one another."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TypedTensorDict, UnbatchedTensor
from tensordict.nn import TensorDictParams

from tests.unit.spec.strategies import Inner, keys, non_tensors, tensors

DIFFERENTIABLE = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


ROOT_DEPTH = 2
"""Levels of nodes below the root."""


class Frozen(TensorClass["frozen"]):
    """Nothing of it is ever set."""

    x: torch.Tensor
    note: str | None = None


class Cast(TensorClass["nocast"]):
    """Holds whatever it is given."""

    x: Any
    number: int = 3


class State(TypedTensorDict):
    """Typed, and a tensordict."""

    x: torch.Tensor


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """One of any kind, of zero to two batch dimensions, in part or as a whole locked."""
    batch_size = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    td = draw(nodes(batch_size, ROOT_DEPTH))
    return td.lock_() if draw(st.integers(0, 4)) == 0 else td


@st.composite
def nodes(draw: st.DrawFn, batch_size: tuple[int, ...], depth: int) -> Any:
    """A node of any kind."""
    kinds = ["dense", "dense", "class", "typed", *(["stack", "stack"] if batch_size and depth else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "stack":
        more = draw(st.lists(st.integers(1, 3), max_size=1)) if depth < ROOT_DEPTH else []
        return draw(stacks((*batch_size, *more), depth))
    if kind == "typed":
        return State(x=draw(tensors(batch_size)), batch_size=list(batch_size))
    return draw(instances(batch_size) if kind == "class" else dense(batch_size, depth))


@st.composite
def dense(draw: st.DrawFn, batch_size: tuple[int, ...], depth: int, *, is_parted: bool = False) -> Any:
    """A TensorDict of leaves and nodes of any kind; ``is_parted``: of those that are the same again when their elements
    are stacked."""
    td = TensorDict({}, batch_size, names=draw(st.none() | st.just([*"ab"[: len(batch_size)]])))
    for key in draw(st.lists(keys, max_size=3, unique=True)):
        if depth and draw(st.booleans()):
            below = draw(nodes(batch_size, depth - 1))
            # what is around a typed one locks it only if it was not locked before
            is_locked = draw(st.integers(0, 5)) == 0 and not isinstance(below, State)
            td.set(key, below.lock_() if is_locked else below)
        else:
            td.set(key, draw(leaves(batch_size, is_parted=is_parted)))
    if not batch_size and depth and draw(st.integers(0, 3)) == 0:
        td.set("params", draw(params()))
    return td


@st.composite
def leaves(draw: st.DrawFn, batch_size: tuple[int, ...], *, is_parted: bool = False) -> Any:
    """A leaf of any kind; ``is_parted`` as of ``dense``."""
    kinds = ["tensor", "tensor", "value", "unbatched", *([] if is_parted else ["grad"])]
    kinds += ["jagged", "strided"] if len(batch_size) == 1 and not is_parted else []
    kind = draw(st.sampled_from(kinds))
    if kind == "tensor":
        return draw(tensors(batch_size))
    if kind == "value":
        return draw(non_tensors(batch_size))
    if kind == "unbatched":
        return UnbatchedTensor(draw(tensors(())))
    if kind == "grad":
        dtype = draw(st.sampled_from(DIFFERENTIABLE))
        leaf = torch.ones(*batch_size, draw(st.integers(0, 2)), dtype=dtype)
        return draw(st.sampled_from([leaf.requires_grad_, lambda: torch.nn.Parameter(leaf)]))()
    sizes = draw(st.lists(st.integers(0, 3), min_size=batch_size[0], max_size=batch_size[0]))
    parts = [torch.arange(float(size)) + number for number, size in enumerate(sizes)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged if kind == "jagged" else torch.strided)


@st.composite
def stacks(draw: st.DrawFn, batch_size: tuple[int, ...], depth: int) -> Any:
    """A lazy stack along any dimension, of members that differ in keys, shapes and kinds, or in shapes alone."""
    dim = draw(st.integers(0, len(batch_size) - 1))
    inner = batch_size[:dim] + batch_size[dim + 1 :]
    if draw(st.booleans()):
        members = [
            TensorDict({"x": torch.rand(*inner, draw(st.integers(0, 3)))}, inner) for _ in range(batch_size[dim])
        ]
    else:
        is_parted = depth < ROOT_DEPTH and len(batch_size) > 1
        members = [draw(dense(inner, depth - 1, is_parted=is_parted)) for _ in range(batch_size[dim])]
        for member in members:
            member.names = None
    # below others its name would have to be theirs
    name = draw(st.sampled_from([None, "time"])) if depth == ROOT_DEPTH else None
    return LazyStackedTensorDict(*members, stack_dim=dim, stack_dim_name=name)


@st.composite
def instances(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    """A tensorclass instance of one of several flavours."""
    kind = draw(st.sampled_from([Inner, Frozen, Cast]))
    leaf = draw(tensors(batch_size))
    if kind is Inner:
        return Inner(z=leaf, tag=draw(st.none() | st.text(max_size=3)), batch_size=list(batch_size))
    if kind is Frozen:
        return Frozen(x=leaf, note=draw(st.none() | st.text(max_size=3)), batch_size=list(batch_size))
    return Cast(x=leaf, number=draw(st.integers(0, 9)), batch_size=list(batch_size))


@st.composite
def params(draw: st.DrawFn) -> Any:
    """TensorDictParams, of parameters, and of buffers where there are no floats."""
    found = TensorDictParams(TensorDict({"w": torch.rand(draw(st.integers(0, 3))), "n": {"b": torch.arange(2)}}))
    return found.eval() if draw(st.booleans()) else found
