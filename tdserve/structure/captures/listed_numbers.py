"""Numbers of Python, and lists of them, as tensors of a dtype that has to hold them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import SpecMismatchError
from tdserve.structure.tensors.array_tensors import make_refusal, read_array
from tdserve.structure.tensors.listed_tensors import list_items, make_array as to_array, stack_tensors
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.matching import show
from tdserve.structure.trees.nodes import Path


class NumberReader:
    """Reads them; errors name the store."""

    def __init__(self, store: str) -> None:
        self._store = store

    def make_array(self, value: Any, path: Path) -> NDArray[Any] | None:
        """Returns an array of a number or of nested lists; None if they differ in length."""
        try:
            return to_array(value)
        except ValueError:
            return None
        except (TypeError, RuntimeError) as error:
            what = "a list of what no array consists of"
            raise make_refusal(what, path, self._store, f"stack its items, or give an array ({error})") from None

    def read(self, value: Any, dtype: str, path: Path) -> torch.Tensor:
        """Reads a number, or a list of them, as a tensor of a dtype; of that which torch gives them if it is empty."""
        array = self.make_array(value, path)
        if array is None:
            raise self._make_mismatch(path, f"{dtype or 'numbers'} in lists of one length", f"{value!r}"[:80])
        is_typed = _has_arrays(value)
        if dtype and not is_typed and not array.size:
            array = array.astype(np.bool_)  # NumPy makes floats of nothing, which fits any dtype
        if array.dtype.kind == "f" and dtype == "uint64" and not is_typed:
            array = _find_integers(value, array)
        if array.dtype.kind == "O" or (array.dtype.kind == "u" and not is_typed and not dtype):
            raise self._make_mismatch(path, f"{dtype or 'int64'} numbers, integers of up to 64 bits", f"{value!r}"[:80])
        tensor = self._convert(array, value, dtype, path) if dtype else None if is_typed else torch.tensor(value)
        if tensor is None and (tensor := stack_tensors(value)) is None:
            tensor = read_array(array, path, store=self._store)
        if not _has_exact_integers(value, tensor):
            expected = f"integers that {str(tensor.dtype).removeprefix('torch.')} holds exactly"
            raise self._make_mismatch(path, expected, f"{value!r}"[:80])
        return tensor

    def _convert(self, array: NDArray[Any], value: Any, dtype: str, path: Path) -> torch.Tensor:
        """Returns the array of a value as a tensor of a dtype, which must hold its numbers."""
        tensor = read_array(np.array(array), path, store=self._store)
        if dtype.startswith(("float", "bfloat", "complex")):
            is_fit = (array.dtype.kind != "c" or dtype.startswith("complex")) and _is_in_range(array, dtype)
        elif array.dtype.kind == "b":
            is_fit = True
        else:
            is_fit = array.dtype.kind in "iu" and dtype != "bool" and np.array_equal(array.astype(dtype), array)
        if not is_fit:
            raise self._make_mismatch(path, f"numbers that {dtype} can hold", f"{value!r}"[:80])
        return tensor.to(to_torch(dtype))

    def _make_mismatch(self, path: Path, expected: str, actual: str) -> SpecMismatchError:
        return SpecMismatchError(store=self._store, key=show(path), expected=expected, actual=actual)


def _is_in_range(array: NDArray[Any], dtype: str) -> bool:
    """Returns whether a floating-point dtype holds integers exactly, and rounds no finite number to infinity."""
    limits = torch.finfo(to_torch(dtype))
    size = float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))
    if array.dtype.kind not in "iu" or size < 2 / limits.eps:
        return size <= limits.max
    converted = torch.tensor(array.tolist(), dtype=to_torch(dtype)).real.double().flatten().tolist()
    return all(map(math.isfinite, converted)) and list(map(int, converted)) == array.flatten().tolist()


def _find_integers(value: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Returns integers as they are that NumPy has read as floating-point numbers, since some are above all int64."""
    items = np.asarray(value, object)
    is_unsigned = all(type(each) is int and 0 <= each < 1 << 64 for each in items.flat)
    return items.astype(np.uint64) if is_unsigned else array


def _has_exact_integers(value: Any, tensor: torch.Tensor) -> bool:
    """Returns whether no integer in lists with fractions was rounded, as NumPy and torch do without a word."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not isinstance(value, (list, tuple)):
        return True
    found = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    if not (found.abs() >= 2 / torch.finfo(tensor.dtype).eps).any():
        return True
    pairs = zip(list_items(value), found.flatten().tolist(), strict=True)
    return all(given == kept for given, kept in pairs if type(given) is int)


def _has_arrays(value: Any) -> bool:
    """Returns whether nested lists end in arrays, which have dtypes of their own."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (np.ndarray, np.generic, torch.Tensor))
