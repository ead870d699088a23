"""The private names of torch that tdserve uses. Those of tensordict are in ``tensordict_private.py``, those of
``torch.distributed`` in ``transport/distributed_private.py``; no other module uses one.

All were seen in torch 2.13.0. ``tests/unit/structure/test_torch_private.py`` looks for each, so that an upgrade that
removes one fails there and names it. Names on a hot path are bound here and called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as clear_transforms
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils import _pytree as pytree

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "NestedTensor",
    "active_fake_mode",
    "clear_transforms",
    "pytree",
    "unset_fake_temporarily",
]

# Imported above, where no public name does the same:
# - clear_transforms: a context manager outside of all transforms of torch.func that the thread is in.
# - FakeTensor and the rest: structure without content is made under a FakeTensorMode.
# - NestedTensor: its constructor takes 60 us less than torch.nested.nested_tensor_from_jagged.
# - pytree: torch's public trees register no nodes with keys.

copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copies many tensors in one call: one by one the calls cost more than the copies."""

nothing_noted: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
"""Context manager in which torch does not record what a view is a view of. That record takes a third of the time of
making a view, and ``.data`` takes as long as the view itself (measured). None if torch lacks it."""

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Modes of the calling thread, in 30 ns, so that every read can ask."""

num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Modes of the calling thread that see its torch functions, such as ``torch.device(...)``, in 30 ns."""

find_transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""How deep in transforms of ``torch.func`` the calling thread is, in 30 ns; None outside of them."""

is_of_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one inside of ``torch.vmap`` or another transform of ``torch.func``: these are of no class of
their own, and have no memory."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` that leaves everything to ``__torch_dispatch__``, as in torch's own subclasses."""

make_wrapper_tensor: Any = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass without memory."""

TO_COPY: Any = torch.ops.aten._to_copy.default
"""The operator that ``__torch_dispatch__`` gets for ``.to()`` and ``.cpu()``."""

jagged_parts: Callable[[Any], tuple[Any, Any, Any, int]] = attrgetter("_values", "_offsets", "_lengths", "_ragged_idx")
"""Values, offsets, lengths and ragged dimension of a NestedTensor: its methods take ten times as long, because they use
torch's dispatcher."""

parameters_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_parameters")
"""A module's own parameters: ``named_parameters`` makes a tuple of each."""

buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers, likewise."""

modules_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = attrgetter("_modules")
"""The modules in a module, also those that are there twice, which ``named_children`` leaves out."""

save_own_state: Callable[[type[torch.nn.Module]], Callable[..., None]] = attrgetter("_save_to_state_dict")
"""The method of a class by which a module, without those in it, puts its state into a ``state_dict()``: the whole call
is collective in some modules."""


def is_buffer(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a ``torch.nn.Buffer``, which is not a class of its own."""
    return getattr(tensor, "_is_buffer", False)


def is_fake_parameter(tensor: FakeTensor) -> bool:
    """Returns whether a fake tensor stands for a parameter."""
    return getattr(tensor, "_is_param", False)
