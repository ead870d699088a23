"""Kinds of plain tensordicts: nested, locked, with values."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

from tests.conformance.kind import ROWS, kind, numbers


@kind("dense")
def dense() -> Any:
    """Nested, with names, dtypes, empty leaves and nodes."""
    inner = TensorDict({"deep": numbers(ROWS, 2, 3).double(), "none": torch.empty(ROWS, 2, 0)}, [ROWS, 2])
    inner.names = ["time", "agent"]
    leaves = {"obs": numbers(ROWS, 3), "done": numbers(ROWS) > 1, "action": numbers(ROWS).long(), "next": inner}
    leaves["nothing"] = TensorDict({}, [ROWS])
    return TensorDict(leaves, [ROWS], names=["time"])


@kind("without batch", has_rows=False)
def without_batch() -> Any:
    """No batch dimension, a node with one."""
    return TensorDict({"scalar": torch.tensor(1.5), "part": TensorDict({"x": numbers(3)}, [3])}, [])


@kind("on a device")
def on_a_device() -> Any:
    """The CPU as its device."""
    return TensorDict({"x": numbers(ROWS), "n": {"y": numbers(ROWS, 2)}}, [ROWS], device="cpu")


@kind("two batch dimensions")
def two_dimensions() -> Any:
    """Rows and columns, named."""
    return TensorDict({"x": numbers(ROWS, 2, 3)}, [ROWS, 2], names=["row", "column"])


@kind("no rows", has_rows=False)
def no_rows() -> Any:
    """A batch of size zero."""
    return TensorDict({"x": torch.empty(0, 3), "n": TensorDict({"y": torch.empty(0, 2)}, [0, 2])}, [0])


@kind("locked")
def locked() -> Any:
    """All of it."""
    return dense().lock_()


@kind("locked without batch", has_rows=False)
def locked_without_batch() -> Any:
    """All of it, values too."""
    return TensorDict({"x": torch.ones(2), "text": "a", "n": {"y": torch.zeros(())}}).lock_()


@kind("a locked node")
def locked_node() -> Any:
    """Only one node, and what is below it."""
    inner = TensorDict({"deep": {"y": numbers(ROWS)}, "v": "text"}, [ROWS]).lock_()
    return TensorDict({"x": numbers(ROWS), "locked": inner, "free": {"z": numbers(ROWS)}}, [ROWS])


@kind("non-tensor data")
def non_tensor_data() -> Any:
    """One value for all rows, and one for each."""
    td = TensorDict({"x": numbers(ROWS), "text": "one for all"}, [ROWS])
    td["each"] = NonTensorStack(*(NonTensorData(text) for text in ("a", "b", "c", "d")))
    td.set_non_tensor("structured", {"role": "user", "parts": [1, 2.5, None, ("x", b"y")]})
    return td


@kind("a stack of non-tensor data in two dimensions")
def non_tensor_stacks() -> Any:
    """One value for each element of a batch of two dimensions."""
    rows = [NonTensorStack(*(NonTensorData(f"{row}-{column}") for column in range(2))) for row in range(ROWS)]
    return TensorDict({"text": NonTensorStack(*rows)}, [ROWS, 2])
