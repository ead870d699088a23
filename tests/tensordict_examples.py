"""An example call of every public method of tensordict, to compare a store with a local tensordict."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

import tdserve
from tdserve.client.handles.view import StoreView
from tests.sameness import difference

Call = Callable[[Any], Any]


def local_td() -> TensorDict:
    """Returns the content of the store: positive floats below two, for which all of arithmetic is defined."""
    numbers = torch.arange(12.0).view(4, 3) / 10 + 0.05
    return TensorDict({"a": numbers.clone(), "n": {"b": numbers + 0.01}}, [4, 3], names=["x", "y"])


def doubled() -> TensorDict:
    """Returns another tensordict of the same structure."""
    return local_td() * 2


def mask() -> torch.Tensor:
    """Returns a mask of every other element."""
    return torch.arange(12).view(4, 3) % 2 == 0


def _plus_one(x: Any) -> Any:
    return x + 1


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Gives a tensor ordinary strides, along dimensions of size 1 too."""
    return x.clone(memory_format=torch.contiguous_format)


PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["add", "div", "mod", "mul", "pow", "rsub", "sub", "repeat_interleave", "new_empty"], (2,)),
    **dict.fromkeys(["add_", "div_", "mul_", "pow_", "sub_", "new_ones", "new_zeros", "chunk", "split"], (2,)),
    **dict.fromkeys(["cummax", "cummin", "cumsum", "flip", "logsumexp", "size", "softmax", "unbind"], (0,)),
    **dict.fromkeys(["cat_from_tensordict", "stack_from_tensordict", "unsqueeze"], (0,)),
    **dict.fromkeys(["exclude", "select", "get", "get_item_shape", "get_non_tensor", "is_non_tensor"], ("a",)),
    **dict.fromkeys(["moveaxis", "movedim", "swapaxes", "swapdims", "transpose"], (0, 1)),
    **dict.fromkeys(["apply", "apply_"], (_plus_one,)),
    **dict.fromkeys(["to", "type"], (torch.float64,)),
    **dict.fromkeys(["del_", "pop"], ("a",)),
    "create_nested": ("q",),
    "rename_key_": ("a", "c"),
    "set_non_tensor": ("t", [1, 2]),
    "setdefault": ("c", torch.zeros(4, 3)),
    "broadcast_to": ((2, 4, 3),),
    "clamp": (0.2, 0.5),
    "clamp_max": (0.5,),
    "clamp_min": (0.5,),
    "expand": (2, 4, 3),
    "fill_": ("a", 3.0),
    "gather": (0, torch.tensor([[0, 1, 2], [3, 3, 3]])),
    "get_at": ("a", 0),
    "named_apply": (lambda name, x: x + len(name),),
    "narrow": (0, 1, 2),
    "new_full": ((2,), 1.0),
    "pad": ([0, 1, 0, 0],),
    "permute": (1, 0),
    "quantile": (0.5,),
    "refine_names": ("x", "y"),
    "rename": ("p", "q"),
    "rename_keys": ({"a": "c"},),
    "repeat": (2, 1),
    "replace": ({"a": torch.zeros(4, 3)},),
    "reshape": (-1,),
    "roll": (1, 0),
    "set": ("a", torch.zeros(4, 3)),
    "set_": ("a", torch.zeros(4, 3)),
    "set_at_": ("a", torch.zeros(3), 0),
    "split_keys": (["a"],),
    "tensor_split": (3,),
    "tile": ((2, 1),),
    "unflatten": (0, (2, 2)),
    "view": (-1,),
}
"""Arguments of methods; a method that is not listed takes none."""


def _given(name: str, *makers: Callable[[], Any]) -> Call:
    return lambda each: getattr(each, name)(*(make() for make in makers))


