"""The calls that are made on a local tensordict and on a store alike: writes in every form, and all calls that act in
place.

``IN_PLACE`` must name each method of the installed tensordict that ends with an underscore or takes ``inplace``,
``OUT`` each that takes ``out``, ``SET`` each property that can be assigned. A new method of a newer tensordict fails
until somebody decides here where it belongs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

from tests.tensordict_examples import PLAIN, WITH_TENSORDICTS

Call = Callable[[Any], Any]


class Point(TensorClass):
    """An instance with a field that is None."""

    x: torch.Tensor
    y: str | None = None


class Face(NamedTuple):
    """One form in which a tensordict is accessed.

    Attributes:
        make: Makes the tensordict; equal ones at every call.
        look: Returns the object on which calls are made.
        keys: Keys that are written.
        writes: How; the others differ by design: a view writes into its store what a copy of the keys would keep to
            itself, and a store takes dicts where instances and members of lazy stacks refuse them.
    """

    make: Callable[[], Any]
    look: Call = lambda each: each
    keys: tuple[Any, ...] = ("a", "b", ("b", "c"), "t", "new")
    writes: tuple[str, ...] = ()


def dense() -> TensorDict:
    """Returns tensors, a nested part and a value."""
    return TensorDict({"a": torch.zeros(4, 3), "b": {"c": torch.ones(4)}, "t": "x"}, [4])


def point() -> Point:
    """Returns an instance."""
    return Point(torch.zeros(4), None, batch_size=[4])


def holding() -> TensorDict:
    """Returns a tensordict that holds an instance."""
    return TensorDict({"a": torch.zeros(4, 3), "b": point()}, [4])


def stack() -> LazyStackedTensorDict:
    """Returns rows of one structure, stacked lazily."""
    rows = [TensorDict({"a": torch.zeros(3), "b": {"c": torch.tensor(1.0)}, "t": "x"}) for _ in range(4)]
    return lazy_stack(rows)


_OF_VIEWS = ("set_", "update_", "fill_", "set_at_", "[0] =")
_OF_CLASSES = ("set", "set in place", "set_", "update", "attribute", "fill_")

FACES = {
    "handle": Face(dense),
    "view": Face(dense, lambda each: each.select("a", "b"), ("a", "b", ("b", "c"), "new"), _OF_VIEWS),
    "arranged view": Face(dense, lambda each: each.unsqueeze(0).squeeze(0), ("a", "b", ("b", "c")), _OF_VIEWS),
    "locked": Face(lambda: dense().lock_()),
    "tensorclass": Face(point, keys=("x", "y", "new"), writes=_OF_CLASSES),
    "tensorclass inside": Face(holding, keys=("b", ("b", "x"), ("b", "y"), ("b", "new")), writes=_OF_CLASSES),
    "lazy stack": Face(stack, writes=(*_OF_CLASSES, "update_")),
}

VALUES: dict[str, Any] = {
    "number": 2.0,
    "no dimension": torch.tensor(2.0),
    "[1]": torch.ones(1) * 2,
    "[3]": torch.ones(3) * 2,
    "[4]": torch.ones(4) * 2,
    "[4, 1]": torch.ones(4, 1) * 2,
    "[1, 3]": torch.ones(1, 3) * 2,
    "[4, 3]": torch.ones(4, 3) * 2,
    "[4, 5]": torch.ones(4, 5),
    "tensordict": TensorDict({"c": torch.ones(4) * 2}, [4]),
    "tensordict without batch": TensorDict({"c": torch.tensor(2.0)}),
    "dict": {"c": torch.ones(4) * 2},
    "dict of a number": {"c": 2.0},
    "array": torch.ones(4, 3).numpy(),
    "None": None,
    "str": "text",
    "instance": point(),
    "value": NonTensorData("text", batch_size=[4]),
}

FEW_VALUES = ("number", "[4]", "[4, 1]", "[4, 3]", "tensordict", "tensordict without batch", "dict", "None", "str")
"""The values that are written through all faces but the first."""

WRITES: dict[str, Callable[[Any, Any], Call]] = {
    "set": lambda key, value: lambda each: each.set(key, value),
    "set in place": lambda key, value: lambda each: each.set(key, value, inplace=True),
    "[key] =": lambda key, value: lambda each: each.__setitem__(key, value),
    "set_": lambda key, value: lambda each: each.set_(key, value),
    "update": lambda key, value: lambda each: each.update({key: value}),
    "update_": lambda key, value: lambda each: each.update_({key: value}),
    "fill_": lambda key, value: lambda each: each.fill_(key, value),
    "set_at_": lambda key, value: lambda each: each.set_at_(key, value, slice(0, 2)),
    "[0] =": lambda key, value: lambda each: each.__setitem__(0, {key: value}),
    "attribute": lambda key, value: lambda each: setattr(each, key, value) if isinstance(key, str) else None,
}
"""Writes of a value at a key."""

ALL_KEYS: dict[str, Callable[[Any], Call]] = {
    "[0] =": lambda value: lambda each: each.__setitem__(0, value),
    "[...] =": lambda value: lambda each: each.__setitem__(..., value),
    "update": lambda value: lambda each: each.update(value),
    "update_": lambda value: lambda each: each.update_(value),
    "masked_fill_": lambda value: lambda each: each.masked_fill_(torch.arange(4) % 2 == 0, value),
}
"""Writes of a value to the whole tensordict."""

NON_TENSOR_ROWS = ("set_at_", "[0] =", "[...] =")
"""Numbers and arrays written to rows of values: tensordict makes tensors of them, but announces that 0.17 will not."""


def _with(name: str, *args: Any, **options: Any) -> Call:
    return lambda each: getattr(each, name)(*args, **options)


def _plus_one(x: Any) -> Any:
    return x + 1


_UNDERSCORED = (
    "abs_ acos_ add_ addcdiv_ addcmul_ apply_ asin_ atan_ auto_batch_size_ auto_device_ ceil_ clamp_max_ clamp_min_"
    " clear_device_ clear_refs_for_compile_ copy_ copy_at_ cos_ cosh_ del_ detach_ div_ erf_ erfc_ exp_ expm1_ fill_"
    " filter_empty_ floor_ frac_ lerp_ lgamma_ load_ load_memmap_ lock_ log10_ log1p_ log2_ log_ masked_fill_ maximum_"
    " memmap_ memmap_refresh_ minimum_ mul_ neg_ pin_memory_ pow_ reciprocal_ rename_ rename_key_ requires_grad_ round_"
    " set_ set_at_ share_memory_ sigmoid_ sign_ sin_ sinh_ sqrt_ sub_ tan_ tanh_ trunc_ unlock_ update_ update_at_"
    " zero_"
)

IN_PLACE: dict[str, Call] = {
    "apply": _with("apply", _plus_one, inplace=True),
    "consolidate": _with("consolidate", inplace=True),
    "contiguous": _with("contiguous", inplace=True),
    "exclude": _with("exclude", "a", inplace=True),
    "flatten": _with("flatten", 0, 1, inplace=True),
    "flatten_keys": _with("flatten_keys", inplace=True),
    "gather": _with("gather", 0, torch.tensor([[0, 1, 2], [3, 3, 3]]), inplace=True),
    "masked_select": _with("masked_select", torch.arange(12).view(4, 3) > 5, inplace=True),
    "named_apply": _with("named_apply", lambda name, x: x + 1, inplace=True),
    "pad": _with("pad", [0, 1, 0, 0], inplace=True),
    "pin_memory": _with("pin_memory", inplace=True),
    "refine_names": _with("refine_names", "x", "z"),
    "repeat": _with("repeat", 2, 1, inplace=True),
    "repeat_interleave": _with("repeat_interleave", 2, inplace=True),
    "roll": _with("roll", 1, 0, inplace=True),
    "select": _with("select", "a", inplace=True),
    "set": _with("set", "a", torch.ones(4, 3), inplace=True),
    "setdefault": _with("setdefault", "c", torch.ones(4, 3), inplace=True),
    "split_keys": _with("split_keys", ["a"], inplace=True),
    "to": _with("to", torch.float64, inplace=True),
    "to_module": lambda each: each,  # of the module
    "unflatten": _with("unflatten", 0, (2, 2), inplace=True),
    "unflatten_keys": _with("unflatten_keys", inplace=True),
    "update": _with("update", {"a": torch.ones(4, 3)}, inplace=True),
    **{name: WITH_TENSORDICTS.get(name) or _with(name, *PLAIN.get(name, ())) for name in _UNDERSCORED.split()},
}
"""Calls in place, by name; each is made on the result of ``tensordict_examples.local_td``."""

OUT: dict[str, Callable[[Any], Call] | None] = {
    "apply": lambda out: _with("apply", _plus_one, out=out),
    "cat": lambda out: lambda each: torch.cat([each[:2], each[2:]], 0, out=out),
    "cat_from_tensordict": None,  # of entries, into a tensor
    "clamp": lambda out: _with("clamp", 0.2, 0.5, out=out),
    "gather": lambda out: _with("gather", 0, torch.tensor([[1, 1, 1]] * 4), out=out),
    "lazy_stack": lambda out: lambda each: TensorDict.lazy_stack(list(each.unbind(0)), 0, out=out),
    "load_memmap": None,  # by store name: of the client
    "logsumexp": lambda out: _with("logsumexp", 0, out=out),
    "map": lambda out: _with("map", _plus_one, out=out, num_workers=1, mp_start_method="fork"),
    "maybe_dense_stack": lambda out: lambda each: TensorDict.maybe_dense_stack(list(each.unbind(0)), 0, out=out),
    "named_apply": lambda out: _with("named_apply", lambda name, x: x + 1, out=out),
    "norm": lambda out: _with("norm", out=out),
    "stack": lambda out: lambda each: torch.stack(list(each.unbind(0)), 0, out=out),
    "stack_from_tensordict": None,  # of entries, into a tensor
    "to_mds": None,  # a folder
    "where": lambda out: _with("where", torch.arange(4) < 2, 0.0, out=out),
    "torch.gather": lambda out: lambda each: torch.gather(each, 0, torch.tensor([[1, 1, 1]] * 4), out=out),
    "torch.where": lambda out: lambda each: torch.where(torch.arange(12).view(4, 3) < 2, each, each * 2, out=out),
    "torch.clamp": lambda out: lambda each: torch.clamp(each, 0.2, 0.5, out=out),
}
"""Calls that fill another tensordict, by name."""

SET: dict[str, Callable[[Any], Any]] = {
    "batch_size": lambda each: [4],
    "data": lambda each: each * 2,
    "device": lambda each: "cpu",
    "grad": lambda each: each * 2,
    "is_locked": lambda each: True,
    "names": lambda each: ["p", "q"],
    "shape": lambda each: [4],
}
"""Values that are assigned to properties, by name."""

TORCH: dict[str, Call] = {
    "unsqueeze": lambda each: torch.unsqueeze(each, 0),
    "squeeze": lambda each: torch.squeeze(torch.unsqueeze(each, 1), dim=1),
    "permute": lambda each: torch.permute(each, dims=(1, 0)),
    "transpose": lambda each: torch.transpose(each, dim0=0, dim1=1),
    "swapaxes": lambda each: torch.swapaxes(each, 0, 1),
    "swapdims": lambda each: torch.swapdims(each, 0, 1),
    "movedim": lambda each: torch.movedim(each, 0, 1),
    "moveaxis": lambda each: torch.moveaxis(each, 0, 1),
    "reshape": lambda each: torch.reshape(each, (-1,)),
    "flatten": lambda each: torch.flatten(each, 0, 1),
    "unflatten": lambda each: torch.unflatten(each, 0, (2, 2)),
    "narrow": lambda each: torch.narrow(each, 0, 1, 2),
    "unbind": lambda each: torch.unbind(each, 0)[1],
    "split": lambda each: torch.split(each, 2)[1],
    "split by name": lambda each: torch.split(each, split_size_or_sections=2, dim=0)[1],
    "chunk": lambda each: torch.chunk(each, 2)[1],
    "tensor_split": lambda each: torch.tensor_split(each, 2)[1],
}
"""Functions of torch that return views; a write to such a view goes to the store."""

TORCH_IN_PLACE: dict[str, Call] = {
    "abs_": torch.abs_,
    "exp_": torch.exp_,
    "neg_": torch.neg_,
    "clamp_max_": lambda each: torch.clamp_max_(each, 0.5),
}
"""Functions of torch that act in place."""


def named_by_tensordict(*parameters: str) -> set[str]:
    """Lists the public methods of the installed tensordict that take one of these arguments or end with an
    underscore."""
    found = set()
    for name in dir(TensorDictBase):
        static = inspect.getattr_static(TensorDictBase, name)
        if name.startswith("_") or isinstance(static, property) or not callable(getattr(TensorDictBase, name)):
            continue
        taken = inspect.signature(getattr(TensorDictBase, name)).parameters
        if any(parameter in taken for parameter in parameters) or ("inplace" in parameters and name.endswith("_")):
            found.add(name)
    return found


def assigned_by_tensordict() -> set[str]:
    """Lists the public properties of the installed tensordict that can be assigned."""
    static = {name: inspect.getattr_static(TensorDictBase, name) for name in dir(TensorDictBase) if name[0] != "_"}
    return {name for name, each in static.items() if isinstance(each, property) and each.fset is not None}


def differs_by_design(write: str, key: Any, title: str) -> bool:
    """Whether a store differs from tensordict on purpose. See ``NON_TENSOR_ROWS``. Also, a store broadcasts the numbers
    of a dict into rows, and a field that gets None holds nothing, as in every instance."""
    if (write == "set_at_" and title == "dict of a number") or (key == ("b", "y") and title == "None"):
        return True
    return write in NON_TENSOR_ROWS and key == "t" and title not in ("str", "None")
