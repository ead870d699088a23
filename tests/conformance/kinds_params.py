"""Kinds with more than content: parameters, modules, tensors that require grad."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    lazy_stack,
)
from tensordict.nn import TensorDictParams

from tests.conformance.kind import ROWS, kind, numbers
from tests.conformance.kinds_stacks import jagged


def network() -> torch.nn.Module:
    """Returns a network with parameters, with buffers of which some require grad, and with integers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Embedding(4, 2))


@kind("requires grad")
def requires_grad() -> Any:
    """Leaves of a graph of their own."""
    td = TensorDict({"x": numbers(ROWS, 2), "n": {"y": numbers(ROWS).double()}, "i": numbers(ROWS).long()}, [ROWS])
    td["x"].requires_grad_()
    td["n", "y"].requires_grad_()
    return td


def detached(td: Any) -> Any:
    """The result of a computation is read as a leaf."""
    return td.detach().requires_grad_()


@kind("computed", expected=detached)
def computed() -> Any:
    """The result of a computation that can be differentiated."""
    return TensorDict({"x": numbers(ROWS, 2).requires_grad_() * 2, "y": torch.ones(ROWS).requires_grad_() + 1}, [ROWS])


@kind("parameters and buffers in a tensordict", has_rows=False)
def parameters() -> Any:
    """Each kind of leaf, in a plain tensordict."""
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    buffers = {"kept": torch.nn.Buffer(torch.ones(2)), "not": torch.nn.Buffer(torch.ones(2), persistent=False)}
    leaves = {"free": torch.nn.Parameter(numbers(2)), "frozen": frozen, "buffers": buffers, "plain": torch.ones(2)}
    return TensorDict(leaves)


@kind("TensorDictParams", has_rows=False)
def params() -> Any:
    """Parameters, and buffers for tensors that are not floats."""
    return TensorDictParams(TensorDict({"w": numbers(2, 3), "n": {"i": torch.arange(3), "b": torch.ones(1)}}))


@kind("TensorDictParams with rows")
def params_rows() -> Any:
    """Rows of it are plain tensors."""
    return TensorDictParams(TensorDict({"w": numbers(ROWS, 3), "n": {"b": numbers(ROWS)}}, [ROWS]))


@kind("TensorDictParams that convert nothing", has_rows=False)
def params_no_convert() -> Any:
    """Tensors that are not parameters become buffers."""
    return TensorDictParams(TensorDict({"w": torch.nn.Parameter(torch.ones(2)), "b": torch.ones(2)}), no_convert=True)


@kind("TensorDictParams of TensorDictParams, locked and in eval mode", has_rows=False)
def params_locked() -> Any:
    """Locked in every way."""
    found = TensorDictParams(TensorDictParams(TensorDict({"w": torch.ones(2), "text": "a"})), lock=True)
    return found.eval()


@kind("TensorDictParams in a tensordict", has_rows=False)
def params_nested() -> Any:
    """TensorDictParams in a locked and in an unlocked node."""
    return TensorDict({"actor": params(), "x": torch.ones(2), "locked": TensorDict({"critic": params()}).lock_()})


@kind("TensorDictParams in a locked tensordict", has_rows=False)
def params_in_locked() -> Any:
    """The lock is of the tensordict around it."""
    return TensorDict({"actor": params(), "x": torch.ones(2)}).lock_()


@kind("from_module", has_rows=False)
def from_module() -> Any:
    """Parameters and buffers of a module."""
    return TensorDict.from_module(network())


@kind("from_module as module", has_rows=False)
def from_module_as_module() -> Any:
    """The same, as parameters."""
    return TensorDict.from_module(network(), as_module=True)


@kind("from_modules", has_rows=False)
def from_modules() -> Any:
    """Of several modules, stacked."""
    torch.manual_seed(0)
    return TensorDict.from_modules(*(torch.nn.Linear(2, 3) for _ in range(ROWS)))


@kind("from_modules as module", has_rows=False)
def from_modules_as_module() -> Any:
    """The same, as parameters."""
    torch.manual_seed(0)
    return TensorDict.from_modules(*(torch.nn.Linear(2, 3) for _ in range(ROWS)), as_module=True)


@kind("from_modules as a lazy stack")
def from_modules_lazy() -> Any:
    """The members are the parameters of each module."""
    torch.manual_seed(0)
    return TensorDict.from_modules(*(torch.nn.Linear(2, 3) for _ in range(ROWS)), lazy_stack=True)


@kind("parameters in a lazy stack of different shapes")
def params_in_stack() -> Any:
    """Each row has parameters of its own size."""
    return lazy_stack([TensorDict({"w": torch.nn.Parameter(numbers(size))}) for size in (1, 2, 3, 4)])


@kind("TensorDictParams in a lazy stack")
def params_stacked() -> Any:
    """The members of a stack are TensorDictParams."""
    return LazyStackedTensorDict(*(TensorDictParams(TensorDict({"w": numbers(2)})) for _ in range(ROWS)), stack_dim=0)


@kind("jagged that requires grad")
def jagged_grad() -> Any:
    """A nested tensor, detached from the tensors that it was made of."""
    td = jagged()
    td["x"].requires_grad_()
    return td
