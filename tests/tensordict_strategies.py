"""Any tensordict that tdserve carries, and what "equal in type, structure and value" means."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict

from tdserve.structure.tensors.torch_types import TO_TORCH

RESERVED = ("_total_bytes", "cls", "leaves", "size", "shape", "device", "_type", "non_tensors", "cls_metadata", "data")
ODD = ("", ".", "..", "a/b", "a.b", " ", "a b", "ä", "😀", "\x00", "__metadata__", "batch_size", "_tensordict")


class Inner(TensorClass):
    """A tensorclass inside of another."""

    z: torch.Tensor
    tag: str | None = None


class Outer(TensorClass):
    """A tensorclass with tensors, a value, a nested tensorclass and a nested tensordict; each may be missing."""

    x: torch.Tensor
    y: torch.Tensor
    note: str | None = None
    inner: Inner | None = None
    rest: TensorDict | None = None


text = st.text(max_size=6)
keys = st.sampled_from(RESERVED + ODD) | st.text(st.characters(codec="utf-8"), max_size=6)
any_text = st.text(st.characters(), max_size=6)  # surrogates too

arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.unsigned_integer_dtypes(),
        hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
        hnp.complex_number_dtypes(sizes=(64, 128)),
        hnp.unicode_string_dtypes(max_len=4),
        hnp.byte_string_dtypes(max_len=4),
        hnp.datetime64_dtypes(),
        hnp.timedelta64_dtypes(),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
scalars = arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
offsets = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**300), max_value=2**300),
    st.floats(),
    any_text,
    st.binary(max_size=6),
    any_text.map(np.str_),
    st.binary(max_size=6).map(np.bytes_),
    st.complex_numbers(),
    st.dates(),
    st.timedeltas(),
    st.times(timezones=st.none() | offsets),
    st.datetimes(timezones=st.none() | offsets),
    st.frozensets(any_text | st.integers(), max_size=3),
)
names_of_entries = hashable | st.tuples(hashable, hashable)
values = st.recursive(
    hashable | arrays | scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashable, max_size=3),
        st.dictionaries(names_of_entries, inner, max_size=3),
    ),
    max_leaves=6,
)


@st.composite
def tensors(draw: st.DrawFn, batch_size: tuple[int, ...]) -> torch.Tensor:
    """A leaf of any dtype with random bits (NaNs of every kind among them)."""
    dtype = TO_TORCH[draw(st.sampled_from(sorted(TO_TORCH)))]
    shape = batch_size + tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    num = math.prod(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    bits = torch.randint(0, 256, (num * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape) if num else torch.empty(shape, dtype=dtype)


@st.composite
def non_tensors(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    """One value for all rows, or one for each."""
    if not batch_size or 0 in batch_size or draw(st.booleans()):
        return NonTensorData(data=draw(values), batch_size=batch_size)
    return NonTensorStack(*[_row(draw, batch_size[1:]) for _ in range(batch_size[0])])


def _row(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    if not batch_size:
        return NonTensorData(data=draw(values))
    return NonTensorStack(*[_row(draw, batch_size[1:]) for _ in range(batch_size[0])])


@st.composite
def tensordicts(draw: st.DrawFn, depth: int = 2, *, is_named: bool = True) -> Any:
    """A TensorDict or Outer with nested ones below it, each with batch dimensions, names and a device of its own."""
    batch_size = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    names = draw(st.none() | st.just([*"ab"[: len(batch_size)]])) if is_named else None
    return draw(_nested(batch_size, names, draw(st.sampled_from([None, "cpu"])), depth))


@st.composite
def _nested(draw: st.DrawFn, batch_size: tuple[int, ...], names: Any, device: str | None, depth: int) -> Any:
    if draw(st.integers(0, 3)) == 0:
        return draw(_outer(batch_size, names, device, depth))
    td = TensorDict({}, batch_size=batch_size, names=names, device=device)
    for key in draw(st.lists(keys, max_size=4, unique=True)):
        kind = draw(st.sampled_from("ttvn" if depth else "ttv"))
        if kind == "n":
            more = tuple(draw(st.lists(st.integers(0, 2), max_size=1)))
            below = None if names is None else [*names, *[f"c{depth}" for _ in more]]
            td.set(
                key, draw(_nested(batch_size + more, below, device or draw(st.sampled_from([None, "cpu"])), depth - 1))
            )
        else:
            td.set(key, draw(tensors(batch_size) if kind == "t" else non_tensors(batch_size)))
    return td


@st.composite
def _outer(draw: st.DrawFn, batch_size: tuple[int, ...], names: Any, device: str | None, depth: int) -> Any:
    td: Any = TensorDict({"x": draw(tensors(batch_size))}, batch_size=batch_size, names=names, device=device)
    if draw(st.booleans()):
        td.set("note", NonTensorData(data=draw(text), batch_size=batch_size))
    if draw(st.booleans()):
        inner = TensorDict({"z": draw(tensors(batch_size))}, batch_size=batch_size, names=names, device=device)
        td.set("inner", Inner.from_tensordict(inner))
    if depth and draw(st.booleans()):
        td.set("rest", draw(_nested(batch_size, names, device, depth - 1)))
    return Outer.from_tensordict(td)
