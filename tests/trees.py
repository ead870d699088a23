# mypy: ignore-errors
# tensordict's classes take more than their annotations say.
"""Random trees in which tensordicts of every kind hold one another."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnbatchedTensor,
)
from tensordict.nn import TensorDictParams

from tests.tensordict_strategies import Inner, keys, non_tensors, tensors

DIFFERENTIABLE = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


ROOT_DEPTH = 2
"""Levels of nodes below the root."""


class Frozen(TensorClass["frozen"]):
    """A frozen class."""

    x: torch.Tensor
    note: str | None = None


class Cast(TensorClass["nocast"]):
    """A class that accepts any content."""

    x: Any
    number: int = 3


class State(TypedTensorDict):
    """A typed tensordict."""

    x: torch.Tensor


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Draws a tensordict of any kind with up to two batch dimensions, locked in part, as a whole or not."""
    batch_size = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    td = draw(nodes(batch_size, ROOT_DEPTH))
    return td.lock_() if draw(st.integers(0, 4)) == 0 else td


@st.composite
def trees_around_stacks(draw: st.DrawFn) -> Any:
    """Draws a tensordict around a lazy stack of members of any kind, along any of its dimensions."""
    batch_size = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    more = draw(st.lists(st.integers(1, 3), max_size=1, min_size=2 - len(batch_size)))
    stack = draw(stacks((*batch_size, *more), ROOT_DEPTH, is_unlike=True))
    td = TensorDict({"stack": stack}, batch_size)
    td.set("more", draw(leaves(batch_size)))
    return td.lock_() if draw(st.integers(0, 4)) == 0 else td


@st.composite
def nodes(draw: st.DrawFn, batch_size: tuple[int, ...], depth: int) -> Any:
    """Draws a node of any kind."""
    kinds = ["dense", "dense", "class", "typed", *(["stack", "stack"] if batch_size and depth else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "stack":
        more = draw(st.lists(st.integers(1, 3), max_size=1)) if depth < ROOT_DEPTH else []
        return draw(stacks((*batch_size, *more), depth))
    if kind == "typed":
        return State(x=draw(tensors(batch_size)), batch_size=list(batch_size))
    return draw(instances(batch_size) if kind == "class" else dense(batch_size, depth))


@st.composite
def dense(draw: st.DrawFn, batch_size: tuple[int, ...], depth: int) -> Any:
    """Draws a TensorDict of leaves and nodes of any kind."""
    td = TensorDict({}, batch_size, names=draw(st.none() | st.just([*"ab"[: len(batch_size)]])))
    for key in draw(st.lists(keys, max_size=3, unique=True)):
        if depth and draw(st.booleans()):
            below = draw(nodes(batch_size, depth - 1))
            # a wrapper around a typed tensordict locks it only if it was unlocked before
            is_locked = draw(st.integers(0, 5)) == 0 and not isinstance(below, State)
            td.set(key, below.lock_() if is_locked else below)
        else:
            td.set(key, draw(leaves(batch_size)))
    if depth and draw(st.integers(0, 3)) == 0:
        td.set("params", draw(params(batch_size)))
    return td


@st.composite
def leaves(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    """Draws a leaf of any kind."""
    kinds = ["tensor", "tensor", "value", "unbatched", "grad"]
    kinds += ["alike"] if batch_size else []
    kinds += ["jagged", "strided"] if len(batch_size) == 1 else []
    kind = draw(st.sampled_from(kinds))
    if kind == "tensor":
        return draw(tensors(batch_size))
    if kind == "value":
        return draw(non_tensors(batch_size))
    if kind == "unbatched":
        return UnbatchedTensor(draw(tensors(())))
    if kind == "alike":
        return alike(batch_size, draw(st.sampled_from(["same", 1, None])))
    if kind == "grad":
        dtype = draw(st.sampled_from(DIFFERENTIABLE))
        leaf = torch.ones(*batch_size, draw(st.integers(0, 2)), dtype=dtype)
        kinds = [
            leaf.requires_grad_,
            lambda: torch.nn.Parameter(leaf),
            lambda: torch.nn.Parameter(leaf, requires_grad=False),
            lambda: torch.nn.Buffer(leaf),
            lambda: torch.nn.Buffer(leaf, persistent=False),
        ]
        return draw(st.sampled_from(kinds))()
    sizes = draw(st.lists(st.integers(0, 3), min_size=batch_size[0], max_size=batch_size[0]))
    parts = [torch.arange(float(size)) + number for number, size in enumerate(sizes)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged if kind == "jagged" else torch.strided)
    return nested.requires_grad_(draw(st.booleans()))


def alike(batch_size: tuple[int, ...], value: Any) -> Any:
    """Returns one value per row, all equal."""
    if not batch_size:
        return NonTensorData(data=value)
    return NonTensorStack(*[alike(batch_size[1:], value) for _ in range(batch_size[0])])


@st.composite
def stacks(draw: st.DrawFn, batch_size: tuple[int, ...], depth: int, *, is_unlike: bool = False) -> Any:
    """Draws a lazy stack along any dimension. Its members differ in keys, shapes and kinds, or only in shapes."""
    dim = draw(st.integers(0, len(batch_size) - 1))
    inner = batch_size[:dim] + batch_size[dim + 1 :]
    if not is_unlike and draw(st.booleans()):
        members = [
            TensorDict({"x": torch.rand(*inner, draw(st.integers(0, 3)))}, inner) for _ in range(batch_size[dim])
        ]
    else:
        members = [draw(members_of(inner, depth - 1)) for _ in range(batch_size[dim])]
    # inside other stacks its dimension name would have to be theirs
    name = draw(st.sampled_from([None, "time"])) if depth == ROOT_DEPTH and not is_unlike else None
    return LazyStackedTensorDict(*members, stack_dim=dim, stack_dim_name=name)


@st.composite
def members_of(draw: st.DrawFn, batch_size: tuple[int, ...], depth: int) -> Any:
    """Draws members of a stack, some of them locked: TensorDicts, TensorDictParams or other stacks."""
    kinds = ["dense", "dense", "dense", "params", *(["stack"] if batch_size and depth else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "params":
        return draw(params(batch_size))
    member = draw(stacks(batch_size, depth) if kind == "stack" else dense(batch_size, depth))
    member.names = None
    return member.lock_() if draw(st.integers(0, 3)) == 0 else member


@st.composite
def instances(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    """Draws a tensorclass instance of one of several flavours."""
    kind = draw(st.sampled_from([Inner, Frozen, Cast]))
    leaf = draw(tensors(batch_size))
    if kind is Inner:
        return Inner(z=leaf, tag=draw(st.none() | st.text(max_size=3)), batch_size=list(batch_size))
    if kind is Frozen:
        return Frozen(x=leaf, note=draw(st.none() | st.text(max_size=3)), batch_size=list(batch_size))
    return Cast(x=leaf, number=draw(st.integers(0, 9)), batch_size=list(batch_size))


@st.composite
def params(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    """Draws TensorDictParams of parameters, and of buffers where there are no floats."""
    weights = torch.rand(*batch_size, draw(st.integers(0, 3)))
    numbers = torch.arange(2).expand(*batch_size, 2).clone()
    found = TensorDictParams(TensorDict({"w": weights, "n": TensorDict({"b": numbers}, batch_size)}, batch_size))
    return found.eval() if draw(st.booleans()) else found
