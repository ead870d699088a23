"""The state of a tensordict besides its content: locks, parameters, buffers and ``requires_grad``."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensordict_private import (
    content_of,
    entries_of,
    has_hooks,
    has_locked_content,
    params_content,
    set_content,
)
from tdserve.structure.tensordicts.instances import find_content, strip_wrappers
from tdserve.structure.torch_private import is_buffer
from tdserve.structure.trees.nodes import Node, Params, TensorKind, has_state, is_marked

PLAIN = (TensorKind.PLAIN, False)
"""The mark of most tensors."""

_PLAIN_CLASSES = (torch.Tensor, MemoryMappedTensor)
"""Classes of tensors that are restored as plain ones: they differ only in where their memory comes from."""


def read_mark(tensor: torch.Tensor) -> tuple[TensorKind, bool]:
    """Returns the kind of a tensor, and whether it requires grad.

    Raises:
        NotSupportedError: Its class cannot be restored from its bytes.
    """
    kind = type(tensor)
    if kind is torch.nn.Parameter:
        return TensorKind.PARAMETER, tensor.requires_grad
    if is_buffer(tensor):
        is_persistent = getattr(tensor, "persistent", True)
        return TensorKind.BUFFER if is_persistent else TensorKind.NON_PERSISTENT_BUFFER, tensor.requires_grad
    if kind in _PLAIN_CLASSES or tensor.is_nested:
        return TensorKind.PLAIN, tensor.requires_grad
    reason = "only tensors, parameters and buffers can be sent; convert it with .as_subclass(torch.Tensor)"
    raise NotSupportedError(feature=f"a tensor of class {kind.__name__}", reason=reason)


def mark_tensor(tensor: torch.Tensor, kind: TensorKind, requires_grad: bool) -> torch.Tensor:
    """Returns a tensor of this kind over the same memory; a leaf of a graph of its own."""
    tensor = tensor.detach().requires_grad_(requires_grad)
    if kind is TensorKind.PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if kind is TensorKind.PLAIN:
        return tensor
    buffer: torch.Tensor = torch.nn.Buffer(tensor, persistent=kind is TensorKind.BUFFER)
    return buffer


def read_params(td: TensorDictParams) -> Params:
    """Returns the state of a ``TensorDictParams``.

    Raises:
        NotSupportedError: It has hooks, which are code.
    """
    if has_hooks(td):
        reason = "hooks are code, which cannot be sent; send its content, .to_tensordict()"
        raise NotSupportedError(feature="a TensorDictParams with hooks", reason=reason)
    return Params(td.no_convert, has_locked_content(td), bool(params_content(td).is_locked), not td.training)


def make_params(content: Any, params: Params) -> TensorDictParams:
    """Returns a ``TensorDictParams`` with this content, which holds parameters and buffers already."""
    if params.is_content_locked:
        content.lock_()
    found = TensorDictParams(content, no_convert="skip", lock=params.locks_content)
    found.no_convert = params.no_convert
    return found.train(not params.is_in_eval)


def restore_state(td: Any, node: Node, *, is_below_lock: bool = False) -> Any:
    """Restores the state of a tensordict that its node records.

    Args:
        td: Just built, and not used elsewhere; changed in place.
        node: Its node.
        is_below_lock: Whether the node around it will be locked.

    Returns:
        ``td``, or what wraps it now.
    """
    is_locked = is_below_lock or node.is_locked
    if node.inner is None and node.stack_dim is not None:
        row = node._replace(stack_dim=None, is_locked=False, params=None)
        if has_state(row, is_locked=not is_locked):
            stack = td if isinstance(td, LazyStackedTensorDict) else find_content(td)
            for each in stack.tensordicts:
                restore_state(each, row, is_below_lock=is_locked)
    elif node.inner is None:
        held = entries_of(strip_wrappers(td))
        for key, entry in node.entries:
            if isinstance(entry, Node):
                if has_state(entry, is_locked=not is_locked):
                    held[key] = restore_state(held[key], entry, is_below_lock=is_locked)
            elif is_marked(entry):
                held[key] = mark_tensor(held[key], getattr(entry, "kind", TensorKind.PLAIN), entry.requires_grad)
    if node.params is not None and node.params.is_in_class:
        set_content(td, make_params(content_of(td), node.params))
    elif node.params is not None:
        td = make_params(td, node.params)
    return td.lock_() if node.is_locked and not is_below_lock else td