WITH_TENSORDICTS: dict[str, Call] = {
    **{name: _given(name, doubled, doubled) for name in ["addcdiv", "addcmul", "addcdiv_", "addcmul_"]},
    **{name: _given(name, doubled) for name in ["maximum", "maximum_", "minimum", "minimum_", "logical_and"]},
    **{name: _given(name, doubled) for name in ["clamp_max_", "clamp_min_", "copy_", "update", "update_"]},
    **{name: _given(name, doubled, lambda: 0.5) for name in ["lerp", "lerp_"]},
    **{name: _given(name, mask, lambda: 0.0) for name in ["masked_fill", "masked_fill_"]},
    "bitwise_and": lambda each: (each > 0.5).bitwise_and(doubled() > 0.5),
    "copy_at_": lambda each: each.copy_at_(doubled()[0], 0),
    "expand_as": lambda each: each.expand_as(doubled().expand(2, 4, 3)),
    "load_state_dict": lambda each: each.load_state_dict(doubled().state_dict()),
    "masked_select": lambda each: each.masked_select(mask()),
    "new_tensor": lambda each: each.new_tensor(doubled()),
    "to_module": lambda each: TensorDict.from_module(_with_parameters(each)),
    "update_at_": lambda each: each.update_at_(doubled()[0], 0),
    "where": lambda each: each.where(mask(), doubled()),
}
"""Calls that need more than plain arguments."""

FILES = ("memmap", "save", "dumps", "to_h5")
"""Methods whose argument is the path of a new file."""


class _Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4, 3))
        self.n = torch.nn.Module()
        self.n.b = torch.nn.Parameter(torch.zeros(4, 3))


def _with_parameters(params: Any) -> torch.nn.Module:
    module = _Small()
    params.data.to_module(module)
    return module


def names() -> list[str]:
    """Lists every public name of the installed TensorDictBase."""
    return [name for name in dir(TensorDictBase) if not name.startswith("_")]


def example(name: str, folder: Path) -> Call:
    """Returns the example call of a method, or the access to a property."""
    if isinstance(inspect.getattr_static(TensorDictBase, name), property):
        return lambda each: getattr(each, name)
    if name in WITH_TENSORDICTS:
        return WITH_TENSORDICTS[name]
    if name in FILES:
        return lambda each: getattr(each, name)(str(folder / f"{type(each).__name__}-{name}"))
    return lambda each: getattr(each, name)(*PLAIN.get(name, ()))


def outcome(call: Call, each: Any) -> Any:
    """Returns the result of a call, or the exception that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the deprecated ones are called too
            return call(each)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return error


def fault(local: Any, remote: Any) -> str | None:
    """Returns why two results differ; None if they are equal. Two errors are equal if a caller could catch one as the
    other."""
    if isinstance(local, Exception) or isinstance(remote, Exception):
        families = (KeyError, IndexError, AttributeError, TypeError, ImportError, (RuntimeError, ValueError))
        is_same = any(isinstance(local, family) and isinstance(remote, family) for family in families)
        return None if is_same else f"{local!r} against {remote!r}"
    if isinstance(remote, (tdserve.StoreHandle, StoreView)):
        remote = remote.to_tensordict()
    if is_tensor_collection(local):
        if type(local).__name__ in ("PersistentTensorDict", "LazyStackedTensorDict"):
            local, remote = local.to_tensordict().contiguous(), remote.to_tensordict().contiguous()
        return difference(*(each.contiguous().apply(_packed) for each in (local, remote)))
    if isinstance(local, torch.Tensor) and isinstance(remote, torch.Tensor):
        return difference(*(TensorDict({"x": _packed(each)}, []) for each in (local, remote)))
    if isinstance(local, np.ndarray):
        is_same = type(local) is type(remote) and np.array_equal(np.asarray(local), np.asarray(remote))
        return None if is_same else f"{local} against {remote}"
    if isinstance(local, dict):
        local, remote = list(local.items()), list(remote.items())
    if not isinstance(local, str) and hasattr(local, "__iter__"):
        local, remote = list(local), list(remote)
        if len(local) != len(remote):
            return f"{len(local)} against {len(remote)}"
        return next((found for pair in zip(local, remote, strict=True) if (found := fault(*pair))), None)
    return None if local == remote else f"{local!r} against {remote!r}"
